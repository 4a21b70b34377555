#!/usr/bin/env bash
# Guess: padding on the left of a prompt, masked by attention_mask, changes nothing, neither the answer nor
#   what is drafted.
# What happens: an assistant model drafts the same. Gemma 4's assistant counts the padding in its position,
#   and the model's own layers (use_mtp) get no mask at all and read the padding as text. Their drafts
#   are those of another text. Answers are right, and there is no warning.
# Why it matters: prompts are padded to a multiple of some length on accelerators, or come padded from a
#   data loader. Drafts get worse with the padding, and only the acceptance rate tells.
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
from safetensors.torch import load_file, save_file
from transformers import (Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig,
                          Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM)
from transformers.modeling_layers import MtpModel

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZE, PADDING = 12, 8
sizes = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def random_weights(model, seed=0):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(0.3 * torch.randn(p.shape, generator=random))
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0
    return model.eval()


def with_mtp():
    """GLM-4-MoE of two layers with its one MTP layer, which from_pretrained needs in a checkpoint."""
    Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9].*"]  # not layer 92 here
    settings = dict(sizes, num_key_value_heads=2, head_dim=16, moe_intermediate_size=16, n_routed_experts=4,
                    num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, num_nextn_predict_layers=1)
    random_weights(Glm4MoeForCausalLM(Glm4MoeConfig(**dict(settings, num_hidden_layers=3)))).save_pretrained("three")
    Glm4MoeForCausalLM(Glm4MoeConfig(**settings)).save_pretrained("two")
    weights = load_file("three/model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = 0.3 * torch.randn(32, 64, generator=torch.Generator().manual_seed(7))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.2.{name}.weight"] = torch.ones(32)
    save_file(weights, "two/model.safetensors", metadata={"format": "pt"})
    return Glm4MoeForCausalLM.from_pretrained("two").eval()


gemma = dict(sizes, num_key_value_heads=1, head_dim=16, global_head_dim=16, hidden_size_per_layer_input=0,
             vocab_size_per_layer_input=0, sliding_window=64, layer_types=["sliding_attention", "full_attention"])
llama, small = (random_weights(LlamaForCausalLM(LlamaConfig(**sizes)), seed) for seed in (0, 1))
gemma4 = random_weights(Gemma4ForCausalLM(Gemma4TextConfig(**gemma, num_kv_shared_layers=0)))
drafter = random_weights(Gemma4AssistantForCausalLM(Gemma4AssistantConfig(
    text_config=Gemma4TextConfig(**gemma, num_kv_shared_layers=2), backbone_hidden_size=32)), 1)
ways = {"Llama with an assistant": (llama, {"assistant_model": small}, LlamaForCausalLM),
        "Gemma 4 with its assistant": (gemma4, {"assistant_model": drafter}, Gemma4AssistantForCausalLM),
        "GLM-4-MoE with use_mtp": (with_mtp(), {"use_mtp": True}, MtpModel)}


def first_draft(target, drafts, cls, prompt, mask):
    """The answer, and the logits that the first draft is chosen by."""
    seen, inner = [], cls.forward

    def forward(self, *args, **options):
        output = inner(self, *args, **options)
        if self is not target:
            logits = output[1] if cls is MtpModel else output.logits
            seen.append(logits[0, 0 if cls is MtpModel else -1])
        return output

    cls.forward = forward
    text = target.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=16, **drafts)
    cls.forward = inner
    return text[0, prompt.shape[1]:], seen[0]


print(f"transformers {transformers.__version__}, 20 prompts of 8 tokens, with {PADDING} of padding or without: equal answers |\n"
      "the largest difference of the first draft's logits | other first drafts")
good = True
for name, (target, drafts, cls) in ways.items():
    random = torch.Generator().manual_seed(1)
    equal = other = worst = 0
    for _ in range(20):
        prompt = torch.randint(1, SIZE, (1, 8), generator=random)
        plain, logits = first_draft(target, drafts, cls, prompt, torch.ones_like(prompt))
        padding = torch.zeros(1, PADDING, dtype=torch.long)
        padded, logits_padded = first_draft(target, drafts, cls, torch.cat([padding, prompt], dim=1),
                                            torch.cat([padding, torch.ones_like(prompt)], dim=1))
        equal += torch.equal(plain, padded)
        worst = max(worst, (logits - logits_padded).abs().max().item())
        other += (logits.argmax() != logits_padded.argmax()).item()
    print(f"{name}: {equal} of 20 | {worst:.2g} | {other}")
    good &= equal == 20 and (worst < 1e-3 if target is llama else worst > 0.1)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
