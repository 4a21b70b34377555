#!/usr/bin/env bash
# Guess: the model builder exports a Mistral with sliding windows as it is: its logits are those of
#   transformers, whose config names one window for all layers.
# What happens: the window is looked up in a list of layer types, which this config does not have. So no
#   layer gets it, though genai_config.json names its size, and all tokens see the whole text, without a
#   warning. Phi-3 is exported like that too; Qwen2, whose config has the list, is right.
# Why it matters: behind the window the exported model is another one. It is no longer the target that
#   a draft model was trained for, its greedy answers differ, and if it drafts, it drafts other tokens.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
  "$VENV"/bin/pip install -q transformers==5.23.0 onnxruntime-genai==0.18.0 onnxruntime==1.32.0 \
    onnx==1.23.2 onnx-ir==1.1.0
fi
cat > "$work/try.py" <<'EOP'
import contextlib
import json
import runpy
import sys

import numpy as np
import onnx
import onnxruntime_genai as genai
import torch
from tokenizers import Tokenizer, models
from transformers import (MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast,
                          Qwen2Config, Qwen2ForCausalLM)

WINDOW, LENGTH, TEXTS, SIZE = 16, 30, 20, 250


def exported(name, model):
    """Saves a model, runs the model builder with its defaults, and loads the result."""
    model.save_pretrained("torch_" + name)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SIZE)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0").save_pretrained(
        "torch_" + name)
    sys.argv = ["builder", "-i", "torch_" + name, "-o", name, "-p", "fp32", "-e", "cpu", "-c", "cache"]
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    with open(name + "/genai_config.json") as file:
        named = json.load(file)["model"]["decoder"].get("sliding_window", {}).get("window_size")
    nodes = onnx.load(name + "/model.onnx", load_external_data=False).graph.node
    used = {a.i for n in nodes for a in n.attribute if a.name == "local_window_size"}
    return genai.Model(name), named, used


def logits(model, text):
    """The logits at all places, one token after the other."""
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=2 * WINDOW)
    generator = genai.Generator(model, params)
    rows = []
    for token in text:
        generator.append_tokens(np.array([token], dtype=np.int32))
        rows.append(generator.get_logits().reshape(-1, SIZE)[-1])
    return np.stack(rows)


torch.set_num_threads(1)
shape = dict(vocab_size=SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
             pad_token_id=0, attn_implementation="eager", sliding_window=WINDOW)
kinds = {"Mistral": lambda **more: MistralForCausalLM(MistralConfig(**shape | more)),
         "Phi-3": lambda **more: Phi3ForCausalLM(Phi3Config(**shape | {"original_max_position_embeddings": 512} | more)),
         "Qwen2": lambda **more: Qwen2ForCausalLM(Qwen2Config(**shape | {"use_sliding_window": True,
                                                                        "max_window_layers": 0} | more))}
random = np.random.default_rng(0)
texts = [random.integers(3, SIZE, LENGTH) for _ in range(TEXTS)]
print(f"onnxruntime-genai {genai.__version__}, windows of {WINDOW}, {TEXTS} texts of {LENGTH} tokens, default settings\n"
      "model: window in genai_config.json, in the attention nodes | largest difference of a logit from transformers up to "
      "the window, behind it, behind it without a window | same likeliest token behind it")
right = True
for name, make in kinds.items():
    torch.manual_seed(0)
    model = make().eval()
    whole = make(sliding_window=4096).eval()  # the same weights, and all tokens in sight
    whole.load_state_dict(model.state_dict())
    engine, named, used = exported(name, model)
    got = np.stack([logits(engine, text) for text in texts])
    with torch.no_grad():
        windowed, full = (m(torch.tensor(np.stack(texts)), use_cache=False).logits.numpy() for m in (model, whole))
    before = np.abs(got - windowed)[:, :WINDOW].max()
    behind = np.abs(got - windowed)[:, WINDOW:].max()
    without = np.abs(got - full)[:, WINDOW:].max()
    same = (got.argmax(-1) == windowed.argmax(-1))[:, WINDOW:].mean()
    print(f"{name}: {named}, {used} | {before:.0e}, {behind:.0e}, {without:.0e} | {same:.2f}")
    right &= before < 1e-3 and (behind < 1e-3 < without if name == "Qwen2" else without < 1e-3 and same < 0.8)
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
