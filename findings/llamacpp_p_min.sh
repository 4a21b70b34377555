#!/usr/bin/env bash
# Guess: llama.cpp's p_min ends a draft at the first token whose probability in the draft model,
#   its softmax over the vocabulary, is below p_min.
# What happens: the probability is renormalised over the draft model's ten likeliest tokens, so it
#   is larger than the draft model's own, and most so where the model is unsure. Up to 2.6 times
#   as many tokens are drafted here as the threshold would allow.
# Why it matters: a threshold that was tuned as a probability (in a paper, or in another program)
#   drafts much further here, and a model that spreads its mass is treated as a confident one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
fi
cat > "$work/try.py" <<'EOF'
import json
import sys

import gguf
import numpy as np
import xllamacpp


def write_model(path, noise=0.0, width=64, layers=2, heads=4, ffn=128):
    """A random Llama over printable characters; `noise` is added to the same weights."""
    tokens = [chr(256 + 10), chr(256 + 32)] + [chr(c) for c in range(33, 127)]
    ends, size = len(tokens), len(tokens) + 2
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(1024)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(width // heads)
    w.add_vocab_size(size)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens + ["<s>", "</s>"])
    w.add_token_types([1] * ends + [3, 3])
    w.add_token_merges(["a b"])
    w.add_bos_token_id(ends)
    w.add_eos_token_id(ends + 1)
    w.add_add_bos_token(False)
    weights, extra = np.random.default_rng(0), np.random.default_rng(99)

    def add(name, *shape, scale=0.25):
        value = weights.standard_normal(shape) + noise * extra.standard_normal(shape)
        w.add_tensor(name, (scale * value).astype(np.float32))

    add("token_embd.weight", size, width, scale=1.0)
    add("output.weight", size, width)
    ones = np.ones(width, np.float32)
    w.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", width, width)
        add(f"blk.{layer}.ffn_gate.weight", ffn, width)
        add(f"blk.{layer}.ffn_up.weight", ffn, width)
        add(f"blk.{layer}.ffn_down.weight", width, ffn)
        w.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        w.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def server(draft=None, context=1024, gamma=4, p_min=0.0):
    p = xllamacpp.CommonParams()
    p.model.path = "target.gguf"
    p.n_ctx, p.n_parallel, p.warmup, p.verbosity, p.fit_params = context, 1, False, -1, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    if draft:
        d = p.speculative.draft
        d.mparams.path, d.n_max, d.n_min, d.p_min = draft, gamma, 0, p_min
        d.cpuparams.n_threads = 1
        kinds = xllamacpp.common_speculative_type
        p.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    return xllamacpp.Server(p)


def ask(engine, **request):
    request = {"prompt": "hello world, this", "temperature": 0, "cache_prompt": False, **request}
    reply = engine.handle_completions(request)
    return reply if isinstance(reply, dict) else json.loads(reply)


import math

write_model("target.gguf")
total = 60
reply = ask(server(), n_predict=total, logprobs=10)
steps = reply["choices"][0]["logprobs"]["content"]
own = [math.exp(step["logprob"]) for step in steps]
ten = [p / sum(math.exp(t["logprob"]) for t in step["top_logprobs"]) for p, step in zip(own, steps)]


def expected(probabilities, p_min, gamma=4):
    """Tokens drafted by a model that drafts for itself, so that all of them are accepted."""
    drafted, place = 0, 1  # the prompt's forward gives the first token
    while place < total:
        length = 0
        while length < min(gamma, total - place - 1) and probabilities[place + length] >= p_min:
            length += 1
        drafted += length
        place += length + 1
    return drafted


print("xllamacpp 2026.10.11549 (llama.cpp), greedy, 60 tokens, a random model drafts for itself")
print("p_min | drafted | by the probability of the vocabulary | by the probability among ten")
right, apart = True, False
for p_min in (0.2, 0.3, 0.4, 0.5, 0.6):
    timings = ask(server("target.gguf", p_min=p_min), n_predict=total)["timings"]
    found = timings.get("draft_n", 0)
    print(f"{p_min:5} | {found:7} | {expected(own, p_min):36} | {expected(ten, p_min)}")
    right &= abs(found - expected(ten, p_min)) <= 1
    apart |= found > 1.5 * expected(own, p_min)
sys.exit(0 if right and apart else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
