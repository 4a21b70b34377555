#!/usr/bin/env bash
# Guess: the caches of mlx-lm's target and draft model, kept for the next turn of a chat, both hold
#   the text so far. A draft model that drafts well goes on doing so.
# What happens: where the drafts of a turn's last round are all accepted, the draft model has not yet
#   read the last of them. Within a turn the next round makes up for it, but the next turn does not:
#   its cache has a hole of one token, and all later keys stand one position too early. The holes add
#   up. The answers stay right, because the target's cache is whole.
# Why it matters: the better the draft model, the likelier the hole, and the longer the chat, the less
#   it saves. Nothing is reported, and a measurement of single answers does not show it.
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
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=128,
        num_attention_heads=2, rms_norm_eps=1e-6, vocab_size=100, tie_word_embeddings=False))
    weights, more = np.random.default_rng(3), np.random.default_rng(5)

    def fill(p):
        if p.ndim < 2:
            return p
        w = weights.normal(size=p.shape) + noise * more.normal(size=p.shape)
        return mx.array((0.25 * w).astype(np.float32))

    model.update(tree_map(fill, model.parameters()))
    return model


def caches(draft):
    return make_prompt_cache(target) + make_prompt_cache(draft)


def speculate(draft, tokens, cache):
    """The answer's tokens, and how many of them were drafted."""
    out = list(speculative_generate_step(
        mx.array(tokens), target, draft, num_draft_tokens=4, max_tokens=13, prompt_cache=cache))
    return [int(token) for token, _, _ in out], sum(drafted for _, _, drafted in out)


target = random_model()
TURNS, CHATS = 5, 10
print(f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, greedy, {CHATS} chats of {TURNS} turns, "
      "answers of 13 tokens:\ndraft model | turn | right answers | tokens of the text that the "
      "draft model's cache lacks, on average |\ndrafted tokens, caches kept | caches made anew")
good = True
for name, noise in ("the target itself", 0.0), ("a noisy copy", 0.05):
    draft = random_model(noise)
    random = np.random.default_rng(0)
    count = np.zeros((TURNS, 4))
    for _ in range(CHATS):
        kept, text = caches(draft), []
        for turn in range(TURNS):
            text += random.integers(0, 100, 8).tolist()
            # what the target's cache lacks: the new words, and the answer's last token
            done = kept[0].offset
            lacks = done - kept[-1].offset
            answer, drafted = speculate(draft, text[done:], kept)
            right = [int(t) for t, _ in generate_step(mx.array(text), target, max_tokens=13)]
            fresh, drafted_fresh = speculate(draft, text, caches(draft))
            assert fresh == right
            count[turn] += answer == right, lacks, drafted, drafted_fresh
            text += answer
    for turn, (equal, lacks, drafted, drafted_fresh) in enumerate(count.tolist(), 1):
        print(f"{name} | {turn} | {equal:.0f} | {lacks / CHATS:.1f} | {drafted:.0f} | "
              f"{drafted_fresh:.0f}")
    good &= (count[:, 0] == CHATS).all() and count[0, 2] == count[0, 3]
    good &= (count[1:, 1] > 0).all() and count[1:, 2].sum() < 0.9 * count[1:, 3].sum()
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
