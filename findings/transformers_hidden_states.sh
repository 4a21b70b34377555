#!/usr/bin/env bash
# Guess: with drafts, generate(output_hidden_states=True, output_attentions=True) gives the target's
#   states for each new token, as without drafts; scores and logits are right as well.
# What happens: in the first round only the first token gets its own. The others, accepted drafts
#   and the token after them, get states and attention of the prompt's first, second, ... token.
#   Later rounds are right, and so are the number and the shapes of all entries.
# Why it matters: drafting heads are trained on the target's states. Those collected with drafts are
#   paired with wrong tokens; the better the drafts and the shorter the answers, the more of them.
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

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()


def random_model(noise=0.0):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.1, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, attn_implementation="eager")).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += noise * p.std() * torch.randn(p.shape)
        model.lm_head.weight[:3] = 0  # no padding and no end inside of a text
    model.generation_config.num_assistant_tokens = 5
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0
    return model


target = random_model()
ways = {"without drafts": {}, "the target as assistant": {"assistant_model": target},
        "a noisy assistant": {"assistant_model": random_model(0.02)},
        "prompt lookup": {"prompt_lookup_num_tokens": 5}}
greedy = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
random = torch.Generator().manual_seed(1)
prompts = []
for _ in range(6):  # what the model says after a while repeats itself, for the lookup
    start = torch.randint(3, 100, (1, 6), generator=random)
    prompts.append(target.generate(start, do_sample=False, max_new_tokens=90, min_new_tokens=90))


def differ(left, right):
    return left.shape != right.shape or (left - right).abs().max().item() > 1e-3


def wrong(prompt, drafts):
    """The numbers of the tokens with wrong states, attention, logits; are they the prompt's?"""
    out = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True,
        output_hidden_states=True, output_attentions=True, output_logits=True, **greedy, **drafts)
    with torch.no_grad():  # one forward over the finished text, without a cache
        whole = target(out.sequences, output_hidden_states=True, output_attentions=True)
    start = prompt.shape[1]
    assert len(out.hidden_states) == len(out.attentions) == len(out.logits) == 20
    states, rows, logits, of_prompt = [], [], [], True
    for i in range(20):
        at = start - 1 + i  # the place whose state gives token i of the answer
        given = [layer[0, -1] for layer in out.hidden_states[i]]
        if any(differ(g, h[0, at]) for g, h in zip(given, whole.hidden_states)):
            states.append(i + 1)
            of_prompt &= not any(differ(g, h[0, i - 1])
                                 for g, h in zip(given, whole.hidden_states))
        if any(differ(g[0, :, -1], a[0, :, at, :at + 1])
               for g, a in zip(out.attentions[i], whole.attentions)):
            rows.append(i + 1)
        if differ(out.logits[i][0], whole.logits[0, at]):
            logits.append(i + 1)
    return states, rows, logits, of_prompt


print(f"transformers {transformers.__version__}, greedy, 6 answers of 20 tokens, up to 5 drafts a "
      "round.\nTokens whose entry differs from one forward over the finished text by over .001:\n"
      "drafts | hidden states, answer by answer | attention | logits")
right = True
for name, drafts in ways.items():
    found = [wrong(prompt, drafts) for prompt in prompts]
    shown = ["none" if not s else f"2-{s[-1]}" if len(s) > 1 else "2" for s, *_ in found]
    same = "the same" if any(s for s, *_ in found) else "none"
    print(name, " ".join(shown), same, sum(len(f[2]) for f in found) or "none", sep=" | ")
    for states, rows, logits, of_prompt in found:
        right &= states == rows == list(range(2, 2 + len(states))) and not logits and of_prompt
    right &= any(s for s, *_ in found) == bool(drafts)
print("The wrong ones equal those of the prompt's first, second, ... token.")
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
