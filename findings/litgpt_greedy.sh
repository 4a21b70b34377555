#!/usr/bin/env bash
# Guess: at temperature 0 an answer with a draft model equals plain decoding's, whatever the draft
#   model is. (From the second token on: that the first one is left out of the answer is known.)
# What happens: the draft model's likeliest token is judged by the rule for drawn tokens, with the
#   probabilities at temperature 1. A token that is not the target's likeliest is often kept, and
#   one that is may be rejected and replaced by another. So answers are random, and differ even if
#   the draft model always drafts what the target would say, but is more certain. With top_k=1 the
#   answers are right.
# Why it matters: an evaluation at temperature 0 measures another model, and its acceptance rate is
#   that of another rule. Only a draft model that is the target, or less certain, looks right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 lightning==2.6.6 litgpt==0.5.13
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import sys
import warnings

import torch
from litgpt import GPT, Config
from litgpt.generate.base import generate as plain
from litgpt.generate.speculative_decoding import generate as with_drafts

warnings.filterwarnings("ignore")
PROMPT, LENGTH, ANSWERS = 10, 50, 10


def random_model(noise=0.0, head=1.0):
    """Always the same random model; noise is added to its weights, its logits are scaled."""
    torch.manual_seed(0)
    model = GPT(Config(
        name="tiny", block_size=64, vocab_size=64, padded_vocab_size=64, n_layer=2, n_head=4, n_embd=32,
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=64)).eval()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    with torch.no_grad():
        for p in matrices:
            p.copy_(0.25 * torch.randn(p.shape))
        for p in matrices:
            p += noise * p.std() * torch.randn(p.shape)
        model.lm_head.weight *= head
    model.max_seq_length = LENGTH
    return model


def cached(model):
    model.set_kv_cache(batch_size=1)
    return model


target = random_model()
drafts = {"the target": random_model(), "less certain": random_model(head=0.5),
          "more certain": random_model(head=2.0), "noisy": random_model(noise=0.1)}
prompts = [torch.randint(3, 64, (PROMPT,), generator=torch.Generator().manual_seed(i)) for i in range(ANSWERS)]
answers = [plain(cached(target), prompt, LENGTH, temperature=0.0) for prompt in prompts]
# a forward without a cache agrees: every token of a plain answer is the likeliest
with torch.no_grad():
    right = all(torch.equal(target(x[None])[0, PROMPT - 1:-1].argmax(-1), x[PROMPT:]) for x in answers)

print(f"litgpt {importlib.metadata.version('litgpt')}, {ANSWERS} answers of {LENGTH - PROMPT} tokens, 4 drafts\n"
      "setting, draft model | answers as without drafts | the target's likeliest tokens | acceptance | "
      "equal if asked again")
for name, setting in (("temperature=0", {"temperature": 0.0}), ("top_k=1", {"top_k": 1})):
    for kind, draft in drafts.items():
        equal = again = likeliest = count = accepted = 0
        for prompt, answer in zip(prompts, answers):
            text, rate = with_drafts(cached(draft), cached(target), prompt, LENGTH, speculative_k=4,
                                     include_prompt=False, **setting)
            other, _ = with_drafts(cached(draft), cached(target), prompt, LENGTH, speculative_k=4,
                                   include_prompt=False, **setting)
            accepted += rate / ANSWERS
            # the first token is plain decoding's, but is not returned; there may be one behind LENGTH
            text, other = text[:LENGTH - PROMPT - 1], other[:LENGTH - PROMPT - 1]
            equal += torch.equal(text, answer[PROMPT + 1:])
            again += torch.equal(text, other)
            whole = torch.cat([answer[:PROMPT + 1], text])
            with torch.no_grad():
                likeliest += (target(whole[None])[0, PROMPT:-1].argmax(-1) == text).sum().item()
            count += len(text)
        print(f"{name}, {kind} | {equal} | {likeliest / count:.2f} | {accepted:.2f} | {again}")
        if setting.get("top_k") or kind in ("the target", "less certain"):
            right &= equal == again == ANSWERS and likeliest == count
            right &= kind == "noisy" or accepted > 0.999
        else:
            right &= equal < 2 and again < 2 and likeliest / count < 0.9 and accepted < 0.9
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
