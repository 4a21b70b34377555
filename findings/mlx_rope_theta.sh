#!/usr/bin/env bash
# Guess: mlx-lm reads the rotation's base from a config that transformers 5 has written, where
#   rope_theta is inside rope_parameters. If it did not look there, it would say so.
# What happens: mlx-lm's Llama takes rope_theta from the top level of config.json only. If it is
#   not there, the model rotates with base 10,000 without a warning, whatever its own base is.
# Why it matters: a draft model that transformers 5 has saved (distilled, merged, cut) rotates
#   differently from the target. Greedy answers stay right, so nothing shows, but its drafts are
#   rejected. A target that transformers 5 has saved answers wrongly.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q "mlx[cpu]==0.32.4" mlx-lm==0.32.2 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOF'
import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.utils import load_model
from transformers import LlamaConfig

VOCAB, WIDTH, FFN, LAYERS, BASE = 128, 64, 128, 2, 500_000.0


def write_model(folder, **top_level):
    """A random Llama with base 500,000, its config as transformers writes it."""
    rotation = {"rope_type": "default", "rope_theta": BASE}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=False, rope_parameters=rotation, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    path = Path(folder, "config.json")
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | top_level))
    mx.random.seed(0)
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH)}
    ones = {"model.norm": WIDTH}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in "qkvo":
            shapes[f"{name}self_attn.{part}_proj"] = (WIDTH, WIDTH)
        shapes |= {f"{name}mlp.{part}_proj": (FFN, WIDTH) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj"] = (WIDTH, FFN)
        ones |= {f"{name}{norm}_layernorm": WIDTH for norm in ("input", "post_attention")}
    weights = {f"{name}.weight": 0.25 * mx.random.normal(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": mx.ones(size) for name, size in ones.items()}
    mx.save_safetensors(str(Path(folder, "model.safetensors")), weights, metadata={"format": "mlx"})
    return written


written = write_model("as_written")
write_model("top_level", rope_theta=BASE)
write_model("base_10000", rope_theta=10_000.0)
print("mlx-lm 0.32.2, a Llama whose config.json is written by transformers 5.24.0:")
print(f"rope_theta at its top level: {written.get('rope_theta')}; rope_parameters: {written['rope_parameters']}")
models = {name: load_model(Path(name))[0] for name in ("as_written", "top_level", "base_10000")}
ids = mx.random.randint(0, VOCAB, (300,), key=mx.random.key(1))
logits = {name: model(ids[None])[0] for name, model in models.items()}


def distance(one, other):
    return float(mx.abs(logits[one] - logits[other]).max())


print("largest difference of two logits, over 300 tokens:")
print(f"  as written, and with rope_theta 500,000 at the top level: {distance('as_written', 'top_level'):.3f}")
print(f"  as written, and with rope_theta 10,000 at the top level:  {distance('as_written', 'base_10000'):.3f}")


def accepted(draft):
    steps = speculative_generate_step(ids, models["top_level"], models[draft], num_draft_tokens=3, max_tokens=200)
    tokens = [(int(token), drafted) for token, _, drafted in steps]
    return [token for token, _ in tokens], sum(drafted for _, drafted in tokens)


right, most = accepted("top_level")
text, fewer = accepted("as_written")
print(f"the model with the right base drafts for itself: {most} of 200 tokens are drafts")
print(f"the folder as written drafts for it: {fewer} of 200, the same answer: {text == right}")
same = distance("as_written", "base_10000") == 0 and distance("as_written", "top_level") > 0.1
sys.exit(0 if same and text == right and fewer < most else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
