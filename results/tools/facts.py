"""Facts about sampling that are easily guessed wrong: results/facts.json.

    python results/tools/facts.py    # takes minutes; PAPERS.md has the figures

Those about p and q are means over places of texts that the target has sampled at
temperature 1, where q is that of SpecDec++'s draft model. The others are computed from
probabilities that are assumed.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a script

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

import common  # noqa: E402
import glide  # noqa: E402
import specdecpp  # noqa: E402
from support.measuring import prompts, report  # noqa: E402
from support.training import data  # noqa: E402

MIXED = (0.9, 0.3)  # alpha of easy and of hard rounds, equally many


def rounds(alpha: float, gamma: int, length: int) -> Tensor:
    """The probabilities that an answer of `length` tokens takes 0, 1, ... rounds."""
    commits = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
    law = torch.zeros(length + 1, dtype=torch.float64)
    missing = {length: 1.0}  # {tokens that are still to come: probability}
    for n in range(1, length + 1):
        after: dict[int, float] = {}
        for tokens, here in missing.items():
            for count, chance in enumerate(commits, 1):
                rest = max(0, tokens - count)
                after[rest] = after.get(rest, 0.0) + here * chance
        law[n] = after.pop(0, 0.0)
        missing = after
    return law


def slowest(alphas: list[float]) -> float:
    """The rounds of the slowest of eight answers of 128 tokens, over those of one.

    alphas: each answer has one of these.
    """
    below = sum(rounds(alpha, 5, 128) for alpha in alphas).cumsum(0) / len(alphas)
    return float((1 - below**8).sum() / (1 - below).sum())


def with_blocks(p: Tensor, q: Tensor, gamma: int) -> float:
    """Tokens a round with block verification (Sun et al., 2024) over those without.

    p and q (V,) are the same at each place. Block verification accepts a draft up to
    its token i, or further, with the probability P_i = min(1, P_(i-1) p / q).
    """
    accepted = drafted = torch.ones(1, dtype=p.dtype)  # P_i and q of all drafts
    tokens = 1.0
    for _ in range(gamma):
        accepted = (accepted[:, None] * p / q).clamp(max=1).flatten()
        drafted = (drafted[:, None] * q).flatten()
        tokens += float(drafted @ accepted)
    alpha = float(torch.minimum(p, q).sum())
    return tokens / glide.expected_speedup(alpha, gamma, 0.0)


def exact() -> dict:
    """The facts about assumed probabilities."""

    def speed(gamma: int) -> float:
        return sum(glide.expected_speedup(alpha, gamma, 0.1) for alpha in MIXED) / 2

    mean = sum(MIXED) / 2
    gammas = range(1, 21)
    formula = max(gammas, key=lambda gamma: glide.expected_speedup(mean, gamma, 0.1))
    best = max(gammas, key=speed)
    judged = sum(alpha**n for alpha in MIXED for n in range(5))
    accepted = sum(alpha**n for alpha in MIXED for n in range(1, 6))
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.5, 0.2]], dtype=torch.float64)
    of_48 = float(rounds(0.7, 5, 48) @ torch.arange(49, dtype=torch.float64))
    return {
        "gamma": [formula, best],
        "gamma_loss": 1 - speed(formula) / speed(best),
        "alpha": [mean, accepted / judged, accepted / 10],
        "block": [with_blocks(p, q, gamma) - 1 for gamma in (2, 4, 8)],
        "cut": 1 - 48 / of_48 / glide.expected_speedup(0.7, 5, 0.0),
        "slowest": [slowest([0.7]) - 1, slowest([n / 20 for n in range(10, 19)]) - 1],
    }


def missed(p: Tensor, siblings: list) -> tuple[float, Tensor]:
    """The probability that `common.draw` rejects all siblings, and what p is then."""
    chance = 1.0
    for token, q in siblings:
        chance *= 1 - min(1.0, float(p[token] / q[token]))
        left = (p - q).clamp(min=0)
        p = left / left.sum() if left.sum() > 0 else p
    return chance, p


def at_a_place(p: Tensor, q: Tensor) -> dict:
    """The facts about p and q (V,) of one place, for one draw of eight siblings."""
    siblings = []
    left = q.clone()
    for _ in range(8):
        row = left / left.sum()
        siblings.append((int(common.sample(row)), row))
        left[siblings[-1][0]] = 0.0
    rejected, residual = missed(p, siblings[:1])
    others = q.index_fill(0, torch.tensor(siblings[0][0]), 0.0)
    likeliest = float(residual[others.topk(7).indices].sum())
    # Medusa's rule, with its constants. A token that is not accepted is drawn from p.
    token = q.argmax()
    border = 0.3 * (-torch.special.entr(p).sum()).exp()
    typical = 1 - float(p[token]) if p[token] > border.clamp(max=0.09) else 0.0
    return {
        "likeliest": 1 - rejected * (1 - likeliest),
        "sampled": 1 - missed(p, siblings)[0],
        "typical": typical,
    }


@torch.no_grad()
def measured() -> dict:
    """The facts about p and q of the default target and SpecDec++'s draft model."""
    target, tokenizer = common.load_target()
    folder = ROOT / "checkpoints" / "specdecpp"
    drafter = common.load_drafter(specdecpp.Drafter, folder, target)
    asked = data.read_prompts(sorted((ROOT / "prompts").glob("*.jsonl")), 16)
    options = {"max_new_tokens": 48, "do_sample": True, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    places = []
    for prompt in tqdm(asked):
        inputs = prompts.encode(tokenizer, prompt["turns"][:1], target.device)
        decoding = common.start(target, **inputs, **options, temperature=1.0)
        for draft in specdecpp.drafts(decoding, drafter, stop="fixed", gamma=1):
            # Without a draft, each token of the text is a place.
            nothing = common.chain([], decoding.ids)
            scored = common.score(target, decoding.ids, nothing, decoding.cache)
            if draft.parents:
                p = scored[0][0].double().softmax(-1)
                places.append(at_a_place(p, draft.probs[0].double()))
            decoding.commit(nothing, *scored)
    means = {name: sum(x[name] for x in places) / len(places) for name in places[0]}
    return {"places": len(places)} | means


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    facts = report.rounded(exact() | measured(), 4)
    report.write_result(facts, str(ROOT / "results" / "facts.json"))
    print(facts)


if __name__ == "__main__":
    main()
