#!/usr/bin/env bash
# Guess: max_tokens, of a rule or of a structural tag, holds with drafts: the documentation says that
#   rollback restores it exactly and that speculative decoding keeps working. So masks, and
#   greedy answers, are those of plain decoding.
# What happens: where the budget has run out, accept_token ends the rule only if a mask was filled
#   since the last token or rollback. Every rollback forgets that, and traverse_draft_tree rolls
#   back all it has accepted. So tokens that are accepted after the verification go into the rule
#   as well, and if its text can contain what follows it, as in the documentation's example, it
#   goes on: later masks allow its end a second time, in the midst of the answer. A warning says
#   that the rule could not end there, but it could. The same limit written as a repetition is
#   right, and so is filling another mask before each token is accepted.
# Why it matters: with drafts a thinking budget is overrun and the answer is another one, even if
#   all drafts are right. A test of greedy equality passes without budgets, and with rules whose
#   text cannot contain what follows.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.23.0 xgrammar==0.2.9
fi
cat > "$work/try.py" <<'EOP'
import importlib.metadata
import re
import sys

import torch
import xgrammar as xgr

ANSWERS, LENGTH, DRAFTS, BUDGET = 30, 40, 3, 8
TOKENS = ["<eos>", *"</>think abc;0123456789"]  # of one character, so a budget is a repetition
SIZE, EOS = len(TOKENS), 0
RULES = {"max_tokens": f"reasoning[max_tokens={BUDGET}] ::= [^]*",
         "repetition": f"reasoning ::= [^]{{0,{BUDGET}}}"}
RIGHT = re.compile(rf"<think>.{{0,{BUDGET}}}(</think>|;)[0-9]*(<eos>)?")

compiler = xgr.GrammarCompiler(xgr.TokenizerInfo(TOKENS, stop_token_ids=[EOS]), max_threads=1)
grammars = {name: compiler.compile_grammar(
    f'root ::= "<think>" reasoning ("</think>" | ";") answer\n{rule}\nanswer ::= [0-9]+\n')
    for name, rule in RULES.items()}
grammars["structural tag"] = compiler.compile_structural_tag({"type": "structural_tag", "format": {
    "type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "end": "</think>",
         "content": {"type": "any_text", "max_tokens": BUDGET}},
        {"type": "regex", "pattern": "[0-9]+"}]}})


class Model:
    """A table of random logits for the next token after the last two."""

    def __init__(self, seed, noise=0.0):
        random = torch.Generator().manual_seed(seed)
        self.table = torch.randn(SIZE, SIZE, SIZE, generator=random)
        self.table[:, :, EOS] -= 3
        self.table += noise * torch.randn(SIZE, SIZE, SIZE, generator=random)

    def likeliest(self, text, mask):
        a, b = ([EOS, EOS] + text)[-2:]
        return self.table[a, b].masked_fill(~mask, -torch.inf).argmax().item()


def unpacked(bits):
    return (bits[:, None] >> torch.arange(32) & 1).flatten()[:SIZE].bool()


def mask_of(matcher):
    bits = xgr.allocate_token_bitmask(1, SIZE)
    matcher.fill_next_token_bitmask(bits)
    return unpacked(bits[0])


def accept(matcher, token, fill):
    if fill:
        mask_of(matcher)
    assert matcher.accept_token(token)


def plain(grammar, target):
    matcher, text = xgr.GrammarMatcher(grammar), []
    while len(text) < LENGTH and not matcher.is_terminated():
        text.append(target.likeliest(text, mask_of(matcher)))
        assert matcher.accept_token(text[-1])
    return text


def drafted(matcher, text, draft):
    """Accept some drafts; return them and the masks in front of each and behind the last."""
    masks, drafts = [], []
    while not matcher.is_terminated():
        masks.append(mask_of(matcher))
        if len(drafts) == DRAFTS:
            break
        drafts.append(draft.likeliest(text + drafts, masks[-1]))
        assert matcher.accept_token(drafts[-1])
    return drafts, masks


def with_drafts(grammar, target, draft, way, fill):
    matcher, text = xgr.GrammarMatcher(grammar), []
    while len(text) < LENGTH and not matcher.is_terminated():
        if way == "traverse_draft_tree":
            drafts, _ = drafted(matcher.fork(), text, draft)
            count = len(drafts) + 1
            child = torch.tensor([*range(1, count), -1])
            bits = xgr.allocate_token_bitmask(count, SIZE)
            matcher.traverse_draft_tree(
                child, torch.full((count,), -1), torch.tensor([EOS] + drafts), bits)
            masks = [unpacked(row) for row in bits if row.any()]
        else:
            drafts, masks = drafted(matcher, text, draft)
        new = []
        for i, mask in enumerate(masks):
            new.append(target.likeliest(text + new, mask))
            if i == len(drafts) or new[i] != drafts[i]:
                break
        kept = sum(a == b for a, b in zip(new, drafts))
        if way == "roll back the rejected":
            if kept < len(drafts):
                matcher.rollback(len(drafts) - kept)
            rest = new[kept:]
        else:
            if way == "roll back all":
                matcher.rollback(len(drafts))
            rest = new
        for token in rest:
            accept(matcher, token, fill)
        text += new
    return text[:LENGTH]


print(f"xgrammar {importlib.metadata.version('xgrammar')}, {ANSWERS} greedy answers of up to {LENGTH} tokens, "
      f"{DRAFTS} drafts a round\ngrammar, way, draft model | answers as without drafts | the budget kept | "
      "both, with a mask filled before each accepted token")
right = True
for name, grammar in grammars.items():
    for way in ("traverse_draft_tree", "roll back all", "roll back the rejected"):
        for kind, noise in (("the target", 0.0), ("noisy", 1.0)):
            counts = []
            for fill in (False, True):
                equal = kept = 0
                for seed in range(ANSWERS):
                    target = Model(seed)
                    expected = plain(grammar, target)
                    right &= name == "structural tag" or plain(grammars["repetition"], target) == expected
                    text = with_drafts(grammar, target, Model(seed, noise), way, fill)
                    equal += text == expected
                    kept += RIGHT.fullmatch("".join(TOKENS[token] for token in text)) is not None
                counts += [equal, kept]
            print(f"{name}, {way}, {kind}", *counts[:2], f"{counts[2]}, {counts[3]}", sep=" | ")
            right &= counts[2:] == [ANSWERS] * 2
            if name == "repetition" or (way, kind) == ("roll back the rejected", "the target"):
                right &= counts[:2] == [ANSWERS] * 2  # with max_tokens: nothing is rolled back
            elif name == "max_tokens" or way != "roll back the rejected":
                right &= max(counts[:2]) < ANSWERS
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
