#!/usr/bin/env bash
# Guess: the accuracies that speculators reports while it trains an EAGLE-3 draft model are means over
#   the trained tokens: a token that the draft vocabulary lacks counts as wrong, and a draft model
#   that is always right has 1.0 at each step.
# What happens: the target's token is taken to be the likeliest one inside the draft vocabulary, so
#   tokens that can never be drafted count as right. From the second step on, full_acc counts drafts
#   that began before the answer as wrong, and cond_acc those that go on behind its end, so that a
#   draft model that is always right gets less than 1.0, by how short the answers are.
# Why it matters: these are the numbers by which one compares draft vocabularies, step counts and
#   data sets. A smaller vocabulary looks better, and data with shorter answers looks worse.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.19.0 datasets==5.1.0 \
    pydantic-settings loguru typer openai aiohttp
  "$VENV"/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
fi
cat > "$work/try.py" <<'EOF'
import sys
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
from speculators.losses.utils import resolve_loss_config
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.metrics import compute_metrics

V, T, STEPS = 64, 96, 3  # the target's vocabulary, positions of a row, steps of a draft
config = LlamaConfig(
    vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3)
torch.manual_seed(0)
target = LlamaForCausalLM(config).eval()
target.save_pretrained("target")
ids = torch.randint(0, V, (1, T))
# speculators takes the hidden states before the last norm, and applies the norm itself.
taken = {}
target.model.norm.register_forward_pre_hook(lambda _, args: taken.update(h=args[0]))
with torch.no_grad():
    logits = target(ids).logits


def targets_for(size):
    """The target's logits as the trainer sees them, for a draft vocabulary of the first `size`."""
    t2d = torch.arange(V) < size
    draft = Eagle3DraftModel.from_training_args(
        LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}),
        t2d=t2d, d2t=torch.zeros(size, dtype=torch.long), num_layers=1, draft_vocab_size=size,
        norm_before_residual=False, ttt_steps=STEPS, verifier_name_or_path="target",
        draft_attn_impl="sdpa", target_layer_ids=[1, 3, 4])
    with torch.no_grad():
        return draft.verifier_lm_head(draft.verifier_norm(taken["h"]))


def accuracies(targets, mask):
    """full_acc and cond_acc of each step, for a drafter that always has the target's logits."""
    correct, out = mask.clone(), []
    for step in range(STEPS):
        drafted = torch.roll(targets, -step, dims=1)  # what comes around is cut off
        _, seen = compute_metrics(drafted, targets, mask, correct, step, 1.0,
                                  resolve_loss_config("kl_div", "eager"))
        out.append([(seen[f"{kind}_acc_{step}_sum"] / seen[f"{kind}_acc_{step}_total"]).item()
                    for kind in ("full", "cond")])
    return out


whole = torch.ones(1, T, dtype=torch.bool)
print("speculators 0.9.0, EAGLE-3, a draft model with the target's own logits\n"
      "draft vocabulary | share of positions whose token is in it | accuracy of the first step")
right = True
for size in (V, 48, 16):
    inside = (logits.argmax(-1) < size).float().mean().item()
    accuracy = accuracies(targets_for(size), whole)[0][0]
    right &= accuracy == 1.0 and (inside < 0.9 or size == V)
    print(f"{size} of {V} | {inside:.2f} | {accuracy:.2f}")
print("the whole vocabulary, answers of some tokens after prompts | full_acc | cond_acc, by step")
for length in (4, 8, 24):
    mask = (torch.arange(T) % (2 * length) >= length)[None]
    rows = accuracies(targets_for(V), mask)
    for column, kind in enumerate(("full_acc", "cond_acc")):
        right &= rows[0][column] == 1.0 and rows[2][column] < 1 - 1 / length
    print(f"{length} | " + " | ".join(
        ", ".join(f"{row[column]:.2f}" for row in rows) for column in (0, 1)))
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
