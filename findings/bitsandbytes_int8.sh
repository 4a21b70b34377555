#!/usr/bin/env bash
# Guess: a target loaded in 8 bits (bitsandbytes' LLM.int8) gives the same greedy answers with drafts,
#   as its weights are rounded once and its activations row by row, each token with a scale of its own.
# What happens: a column in which any token of the forward reaches llm_int8_threshold (6.0) leaves
#   the int8 product for all tokens. So what is rounded in a token depends on the drafts behind it,
#   the rejected ones as well: its logits change with text that causal attention hides from it, and
#   most answers differ. With llm_int8_threshold=0, and without quantisation, all are equal.
# Why it matters: this is how a large target is loaded with one flag, and no draft model makes it
#   right: a copy of the target differs, too. States collected in one forward over a text to train
#   a drafter are not those that decoding sees.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
ANSWERS, LENGTH = 20, 40


def write_model(folder, noise=0.0):
    """A random Llama, some features of which are larger than others; `noise` is added to the same."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, bos_token_id=1, eos_token_id=None, pad_token_id=0))
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in layer.input_layernorm, layer.post_attention_layernorm:
                norm.weight.copy_(torch.exp(0.8 * torch.randn(norm.weight.shape)))
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape)
    model.save_pretrained(folder)


def load(folder, threshold):
    settings = {}
    if threshold is not None:
        settings = dict(device_map="cpu", quantization_config=BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=threshold))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


@torch.no_grad()
def change(model, prompt):
    """Largest change of the prompt's last logits if five tokens follow."""
    longer = torch.cat([prompt, torch.full((1, 5), 7)], 1)
    return (model(prompt).logits[0, -1] - model(longer).logits[0, prompt.shape[1] - 1]).abs().max().item()


@torch.no_grad()
def outliers(model, threshold):
    """The share of inputs of the first layer's attention that reach the threshold."""
    seen = []
    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for prompt in prompts:
        model(prompt)
    hook.remove()
    return (torch.cat(seen, 1).abs() >= threshold).float().mean().item()


def answer(model, prompt, **drafts):
    return model.generate(prompt, max_new_tokens=LENGTH, do_sample=False, **drafts)[0, prompt.shape[1]:]


write_model("target")
write_model("noisy", noise=0.1)
prompts = [torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(i)).repeat(1, 3)
           for i in range(ANSWERS)]
plain = load("target", None)
print(f"bitsandbytes {importlib.metadata.version('bitsandbytes')}, transformers {transformers.__version__}, "
      f"a target on the CPU in float32; {outliers(plain, 6.0):.1%} of its inputs reach 6.0\n"
      f"{ANSWERS} greedy answers of {LENGTH} tokens, equal to those without drafts: prompt lookup | a noisy copy "
      "drafts | the target drafts | change of the prompt's last logits by five tokens behind it")
right = True
for name, threshold in (("not quantised", None), ("8 bits, threshold 0", 0.0), ("8 bits, threshold 6.0", 6.0)):
    target = load("target", threshold)
    expected = [answer(target, prompt) for prompt in prompts]
    same = []
    for drafts in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": load("noisy", None)},
                   {"assistant_model": load("target", threshold)}):
        same.append(sum(torch.equal(answer(target, prompt, **drafts), e) for prompt, e in zip(prompts, expected)))
    moved = max(change(target, prompt) for prompt in prompts)
    print(name, *same, f"{moved:.4f}", sep=" | ")
    if threshold == 6.0:
        right &= max(same) < ANSWERS / 2 and moved > 0.02
    else:
        right &= min(same) == ANSWERS and moved < 1e-3
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
