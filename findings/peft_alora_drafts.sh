#!/usr/bin/env bash
# Guess: an activated LoRA (aLoRA) of peft, which changes the model from its invocation tokens on, does so
#   with drafts as without: greedy answers are the same.
# What happens: peft tells the layers how many tokens from the end on the adapter acts, and counts them on
#   the prompt. The first forward of assisted decoding holds the prompt and the drafts, so as many tokens
#   of the invocation as there are drafts stay without the adapter. They are in the cache, and answers
#   are those of another model. There is no warning, and a plain LoRA's answers are right.
# Why it matters: an aLoRA is made for fast changes on one cache, next to drafts for speed. That only the
#   first forward is wrong makes the answers look sensible.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
fi
cat > "$work/try.py" <<'EOP'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
INVOCATION = [7, 8, 9, 10, 11]


def random_model(noise=0.0):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.25, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape)
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0
    return model


def adapted(**more):
    model = get_peft_model(random_model(), LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj"], **more))
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape))
    return model.eval()


def answer(model, prompt, **drafts):
    return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                          max_new_tokens=30, **drafts)


def by_hand(model, text):
    """Greedy, by forwards over the whole text."""
    with torch.no_grad():
        for _ in range(30):
            text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], dim=1)
    return text


random = torch.Generator().manual_seed(1)
prompts = []
for _ in range(20):
    part = torch.randint(12, 100, (1, 6), generator=random)
    invocation = torch.tensor([INVOCATION])
    prompts.append(torch.cat([part, part, invocation, part, part[:, :2]], dim=1))
ways = {"without drafts": {}, "the base model as assistant": {"assistant_model": random_model()},
        "a noisy assistant": {"assistant_model": random_model(0.05)},
        "prompt lookup": {"prompt_lookup_num_tokens": 4}}
print(f"peft {peft.__version__}, transformers {transformers.__version__}, greedy: answers of 20 that are "
      "right (those of forwards over the whole text)")
good = True
for name, model in (("LoRA", adapted()), ("aLoRA", adapted(alora_invocation_tokens=INVOCATION))):
    expected = [by_hand(model, prompt) for prompt in prompts]
    for way, drafts in ways.items():
        right = sum(torch.equal(answer(model, p, **drafts), e) for p, e in zip(prompts, expected))
        print(f"{name}, {way}: {right}")
        good &= right < 10 if name == "aLoRA" and drafts else right == 20
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
