"""Try rules on recorded drafts: where a chain stops, and which sets CAPE adds to it.

    python results/tools/stop_rules.py --method specdecpp --num-prompts 0 --json F.json

This asks the first arm what bench.py would ask, records its chains, and prints a table
of all rules and settings. A record says what a drafter drafts at every place of an
answer, and how much of that the target accepts. Then what a rule saves and wastes
follows without drafting again: `count` goes through an answer from round to round, as
decoding with the rule would, and counts

    N_target / N       verification rate: target forwards per answer token
    N_discarded / N    discard rate: discarded tokens per answer token (with CAPE's
                       sets: passes that brought none)

from which Eq. 2.2 of SpecDec++ computes how long the answer takes. Your own rule is a
function of a Round and a setting. It returns how many tokens are drafted there, or a
list with S(p), CAPE's number of extras, for each of them:

    import cape
    from results.tools import stop_rules

    answers = stop_rules.read("results/rounds_greedy.json.gz")
    falls = lambda each, level: (p < level for p in each.confidence)
    rule = lambda each, level: 1 + stop_rules.first(falls(each, level))
    print(stop_rules.compare(answers, (rule, (0.3, 0.5, 0.7)), "K", cost=0.1))

    answers = stop_rules.read("results/rounds_glide.json.gz")
    sets = lambda each, gamma: [8 if p < 0.5 else 1 for p in each.confidence[:gamma]]
    size = lambda p: cape.set_size(p, cape.Config())  # the paper's
    paper = lambda each, gamma: [size(p) for p in each.confidence[:gamma]]
    gammas = (2, 3, 4, 5)  # lengths of the chain
    print(stop_rules.compare(answers, (sets, gammas), (paper, gammas), cost=0.1))

Each prints how many times as fast the first rule is, and a 95% interval. The time of a
forward of the target does not depend here on how many nodes it verifies.
"""

import functools
import gzip
import itertools
import json
import operator
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import bench  # noqa: E402
import common  # noqa: E402
import specdecpp  # noqa: E402
from support import cli  # noqa: E402
from support.measuring import arms, command, report  # noqa: E402

LONGEST = 12  # tokens drafted at each place
LIKELIEST = 20  # other tokens of a step, from which CAPE's sets are


# ------------------------------------------------------------------------ the recording


@dataclass
class Round:
    """What is drafted at one place of an answer: a chain of m tokens."""

    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # (m,) the maximum of q_draft
    entropy: list[float] = field(default_factory=list)  # (m,) of q_draft, in nats
    # (m - 1,) the head's predictions, if there is a head
    accepts: list[float] = field(default_factory=list)
    agreed: int = 0  # how many of the tokens, from the first on, the target accepts
    # The place of the answer's next token among the others of q_draft in the step after
    # these, from 1 for the likeliest. -1 if it is not among the first LIKELIEST.
    rank: int = -1


def round_of(draft: common.Draft) -> Round:
    """The Round of a chain, without what follows from the answer: agreed and rank."""
    each = Round(draft.tokens.tolist())
    for q_draft in [] if draft.probs is None else draft.probs:  # None if it is empty
        each.confidence.append(float(q_draft.max()))
        each.entropy.append(float(torch.special.entr(q_draft).sum()))
    # The notes hold p^, the product of the predictions so far.
    chances = draft.notes.get("chances", [])
    for chance, before in zip(chances, [1.0, *chances]):
        each.accepts.append(chance / before if before else 0.0)
    return each


def has_head(arm) -> bool:
    """Whether the drafter of an arm has a head that has been trained."""
    drafter = arm.drafter
    return isinstance(drafter, specdecpp.Drafter) and drafter.config.stage == "head"


def longest_chains(arm):
    """A function of a Decoding, which yields an arm's chains of LONGEST tokens.

    Raises UserError if the arm drafts other trees than chains, or copies.
    """
    plain = arm.name.partition("@")[0]  # NAME[:SETTINGS]
    if plain.partition(":")[0] not in cli.CHAINS or "+" in plain:
        methods = " or ".join(cli.CHAINS)
        raise common.UserError(
            f"{arm.name} does not draft plain chains: take {methods} first"
        )
    changes = {"gamma": LONGEST}
    if has_head(arm):  # it judges all tokens, but 1 - p^ never exceeds 1
        changes = {"stop": "head", "threshold": 1.0, "max_draft": LONGEST}
    elif arm.module is specdecpp:
        changes["stop"] = "fixed"
    return functools.partial(arm.module.drafts, drafter=arm.drafter, **changes)


def commit_one(decoding: common.Decoding, draft: common.Draft) -> None:
    """Commit what verification puts in the place of the draft's first token.

    That is the first token itself if it is accepted, else a draw from the residual.
    """
    empty = common.chain([], decoding.ids)
    logits, hidden = common.score(decoding.target, decoding.ids, empty, decoding.cache)
    if decoding.do_sample and len(draft.tokens):
        p_target = decoding.process(logits[0]).softmax(-1)
        token = common.rejection_sample(
            p_target, [(int(draft.tokens[0]), draft.probs[0])]
        )
        # Rule out all other tokens, so that `commit` draws this one.
        logits = torch.full_like(logits, float("-inf"))
        logits[0, token] = 0.0
    decoding.commit(empty, logits, hidden)


def likeliest(draft: common.Draft) -> list[list[int]]:
    """For each step of a chain its LIKELIEST tokens but the drafted one, best first."""
    if draft.probs is None:  # it is empty
        return []
    others = draft.probs.scatter(1, draft.tokens[:, None], 0.0)
    best = others.topk(min(LIKELIEST, others.shape[1]))
    steps = zip(best.indices.tolist(), best.values.tolist())
    return [[token for token, p in zip(*step) if p > 0] for step in steps]


def judge(each: Round, others: list[list[int]], answer: list[int]) -> None:
    """Note where a round leaves the answer: agreed and rank.

    others: of `likeliest`.
    answer: its tokens from the place of the round on.
    """
    each.agreed = len(os.path.commonprefix([each.tokens, answer]))
    if each.agreed < min(len(each.tokens), len(answer)):
        token, ids = answer[each.agreed], others[each.agreed]
        each.rank = ids.index(token) + 1 if token in ids else -1


def join(rounds: list[Round]) -> None:
    """Let a draft continue as the next place's does, once its first token is accepted.

    rounds: of all places of a sampled answer.
    """
    # A draft whose first token is accepted has come to the place where the next draft
    # begins. There the two have sampled different tokens, from the same q_draft. But
    # only the next place's was verified together with the answer: it was accepted, and
    # is the answer's token, or it was rejected, and the answer's token came from the
    # residual. With that draft, what is counted has the distribution of real rounds.
    for each, after in reversed(list(itertools.pairwise(rounds))):
        if each.agreed:
            for name in ("tokens", "confidence", "entropy"):
                getattr(each, name)[1:] = getattr(after, name)[: LONGEST - 1]
            each.accepts[1:] = after.accepts[: LONGEST - 2]
            each.agreed = 1 + after.agreed
            each.rank = after.rank


@torch.no_grad()
def record(chains, target, turn: dict) -> list[Round]:
    """The Round at every place of an answer, greedy or sampled.

    chains: of `longest_chains`.
    turn: arguments of target.generate, such as input_ids (1, T).
    """
    # Decoding advances by one token a round, so the drafter starts anew at each place.
    # GLIDE then sees the target's rows up to there. In a real round it does not see
    # those of accepted draft tokens. This makes little difference.
    decoding = common.start(target, **turn)
    rounds = []
    others = []
    for draft in chains(decoding):
        commit_one(decoding, draft)
        rounds.append(round_of(draft))
        others.append(likeliest(draft))
    answer = decoding.ids[0, -len(rounds) :].tolist()
    for place, (each, best) in enumerate(zip(rounds, others)):
        judge(each, best, answer[place:])
    if decoding.do_sample:
        join(rounds)
    return rounds


# ----------------------------------------------------------------------------- the file

PLAIN = ("agreed", "rank")  # one integer a Round
# One number a token, with what it is multiplied by before it is rounded.
SCALES = {"tokens": 1, "confidence": 1000, "entropy": 100, "accepts": 1000}


def as_integers(rounds: list[Round]) -> dict:
    """The rounds of an answer as a file holds them, in lists of integers."""
    data = {name: [getattr(each, name) for each in rounds] for name in PLAIN}
    for name, scale in SCALES.items():
        rows = [getattr(each, name) for each in rounds]
        data[name] = [[round(scale * value) for value in row] for row in rows]
    return data


def read(path) -> list[list[Round]]:
    """The answers in a file, each a list with the Round of every place.

    path: of a file in results/, or what --json wrote.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        data = json.load(file)
    answers = []
    for answer in data.get("sweep", data)["answers"]:
        rounds = [Round() for _ in answer["agreed"]]  # with what was recorded
        for name in answer.keys() - {"name"}:
            scale = SCALES.get(name, 1)
            for each, value in zip(rounds, answer[name], strict=True):
                if scale > 1:
                    value = [x / scale for x in value]
                setattr(each, name, value)
        answers.append(rounds)
    return answers


# ---------------------------------------------------------------------------- the rules


def first(flags) -> int:
    """How many flags stand before the first True."""
    return [*flags, True].index(True)


def products(chances):
    """The product of the first, of the first two, ... of them."""
    return itertools.accumulate(chances, operator.mul)


COST = 0.1  # of a draft model's pass in forwards of the target, on our CPU
H = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # settings of a threshold h

# {rule: (function of a Round and a setting, settings)}. The function returns how many
# tokens are drafted; where that is more than the Round holds, all of them are. The head
# has to read a token before it judges it, so one more is drafted by then and submitted
# as well. The other rules judge a token by the q_draft that it is drawn from.
RULES = {
    "K": (lambda each, k: k, (1, 2, 3, 4, 5, 6, 8, 10, 12)),
    "head": (
        lambda each, h: 2 + first(1 - p > h for p in products(each.accepts)),
        H,
    ),
    "product": (
        lambda each, h: 1 + first(1 - p > h for p in products(each.confidence)),
        H,
    ),
    "confidence": (
        lambda each, level: 1 + first(c < level for c in each.confidence),
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    ),
    "entropy": (
        lambda each, most: 1 + first(e > most for e in each.entropy),
        (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0),
    ),
    "oracle": (lambda each, _: each.agreed, ("",)),  # Lemma 2.1
}


def count(rounds: list[Round], rule, setting) -> tuple[int, int, int]:
    """(N_target, N_discarded, nodes) of an answer whose drafts follow a rule."""
    place = 0
    n_target = 0
    # Of passes, not of nodes: a set costs no pass, and in Eq. 2.2 every pass brings a
    # token or a discarded one.
    n_discarded = 0
    nodes = 0
    while place < len(rounds):
        each = rounds[place]
        sizes = rule(each, setting)  # of the set of each step
        if not isinstance(sizes, list):  # a number of tokens without sets
            sizes = [0] * sizes
        sizes = sizes[: len(each.confidence)]
        accepted = min(each.agreed, len(sizes))
        # Where the chain is rejected, the set of that step may hold the token. It is a
        # leaf, so after it only the bonus token follows.
        if accepted < len(sizes) and 1 <= each.rank <= sizes[accepted]:
            accepted += 1
        n_target += 1
        n_discarded += len(sizes) - accepted
        nodes += len(sizes) + sum(sizes)
        place += accepted + 1
    return n_target, n_discarded, nodes


def counts(answers: list[list[Round]], rule) -> Tensor:
    """What `count` returns for n answers at all S settings of a rule, (S, n, 3).

    rule: a name of RULES, or (function, settings).
    """
    function, settings = RULES[rule] if isinstance(rule, str) else rule
    rows = [[count(rounds, function, s) for rounds in answers] for s in settings]
    return torch.tensor(rows, dtype=torch.float64)


def points(answers, rule, t_draft: float, t_target: float) -> dict[str, list[float]]:
    """Figure 4: {setting: [N_target / N, N_discarded / N, tokens/s]} of a rule."""
    _, settings = RULES[rule]
    tokens = sum(map(len, answers))  # N
    rates = counts(answers, rule)[..., :2].sum(1) / tokens  # (S, 2)
    speeds = specdecpp.throughput(*rates.unbind(-1), t_draft, t_target)  # (S,)
    rows = torch.cat([rates, speeds[:, None]], dim=1).tolist()
    return {str(s): row for s, row in zip(settings, rows)}


def times(answers: list[list[Round]], counted: Tensor, cost: float) -> Tensor:
    """The time (n,) of each answer, in target forwards, by Eq. 2.2.

    Each is judged with the setting that is best on the other half of the answers (every
    second one), so that no setting is chosen on what it is judged on.

    counted: (S, n, 3), of `counts`.
    cost: t_draft / t_target.
    """
    tokens = torch.tensor([len(rounds) for rounds in answers])  # (n,)
    n_target, n_discarded, _ = counted.unbind(-1)  # (S, n)
    rates = (n_target / tokens, n_discarded / tokens)
    taken = tokens / specdecpp.throughput(*rates, t_draft=cost, t_target=1.0)  # (S, n)
    odd = torch.arange(len(answers)) % 2 == 1
    for_even = taken[:, odd].sum(1).argmin()
    for_odd = taken[:, ~odd].sum(1).argmin()
    return torch.where(odd, taken[for_odd], taken[for_even])


def compare(answers: list[list[Round]], ours, theirs, cost: float) -> tuple:
    """How many times as fast one rule is as another, and a 95% interval over answers.

    ours, theirs: as `counts` takes them.
    cost: t_draft / t_target.
    """
    tokens = [len(rounds) for rounds in answers]
    counted = [counts(answers, rule) for rule in (ours, theirs)]
    taken = [times(answers, each, cost).tolist() for each in counted]
    return report.paired(*({"tokens": tokens, "seconds": each} for each in taken))


# ---------------------------------------------------------------------------- the sweep


def sweep(arm, turns: list[dict]) -> dict:
    """Figure 4, and Eq. 2.3, of the chains of an arm.

    turns: arguments of target.generate for each prompt.
    Returns {"points": {rule: {setting: [N_target / N, N_discarded / N, tokens per
    forward's time]}}, "answers"}, the latter for `read`.
    Raises UserError, see `longest_chains`.
    """
    chains = longest_chains(arm)
    bar = tqdm(turns, desc="recording", disable=None)
    recorded = [record(chains, arm.target, turn) for turn in bar]
    counted = {rule: points(recorded, rule, COST, 1.0) for rule in RULES}
    if not has_head(arm):
        del counted["head"]
    kept = [as_integers(rounds) for rounds in recorded]
    return {"points": counted, "answers": kept}


def table(sweep: dict) -> list[str]:
    """A line and a table of `sweep`."""
    rows = []
    for rule, settings in sweep["points"].items():
        for setting, (n_target, n_discarded, speed) in settings.items():
            numbers = [report.cell(n_target), report.cell(n_discarded)]
            rows.append([rule, setting, *numbers, report.cell(speed)])
    return [
        "Stop rules, replayed. Modelled speed: tokens in the time of a forward, if a "
        f"pass takes {COST} of it",
        report.markdown(["rule", "setting", "N_t/N", "N_d/N", "speed"], rows),
    ]


def main(argv: list[str] | None = None) -> None:
    """Record the chains of the first arm, and print the table of all rules."""
    argv = sys.argv[1:] if argv is None else argv
    args = command.read(command.options(__doc__), argv)
    if not args.method:
        raise common.UserError("nothing to record: give --method")
    prompts = bench.prompts_of(args)
    stock, target, tokenizer = bench.load(args)
    arm = arms.make_arms(args.method, target)[0]
    longest_chains(arm)  # a UserError comes before the long run
    torch.manual_seed(args.seed)
    options = bench.generate_options(args)
    plain = arms.plain_loops(stock, target)[:1]
    asked, _ = bench.ask(tokenizer, plain, prompts, options, args.seed)
    result = report.header(args, target, "results/tools/stop_rules.py")
    result["prompts"] = len(prompts)
    turns = [inputs | options for inputs in asked]
    result["sweep"] = report.rounded(sweep(arm, turns))
    print("\n\n".join([report.about(result), *table(result["sweep"])]))
    if args.json:
        report.write_result(result, args.json)


if __name__ == "__main__":
    cli.run(main)
