#!/usr/bin/env bash
# Guess: generate with input_ids and their inputs_embeds answers as with input_ids alone, with drafts too:
#   the embeddings are used in place of the prompt's ids, the drafts are ids.
# What happens: the first forward gets the embeddings of the prompt only. The drafts of this round are not
#   read, but they are judged all the same, by the logits of the prompt's last tokens. Their cache rows
#   are missing, and those of the prompt are cropped instead. Answers are wrong without a warning.
#   Without drafts they are right.
# Why it matters: embeddings are given with ids where a prompt is changed softly, or holds images. A
#   user who adds drafts there gets other answers, although greedy drafts should change no token.
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


target = random_model()
ways = {"without drafts": {}, "the target as assistant": {"assistant_model": target},
        "a noisy assistant": {"assistant_model": random_model(0.05)},
        "early exit": {"assistant_early_exit": 1},
        "prompt lookup": {"prompt_lookup_num_tokens": 4}}
random = torch.Generator().manual_seed(1)
prompts = [torch.randint(0, 100, (1, 6), generator=random).repeat(1, 3) for _ in range(20)]


def answer(prompt, **more):
    return target.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                           max_new_tokens=30, **more)


print(f"transformers {transformers.__version__}, greedy: answers of 20 that equal those without drafts and embeddings\n"
      "with input_ids | with input_ids and inputs_embeds")
good = True
for name, drafts in ways.items():
    right = [0, 0]
    for prompt in prompts:
        expected = answer(prompt)
        right[0] += torch.equal(answer(prompt, **drafts), expected)
        embeddings = target.get_input_embeddings()(prompt)
        right[1] += torch.equal(answer(prompt, inputs_embeds=embeddings, **drafts), expected)
    print(f"{name}: {right[0]} | {right[1]}")
    good &= right[0] == 20 and (right[1] < 10 if drafts else right[1] == 20)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
