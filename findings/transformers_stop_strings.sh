#!/usr/bin/env bash
# Guess: with drafts, transformers ends an answer at the first token that a stopping criterion or a
#   stop string asks for, as without drafts.
# What happens: the criteria are asked once a round, about the text with all accepted drafts. If the
#   stop is inside of what a round accepts, none of them sees it: the answer runs on until a round
#   happens to end with a stop, or to max_new_tokens. Only eos tokens and lengths are cut.
# Why it matters: the better the drafts, the more stops are missed. A program that waits for "\n\n"
#   or for the end of a tool call gets more text, and greedy answers differ from those without drafts.
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
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import StoppingCriteriaList, StopStringCriteria

transformers.logging.set_verbosity_error()
symbols = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
inner.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def ids(text):
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(symbols), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, initializer_range=0.25, bos_token_id=1,
    eos_token_id=2, pad_token_id=0)).eval()
with torch.no_grad():
    target.lm_head.weight[:3] = 0  # letters alone
prompt = ids("abcdefghabc")
plain = {"max_new_tokens": 40, "do_sample": False}
answer = tokenizer.decode(target.generate(prompt, **plain)[0, prompt.shape[1]:])
target.generation_config.num_assistant_tokens = 5
target.generation_config.num_assistant_tokens_schedule = "constant"
target.generation_config.assistant_confidence_threshold = 0
ways = {"without drafts": {}, "the model is its own assistant": {"assistant_model": target},
        "prompt lookup, 5 tokens": {"prompt_lookup_num_tokens": 5}}
prompts = {name: prompt for name in ways}
prompts["prompt lookup, 5 tokens"] = torch.cat([prompt, ids(answer), prompt], dim=1)


class AtToken(transformers.StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **more):
        return input_ids[:, -1] == self.token


def end(name, drafts, **stop):
    out = target.generate(prompts[name], **plain, **stop, **drafts)
    return tokenizer.decode(out[0, prompts[name].shape[1]:])


print(f"transformers {transformers.__version__}, greedy, at most 40 tokens: how often the answer "
      "ends with its first stop, and its mean length")
hits = {}
for name, drafts in ways.items():
    undrafted = end(name, {})
    assert end(name, drafts) == undrafted  # without a stop, drafts change nothing
    for kind in ("stop_strings", "criterion"):
        if kind == "stop_strings" and "assistant_model" in drafts:
            kind = "StopStringCriteria"  # its generate() takes no tokenizer for stop_strings
        good, lengths = 0, []
        for place in range(20):
            text = undrafted[place:place + (1 if kind == "criterion" else 3)]
            stop = {"stop_strings": {"stop_strings": [text], "tokenizer": tokenizer},
                    "StopStringCriteria": {"stopping_criteria": StoppingCriteriaList(
                        [StopStringCriteria(tokenizer, [text])])},
                    "criterion": {"stopping_criteria": StoppingCriteriaList(
                        [AtToken(ids(text)[0, 0])])}}[kind]
            right = undrafted[:undrafted.index(text) + len(text)]
            found = end(name, drafts, **stop)
            good += found == right
            lengths.append(len(found))
        hits[name, kind] = good
        print(f"{name}, {kind}: {good} of 20, {sum(lengths) / 20:.1f} tokens")
right = all(h == 20 if "without" in name else h < 18 for (name, _), h in hits.items())
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
