#!/usr/bin/env bash
# Guess: prompt lookup with an encoder-decoder (T5, BART) takes drafts from the prompt, which is what the
#   encoder reads: a summary or a correction repeats it.
# What happens: drafts are looked up in the decoder's ids alone, that is in the answer. If the prompt is
#   the very answer, nothing is drafted from it, and each token takes a forward. There is no warning.
# Why it matters: summaries and corrections are what prompt lookup is recommended for, and many models
#   for them are encoder-decoders. There it finds only what the answer has said before.
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
from transformers import T5Config, T5ForConditionalGeneration

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
SIZE, LENGTH = 1000, 24


def random_weights(model):
    """Random weights; the next token depends on the last ones, but not on what the encoder read."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(0 * p if "EncDecAttention.o" in name else 0.3 * torch.randn(p.shape, generator=random))
    return model.eval()


t5 = random_weights(T5ForConditionalGeneration(T5Config(
    vocab_size=SIZE, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, decoder_start_token_id=0,
    pad_token_id=None, eos_token_id=None, tie_word_embeddings=False)))
forwards = []
t5.decoder.register_forward_hook(lambda *_: forwards.append(1))


def answer(prompt, **drafts):
    forwards.clear()
    text = t5.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=LENGTH,
                       no_repeat_ngram_size=1, **drafts)  # no repetition to draft from in the answer itself
    return text[:, -LENGTH:], len(forwards)


print(f"transformers {transformers.__version__}, prompt lookup, answers of {LENGTH} tokens: forwards that they take")
other = torch.randint(3, SIZE, (1, LENGTH), generator=torch.Generator().manual_seed(2))
lookup = {"prompt_lookup_num_tokens": 4}
first, _ = answer(other)
same, needed = answer(first, **lookup)
_, without = answer(other, **lookup)
print(f"T5, a prompt that is the answer itself: {needed}; another prompt: {without}; "
      f"the answer repeats {LENGTH - len(set(first[0].tolist()))} tokens")
good = torch.equal(first, same) and needed == without == LENGTH
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
