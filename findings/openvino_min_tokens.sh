#!/usr/bin/env bash
# Guess: min_new_tokens keeps the end token out of an answer until it is that long, with drafts too.
# What happens: in OpenVINO GenAI most answers end below the minimum with a noisy draft model or prompt
#   lookup, at the end token where they would end without a minimum. If the target drafts for itself
#   the minimum is kept, and without a minimum the answers are right.
# Why it matters: the minimum is there because a model likes to end too early, and then most answers
#   come out short. Greedy answers should not depend on drafts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.5.4 optimum==2.3.0 \
    'optimum-intel[openvino]==2.2.0' openvino-genai==2026.4.1.0
  "$VENV"/bin/pip uninstall -q -y torchvision torchaudio  # may be built for another torch
fi
cat > "$work/try.py" <<'EOF'
import sys

import numpy as np
import openvino
import openvino_genai as genai
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VERSION = "openvino-genai 2026.4.1.0, greedy, float32 caches and arithmetic"


def write_model(folder, noise=0.0):
    """A random Llama over bytes; `noise` is added to the same weights."""
    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(symbols), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.lm_head.weight[98:] = 0
        model.lm_head.weight *= 1.5
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape, generator=random)
    model.save_pretrained("torch_" + folder)
    tokenizer.save_pretrained("torch_" + folder)
    OVModelForCausalLM.from_pretrained(
        "torch_" + folder, export=True, load_in_8bit=False, compile=False).save_pretrained(folder)
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(there, folder + "/openvino_tokenizer.xml")
    openvino.save_model(back, folder + "/openvino_detokenizer.xml")


def pipeline(draft=None, **more):
    options = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32",
               "INFERENCE_NUM_THREADS": 1}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    if draft:
        more["draft_model"] = genai.draft_model(draft, "CPU", **options)
    return genai.LLMPipeline("target", "CPU", scheduler_config=scheduler, **options, **more)


def generate(name, ids, **settings):
    config = genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = 40, False, False
    if name != "plain":
        config.num_assistant_tokens = 4
    if name == "prompt lookup":
        config.max_ngram_size = 2
    for key, value in settings.items():
        setattr(config, key, value)
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    return engines[name].generate(inputs, config)


write_model("target")
write_model("noisy", noise=0.1)
engines = {"plain": pipeline(), "the target as draft model": pipeline("target"),
           "a noisy draft model": pipeline("noisy"), "prompt lookup": pipeline(prompt_lookup=True)}
random = np.random.default_rng(0)
prompts = [np.tile(random.integers(5, 95, 6), 3)[None].astype(np.int64) for _ in range(20)]

MINIMUM = 20
print(VERSION + f"\nmin_new_tokens {MINIMUM}, 20 prompts, whose end token is the tenth of the answer without one: answers that are "
      "too short |\nthat equal those without drafts | the same without a minimum")
right = True
ends = [int(generate("plain", ids).tokens[0][9]) for ids in prompts]
expected = {}
for name in engines:
    short, equal = 0, [0, 0]
    for number, (ids, end) in enumerate(zip(prompts, ends)):
        for place, more in enumerate(({"min_new_tokens": MINIMUM}, {})):
            tokens = list(generate(name, ids, eos_token_id=end, stop_token_ids={end}, **more).tokens[0])
            equal[place] += tokens == expected.setdefault((number, place), tokens)
            short += bool(more) and len(tokens) < MINIMUM
    print(f"{name}: {short} | {equal[0]} | {equal[1]}")
    right &= equal[1] == 20 and (short == 0 if name == "plain" else True)
    if name in ("a noisy draft model", "prompt lookup"):
        right &= short > 5
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
