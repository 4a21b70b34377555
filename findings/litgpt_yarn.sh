#!/usr/bin/env bash
# Guess: a model with YaRN rotates in litgpt as in transformers, if rope_adjustments has the values of
#   its config (factor, beta_fast, beta_slow, original_max_seq_len), as with linear and Llama 3 scaling.
# What happens: the two ends are exchanged. The fast frequencies, which YaRN leaves alone, are divided
#   by the factor, and the slow ones, which it divides, are left alone, without a warning. If
#   mscale is left out, as in most configs, the factor for cosine and sine is missing as well.
# Why it matters: it is wrong from the second token on, not only in long texts. Such a model, used as
#   draft model for itself, or trained further as one, is not the one that other engines run. (None of
#   the models that litgpt 0.5.13 knows by name has YaRN, so this takes a Config of one's own.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.23.0 fsspec psutil
  "$VENV"/bin/pip install -q --no-deps litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 \
    torchmetrics==1.9.0 jsonargparse==4.41.0
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import math
import sys
import warnings

import torch
import transformers
from litgpt import GPT, Config
from litgpt.model import build_rope_cache
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
LENGTH, BASE, FACTOR, ORIGINAL = 200, 10000.0, 4.0, 2048
SIZE = 64  # of a head

names = {"original_max_position_embeddings": "original_max_seq_len"}
yarn = {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "beta_fast": 32.0, "beta_slow": 1.0}
llama3 = {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}
kinds = {  # name: type, values in transformers, more values in litgpt
    "none": ("default", {}, {}), "linear": ("linear", {"factor": FACTOR}, {}), "llama3": ("llama3", llama3, {}),
    # mscale=1 gives litgpt the factor 0.1 * log(4) + 1 that transformers has without it
    "yarn, mscale=1": ("yarn", yarn, {"mscale": 1.0}), "yarn": ("yarn", yarn, {})}

print(f"litgpt {importlib.metadata.version('litgpt')}, transformers {transformers.__version__}, a Llama with "
      f"the same weights, {LENGTH} tokens\nscaling | largest difference of logits | same likeliest token")
right = True
text = torch.randint(3, 100, (1, LENGTH), generator=torch.Generator().manual_seed(1))
for name, (kind, values, more) in kinds.items():
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=2 * SIZE, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=SIZE, initializer_range=0.15, rms_norm_eps=1e-5,
        max_position_embeddings=int(FACTOR) * ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": BASE} | values)).eval()
    config = Config(
        name="tiny", block_size=int(FACTOR) * ORIGINAL, vocab_size=100, padded_vocab_size=100, n_layer=2, n_head=2,
        n_embd=2 * SIZE, n_query_groups=1, head_size=SIZE, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=1e-5, mlp_class_name="LLaMAMLP", intermediate_size=128,
        rope_base=int(BASE), rope_adjustments={names.get(k, k): v for k, v in values.items()} | more or None)
    weights = {}
    copy_weights_hf_llama(config, {}, weights, dict(theirs.state_dict()))
    ours = GPT(config).eval()
    ours.load_state_dict(weights)
    with torch.no_grad():
        a, b = theirs(text).logits[0], ours(text)[0]
    apart, same = (a - b).abs().max().item(), (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    print(f"{name} | {apart:.4f} | {same:.2f}")
    right &= apart > 1 and same < 0.8 if kind == "yarn" else apart < 1e-3 and same == 1
    if kind == "yarn" and more:
        with torch.no_grad():  # the rotation is all that differs
            ours.cos, ours.sin = (x[0] for x in theirs.model.rotary_emb(a, torch.arange(LENGTH)[None]))
            b = ours(text)[0]
        apart, same = (a - b).abs().max().item(), (a.argmax(-1) == b.argmax(-1)).float().mean().item()
        print(f"{name}, with transformers' cosines and sines | {apart:.4f} | {same:.2f}")
        right &= apart < 1e-3 and same == 1
        # the frequencies themselves
        plain = BASE ** (-torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = build_rope_cache(2, SIZE, base=int(BASE), extra_config=config.rope_adjustments)
        found = torch.atan2(sin, cos)[1, :SIZE // 2] / plain
        other = theirs.model.rotary_emb.inv_freq / plain
        turns = ORIGINAL * plain / (2 * math.pi)  # within the original length

assert (other[turns > 32] > 0.999).all() and (other[turns < 1] < 1 / FACTOR + 0.001).all()  # as YaRN says
print("YaRN's frequencies by those without scaling, transformers and litgpt:")
for what, which in (("more than 32 turns in the original length", turns > 32), ("less than one", turns < 1)):
    print(f"{what} | {other[which].mean():.2f} | {found[which].mean():.2f}")
right &= found[turns > 32].max().item() < 1 / FACTOR + 0.001 and found[turns < 1].min().item() > 0.999
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
