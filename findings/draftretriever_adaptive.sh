#!/usr/bin/env bash
# Guess: a reader adapts to the contexts that it is asked with, so the longer it is used, the better
#   its drafts, as the project promises; on text like the datastore's they are at least as good.
# What happens: each search raises the weight of every triple of tokens in the last 16 of the context
#   by the same amount, also if the search before raised it for the same place, up to a limit, and
#   the weights are never normalised. So those of all continuations of a pair reach the limit, and
#   the reader no longer knows which is likely: when each pair has occurred some 400 times, a third
#   fewer drafts are accepted, without a warning. Text unlike the datastore's is drafted better for
#   a while, then worse than at the start.
# Why it matters: a server that keeps its reader gets slower from day to day, and an evaluation
#   depends on how many searches came before it, and in which order. A new reader, or contexts of two
#   tokens, in which there is no triple, draft as at the start.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q draftretriever==0.1.1
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import random
import sys

import draftretriever

SIZE, SUCCESSORS, LENGTH, TEXTS, CHOICES, LONGEST = 8, 6, 2000, 12, 64, 8
WEIGHTS = [0.6] + [0.4 / (SUCCESSORS - 1)] * (SUCCESSORS - 1)
source = random.Random(0)


class Process:
    """Texts in which each token depends on the two before it: one of six follows in 60% of the places."""

    def __init__(self):
        self.following = {(a, b): source.sample(range(SIZE), SUCCESSORS) for a in range(SIZE) for b in range(SIZE)}

    def text(self):
        tokens = source.choices(range(SIZE), k=2)
        while len(tokens) < LENGTH:
            tokens += source.choices(self.following[tokens[-2], tokens[-1]], WEIGHTS)
        return tokens


def accepted(reader, text, context):
    """Accepted drafts a search, in a decoding loop that writes `text` and shows the last `context` tokens."""
    place, searches, right = 20, 0, 0
    while place < LENGTH - LONGEST:
        paths = reader.search(text[place - context:place], choices=CHOICES)[0]
        nodes = {tuple(path[:i + 1]) for path in paths for i, token in enumerate(path) if token != -2}
        answer = text[place:place + LONGEST]
        count = next((i for i in range(LONGEST) if tuple(answer[:i + 1]) not in nodes), LONGEST)
        searches, right, place = searches + 1, right + count, place + count + 1
    return right / searches


known, unknown = Process(), Process()
writer = draftretriever.Writer(file_path="store.idx", vocab_size=SIZE)
for _ in range(50):
    writer.add_entry(known.text())
writer.finalize()
print(f"draftretriever {importlib.metadata.version('draftretriever')}, accepted tokens a search, {CHOICES} choices, "
      f"texts of {LENGTH} tokens\ntext | the same reader for all | a new reader for each | the same reader, two "
      "tokens of context | text unlike the datastore's: the same reader | a new one")
rows, readers = [], [draftretriever.Reader("store.idx") for _ in range(3)]
for number in range(1, TEXTS + 1):
    like, unlike = known.text(), unknown.text()
    rows.append((accepted(readers[0], like, 18), accepted(draftretriever.Reader("store.idx"), like, 18),
                 accepted(readers[1], like, 2), accepted(readers[2], unlike, 18),
                 accepted(draftretriever.Reader("store.idx"), unlike, 18)))
    print(number, *(f"{value:.2f}" for value in rows[-1]), sep=" | ")
first, last = rows[0], [sum(values) / 3 for values in zip(*rows[-3:])]
good = last[0] < 0.8 * first[0] and max(abs(row[1] / first[1] - 1) for row in rows) < 0.2
good &= max(abs(row[2] / first[2] - 1) for row in rows) < 0.2 and last[3] < 0.9 * max(row[3] for row in rows)
sys.exit(0 if good else "the behaviour has changed")
EOP
cd "$work"
"$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
