#!/usr/bin/env bash
# Guess: a press of kvpress compresses the prompt's part of the cache with an assistant as without, so that
#   greedy answers with drafts are those with the press and no drafts; or the two are refused together.
# What happens: the answers are others. The first forward holds drafts besides the prompt, and they are
#   compressed with it. Afterwards transformers cuts rejected drafts off by the length of the text, and
#   the compressed cache is shorter than that: rejected drafts stay, until the cache is as long as
#   without compression. With a compression ratio of 0 all is right. There is no warning.
# Why it matters: compressed caches and drafts are both for long prompts. Who measures a press and turns
#   drafts on for speed measures something else.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
fi
cat > "$work/try.py" <<'EOF'
import importlib.metadata
import sys
import warnings

import torch
import transformers
from kvpress import KnormPress, SnapKVPress, StreamingLLMPress
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


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


target, assistant = random_model(), random_model(0.05)
random = torch.Generator().manual_seed(1)
prompts = [torch.randint(0, 100, (1, 40), generator=random) for _ in range(20)]
rows = []


def answer(prompt, press, **drafts):
    """The greedy answer; `rows` gets the length of the target's cache at the end."""
    with press(target):
        out = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30,
                              return_dict_in_generate=True, **drafts)
    rows.append(out.past_key_values.get_seq_length())
    return out.sequences


print(f"kvpress {importlib.metadata.version('kvpress')}, transformers {transformers.__version__}, prompts of 40 tokens, answers of 30: "
      "answers of 20 with an assistant that equal those without |\nmean rows in the cache at the end, without and with it")
good = True
for name, press in (("Knorm, ratio 0", KnormPress(0.0)), ("Knorm, ratio 0.5", KnormPress(0.5)),
                    ("StreamingLLM, ratio 0.5", StreamingLLMPress(0.5)),
                    ("SnapKV, ratio 0.5", SnapKVPress(0.5, window_size=8))):
    rows.clear()
    plain = [answer(prompt, press) for prompt in prompts]
    without = sum(rows) / len(rows)
    rows.clear()
    equal = sum(torch.equal(answer(prompt, press, assistant_model=assistant), p) for prompt, p in zip(prompts, plain))
    print(f"{name}: {equal} | {without:.1f}, {sum(rows) / len(rows):.1f}")
    good &= equal == 20 if name.endswith(" 0") else equal < 10
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
