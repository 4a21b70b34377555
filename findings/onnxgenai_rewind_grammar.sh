#!/usr/bin/env bash
# Guess: with a grammar (set_guidance), rewind_to takes the grammar back to the same place, or to its
#   beginning if the answer is gone; and tokens appended to an answer are counted by it, as others are.
# What happens: rewind_to takes the grammar to its beginning, wherever the answer is cut. And the first
#   token after a rewind is not counted, so even an answer generated again from the prompt's end has its
#   first token twice. If tokens are appended to an answer, the one generated last is not counted.
#   There is no warning, with or without a draft model. A rewind into the prompt with its tokens
#   appended again is right, and so is all without a grammar.
# Why it matters: generating, appending and rewinding is how one drafts and verifies by hand, or samples
#   several answers to one prompt: the answers then do not fit the grammar.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 tokenizers==0.23.3
fi
cat > "$work/try.py" <<'EOP'
import json
import re
import sys

import numpy as np
import onnx
import onnxruntime_genai as genai
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GRAMMAR, PROMPT, LENGTH, ANSWERS = "name=[a-z]{5} age=[0-9]{3}[.]", 6, 60, 20

symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(symbols[:3])
tokenizer.save("tokenizer.json")
with open("tokenizer_config.json", "w") as file:
    json.dump({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}, file)


def load(*names):
    """A bigram model without caches, whose next logits are a row of a table; a second name is a draft model."""
    model = {"type": "decoder", "vocab_size": len(symbols), "context_length": LENGTH, "bos_token_id": 1,
             "eos_token_id": 2, "pad_token_id": 0}
    for key, name in zip(("decoder", "draft"), names):
        table = np.random.default_rng(0).normal(0, 2, (len(symbols), len(symbols)))
        table += np.random.default_rng(1).normal(0, 1, table.shape) * (name == "noisy")
        graph = helper.make_graph(
            [helper.make_node("Gather", ["table", "input_ids"], ["logits"], axis=0)], name,
            [helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "length"]),
             helper.make_tensor_value_info("attention_mask", TensorProto.INT32, ["batch", "total"])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", len(symbols)])],
            [numpy_helper.from_array(table.astype(np.float32), "table")])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        made.ir_version = 10
        onnx.save(made, name + ".onnx")
        model[key] = {"filename": name + ".onnx", "session_options": {"provider_options": [], "intra_op_num_threads": 1},
                      "head_size": 1, "hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                      "num_hidden_layers": 0, "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"},
                      "outputs": {"logits": "logits"}}
    with open("genai_config.json", "w") as file:
        json.dump({"model": model, "search": {"max_length": LENGTH}}, file)
    return genai.Model(".")


def steps(generator, count=LENGTH):
    for _ in range(count):
        if not generator.is_done():
            generator.generate_next_token()


def way(generator, prompt, name):
    """Makes an answer, with some other calls before the rest is generated."""
    generator.append_tokens(prompt)
    if name == "rewound to the prompt's end":
        steps(generator, 9)
        generator.rewind_to(PROMPT)
    elif name == "rewound by 2 of 9 tokens":
        steps(generator, 9)
        generator.rewind_to(PROMPT + 7)
    elif name == "two letters appended to 7 tokens":
        steps(generator, 7)
        generator.append_tokens(np.array(tokenizer.encode("xy").ids, dtype=np.int32))
    elif name == "rewound into the prompt":
        steps(generator, 9)
        generator.rewind_to(PROMPT - 2)
        generator.append_tokens(prompt[-2:])
    steps(generator)
    return generator.get_sequence(0).tolist()


WAYS = {"one go": True, "rewound into the prompt": True, "rewound to the prompt's end": False,
        "rewound by 2 of 9 tokens": False, "two letters appended to 7 tokens": False}
prompts = [np.random.default_rng(i).integers(3, 200, PROMPT).astype(np.int32) for i in range(ANSWERS)]
print(f"onnxruntime-genai {genai.__version__}, {ANSWERS} greedy answers, grammar {GRAMMAR}\n"
      "decoding, way: answers that fit the grammar, the first one | answers without a grammar that equal those of a new "
      "generator")
right = True
for kind, model in (("plain", load("target")), ("draft model", load("target", "noisy"))):
    for name, fine in WAYS.items():
        texts, equal = [], 0
        for prompt in prompts:
            for grammar in (True, False):
                params = genai.GeneratorParams(model)
                params.set_search_options(do_sample=False, max_length=LENGTH if grammar else 30)
                if grammar:
                    params.set_guidance("regex", GRAMMAR)
                answer = way(genai.Generator(model, params), prompt, name)
                if grammar:
                    texts.append(tokenizer.decode(answer[PROMPT:]))
                else:  # the same text from a generator that was given its first tokens at once
                    given = PROMPT + (9 if "appended" in name else 7 if "2 of 9" in name else 0)
                    other = genai.Generator(model, params)
                    other.append_tokens(np.array(answer[:given], dtype=np.int32))
                    steps(other)
                    equal += other.get_sequence(0).tolist() == answer
        fits = sum(re.fullmatch(GRAMMAR, text) is not None for text in texts)
        print(f"{kind}, {name}: {fits}, {texts[0]!r} | {equal}")
        right &= equal == ANSWERS and fits == (ANSWERS if fine else 0)
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
