#!/usr/bin/env bash
# Guess: with a draft model, greedy answers of a target with sliding windows (Mathstral 7B, Phi-3
#   mini 4k, Gemma 3) equal plain decoding's, as those of a target without windows do.
# What happens: they do until the text is as long as the window. From there on the key/value cache is
#   a ring without a mask, and each token of a round sees the drafts behind it in place of the oldest
#   tokens of its window, which they have overwritten. There is no error and no warning.
# Why it matters: behind the window the answers are not the target's, and a draft model that is the
#   target itself is rejected, so that the acceptance rate is wrong as well. Gemma 3 1B's window is 512.
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


def random_model(window, layers):
    torch.manual_seed(0)
    model = GPT(Config(
        name="tiny", block_size=64, vocab_size=64, padded_vocab_size=64, n_layer=2, n_head=4, n_embd=32,
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=64,
        sliding_window_size=window, sliding_window_indices=layers)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(0.25 * torch.randn(p.shape))
    model.max_seq_length = LENGTH
    return model


def cached(model):
    model.set_kv_cache(batch_size=1)
    return model


@torch.no_grad()
def uncached(model, text):
    """Greedy decoding with a forward over the whole text for each token."""
    while len(text) < LENGTH:
        text = torch.cat([text, model(text[None])[0, -1:].argmax(-1)])
    return text


print(f"litgpt {importlib.metadata.version('litgpt')}, {ANSWERS} greedy answers up to position {LENGTH}, "
      "the target drafts 4 tokens for itself\n"
      "window, layers with it | plain answers right | right with drafts | first wrong position | acceptance")
prompts = [torch.randint(3, 64, (PROMPT,), generator=torch.Generator().manual_seed(i)) for i in range(ANSWERS)]
right = True
for window, layers in ((None, None), (64, [1, 1]), (32, [1, 1]), (16, [1, 1]), (32, [1, 0]), (16, [1, 0])):
    target, draft = random_model(window, layers), random_model(window, layers)
    good = same = accepted = 0
    first = LENGTH
    for prompt in prompts:
        answer = uncached(target, prompt)
        good += torch.equal(plain(cached(target), prompt, LENGTH, temperature=0.0), answer)
        # greedy; temperature=0 would not be (litgpt_greedy.sh)
        text, rate = with_drafts(cached(draft), cached(target), prompt, LENGTH, speculative_k=4,
                                 include_prompt=False, top_k=1)
        accepted += rate / ANSWERS
        # the answer's first token is not returned, which is known; there may be one behind LENGTH
        wrong = (text[:LENGTH - PROMPT - 1] != answer[PROMPT + 1:]).nonzero()
        same += len(wrong) == 0
        if len(wrong):
            first = min(first, PROMPT + 1 + wrong[0].item())
    kind = "none" if window is None else f"{window}, {'all' if all(layers) else 'every second'}"
    print(f"{kind} | {good} | {same} | {first if same < ANSWERS else '-'} | {accepted:.2f}")
    right &= good == ANSWERS
    if window is None or window > LENGTH:
        right &= same == ANSWERS and accepted > 0.999
    else:
        right &= same < ANSWERS / 2 and accepted < 0.9 and first > window - 4
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
