#!/usr/bin/env bash
# Guess: n-gram decoding gives plain decoding's greedy answers with no_repeat_ngram_size too: the target
#   decides every token, says the documentation, and only draft models refuse the setting.
# What happens: tokens of a round with a draft are the target's likeliest, banned or not. Only where the
#   lookup finds nothing, plain decoding's step obeys the setting. No warning is given.
# Why it matters: the drafts are repetitions, which is what the setting forbids, so it fails exactly
#   where it is needed: answers go round in circles that plain decoding leaves, and the acceptance rate
#   looks excellent. With a repetition penalty, a minimal length or neither, the answers are equal.
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

SIZE, PROMPT, LENGTH, ANSWERS = 64, 4, 60, 20

# a bigram model without caches: the next token's logits are a row of a table
table = np.random.default_rng(0).normal(0, 2, (SIZE, SIZE)).astype(np.float32)
table[:, 0] = -20  # the end token
graph = helper.make_graph(
    [helper.make_node("Gather", ["table", "input_ids"], ["logits"], axis=0)], "bigram",
    [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "length"]),
     helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"])],
    [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", SIZE])],
    [numpy_helper.from_array(table, "table")])
made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
made.ir_version = 10
onnx.save(made, "model.onnx")
with open("genai_config.json", "w") as file:
    json.dump({"model": {
        "type": "decoder", "vocab_size": SIZE, "context_length": 128, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0,
        "decoder": {"filename": "model.onnx", "session_options": {"provider_options": [], "intra_op_num_threads": 1},
                    "head_size": 1, "hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                    "num_hidden_layers": 0, "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
                    "outputs": {"logits": "logits"}}}, "search": {"max_length": LENGTH}}, file)
model = genai.Model(".")


def answer(prompt, drafts, settings):
    params = genai.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=LENGTH, **settings)
    if drafts:
        params.set_speculative_options(ngram_size=2, max_draft_tokens=4)
    generator = genai.Generator(model, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0).tolist(), generator.get_speculative_stats()


def expected(prompt, size):
    """Greedy decoding written out here, without a token that would complete an earlier n-gram."""
    text = prompt.tolist()
    while len(text) < LENGTH:
        logits = table[text[-1]].copy()
        if size:
            start = text[len(text) - size + 1:]
            logits[[text[i + size - 1] for i in range(len(text) - size + 1) if text[i:i + size - 1] == start]] = -1e9
        text.append(int(logits.argmax()))
    return text


def repeated(text, size=3):
    grams = [tuple(text[i:i + size]) for i in range(len(text) - size + 1)]
    return len(grams) - len(set(grams))


prompts = [np.random.default_rng(i).integers(1, SIZE, PROMPT).astype(np.int32) for i in range(ANSWERS)]
print(f"onnxruntime-genai {genai.__version__}, {ANSWERS} greedy answers of {LENGTH - PROMPT} tokens\n"
      "setting: answers that equal plain decoding's | acceptance | repeated 3-grams in an answer, without and with drafts")
right = True
for settings in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 2}):
    plain = [answer(prompt, False, settings)[0] for prompt in prompts]
    drafted, stats = zip(*(answer(prompt, True, settings) for prompt in prompts))
    equal = sum(a == b for a, b in zip(plain, drafted))
    accepted = sum(s["draft_tokens_accepted"] for s in stats) / max(1, sum(s["draft_tokens_evaluated"] for s in stats))
    print(f"{settings or 'none'}: {equal} of {ANSWERS} | {accepted:.2f} | {np.mean([repeated(x) for x in plain]):.1f}, "
          f"{np.mean([repeated(x) for x in drafted]):.1f}")
    size = settings.get("no_repeat_ngram_size", 0)
    if "repetition_penalty" not in settings:
        right &= plain == [expected(prompt, size) for prompt in prompts]
    right &= equal < ANSWERS / 4 if size else equal == ANSWERS
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
