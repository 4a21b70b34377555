#!/usr/bin/env bash
# Guess: prefill_chunk_size reads a long prompt in pieces, with drafts as without.
# What happens: with drafts the target reads the whole prompt at once. The setting is passed on to the
#   assistant, so the small model reads in pieces and the large one does not. Answers are right, and
#   there is no warning.
# Why it matters: pieces are what makes a long prompt fit into memory. With drafts the peak is that of
#   the whole prompt, in the model that needs it most.
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
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
PROMPT, CHUNK = 96, 8


def random_model(noise=0.0):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.25, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape)
    return model


def lengths(model):
    """A list that fills with the number of tokens of each forward."""
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    return seen


target, assistant = random_model(), random_model(0.05)
read = {"target": lengths(target), "assistant": lengths(assistant)}
prompt = torch.randint(0, 100, (1, 12), generator=torch.Generator().manual_seed(1)).repeat(1, PROMPT // 12)


def answer(**more):
    for seen in read.values():
        seen.clear()
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, **more)


print(f"transformers {transformers.__version__}, a prompt of {PROMPT} tokens, prefill_chunk_size={CHUNK}: the longest forward of "
      "the target | of the assistant")
expected, good = answer(), True
for name, drafts in (("without drafts", {}), ("assistant", {"assistant_model": assistant}),
                     ("prompt lookup", {"prompt_lookup_num_tokens": 4})):
    right = torch.equal(answer(prefill_chunk_size=CHUNK, **drafts), expected)
    longest = [max(seen, default=0) for seen in read.values()]
    print(f"{name}: {longest[0]} | {longest[1] or '-'}")
    good &= right and (longest[0] >= PROMPT if drafts else longest[0] == CHUNK) and longest[1] <= CHUNK
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
