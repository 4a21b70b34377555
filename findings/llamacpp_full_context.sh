#!/usr/bin/env bash
# Guess: greedy answers of llama.cpp's server are the same with and without a draft model, even
#   if the context fills up before the answer ends: the last drafts are just cut shorter.
# What happens: an answer that fills the context ends some tokens earlier with drafts (here 2 with
#   drafts of 2 tokens, 3 with 4, 6 with 16). Every answer says finish_reason "length".
# Why it matters: "lossless" does not cover the length here. A comparison of answers or of token
#   counts finds a difference that is neither rounding nor a wrong acceptance.
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
prompt = "a bird " * 33


def answer(**settings):
    reply = ask(server(context=256, **settings), prompt=prompt, n_predict=-1, ignore_eos=True)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length", choice
    return choice["text"], reply["usage"]["completion_tokens"]


text, plain = answer()
print("xllamacpp 2026.10.11549 (llama.cpp), context 256, prompt of 231 tokens, greedy, no limit")
print(f"without drafts {plain} tokens: {text!r}")
missing = []
for gamma in (2, 4, 8, 16):
    found, count = answer(draft="target.gguf", gamma=gamma)
    missing.append(plain - count)
    print(f"drafts of {gamma}: {count} tokens, a beginning of the same text: {text.startswith(found)}")
    if not text.startswith(found):
        sys.exit("the behaviour has changed: another text")
sys.exit("the behaviour has changed" if max(missing) < 3 else 0)
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
