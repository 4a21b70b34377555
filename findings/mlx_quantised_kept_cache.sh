#!/usr/bin/env bash
# Guess: with kv_bits, mlx-lm quantises the cache that it is given, with a draft model as without one,
#   and the cache holds the text at the end ("updated in place", says speculative_generate_step).
# What happens: with a draft model the quantised caches are put into a copy of the list. Those that
#   were given stay unquantised and end where quantisation began, without a warning: the whole answer
#   is missing. A chat that goes on with the new words gets an answer to another text.
# Why it matters: quantised caches are for long chats, which keep their caches. The first answers are
#   right, and without kv_bits or without drafts so are the later ones. The caller's unquantised
#   copy also costs the memory that was to be saved.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
fi
cat > "$work/try.py" <<'EOF'
import sys
from importlib.metadata import version

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

mx.set_default_device(mx.cpu)


def random_model(noise=0.0):
    model = Model(ModelArgs(
        model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=128,
        num_attention_heads=2, rms_norm_eps=1e-6, vocab_size=100, tie_word_embeddings=False))
    weights, more = np.random.default_rng(3), np.random.default_rng(5)

    def fill(p):
        if p.ndim < 2:
            return p
        w = weights.normal(size=p.shape) + noise * more.normal(size=p.shape)
        return mx.array((0.25 * w).astype(np.float32))

    model.update(tree_map(fill, model.parameters()))
    return model


def decode(tokens, cache, drafts, settings):
    if drafts:
        out = speculative_generate_step(mx.array(tokens), target, draft, num_draft_tokens=4,
                                        max_tokens=13, prompt_cache=cache, **settings)
    else:
        out = generate_step(mx.array(tokens), target, max_tokens=13, prompt_cache=cache, **settings)
    out = list(out)
    # a last token of the target's own, behind drafts, has not been read yet
    return [int(step[0]) for step in out], drafts and not out[-1][2]


def caches(drafts):
    return make_prompt_cache(target) + (make_prompt_cache(draft) if drafts else [])


target, draft, CHATS = random_model(), random_model(0.05), 4
print(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, greedy, {CHATS} chats, prompts of 12 tokens, "
      "answers of 13: right first answers |\nthe given cache then | right second answers")
seen = {}
for name, settings in ("without kv_bits", {}), ("kv_bits=8", {
        "kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}):
    for drafts in (False, True):
        random = np.random.default_rng(0)
        first = second = 0
        for _ in range(CHATS):
            text = random.integers(0, 100, 12).tolist()
            kept = caches(drafts)
            answer, unread = decode(text, kept, drafts, settings)
            first += answer == decode(text, caches(False), False, settings)[0]
            text += answer
            words = random.integers(0, 100, 8).tolist()
            news = text[-1:] * unread + words
            text += words
            state = type(kept[0]).__name__, kept[0].offset
            second += decode(news, kept, drafts, settings)[0] == decode(
                text, caches(False), False, settings)[0]
        label = f"{name}, {'a draft model' if drafts else 'no drafts'}"
        seen[label] = first, state[0], state[1], second
        print(f"{label} | {first} | {state[0]} of {state[1]} tokens | {second}")
good = all(values[0] == CHATS for values in seen.values())
wrong = seen.pop("kv_bits=8, a draft model")
good &= wrong[1] == "KVCache" and wrong[2] < 13 and wrong[3] == 0
good &= all(values[2] >= 24 and values[3] >= CHATS - 1 for values in seen.values())
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
