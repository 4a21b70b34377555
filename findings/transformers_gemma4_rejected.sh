#!/usr/bin/env bash
# Guess: what a drafter proposes depends on the text alone. After drafts were rejected, Gemma 4's assistant
#   drafts what it would draft in a new call with the text so far as the prompt.
# What happens: the assistant reads the target's keys and values, which are cut to the length of the text
#   after a rejection. But the text's last token has none yet, so one rejected token stays in sight.
#   Past the sliding window nothing is cut from those layers, and all rejected tokens stay.
# Why it matters: drafts are worse after every rejection, just where the drafter was unsure. Answers
#   are right, so only the acceptance rate suffers.
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
from transformers import (Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM,
                          Gemma4TextConfig)

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_default_dtype(torch.float64)
SIZE, DRAFTS = 12, 4


def random_weights(model, seed):
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(0.3 * torch.randn(p.shape, generator=random))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval()


def models(window):
    sizes = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16,
             "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": window,
             "layer_types": ["sliding_attention", "full_attention"]}
    target = random_weights(Gemma4ForCausalLM(Gemma4TextConfig(**sizes, num_kv_shared_layers=0)), 0)
    assistant = random_weights(Gemma4AssistantForCausalLM(Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**sizes, num_kv_shared_layers=2), backbone_hidden_size=32)), 1)
    assistant.generation_config.num_assistant_tokens = DRAFTS
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return target, assistant


def rounds(target, assistant, prompt, length):
    """The answer, and of each round: length of the text, keys in sight of both layers, first logits."""
    seen = []

    def look(module, args, options, output):
        size = options["position_ids"].item() + 1  # the same in all drafts of a round
        if not seen or seen[-1][0] != size:
            states = options["shared_kv_states"]
            keys = [states[kind][0].shape[2] for kind in ("sliding_attention", "full_attention")]
            seen.append((size, keys, output.logits[0, -1]))

    handle = assistant.register_forward_hook(look, with_kwargs=True)
    text = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                           max_new_tokens=length, assistant_model=assistant)
    handle.remove()
    return text, seen


print(f"transformers {transformers.__version__}, Gemma 4 with an assistant, greedy, 20 answers of 24 tokens; rounds after "
      f"the first, compared with a new call on the same text")
good = True
for window in (64, 10):
    target, assistant = models(window)
    random = torch.Generator().manual_seed(1)
    counts = dict.fromkeys(("rounds", "other logits", "another first draft"), 0)
    right, rejected = 0, [0, 0]
    for _ in range(20):
        prompt = torch.randint(3, SIZE, (1, 8), generator=random)
        text, seen = rounds(target, assistant, prompt, 24)
        right += torch.equal(text, target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24))
        for (before, *_), (size, keys, logits) in zip(seen, seen[1:]):
            _, new = rounds(target, assistant, text[:, :size - 1], 8)
            assert new[0][0] == size
            counts["rounds"] += 1
            counts["other logits"] += not torch.allclose(logits, new[0][2])
            counts["another first draft"] += (logits.argmax() != new[0][2].argmax()).item()
            for layer, limit in enumerate((window - 1, 1000)):
                rejected[layer] += keys[layer] - min(before - 1, limit) - (size - before)
    means = [count / counts["rounds"] for count in rejected]
    print(f"window {window}: {right} of 20 answers right; {counts}; rejected tokens in sight, a round: "
          f"{means[0]:.2f} in the sliding layer, {means[1]:.2f} in the other")
    good &= right == 20 and counts["other logits"] > counts["rounds"] / 2 and means[1] > 0.5
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
