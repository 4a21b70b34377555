#!/usr/bin/env bash
# Guess: an EAGLE-3 drafter with a vocabulary of its own (d2t) only lacks some drafts. Where the target
#   wants a token that the drafter has not, the draft is rejected, and answers stay the target's.
# What happens: with Gemma 4, mlx-vlm judges drafts by the likeliest token of the draft vocabulary. Where
#   the target wants another one, a draft that is best among the rest is accepted in its place. The whole
#   vocabulary is asked only for the token behind the accepted ones. At any temperature, a draft
#   is accepted if it is that likeliest token, so sampling does not follow the target, either. Drafters
#   with the whole vocabulary are right in both.
# Why it matters: EAGLE-3 drafters usually have such vocabularies (speculators' default is 32,000 tokens; Gemma 4
#   has 262,144), without names and rare words. The acceptance rate looks better than it is.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q 'mlx[cpu]==0.32.4' mlx-vlm==0.7.10
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import sys

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.generate import generate_step
from mlx_vlm.models import gemma4
from mlx_vlm.models.gemma4.config import ModelConfig, TextConfig, VisionConfig
from mlx_vlm.speculative.drafters.eagle3.config import Eagle3Config
from mlx_vlm.speculative.drafters.eagle3.config import TextConfig as DraftLayer
from mlx_vlm.speculative.drafters.eagle3.eagle3 import Eagle3DraftModel

VOCAB, LENGTH, ANSWERS = 64, 40, 20
HEADS = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)


def random_weights(model, seed):
    mx.random.seed(seed)
    model.load_weights([(name, 0.2 * mx.random.normal(p.shape)) for name, p in tree_flatten(model.parameters())
                        if p.ndim > 1], strict=False)
    mx.eval(model.parameters())
    return model


def answer(prompt, length, drafter=None, temperature=0.0):
    drafts = dict(draft_model=drafter, draft_kind="eagle3", draft_block_size=5) if drafter else {}
    tokens = [int(token) for token, _ in generate_step(
        mx.array([prompt]), target, None, None, max_tokens=length, temperature=temperature, **drafts)]
    return tokens[:length]


def train(size):
    """A drafter of the `size` commonest tokens of the target's answers, its head fitted to these."""
    drafter = random_weights(Eagle3DraftModel(Eagle3Config(
        transformer_layer_config=DraftLayer(vocab_size=VOCAB, **HEADS), draft_vocab_size=size,
        target_hidden_size=64, eagle_aux_hidden_state_layer_ids=[1, 2, 4])), 1)
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    if size < VOCAB:
        drafter.d2t = mx.array(kept - np.arange(size), dtype=mx.int32)
    output = target.language_model(texts, capture_layer_ids=drafter.config.capture_layer_ids)
    states = mx.concatenate(output.hidden_states, axis=-1)[:, :-1]
    labels = output.logits[:, 1:, mx.array(kept)].argmax(-1)

    drafter.reset(target)  # takes the target's embedding
    drafter._cache = []
    inputs = drafter.norm(drafter._forward_tokens(texts[:, 1:], states, mx.int32))
    drafter.lm_head.weight = 30 * mx.array(np.linalg.lstsq(
        np.array(inputs).reshape(-1, 64), np.eye(size, dtype=np.float32)[np.array(labels).ravel()])[0].T)
    return drafter, set(kept.tolist())


def surprise(drafter):
    """Mean surprise of tokens drawn at temperature 1, less the target's entropy, and its standard error."""
    rows = mx.array([prompt + answer(prompt, LENGTH, drafter, 1.0) for prompt in learned])
    chances = mx.softmax(target.language_model(rows[:, :-1]).logits[:, 9:], axis=-1)
    each = -mx.log(chances)
    entropy = (chances * each).sum(-1)
    variance = (chances * (each - entropy[..., None]) ** 2).sum(-1)
    drawn = mx.take_along_axis(each, rows[:, 10:, None], axis=-1)[..., 0]
    return (drawn - entropy).mean().item(), variance.sum().item() ** 0.5 / drawn.size


target = random_weights(gemma4.Model(ModelConfig(
    vocab_size=VOCAB, hidden_size=64, eos_token_id=[1], text_config=TextConfig(
        num_hidden_layers=5, global_head_dim=32, vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, use_double_wide_mlp=False, **HEADS),
    vision_config=VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, global_head_dim=16, position_embedding_size=16))), 0)
random = np.random.default_rng(0)
prompts = [random.integers(3, VOCAB, 10).tolist() for _ in range(100)]
learned, prompts = prompts[ANSWERS:], prompts[:ANSWERS]
texts = mx.array([prompt + answer(prompt, LENGTH) for prompt in learned])
counts = np.bincount(np.array(texts[:, 10:]).ravel(), minlength=VOCAB)
plain = [answer(prompt, LENGTH) for prompt in prompts]
mx.random.seed(0)
mean, error = surprise(None)
print(f"mlx-vlm {importlib.metadata.version('mlx-vlm')}, Gemma 4 with EAGLE-3, {ANSWERS} greedy answers and "
      f"{len(learned)} at temperature 1 of {LENGTH} tokens\n"
      f"without drafts, the surprise of the latter's tokens is {mean:+.2f} +- {error:.2f} from the target's entropy\n"
      "draft vocabulary of the target's | share of the answers' tokens in it | greedy answers right | wrong ones whose first"
      "\nwrong token stands for one outside it | accepted drafts a round | at temperature 1, surprise less entropy")
right = True
for size in (VOCAB, 48, 32, 16):
    drafter, kept = train(size)
    same = outside = accepted = rounds = 0
    for prompt, wanted in zip(prompts, plain):
        given = answer(prompt, LENGTH, drafter)
        accepted, rounds = accepted + sum(drafter.accept_lens), rounds + len(drafter.accept_lens)
        same += given == wanted
        if given != wanted:
            a, b = next((a, b) for a, b in zip(given, wanted) if a != b)
            outside += a in kept and b not in kept
    covered = np.mean([token in kept for text in plain for token in text])
    mean, error = surprise(drafter)
    print(f"{size} of {VOCAB} | {covered:.2f} | {same} | {outside} of {ANSWERS - same} | {accepted / rounds:.2f} | "
          f"{mean:+.2f} +- {error:.2f}")
    if size == VOCAB:
        right &= same == ANSWERS and abs(mean) < 4 * error
    else:
        right &= same < ANSWERS and outside == ANSWERS - same and mean < -5 * error
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
