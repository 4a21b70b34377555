#!/usr/bin/env bash
# Guess: an EAGLE-3 drafter whose drafts are all right has accuracy 1 at each step of training, full_acc and
#   cond_acc, however long the answers are.
# What happens: at step k, speculators compares places whose draft is k further on. Where only the first or
#   only the second of the two is in an answer, that counts as an error: of each answer, full_acc takes the k
#   first tokens for wrong, cond_acc up to k at its end. With n tokens, full_acc is at most 1 - k/n.
# Why it matters: the numbers are read as acceptance rates by depth. With short answers (chats, tool
#   calls) later drafts look bad when nothing is wrong with them, and a drafter looks better on data
#   with longer answers.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.19.0 speculators==0.9.0
  "$VENV"/bin/pip uninstall -q -y torchvision torchaudio  # may be built for another torch
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import sys

import torch
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT, TOKENS, STEPS, LAYERS = 8, 120, 3, [1, 2, 3]


@torch.no_grad()
def make_batch(length):
    """The target's answers, `length` tokens each, packed by speculators. The loss is on the answers."""
    rows, last = [], []
    for i in range(TOKENS // length):
        prompt = torch.randint(3, 64, (1, PROMPT), generator=torch.Generator().manual_seed(i))
        text = target.generate(prompt, max_new_tokens=length, do_sample=False)
        hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
        states = target(text, output_hidden_states=True).hidden_states
        hook.remove()
        places = torch.arange(text.shape[1])
        rows.append(shift_batch({
            "hidden_states": torch.cat([states[layer][0] for layer in LAYERS], -1), "input_ids": text[0],
            "verifier_last_hidden_states": last[-1], "loss_mask": (places >= PROMPT).long(),
            "lengths": torch.tensor([text.shape[1]]), "position_ids": places}))
    batch = CollateFn(len(rows) * (PROMPT + length - 1), 64, dtype=torch.float32)(rows)
    del batch["error_records"]
    return batch


@torch.no_grad()
def shares_right(batch, drafts, drafter):
    """For each step, how many of the runs of drafts that lie in one answer are right up to it."""
    wanted = drafter.verifier_lm_head(drafter.verifier_norm(batch["verifier_last_hidden_states"])).argmax(-1)
    inside, answer = batch["loss_mask"].bool(), batch["document_ids"]
    good, whole, shares = torch.ones_like(inside), inside, []
    for k in range(STEPS):
        end = inside.shape[1] - k
        good = good[:, :end] & (drafts[k][:, :end] == wanted[:, k:])
        whole = whole[:, :end] & inside[:, k:] & (answer[:, :end] == answer[:, k:])
        shares.append(good[whole].float().mean().item())
    return shares


def train(batch):
    """A drafter that learns the batch by heart; its metrics at the first step at which all is right."""
    torch.manual_seed(0)
    drafter = Eagle3DraftModel.from_training_args(
        LlamaConfig.from_pretrained("target", num_hidden_layers=1), draft_vocab_size=64,
        norm_before_residual=True, norm_before_fc=True, verifier_name_or_path="target", ttt_steps=STEPS,
        target_layer_ids=LAYERS, draft_attn_impl="eager").float()
    losses = resolve_loss_config("ce", "eager")
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(300):
        drafts, loss, metrics = drafter(**batch, ttt_steps=STEPS, loss_config=losses)
        shares = shares_right(batch, drafts, drafter)
        if min(shares) == 1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [shares, *([(metrics[f"{kind}_acc_{k}_sum"] / metrics[f"{kind}_acc_{k}_total"]).item()
                       for k in range(STEPS)] for kind in ("full", "cond"))]


torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)).eval()
target.save_pretrained("target")
print(f"speculators {importlib.metadata.version('speculators')}, EAGLE-3, answers learned by heart; at the steps "
      "0, 1, 2:\nlength of the answers | share of drafts right within the answers | full_acc | cond_acc")
right = True
for length in (5, 10, 20, 60):
    shares, full, cond = train(make_batch(length))
    print(length, *(" ".join(f"{x:.2f}" for x in each) for each in (shares, full, cond)), sep=" | ")
    right &= min(shares) == 1 and all(abs(x - 1 + k / length) < 1e-4 for k, x in enumerate(full))
    right &= cond[0] == 1 and max(cond[1:]) < 1
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
