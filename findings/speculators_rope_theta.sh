#!/usr/bin/env bash
# Guess: speculators converts an EAGLE-3 checkpoint with the rotation that its config names.
# What happens: of a config that transformers 5 wrote, which holds the rotation's base in
#   rope_parameters, the converter reads none of it: it writes base 10,000 and no scaling, without
#   a warning. The base is kept where the config has rope_theta at its top, as transformers 4
#   wrote it.
# Why it matters: draft models for Llama 3, Qwen and others have bases of 500,000 and more. The
#   converted one drafts other tokens than the one that was trained, the more so the longer the text.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.19.0 datasets==5.1.0 \
    pydantic-settings loguru typer openai aiohttp
  "$VENV"/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
fi
cat > "$work/try.py" <<'EOF'
import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
from speculators.convert.entrypoints import convert_model
from speculators.models.eagle3.core import Eagle3DraftModel

V, D, T = 64, 64, 200
common = dict(
    vocab_size=V, hidden_size=D, intermediate_size=128, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3,
    tie_word_embeddings=False)
scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, rope_parameters=scaling, **common)
                 ).save_pretrained("target")

# A draft model as EAGLE-3's and SpecForge's checkpoints are, with random weights.
shapes = {"fc": (D, 3 * D), "lm_head": (V, D), "embed_tokens": (V, D)}
shapes |= {f"midlayer.self_attn.{x}_proj": (64, 2 * D) for x in "qkv"}
shapes |= {"midlayer.self_attn.o_proj": (D, 64), "midlayer.mlp.gate_proj": (128, D),
           "midlayer.mlp.up_proj": (128, D), "midlayer.mlp.down_proj": (D, 128)}
weights = {f"{name}.weight": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm",
             "midlayer.post_attention_layernorm"):
    weights[f"{name}.weight"] = torch.ones(D)
configs = {}
for name, rope in {"rope_parameters, as transformers 5 writes": scaling,
                   "the same, base alone": {"rope_type": "default", "rope_theta": 500000.0},
                   "rope_theta, as transformers 4 wrote": None}.items():
    config = LlamaConfig(num_hidden_layers=1, rope_parameters=rope, **common,
                         architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=V)
    config.save_pretrained("draft")
    path = Path("draft/config.json")
    written = json.loads(path.read_text())
    if rope is None:
        del written["rope_parameters"]
        written["rope_theta"] = 500000.0
        path.write_text(json.dumps(written))
    configs[name] = written
    save_file(weights, "draft/model.safetensors")
    convert_model(model="draft", verifier="target", algorithm="eagle3",
                  output_path=f"converted{len(configs)}", eagle_aux_hidden_state_layer_ids=[1, 3, 4])


def drafts(folder, rope):
    """The first drafted token at each position of a random text, by speculators' own class."""
    config = Eagle3DraftModel.config_class.from_pretrained(folder)
    if rope is not None:
        config.transformer_layer_config.rope_parameters = rope
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel.from_pretrained(folder, config=config)
    torch.manual_seed(1)
    with torch.no_grad():
        return model(torch.randn(1, T, 3 * D), torch.randint(0, V, (1, T)),
                     torch.zeros(1, T, dtype=torch.long), ttt_steps=1)[0][0]


print(f"speculators 0.9.0, transformers {transformers.__version__}: the rotation in the draft "
      "model's config | after conversion | first drafts equal to those with the right rotation")
seen = []
for number, (name, written) in enumerate(configs.items(), 1):
    out = f"converted{number}"
    after = json.loads(Path(out, "config.json").read_text())["transformer_layer_config"]
    after = after.get("rope_parameters") or {"rope_theta": after["rope_theta"]}
    truth = written.get("rope_parameters") or {"rope_type": "default", "rope_theta": 500000.0}
    share = (drafts(out, None) == drafts(out, truth)).float().mean().item()
    seen.append((after["rope_theta"], after.get("rope_type"), share))
    print(f"{name}: {truth['rope_theta']:.0f}, {truth['rope_type']} | {after['rope_theta']:.0f}, "
          f"{after.get('rope_type')} | {share:.2f}")
right = seen[0][0] == seen[1][0] == 10000.0 and seen[0][1] == "default"
right &= seen[2][0] == 500000.0 and seen[2][2] == 1.0 and max(seen[0][2], seen[1][2]) < 0.9
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
