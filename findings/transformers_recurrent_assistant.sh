#!/usr/bin/env bash
# Guess: a hybrid model (recurrent layers and attention, such as Qwen3-Next) is refused as an assistant, as
#   it is as a target: a recurrent state cannot go back to where a draft was rejected.
# What happens: it is taken. The keys and values of rejected drafts are removed, the recurrent state keeps
#   them, and each rejection adds to it. Nearly all rounds draft from another state than a new call
#   on the same text would. There is no warning.
# Why it matters: answers are right, so nothing shows but an acceptance rate that looks like a drafter
#   that does not fit. Many of the small new models are hybrids.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOP'
import sys
import warnings

import torch
import transformers
from transformers import (FalconH1Config, FalconH1ForCausalLM, JambaConfig, JambaForCausalLM, LlamaConfig, LlamaForCausalLM,
                          Qwen3NextConfig, Qwen3NextForCausalLM)

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
SIZE, DRAFTS, LENGTH, ANSWERS = 30, 4, 40, 4
sizes = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": None, "tie_word_embeddings": False}


def random_weights(model, seed):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(0.3 * torch.randn(p.shape, generator=random))
    settings = model.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = DRAFTS, "constant"
    settings.assistant_confidence_threshold = 0
    return model.eval()


target = random_weights(LlamaForCausalLM(LlamaConfig(**sizes)), 1)
assistants = {name: random_weights(model, 2) for name, model in {
    "Llama": LlamaForCausalLM(LlamaConfig(**sizes)),
    "Qwen3-Next": Qwen3NextForCausalLM(Qwen3NextConfig(
        **sizes, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=0, layer_types=["linear_attention", "full_attention"])),
    "Falcon-H1": FalconH1ForCausalLM(FalconH1Config(
        **sizes, head_dim=16, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)),
    "Jamba": JambaForCausalLM(JambaConfig(
        **sizes, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        mamba_dt_rank=8, use_mamba_kernels=False))}.items()}


def drafts_of(assistant, text, length):
    """The answer, and of each round: the length of the text, the drafts, the first one's logits."""
    seen, calls = [], []

    def look(module, args, options, output):
        calls.append(output.logits[0, -1])

    inner = assistant.generate

    def generate(input_ids, **options):
        calls.clear()
        output = inner(input_ids, **options)
        seen.append((input_ids.shape[1], output.sequences[0, input_ids.shape[1]:].tolist(), calls[0]))
        return output

    handle = assistant.register_forward_hook(look, with_kwargs=True)
    assistant.generate = generate
    answer = target.generate(text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=length,
                             assistant_model=assistant)
    del assistant.generate
    handle.remove()
    return answer, seen


print(f"transformers {transformers.__version__}, greedy, {ANSWERS} answers of {LENGTH} tokens, {DRAFTS} drafts a round: right answers | "
      "rounds after the first |\nof these, logits unlike a new call's on the same text | other drafts")
random = torch.Generator().manual_seed(1)
prompts = [torch.randint(0, SIZE, (1, 8), generator=random) for _ in range(ANSWERS)]
good = True
for name, assistant in assistants.items():
    right = rounds = other = differ = 0
    for prompt in prompts:
        text, seen = drafts_of(assistant, prompt, LENGTH)
        right += torch.equal(text, target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=LENGTH))
        for size, drafts, logits in seen[1:]:
            _, (new, *_) = drafts_of(assistant, text[:, :size], len(drafts) + 1)
            rounds += 1
            other += not torch.allclose(logits, new[2])
            differ += drafts != new[1]
    print(f"{name}: {right} | {rounds} | {other} | {differ}")
    good &= right == ANSWERS and (other == 0 if name == "Llama" else other > rounds / 2)
    if name != "Llama":
        try:
            assistant.generate(prompts[0], max_new_tokens=8, prompt_lookup_num_tokens=4)
            good = False
        except ValueError as error:
            print("  as the target:", error)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
