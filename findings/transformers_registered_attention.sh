#!/usr/bin/env bash
# Guess: transformers uses an attention function of your own, once it is registered and named in
#   attn_implementation=, or else refuses: set_attn_implementation() leaves a model as it is where
#   its layers cannot use one, and says so.
# What happens: from_pretrained() takes the name for all models. In families whose layers do not
#   look attention functions up (Bloom, XGLM, RemBERT) yours is never called, and there is
#   no warning. But the mask is the one registered for it, which for a kernel like torch's is
#   boolean. Their own attention adds this mask to its scores, so that it hides nothing: a token
#   sees the tokens after it. The logits are those of another model, and so is the text.
# Why it matters: speculative decoding is where people register attention functions, for token
#   trees, paged caches and short queries. A draft that is verified by such a target is verified
#   against another text.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOF'
import sys
import tempfile

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

transformers.logging.disable_progress_bar()
calls = []


def mine(*tensors, **options):
    calls.append(1)
    return sdpa_attention_forward(*tensors, **options)


AttentionInterface.register("mine", mine)
AttentionMaskInterface.register("mine", sdpa_mask)
sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
families = {"Llama": {"intermediate_size": 48}, "Bloom": {},
            "XGLM": {"ffn_dim": 48, "attention_heads": 4, "d_model": 32, "num_layers": 2},
            "RemBert": {"is_decoder": True, "intermediate_size": 48, "input_embedding_size": 16}}
print(f"transformers {transformers.__version__}, models that were loaded with attn_implementation=\"mine\"")
right = True
for family, more in families.items():
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**sizes, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        other = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="mine").eval()
        ids = torch.randint(3, 60, (1, 12))
        changed = ids.clone()
        changed[0, -1] = (ids[0, -1] - 2) % 57 + 3  # the last token only
        calls.clear()
        logits = other(ids).logits
        called = len(calls)
        error = (logits - model(ids).logits).abs().max().item()
        ahead = (logits - other(changed).logits)[0, :-1].abs().max().item()
    print(f"{family:8} says {other.config._attn_implementation}; the function was called {called} times; "
          f"logits differ from the same weights' by {error:.2g}, and by {ahead:.2g} "
          "before the last token if only that one changes")
    if family == "Llama":
        right &= called == 2 and error < 1e-4 and ahead < 1e-4
    else:
        right &= called == 0 and error > 0.1 and ahead > 0.01
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -u try.py
