#!/usr/bin/env bash
# Guess: with top_k=0 and top_p, tokens are drawn from the smallest set whose probability reaches
#   top_p, by plain decoding and with a draft model.
# What happens: on the CPU, tokens are added until their probability would reach top_p even if all the
#   others were as likely as the last one. The larger the vocabulary, the later that is: of 5,000
#   tokens, some 90 are drawn at top_p 0.5 instead of 2, and 45% of the draws are of those that should
#   be left out. There is no warning. If top_k is set to the size of the vocabulary, top_p is exact.
# Why it matters: answers and acceptance rates at a top_p are those of hardly any truncation, and
#   cannot be compared with another engine's. As drafts follow plain decoding, comparing the two does
#   not find it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
fi
cat > "$work/try.py" <<'EOP'
import json
import sys

import numpy as np
import onnx
import onnxruntime_genai as genai
from onnx import TensorProto, helper, numpy_helper

DRAWS, PROMPT = 1500, 3


def write_model(size):
    """A bigram model without caches: the next token's logits are a row of a table. All rows hold the
    same Zipf-like probabilities, each over another order of the tokens. The draft model has a noise."""
    random = np.random.default_rng(0)
    fall = -1.5 * np.log(np.arange(1, size + 1))
    rows = np.stack([random.permutation(fall) for _ in range(8)])
    decoder = {"session_options": {"provider_options": [], "intra_op_num_threads": 1}, "head_size": 1, "hidden_size": 1,
               "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 0,
               "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"}, "outputs": {"logits": "logits"}}
    model = {"type": "decoder", "vocab_size": size, "context_length": 64, "bos_token_id": 1, "eos_token_id": 0,
             "pad_token_id": 0}
    for name, table in (("target", rows), ("draft", rows + random.normal(0, 0.5, rows.shape))):
        graph = helper.make_graph(
            [helper.make_node("Mod", ["input_ids", "eight"], ["row"]),
             helper.make_node("Gather", ["table", "row"], ["logits"], axis=0)], name,
            [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "length"]),
             helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", size])],
            [numpy_helper.from_array(table.astype(np.float32), "table"), numpy_helper.from_array(np.int32([8]), "eight")])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        made.ir_version = 10
        onnx.save(made, name + ".onnx")
        model["decoder" if name == "target" else "draft"] = {**decoder, "filename": name + ".onnx"}
    with open("genai_config.json", "w") as file:
        json.dump({"model": model, "search": {"max_length": 64}}, file)
    both = genai.Model(".")
    del model["draft"]
    with open("genai_config.json", "w") as file:
        json.dump({"model": model, "search": {"max_length": 64}}, file)
    chances = np.exp(rows[PROMPT])
    return {"plain": genai.Model("."), "draft model": both}, chances / chances.sum()


def draws(model, **settings):
    """How often each token comes first, over the seeds."""
    counts = np.zeros(len(chances), dtype=int)
    for seed in range(DRAWS):
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=True, temperature=1.0, random_seed=seed, max_length=2, **settings)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([PROMPT], dtype=np.int32))
        generator.generate_next_token()
        counts[generator.get_next_tokens()[0]] += 1
    return counts


print(f"onnxruntime-genai {genai.__version__}, CPU, {DRAWS} draws of a first token\n"
      "vocabulary, top_p: smallest set | top_k, decoding: different tokens drawn, share outside the set")
right = True
for size in (250, 5000):
    engines, chances = write_model(size)
    order = np.argsort(-chances)
    for top_p in (0.5, 0.9):
        few = 1 + int((np.cumsum(chances[order]) < top_p).sum())
        print(f"{size}, {top_p}: {few} tokens of probability {chances[order[:few]].sum():.3f}")
        for top_k in (0, size):
            for name, model in engines.items():
                counts = draws(model, top_k=top_k, top_p=top_p)
                outside = 1 - counts[order[:few]].sum() / DRAWS
                print(f"    | {top_k}, {name}: {(counts > 0).sum()} tokens, {outside:.3f}")
                right &= outside == 0 if top_k else outside > (0.25 if top_p == 0.5 else 0.04)
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
