#!/usr/bin/env bash
# Guess: a watermark of transformers is as strong with drafts as without. Those are logits
#   processors, and assisted decoding calls the processors at each drafted place with the text
#   up to there.
# What happens: SynthID's processor keeps the last tokens in a state of its own, which moves on by
#   one token with every call. With drafts it is called more often than the text grows, by the
#   assistant and again for rejected tokens, so its state is no longer the text. The answer carries
#   no watermark with an assistant, and hardly any with prompt lookup. There is no warning. The
#   green-list watermark (WatermarkingConfig) depends on the text alone, and stays.
# Why it matters: a watermark is there to be found later. One who turns drafts on for speed loses it
#   without notice. The same holds for any processor with a state.
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
import warnings

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import SynthIDTextWatermarkingConfig, WatermarkDetector, WatermarkingConfig

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


def random_model(noise=0.0):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.25, bos_token_id=1,
        eos_token_id=2, pad_token_id=0)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape)
    return model


target = random_model()
prompt = torch.tensor([[10, 20, 30, 40, 10, 20, 30]])
synthid = SynthIDTextWatermarkingConfig(
    keys=[654, 400, 836, 123, 340, 443, 597, 160, 57], ngram_len=5)
green = WatermarkingConfig(bias=2.0)
judge = synthid.construct_processor(vocab_size=100, device="cpu")
detector = WatermarkDetector(target.config, device="cpu", watermarking_config=green)
ways = {"without drafts": {}, "the target as assistant": {"assistant_model": target},
        "a noisy assistant": {"assistant_model": random_model(0.05)},
        "prompt lookup": {"prompt_lookup_num_tokens": 4}}


def answers(watermark, drafts, count=6, length=100):
    """Answers drawn at temperature 1, as rows."""
    rows = []
    for seed in range(count):
        torch.manual_seed(seed)
        rows.append(target.generate(
            prompt, do_sample=True, temperature=1.0, top_k=0, min_new_tokens=length,
            max_new_tokens=length, watermarking_config=watermark, **drafts)[0, prompt.shape[1]:])
    return torch.stack(rows)


def mean_g(rows):
    """What SynthID's detectors look at: 0.5 without a watermark."""
    fresh = judge.compute_context_repetition_mask(rows)  # seen contexts carry no watermark
    g = judge.compute_g_values(rows).float().mean(-1)
    return ((g * fresh).sum() / fresh.sum()).item()


def green_share(rows):
    found = detector(torch.cat([prompt[:, -1:].expand(len(rows), 1), rows], 1), return_dict=True)
    return found.green_fraction.mean().item()


print(f"transformers {transformers.__version__}, temperature 1, 6 answers of 100 tokens: SynthID's "
      "mean g value; share of green tokens (WatermarkingConfig)")
nothing = answers(None, {})
print(f"no watermark: {mean_g(nothing):.3f}; {green_share(nothing):.3f}")
seen = {}
for name, drafts in ways.items():
    seen[name] = mean_g(answers(synthid, drafts)), green_share(answers(green, drafts))
    print(f"{name}: {seen[name][0]:.3f}; {seen[name][1]:.3f}")
g = {name: values[0] - mean_g(nothing) for name, values in seen.items()}
right = g["without drafts"] > 0.15 and all(
    value < 0.4 * g["without drafts"] for name, value in g.items() if name != "without drafts")
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
