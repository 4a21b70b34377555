#!/usr/bin/env bash
# Guess: the cache of a model with sliding windows holds the window, also if a call with drafts has filled
#   it and the next turn of the chat goes on from it without drafts.
# What happens: a call with drafts switches the cache to keeping all rows until somebody crops it, which
#   each of its rounds does. It hands the cache back without switching this off. Calls without
#   drafts never crop, so from then on the sliding layers keep the keys and values of the whole text.
#   Answers are right.
# Why it matters: the memory that the window was chosen to save is used up in long chats, and each
#   token copies all of it. A first turn with drafts is enough, and nothing shows but the memory.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOP'
import sys
import warnings

import torch
import transformers
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
WINDOW = 16
torch.manual_seed(0)
model = MistralForCausalLM(MistralConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.25, sliding_window=WINDOW, bos_token_id=None, eos_token_id=None,
    pad_token_id=None)).eval()
ways = {"without drafts": {}, "the target as assistant": {"assistant_model": model},
        "prompt lookup": {"prompt_lookup_num_tokens": 4}}
random = torch.Generator().manual_seed(1)
prompt = torch.randint(0, 100, (1, 6), generator=random).repeat(1, 3)
reply = torch.randint(0, 100, (1, 5), generator=random)


def answer(text, length, cache=None, **drafts):
    return model.generate(text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=length,
                          past_key_values=cache, **drafts)


print(f"transformers {transformers.__version__}, window {WINDOW}, a cache kept over turns of 20, 100 and 300 tokens, drafts in "
      "the first one only:\nfirst turn | answers right | rows of a layer after each turn")
good = True
for name, drafts in ways.items():
    cache, text, right, rows = DynamicCache(config=model.config), prompt, 0, []
    for length in (20, 100, 300):
        expected = answer(text, length)
        text = answer(text, length, cache, **(drafts if length == 20 else {}))
        right += torch.equal(text, expected)
        rows.append(cache.layers[0].keys.shape[2])
        text = torch.cat([text, reply], dim=1)
    print(f"{name} | {right} of 3 | {rows}")
    good &= right == 3 and rows[0] < WINDOW and (rows[2] > 400 if drafts else rows[2] < WINDOW)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
