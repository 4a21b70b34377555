#!/usr/bin/env bash
# Guess: with `probabilistic` drafts (rejection sampling instead of sample and match) the draft is
#   drawn with the request's own sampling settings, so a model that drafts for itself has nearly
#   every token accepted at any temperature, top_k, top_p or logit bias.
# What happens: the temperature is the request's, but the draft is always drawn from the ten
#   likeliest tokens, whatever top_k or bias the request has. A model that drafts for itself has
#   all tokens accepted at top_k 10; .36 of them at top_k 3, .50 without a filter, .28 with a bias
#   (but .99 without a filter at temperature .3, where ten tokens have nearly all the mass).
# Why it matters: acceptance measures the filter as well as the drafter, so a rate does not say
#   how good a drafter is, and a narrower top_k, which should make drafting easier, lowers it.
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


def server(draft=None, context=1024, gamma=4, probabilistic=False):
    p = xllamacpp.CommonParams()
    p.model.path = "target.gguf"
    p.n_ctx, p.n_parallel, p.warmup, p.verbosity, p.fit_params = context, 1, False, -1, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    if draft:
        d = p.speculative.draft
        d.mparams.path, d.n_max, d.n_min, d.p_min = draft, gamma, 0, 0.0
        d.cpuparams.n_threads, d.probabilistic = 1, probabilistic
        kinds = xllamacpp.common_speculative_type
        p.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    return xllamacpp.Server(p)


def ask(engine, **request):
    request = {"prompt": "hello world, this", "temperature": 0, "cache_prompt": False, **request}
    reply = engine.handle_completions(request)
    return reply if isinstance(reply, dict) else json.loads(reply)


write_model("target.gguf")
engine = server("target.gguf", probabilistic=True)
off = {"min_p": 0, "top_p": 1.0}
print("xllamacpp 2026.10.11549 (llama.cpp), temperature 1, a random model drafts for itself, 4 tokens")
rates = {}
for name, settings in {
    "top_k 10": {"top_k": 10, **off},
    "top_k 3": {"top_k": 3, **off},
    "no filter": {"top_k": 0, **off},
    "no filter, temperature .3": {"top_k": 0, "temperature": 0.3, **off},
    "top_k 10, logit bias on one token": {"top_k": 10, "logit_bias": [["l", 5]], **off},
}.items():
    drafted = accepted = 0
    for seed in range(40):
        request = {"temperature": 1.0, "n_predict": 60, "seed": seed, **settings}
        timings = ask(engine, **request)["timings"]
        drafted += timings.get("draft_n", 0)
        accepted += timings.get("draft_n_accepted", 0)
    rates[name] = accepted / drafted
    print(f"{name}: {accepted} of {drafted} drafted tokens accepted, {rates[name]:.2f}")
right = rates["top_k 10"] > 0.98 and rates["top_k 3"] < 0.6 and rates["no filter"] < 0.7
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
