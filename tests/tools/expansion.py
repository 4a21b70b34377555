"""Try set sizes for CAPE without decoding: a record of GLIDE's chains, and its replay.

    python tests/tools/expansion.py            # makes results/glide_places.json anew

The record holds, for every place of the target's greedy answers, what GLIDE would draft
there: [agreed, rank, confidences of the steps]. `agreed` is how many of the drafted
tokens are the answer's, `rank` the place of the answer's next token among the drafter's
best ones in the step after them (0: the drafted token; -1: it cannot be drafted). So a
rule of one's own is tried in a second:

    places = expansion.read()
    rule = lambda p: 8 if p < 0.5 else 1
    tokens, forwards, nodes = expansion.replay(places, rule, gamma=3).sum(0)
    print("tau", tokens / forwards, "with", nodes / forwards, "nodes a round")

GLIDE's rows of accepted draft tokens are not those of a real round, where they were
computed with fewer of the target's rows. This makes little difference.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

import cape  # noqa: E402
import common  # noqa: E402
import glide  # noqa: E402
from support import data, packed  # noqa: E402
from support.prompts import encode  # noqa: E402

FILE = ROOT / "results" / "glide_places.json"
LONGEST = 5  # steps at each place
PROMPTS = 0  # first turns; 0: all of prompts/
NEW_TOKENS = 48


# ----------------------------------------------------------------------- the record


def place_of(draft: common.Draft, answer: list[int]) -> list:
    """[agreed, rank, confidences] of a chain and the answer that follows its root."""
    tokens = draft.tokens.tolist()
    pairs = list(zip(tokens, answer))
    agreed = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    rank = -1
    if agreed < len(pairs):
        q = draft.probs[agreed]
        token = answer[agreed]
        rank = int((q > q[token]).sum()) if q[token] > 0 else -1
    confidences = draft.probs.max(-1).values if tokens else torch.zeros(0)
    return [agreed, rank, *(round(float(p), 3) for p in confidences)]


@torch.no_grad()
def record(target, drafter, inputs: dict) -> list[list]:
    """The places of a greedy answer to input_ids (1, T)."""
    decoding = common.start(
        target, **inputs, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    drafts = []
    for draft in glide.drafts(decoding, drafter, gamma=LONGEST):
        drafts.append(draft)
        decoding.verify(common.chain([], decoding.ids))  # commits one token
    answer = decoding.ids[0, -len(drafts) :].tolist()
    return [place_of(draft, answer[n:]) for n, draft in enumerate(drafts)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    torch.set_num_threads(1)
    stock, tokenizer = common.load_target()
    target = packed.pack(stock)
    drafter = common.load_drafter(
        glide.Drafter, str(ROOT / "checkpoints" / "glide"), target
    )
    drafter = packed.pack(drafter, getattr(target, "kernels", None))
    paths = sorted((ROOT / "prompts").glob("*.jsonl"))
    places = {}
    for prompt in data.read_prompts(paths, PROMPTS):
        inputs = encode(tokenizer, prompt["turns"][:1], target.device)
        places[str(prompt["question_id"])] = record(target, drafter, inputs)
        print(len(places), "answers", file=sys.stderr)
    about = (
        "GLIDE's chains at every place of greedy answers to first turns of prompts/, "
        "see tests/tools/expansion.py"
    )
    lines = [
        f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in places.items()
    ]
    text = f'{{\n "about": {json.dumps(about)},\n "places": {{\n'
    FILE.write_text(text + ",\n".join(lines) + "\n }\n}\n")


# ----------------------------------------------------------------------- the replay


def read() -> list[list[list]]:
    """The places of each answer."""
    return list(json.loads(FILE.read_text())["places"].values())


def paper(confidence: float) -> int:
    """The paper's S(p)."""
    return cape.set_size(confidence, cape.Config())


def fixed(size: float):
    """A rule with `size` extras on average, whatever the confidence."""
    given = 0.0

    def rule(confidence: float) -> int:
        nonlocal given
        before = int(given)
        given += size
        return int(given) - before

    return rule


def equal_nodes(answers: list[list[list]], rule, gamma: int) -> float:
    """The size with which `fixed` drafts as many nodes a round as a rule."""

    def nodes(rule):
        _, forwards, nodes = replay(answers, rule, gamma).sum(0)
        return float(nodes / forwards)

    wanted = nodes(rule)
    low, high = 0.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        if nodes(fixed(middle)) < wanted:
            low = middle
        else:
            high = middle
    return high


def replay(answers: list[list[list]], rule, gamma: int) -> torch.Tensor:
    """Tokens, target forwards and nodes of each answer, (answers, 3).

    rule: S(p), a function of a step's confidence. gamma: steps of a chain.
    """
    counts = torch.zeros(len(answers), 3, dtype=torch.float64)
    for answer, places in zip(counts, answers):
        place = 0
        while place < len(places):
            agreed, rank, *confidences = places[place]
            sizes = [rule(p) for p in confidences[:gamma]]
            accepted = min(agreed, len(sizes))
            # An extra is a leaf, so after it only the bonus token follows.
            if accepted < len(sizes) and 1 <= rank <= sizes[accepted]:
                accepted += 1
            taken = min(accepted + 1, len(places) - place)
            answer += torch.tensor([taken, 1, len(sizes) + sum(sizes)])
            place += taken
    return counts


if __name__ == "__main__":
    main()
