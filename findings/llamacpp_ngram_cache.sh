#!/usr/bin/env bash
# Guess: llama.cpp's drafts of type ngram-cache continue what stands in the request so far, prompt and
#   answer, as those of its other n-gram types do. A text that repeats one piece is then drafted
#   rightly from the second piece on.
# What happens: the cache learns from the prompt of the server's first request only. What that answer
#   repeats is not drafted. A later request neither clears the cache nor adds its prompt: the drafts go
#   on with the first prompt, and are rejected.
# Why it matters: who measures the type in a server with one request sees it accept everything, and in
#   use it costs verification. Answers stay right, so nothing shows.
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


def write_model(path, width=64, layers=2, heads=4, ffn=128):
    """A random Llama over printable characters."""
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
    weights = np.random.default_rng(0)

    def add(name, *shape, scale=0.25):
        w.add_tensor(name, (scale * weights.standard_normal(shape)).astype(np.float32))

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


def server(kind):
    p = xllamacpp.CommonParams()
    p.model.path = "target.gguf"
    p.n_ctx, p.n_parallel, p.warmup, p.verbosity, p.fit_params = 1024, 1, False, -1, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    s = p.speculative
    s.draft.n_max, s.draft.n_min, s.draft.p_min = 4, 0, 0.0
    for own in (s.ngram_simple, s.ngram_map_k, s.ngram_map_k4v):
        own.size_n, own.size_m = 3, 4  # looks for three tokens, drafts four
    s.ngram_mod.n_match, s.ngram_mod.n_min, s.ngram_mod.n_max = 3, 1, 4
    types = xllamacpp.common_speculative_type
    s.types = [getattr(types, "COMMON_SPECULATIVE_TYPE_" + kind)]
    return xllamacpp.Server(p)


def ask(engine, prompt):
    """Drafted and accepted tokens of one answer, which the grammar forces."""
    reply = engine.handle_completions({
        "prompt": prompt, "temperature": 0, "n_predict": LENGTH, "ignore_eos": True,
        "cache_prompt": False, "grammar": 'root ::= ("' + PIECE + '")+'})
    reply = reply if isinstance(reply, dict) else json.loads(reply)
    text = reply["choices"][0]["text"]
    assert text == (PIECE * LENGTH)[:LENGTH], text
    times = reply["timings"]
    return times.get("draft_n", 0), times.get("draft_n_accepted", 0)


PIECE, LENGTH = "abcdefghij", 120
OTHER = "some other words of another text than those "  # of PIECE's letters, in other orders
write_model("target.gguf")
kinds = ["NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MAP_K4V", "NGRAM_MOD", "NGRAM_CACHE"]
print(f"xllamacpp 2026.10.11549 (llama.cpp), a grammar repeats {PIECE}, {LENGTH} tokens a request, "
      "drafts of\n4 tokens: accepted / drafted | the prompt repeats it too | the prompt is another "
      "text | the prompt repeats it\ntoo, after a request with another prompt")
seen = {}
for kind in kinds:
    first = ask(server(kind), PIECE * 5)
    answer_only = ask(server(kind), OTHER)
    engine = server(kind)
    ask(engine, OTHER)
    second = ask(engine, PIECE * 5)
    seen[kind] = [first, answer_only, second]
    print(kind, *(f"{accepted} / {drafted}" for drafted, accepted in seen[kind]), sep=" | ")
cache = [accepted for _, accepted in seen.pop("NGRAM_CACHE")]
good = cache[0] > 80 and max(cache[1:]) < 10
good &= all(accepted > 50 for counts in seen.values() for _, accepted in counts)
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
