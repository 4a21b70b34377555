#!/usr/bin/env bash
# Guess: a drafter of modelopt, trained by transformers' Trainer with gradient accumulation, has the
#   loss and the gradient of one large batch, as the target itself has.
# What happens: both are multiplied by the number of accumulation steps. The converted model takes
#   any keyword, so that the Trainer leaves the division to it; but it divides by its own batch.
# Why it matters: losses of runs with different accumulation cannot be compared. With 8 steps the
#   gradient's norm is over max_grad_norm (1.0 unless set) in batches where an eighth of it would
#   not be, so that clipping rescales ordinary batches; and an optimizer without Adam's scaling
#   takes steps that are as many times too large.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.14.1 accelerate==1.15.0 \
    datasets==5.2.0 jinja2 requests nvidia-modelopt==0.47.0
fi
cat > "$work/try.py" <<'EOP'
import sys
import warnings

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

warnings.filterwarnings("ignore")
real, sys.stdout = sys.stdout, sys.stderr  # modelopt and the trainer print, too
import modelopt
import modelopt.torch.speculative as mtsp

V, T, ROWS = 64, 32, 8
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 64}
KINDS = {
    "target": None,
    "eagle": {"eagle_use_torch_compile": False, "eagle_architecture_config": HEADS | {
        "use_aux_hidden_state": True, "use_last_layernorm": True, "has_lm_head": True}},
    "dflash": {"dflash_use_torch_compile": False, "dflash_block_size": 4,
               "dflash_mask_token_id": V - 1,
               "dflash_architecture_config": HEADS | {"num_hidden_layers": 2}},
    "medusa": {"medusa_num_heads": 2}}
torch.manual_seed(0)
rows = []
for _ in range(ROWS):
    ids = torch.randint(0, V - 1, (T + 1,))
    rows.append({"input_ids": ids[:-1], "labels": ids[1:], "attention_mask": torch.ones_like(ids[1:])})


def step(kind, size, accumulation):
    """The logged loss and gradient norm of one step over all rows."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=32, num_hidden_layers=6, initializer_range=0.3,
        max_position_embeddings=512, **HEADS))
    if KINDS[kind]:
        mtsp.convert(model, [(kind, dict(KINDS[kind]))])
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=size, max_steps=1,
        gradient_accumulation_steps=accumulation, learning_rate=0.0, logging_steps=1,
        max_grad_norm=1e9, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        disable_tqdm=True, remove_unused_columns=False)
    trainer = Trainer(
        model, args=args, train_dataset=rows,
        data_collator=lambda batch: {k: torch.stack([row[k] for row in batch]) for k in batch[0]})
    trainer.train()
    log = next(x for x in trainer.state.log_history if "loss" in x)
    return log["loss"], log["grad_norm"]


print(f"modelopt {modelopt.__version__}, transformers {transformers.__version__}, one step over "
      f"{ROWS} rows of {T} tokens, loss (gradient's norm)\n"
      "trained | a batch of 8 | 4 of 2 | 8 of 1", file=real)
right = True
for kind in KINDS:
    seen = [step(kind, size, ROWS // size) for size in (8, 2, 1)]
    print(f"{kind:6} | " + " | ".join(f"{loss:.3f} ({norm:.3f})" for loss, norm in seen), file=real)
    for (loss, norm), times in zip(seen, (1, 4, 8)):
        times = times if KINDS[kind] else 1
        right &= abs(loss / seen[0][0] / times - 1) < 0.05
        # DFlash draws other anchors in another batch.
        right &= abs(norm / seen[0][1] / times - 1) < (0.2 if kind == "dflash" else 0.01)
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
