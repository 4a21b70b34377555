#!/usr/bin/env bash
# Guess: a cache that one call of generate has filled can be given to the next one, for the next
#   turn of a chat, with drafts as without them. The answer is then that of a fresh cache.
# What happens: with an assistant, early exit or prompt lookup, the first forward of the second call
#   gets the whole text again, not only what the cache lacks. The text stands twice in the cache, the
#   second time at later positions, and the answer is another one. There is no warning. The cache that
#   a call with drafts leaves behind is right: without drafts the next call goes on from it.
# Why it matters: chats keep their caches to save prompt processing. Greedy drafts should change no
#   token, and a test of single answers finds them right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOF'
import sys
import warnings

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

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


def draw(length):
    return torch.randint(0, 100, (1, length), generator=random)


chats = []
for _ in range(10):  # with repetitions, for the lookup
    part = draw(6)
    chats.append((part.repeat(1, 3), draw(5)))


def answer(text, length, cache=None, **drafts):
    return target.generate(text, attention_mask=torch.ones_like(text), do_sample=False,
                           max_new_tokens=length, past_key_values=cache, **drafts)


def turns(first, second):
    """How many first and second answers are right, and what the cache holds at the end."""
    right = [0, 0]
    for prompt, reply in chats:
        cache = DynamicCache(config=target.config)
        text = answer(prompt, 13, cache, **first)
        right[0] += torch.equal(text, answer(prompt, 13))
        text = torch.cat([text, reply], dim=1)
        whole = answer(text, 30, cache, **second)
        right[1] += torch.equal(whole, answer(text, 30))
    return *right, cache.get_seq_length(), whole.shape[1]


print(f"transformers {transformers.__version__}, greedy, a cache kept over two turns: right first "
      "answers of 10 |\nright second answers | rows in the cache at the end, for how many tokens of text")
good = True
for name, drafts in ways.items():
    seen = turns(drafts, drafts)
    print(f"{name} | {seen[0]} | {seen[1]} | {seen[2]}, {seen[3]}")
    wrong = seen[1] < 10 and seen[2] > seen[3]
    good &= seen[0] == 10 and (wrong if drafts else seen[1] == 10)
    if drafts:
        seen = turns(drafts, {})
        print(f"  second turn without drafts | {seen[0]} | {seen[1]} | {seen[2]}, {seen[3]}")
        good &= seen[:2] == (10, 10)
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
