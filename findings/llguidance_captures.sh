#!/usr/bin/env bash
# Guess: a finished answer's captures are parts of that answer, with drafts as without: rollback
#   undoes what drafts did, and the function that fills the masks of all drafts says that it rolls
#   back to keep the matcher consistent.
# What happens: masks and answers are right, captures are not. rollback keeps the captures that the
#   drafts made, and the text of the lexeme that a draft ended, so that the next capture has it
#   twice: of the answer "name=e age=6", get_capture("age") is "66". It happens even if all
#   drafts are right, because the masks are filled before that is known. Drafts checked on a
#   deep_copy, or with validate_tokens, leave nothing.
# Why it matters: values that are read from captures are wrong with drafts alone, without an error,
#   while every test of the text passes. (xgrammar rolls its captures back.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q numpy==2.4.6 llguidance==1.9.1
fi
cat > "$work/try.py" <<'EOP'
import re
import sys

import llguidance
import llguidance.numpy as bitmasks
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

ANSWERS, LENGTH, DRAFTS = 30, 60, 3
TOKENS = [b"<eos>", *(bytes([c]) for c in b"abcdegmnst0123456789= "), b"name", b"=", b" age", b"ab", b"12"]
SIZE, EOS = len(TOKENS), 0
GRAMMAR = LLMatcher.grammar_from_lark("""start: person
person[capture]: "name=" name " age=" age
name[capture]: /[a-e]+/
age[capture]: /[0-9]+/
""")
PERSON = re.compile(rb"name=([a-e]+) age=([0-9]+)")
WAYS = ("no drafts", "deep_copy", "validate_tokens", "masks of all drafts", "try_consume_tokens, rollback all",
        "try_consume_tokens, rollback of the rejected")


class Vocabulary:
    eos_token_id, bos_token_id, tokens, special_token_ids = EOS, None, TOKENS, [EOS]

    def __call__(self, text):
        ids = []
        while text:
            ids.append(max((i for i in range(1, SIZE) if text.startswith(TOKENS[i])), key=lambda i: len(TOKENS[i])))
            text = text[len(TOKENS[ids[-1]]):]
        return ids


class Model:
    """A table of random logits for the next token after the last two."""

    def __init__(self, seed, noise=0.0):
        random = np.random.default_rng(seed)
        self.table = random.normal(size=(SIZE, SIZE, SIZE))
        self.table += noise * random.normal(size=(SIZE, SIZE, SIZE))

    def likeliest(self, text, mask):
        a, b = ([EOS, EOS] + text)[-2:]
        return int(np.where(mask, self.table[a, b], -np.inf).argmax())


def unpacked(row):
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE].astype(bool)


def mask_of(matcher):
    bits = bitmasks.allocate_token_bitmask(1, SIZE)
    bitmasks.fill_next_token_bitmask(matcher, bits)
    return unpacked(bits[0])


def answer(target, draft, way):
    matcher, text = LLMatcher(tokenizer, GRAMMAR), []
    while len(text) < LENGTH and EOS not in text:
        # drafts, and the masks in front of each and behind the last, without touching the matcher
        copy, drafts, masks = matcher.deep_copy(), [], []
        while True:
            masks.append(mask_of(copy))
            if len(drafts) == (0 if way == "no drafts" else DRAFTS) or copy.is_stopped():
                break
            drafts.append(draft.likeliest(text + drafts, masks[-1]))
            assert copy.consume_token(drafts[-1])
        if way == "validate_tokens":
            matcher.validate_tokens(drafts)
        elif way == "masks of all drafts":
            bits = bitmasks.allocate_token_bitmask(len(drafts) + 1, SIZE)
            bitmasks.fill_next_token_bitmask_par_with_draft_tokens(executor, [(matcher, 0, drafts)], bits)
            assert all(np.array_equal(unpacked(row), mask) for row, mask in zip(bits, masks))
        elif way.startswith("try"):
            assert matcher.try_consume_tokens(drafts) == len(drafts)
        new = []
        for i, mask in enumerate(masks):
            new.append(target.likeliest(text + new, mask))
            if i == len(drafts) or new[i] != drafts[i] or new[i] == EOS:
                break
        kept = sum(a == b for a, b in zip(new, drafts)) if way.endswith("rejected") else 0
        if way.startswith("try"):
            assert matcher.rollback(len(drafts) - kept)
        text += new
        for token in new[kept:]:
            assert matcher.is_stopped() or matcher.consume_token(token)
    assert not matcher.is_error()
    return text, matcher


tokenizer, executor = LLTokenizer(TokenizerWrapper(Vocabulary())), LLExecutor(1)
print(f"llguidance {llguidance.__version__}, {ANSWERS} greedy answers, {DRAFTS} drafts a round\n"
      "way, draft model | answers as without drafts | get_capture is the answer's | get_captures are | "
      "an answer and its captures")
right, seeds, seed = True, [], 0  # of targets whose answers end
while len(seeds) < ANSWERS:
    if EOS in answer(Model(seed), None, "no drafts")[0]:
        seeds.append(seed)
    seed += 1
for way in WAYS:
    for kind, noise in (("the target", 0.0), ("noisy", 0.7)):
        equal = last = all_of_them = 0
        example = ""
        for seed in seeds:
            target = Model(seed)
            text, matcher = answer(target, Model(seed, noise), way)
            equal += text == answer(target, None, "no drafts")[0]
            written = b"".join(TOKENS[token] for token in text if token != EOS)
            name, age = PERSON.fullmatch(written).groups()
            expected = {"name": name, "age": age, "person": written}
            found = {key: matcher.get_capture(key) for key in expected}
            last += found == expected
            all_of_them += sorted(matcher.get_captures()) == sorted(expected.items())
            if found != expected and (not example or len(written) < len(example.split(" -> ")[0])):
                example = written.decode() + " -> " + ", ".join(v.decode() for v in found.values())
        print(f"{way}, {kind}", equal, last, all_of_them, example, sep=" | ")
        right &= equal == ANSWERS
        if way in WAYS[:3]:
            right &= last == all_of_them == ANSWERS
        elif (way, kind) != (WAYS[-1], "the target"):
            right &= last < ANSWERS > all_of_them
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
