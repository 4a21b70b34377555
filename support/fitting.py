"""Fit to drafter and machine what a method leaves open: `bench.py --refit`.

CAPE's S(p), Falcon's tree, the least worth of a node where confidence chooses them, and how many
tokens to copy from the context. All weigh how often a draft token is accepted, measured on the
target's own answers, against the milliseconds of verifying one token more, measured by `bench.py
--cost-curve`. And which of a target's layers GLIDE should read: `induction`.
"""

from __future__ import annotations

import dataclasses
import heapq
import time

import torch
from torch import Tensor

import common
from support import stopping

ANSWERS = 12  # to count acceptance on
# nodes per depth of the tree that Falcon's ranks are counted with
RANKED_TREE = [12, 12, 8, 8, 6, 6]


def milliseconds(by_tokens: dict, most: int) -> list[float]:
    """Time of a target forward over n tokens at index n = 0 .. most; between counts a line."""
    known = sorted((int(n), ms) for n, ms in by_tokens.items())
    times = []
    for n in range(most + 1):
        low = max((pair for pair in known if pair[0] <= n), default=known[0])
        high = min((pair for pair in known if pair[0] >= n), default=known[-1])
        share = (n - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        times.append(low[1] + share * (high[1] - low[1]))
    return times


def draft_ms(target, turns: list[dict], **options) -> float:
    """Median over turns of the milliseconds that a round spends drafting."""
    times = []
    for turn in turns:
        stats = common.Stats(sync=target.device.type == "cuda")
        prompt = turn["input_ids"]
        target.generate(prompt, max_new_tokens=16, do_sample=False, stats=stats, **options)
        times.append(1000 * stats.seconds.get("draft", 0.0) / max(1, stats.target_forwards - 1))
    return float(torch.tensor(times).median())


def rank_acceptance(
    confidences: Tensor, ranks: Tensor, bounds: list[float], most: int = 10
) -> Tensor:
    """How often the target's token was the drafter's choice number r, by confidence.

    Figure 1b of the CAPE paper shows it for r = 0; the rest of the table is ours.

    Args:
        confidences: (M,) the drafter's largest probability at M positions.
        ranks: (M,) place of the target's token in the drafter's order, 0 for its first choice.
        bounds: upper bounds of the ranges of confidence but the last, as in cape.Config.
        most: ranks counted.
    Returns:
        (len(bounds) + 1, most) shares; a range without positions gives zeros.
    """
    ranges = torch.bucketize(confidences, torch.tensor(bounds))  # (M,), (lower, upper] as in S(p)
    table = torch.zeros(len(bounds) + 1, most)
    for index in range(len(table)):
        here = ranks[ranges == index].clamp(max=most)
        if len(here):
            counts = torch.bincount(here, minlength=most + 1)[:most]  # without those beyond `most`
            table[index] = counts / len(here)
    return table


def refit_sizes(
    acceptance: Tensor,
    frequency: Tensor,
    verify_ms: list[float],
    draft_ms: float,
    gamma: int,
    max_tokens: int = 32,
) -> list[int]:
    """The S(p) of most expected tokens per second, found by adding an extra while that pays.

    Ours: the CAPE paper gives one table for all machines. A round emits the accepted part of the
    trajectory, one token more if an extra is hit, and the bonus. Confidence ranges are taken as
    independent from step to step.

    Args:
        acceptance: (ranges, ranks) from rank_acceptance.
        frequency: (ranges,) share of positions in each range.
        verify_ms: time of a target forward over n tokens at index n, for n = 0 .. max_tokens + 1
            (root included).
        draft_ms: time of drafting the trajectory.
        gamma: length of the trajectory. max_tokens: most draft tokens a round.
    Returns:
        Extras for each range.
    """
    first = float((frequency * acceptance[:, 0]).sum())  # the trajectory's token is right
    reached = [first**step for step in range(gamma)]

    def speed(sizes: list[int]) -> float:
        hit = 0.0  # probability that an extra is right, at a step that is reached
        extras = 0.0  # expected number of extras a step
        for share, row, size in zip(frequency.tolist(), acceptance, sizes):
            hit += share * float(row[1 : 1 + size].sum())
            extras += share * size
        nodes = gamma * (1 + extras)
        if nodes > max_tokens:
            return 0.0
        low = int(nodes)
        high = min(low + 1, max_tokens)
        slope = verify_ms[1 + high] - verify_ms[1 + low]
        cost = verify_ms[1 + low] + slope * (nodes - low)  # between two numbers of tokens
        tokens = 1 + (first + hit) * sum(reached)
        return tokens / (draft_ms + cost)

    sizes = [0] * len(frequency)
    while True:
        larger = []
        for place in range(len(sizes)):
            if sizes[place] + 1 < acceptance.shape[1]:
                larger.append([*sizes[:place], sizes[place] + 1, *sizes[place + 1 :]])
        best = max(larger, key=speed, default=sizes)
        if speed(best) <= speed(sizes):
            return sizes
        sizes = best


def sizes_of_cape(arm, target, turns: list[dict], cost_curve: dict) -> dict:
    """The S(p) of most expected tokens per second for an arm of bench.py, with what it rests on.

    Args:
        turns: {"input_ids" (1, T), "answer"} each, of which some are taken.
        cost_curve: of bench.py.
    """
    module = arm.module
    turns = turns[:ANSWERS]
    base, drafter = arm.base["base"], arm.base["base_drafter"]
    given = {}
    for name, default in vars(module.Config()).items():
        if name != "base":
            given[name] = arm.kwargs.get(name, default)
    config = module.Config(**given)
    judged = []  # (confidence, rank of the target's token), one for each position
    for turn in turns:
        rounds = stopping.record(base, drafter, target, turn["input_ids"], turn["answer"], 1)
        judged += [(each.confidence[0], each.rank) for each in rounds if each.confidence]
    confidences, ranks = torch.tensor(judged).reshape(-1, 2).T.contiguous()  # (M,) each
    acceptance = rank_acceptance(confidences, ranks.long(), config.bounds)
    ranges = torch.bucketize(confidences, torch.tensor(config.bounds))  # (M,)
    frequency = torch.bincount(ranges, minlength=len(config.bounds) + 1) / max(1, len(ranges))
    drafting = draft_ms(target, turns[:4], **arm.kwargs | {"expansion": "cape"})
    times = milliseconds(cost_curve["by_tokens"], config.max_tokens + 1)
    sizes = refit_sizes(acceptance, frequency, times, drafting, config.gamma, config.max_tokens)
    return {
        "sizes": sizes,
        "paper": module.Config().sizes,
        "bounds": config.bounds,
        "frequency": frequency.tolist(),
        "acceptance_by_rank": acceptance.tolist(),
        "draft_ms": drafting,
    }


@torch.no_grad()
def tree_acceptance(falcon, drafter, target, input_ids: Tensor, start: int, tree) -> Tensor:
    """Count how often the token of each depth and rank was right, given that its ancestors were.

    Args: falcon: the module. input_ids: (1, T) a text of the target, to draft from token `start`
        on. tree: which ranks to try.
    Returns: (2, depths, ranks) hits and trials, to be summed over texts.
    """
    config = dataclasses.replace(drafter.config, tree=tree, best_nodes=0)
    hidden = common.target_features(target, input_ids)[0]  # (1, T, D)
    truth = input_ids[0].tolist()
    memory = falcon.new_memory(drafter, target)
    counts = torch.zeros(2, max(map(len, tree)), 1 + max(map(max, tree)))
    fed = 0
    for end in range(start, len(truth)):
        new = hidden[:, fed : end - 1]  # (1, n, D)
        room = len(truth) - end
        draft = falcon.propose(
            drafter, target, input_ids[:, :end], new, memory, config, room, common.Stats()
        )
        fed = end - 1
        right = {()}
        paths = falcon.prune(tree, room, len(drafter.draft_ids))
        for path, token in zip(paths, draft.tokens.tolist()):
            tried = path[:-1] in right
            hit = tried and token == truth[end + len(path) - 1]
            if hit:
                right.add(path)
            counts[:, len(path) - 1, path[-1]] += torch.tensor([hit, tried])
    return counts


def fit_tree(
    counts: Tensor, verify_ms: list[float], draft_ms: list[float], k: int
) -> list[list[int]]:
    """The tree with the most expected tokens per second; empty if plain decoding is faster.

    A node is worth the product of the acceptance rates on its path. For given numbers of passes and
    nodes, the best tree holds the nodes of most worth, parents included since they are worth no
    less; all numbers are tried.

    Args:
        counts: of tree_acceptance.
        verify_ms: time of a target forward over n tokens, root included, at index n; its length
            bounds the tree.
        draft_ms: time of drafting with 1, 2, ... passes (of about the trees expected).
    Returns: rank paths.
    """
    acceptance = counts[0] / counts[1].clamp(min=1)  # (depths, ranks)
    best = []
    best_speed = 1 / verify_ms[1]
    for passes, drafting in enumerate(draft_ms, 1):
        heap = [(-1.0, [])]
        tree = []
        tokens = 1.0  # of a round: the bonus, and each node by its worth
        while heap and len(tree) + 2 < len(verify_ms):
            minus_worth, path = heapq.heappop(heap)
            if path:
                tree = [*tree, path]
                tokens -= minus_worth
            speed = tokens / (drafting + verify_ms[1 + len(tree)])
            if speed > best_speed:
                best = tree
                best_speed = speed
            if len(path) < min(passes * k, len(acceptance)):
                for rank, rate in enumerate(acceptance[len(path)].tolist()):
                    heapq.heappush(heap, (minus_worth * rate, [*path, rank]))
    return best


def tree_of_falcon(arm, target, turns: list[dict], cost_curve: dict) -> dict:
    """The tree of most expected tokens per second for an arm of bench.py, with what it rests on.

    Args: as of sizes_of_cape.
    """
    falcon = arm.module
    drafter = arm.kwargs["drafter"]
    k = drafter.config.k
    turns = turns[:ANSWERS]
    tree = falcon.layered_tree(RANKED_TREE)
    counts = 0
    begin = time.perf_counter()
    for turn in turns:
        answer = turn["input_ids"].new_tensor([turn["answer"]])  # (1, n)
        ids = torch.cat([turn["input_ids"], answer], dim=1)  # (1, T)
        start = turn["input_ids"].shape[1]
        counts = counts + tree_acceptance(falcon, drafter, target, ids, start, tree)
        if time.perf_counter() - begin > 240:  # enough
            break
    passes = []
    for n in (1, 2, 3):
        options = {"tree": falcon.layered_tree([4] * k * n), "best_nodes": 0, "copies": 0}
        options |= {"custom_generate": falcon.generate, "drafter": drafter}
        passes.append(draft_ms(target, turns[:4], **options))
    times = milliseconds(cost_curve["by_tokens"], 64)
    return {
        "tree": fit_tree(counts, times, passes, k),
        "draft_ms_by_passes": passes,
        "acceptance": (counts[0] / counts[1].clamp(min=1)).tolist(),
    }


# -------------------------------------------------------------------------- copies from the context


def copy_acceptance(turns: list[dict], most: int = 16) -> dict[int, dict]:
    """How often copied tokens are right, by how many tokens matched; no model is run for it.

    From every place of the baseline's answers the longest match is taken, as common.Lookup does.

    Args: turns: {"input_ids" (1, T), "answer"} each. most: tokens to copy.
    Returns: {n: {"share" of the places whose longest match is of n tokens, "acceptance" by
        position: the share of copies so long, the answer's end allowing, that are right up to it}}.
    """
    lengths = list(common.Lookup(1).lengths)  # longest first
    offered = {n: [0] * most for n in lengths}
    right = {n: [0] * most for n in lengths}
    matches, places = dict.fromkeys(lengths, 0), 0
    for turn in turns:
        ids = torch.cat([turn["input_ids"].cpu(), torch.tensor([turn["answer"]])], dim=1)
        text, start = ids[0].tolist(), turn["input_ids"].shape[1]
        lookups = {n: common.Lookup(most) for n in lengths}
        for n, lookup in lookups.items():
            lookup.lengths = {n: most}
        for end in range(start, len(text)):
            places += 1
            found = {n: lookup.find(ids[:, :end]) for n, lookup in lookups.items()}
            n = next((n for n in lengths if found[n]), None)
            if n is None:
                continue
            matches[n] += 1
            agreed = True
            for position, (token, truth) in enumerate(zip(found[n], text[end:])):
                agreed = agreed and token == truth
                offered[n][position] += 1
                right[n][position] += agreed
    result = {}
    for n in lengths:
        rates = [good / count for good, count in zip(right[n], offered[n]) if count]
        result[n] = {"share": matches[n] / max(1, places), "acceptance": rates}
    return result


def copy_length(acceptance: list[float], verify_ms: list[float]) -> int:
    """How many tokens to copy for most expected tokens per second, without another draft.

    Args: acceptance: by position, from copy_acceptance. verify_ms: of milliseconds, root included.
    """
    best, best_speed, tokens = 0, 1 / verify_ms[1], 1.0  # the bonus alone
    for length, rate in enumerate(acceptance, 1):
        tokens += rate
        if tokens / verify_ms[1 + length] > best_speed:
            best, best_speed = length, tokens / verify_ms[1 + length]
    return best


def lengths_of_copies(turns: list[dict], cost_curve: dict) -> dict:
    """copy_acceptance, and for each length of match how many tokens to copy on this machine."""
    found = copy_acceptance(turns)
    longest = max(len(each["acceptance"]) for each in found.values())
    times = milliseconds(cost_curve["by_tokens"], 1 + longest)
    for each in found.values():
        each["copy"] = copy_length(each["acceptance"], times)
    return {"by_match": {str(n): each for n, each in found.items()}}


def least_worth(answers: list, cost_curve: dict) -> float:
    """The expected tokens that a node must add to pay for its place in the verification.

    While a node is verified, decoding as fast as in these answers emits that many. Its time is the
    mean over the nodes of a round: between two numbers of tokens a cost curve is mostly noise.

    Args: answers: of an arm of bench.py.
    """
    nodes = sum(a.drafted for a in answers) / max(1, sum(a.rounds for a in answers))
    nodes = max(1, round(nodes))
    times = milliseconds(cost_curve["by_tokens"], 1 + nodes)
    ms_of_a_node = max(0.0, times[1 + nodes] - times[1]) / nodes
    seconds = sum(a.decode_seconds for a in answers)
    return ms_of_a_node * sum(len(a.tokens) for a in answers) / (1000 * seconds)


def worth_of_nodes(arm, target, turns: list[dict], cost_curve: dict) -> dict:
    """`least_worth` for an arm of bench.py. Args: as of sizes_of_cape."""
    return {"least_worth": least_worth(arm.answers, cost_curve)}


def fitter(arm):
    """What fits an arm of bench.py: a function of (target, turns, cost_curve).

    It returns {NAME: what was fitted}, copies from the context always among them.

    Raises: ValueError: the arm leaves nothing else open, and is not the arm `copies`.
    """
    kinds = (("expand", sizes_of_cape), ("prune", tree_of_falcon))
    own = [function for name, function in kinds if hasattr(arm.module, name)]
    if hasattr(getattr(arm.module, "Config", None), "least_worth"):
        own.append(worth_of_nodes)
    if not own and arm.name != "copies":
        raise ValueError(
            f"--refit: {arm.name} leaves nothing open that could be fitted; take cape, falcon, "
            "ctc_drafter or copies"
        )

    def fit(target, turns: list[dict], cost_curve: dict) -> dict:
        found = {}
        for function in own:
            fitted = function(arm, target, turns, cost_curve)
            found[arm.name] = found.get(arm.name, {}) | fitted
        found["copies"] = lengths_of_copies(turns, cost_curve)
        return found

    return fit


@torch.no_grad()
def induction(target, length: int = 60, seed: int = 0) -> list[float]:
    """How far each layer of a target copies: GLIDE can copy, too, if it reads one that does.

    In a text that says `length` random tokens twice, an induction head (Olsson et al. 2022,
    arXiv:2209.11895) attends in the second half to what followed the same token in the first.

    Returns: of each layer the largest share, 0 to 1, that a head pays to that place, on average.
    """
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(
        common.target_shape(target)["vocab_size"], (1, length), generator=generator
    )
    twice = once.repeat(1, 2).to(target.device)
    usual = target.config._attn_implementation
    target.set_attn_implementation("eager")  # the others do not tell what they attend to
    try:
        attentions = target(twice, output_attentions=True).attentions  # each (1, H, 2 T, 2 T)
    finally:
        target.set_attn_implementation(usual)
    queries = torch.arange(length, 2 * length, device=target.device)
    paid = [layer[0, :, queries, queries - length + 1].mean(-1) for layer in attentions]  # (H,)
    return [float(heads.max()) for heads in paid]
