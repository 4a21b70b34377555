#!/usr/bin/env bash
# Guess: a model with a soft prompt of peft (prefix tuning, prompt tuning, P-tuning) generates what its own
#   forward continues with: greedy answers are the likeliest tokens of forwards over the text.
# What happens: with this version of transformers, which passes the cache under another name, generate
#   leaves a learned prefix out: all answers are those of the model without it. Prompt tuning and
#   P-tuning insert the soft prompt again before every token. There is no error and no warning.
#   LoRA and IA3 are right.
# Why it matters: a target or draft model that was adapted this way is measured as another model. Losses
#   and accuracies, which come from forward, look as they should.
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
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
SOFT, ANSWERS = 5, 10


def random_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.25, bos_token_id=None,
        eos_token_id=None, pad_token_id=None)).eval()


def adapted(config):
    model = peft.get_peft_model(random_model(), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.5 * torch.randn(p.shape))
    return model.eval()


def answer(model, prompt):
    return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)


def by_hand(model, text):
    """Greedy, by forwards over the whole text."""
    with torch.no_grad():
        for _ in range(20):
            logits = model(input_ids=text, attention_mask=torch.ones_like(text)).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    return text


kinds = {
    "LoRA": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=SOFT),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=SOFT),
    "P-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=SOFT, encoder_hidden_size=16)}
random = torch.Generator().manual_seed(1)
prompts = [torch.randint(0, 100, (1, 12), generator=random) for _ in range(ANSWERS)]
base = [answer(random_model(), prompt) for prompt in prompts]
print(f"peft {peft.__version__}, transformers {transformers.__version__}: of {ANSWERS} greedy answers of generate, those that "
      "equal forward's |\nthose that equal the model's without the adapter")
good = True
for name, config in kinds.items():
    model = adapted(config)
    answers = [answer(model, prompt) for prompt in prompts]
    right = sum(torch.equal(a, by_hand(model, p)) for a, p in zip(answers, prompts))
    bare = sum(torch.equal(a, b) for a, b in zip(answers, base))
    print(f"{name}: {right} | {bare}")
    if name in ("LoRA", "IA3"):
        good &= right == ANSWERS
    else:
        good &= right < ANSWERS / 2 and (bare == ANSWERS if name == "prefix tuning" else bare < ANSWERS)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
