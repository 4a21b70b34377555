#!/usr/bin/env bash
# Guess: the probability that a suffix cache reports for a drafted token is its share among the
#   recorded continuations, so if one continuation alone has ever been seen, it is 1; and how many
#   other requests are being answered changes nothing, for they have seen nothing else.
# What happens: the end of each text that is being written counts as a place where the token did not
#   follow, also that of the request itself. After one finished answer, N requests that repeat it in
#   step get 1/(N+1) for tokens that are all accepted: .50 for one, below the default threshold of
#   .1 from ten on. Then nothing is drafted at all, and 18 tokens a step become 1. (It takes ten that
#   are equally far in front: those behind them are drafted what these have written.)
# Why it matters: samples of one prompt that start together are such a group, and lose all drafts
#   without a warning. A threshold of more than .5 drafts nothing that was seen once. A score, the
#   sum of the probabilities, is compared with the number of drafts of a model, and says half of the
#   tokens that are accepted, or less. With the requests' own texts evicted from the shared history
#   all is as one would guess.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
  "$VENV"/bin/pip install -q numpy==2.4.6 setuptools==80.9.0 wheel==0.48.0 cmake==4.4.5 ninja==1.13.2 nanobind==2.9.2 \
    grpcio-tools==1.85.1
  # from source, without CUDA and vLLM; the build looks for python in the path
  PATH=$VENV/bin:$PATH "$VENV"/bin/pip install -q --no-deps --no-build-isolation arctic-inference==0.3.0
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import random
import sys

from arctic_inference.suffix_decoding import SuffixDecodingCache

LENGTH, DEPTH = 200, 64
source = random.Random(0)
tokens = source.sample(range(1000), 20 + LENGTH)  # no token occurs twice in a text
prompt, answer = tokens[:20], tokens[20:]


def decode(requests, finished=1, in_history=True, **settings):
    """Requests with the same answer in one batch, which has been given `finished` times before.

    Each step records the new tokens of all requests, then drafts for all, as the package's plugin does."""
    cache = SuffixDecodingCache(max_tree_depth=DEPTH)
    for i in range(finished):
        cache.start_request(f"finished {i}", prompt)
        cache.add_active_response(f"finished {i}", answer)
        cache.stop_request(f"finished {i}")
    for i in range(requests):
        cache.start_request(i, prompt)
        if not in_history:
            cache.evict_cached_response(i)
    written, new, steps = [0] * requests, [1] * requests, 0
    probabilities, drafted, right, score, without, calls = 0.0, 0, 0, 0.0, 0, 0
    while min(written) < LENGTH:
        steps += 1
        going = [i for i in range(requests) if written[i] < LENGTH]
        for i in going:
            cache.add_active_response(i, answer[written[i]:written[i] + new[i]])
            written[i] += new[i]
        for i in going:
            rest = answer[written[i]:]
            draft = cache.speculate(i, (prompt + answer[:written[i]])[-DEPTH:], max_spec_tokens=32, **settings)
            tokens = draft.token_ids[:len(rest)]
            count = next((k for k, token in enumerate(tokens) if token != rest[k]), len(tokens))
            new[i] = min(count + 1, len(rest))
            if rest:
                calls, without = calls + 1, without + (not tokens)
                drafted, right, score = drafted + len(tokens), right + count, score + draft.score
                probabilities += sum(draft.probs[:len(tokens)])
        for i in going:
            if written[i] == LENGTH:
                cache.stop_request(i)
    return LENGTH / steps, probabilities / max(drafted, 1), right / max(drafted, 1), without / calls


print(f"arctic-inference {importlib.metadata.version('arctic-inference')}, answers of {LENGTH} tokens\n"
      "requests, setting | tokens of an answer a step | mean probability of drafted tokens | accepted | no draft")
good = True
for name, cases, settings in (
        ("the same answer finished before", (1, 2, 4, 8, 10, 16, 32), {}),
        ("finished 4 times before", (1, 16, 32, 64), {"finished": 4}),
        ("min_token_prob=0.6", (1,), {"min_token_prob": 0.6}),
        ("evicted from the history", (1, 10, 64), {"in_history": False}),
        ("evicted, min_token_prob=0.6", (1, 64), {"in_history": False, "min_token_prob": 0.6})):
    for requests in cases:
        speed, probability, accepted, without = decode(requests, **settings)
        print(f"{requests}, {name} | {speed:.2f} | {probability:.2f} | {accepted:.2f} | {without:.2f}")
        if name.startswith("evicted"):
            good &= speed > 15 and probability > 0.999 and accepted == 1
            continue
        finished = settings.get("finished", 1)
        share = finished / (finished + requests)
        if share < settings.get("min_token_prob", 0.1):
            good &= speed == 1 and without == 1
        else:
            good &= speed > 15 and accepted == 1 and abs(probability - share) < 0.01
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
