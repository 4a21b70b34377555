"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_fitting.py"]
MUTANTS = [
    (
        "support/fitting.py",
        "known = sorted((int(n), ms)",
        "known = sorted((n, ms)",
        "costs: counts in the order of words",
    ),
    (
        "support/fitting.py",
        "share = (n - low[0]) / (high[0] - low[0]) if",
        "share = 0.0 if",
        "costs between counts: those below",
    ),
    (
        "support/fitting.py",
        "max(1, stats.target_forwards - 1)",
        "max(1, stats.target_forwards)",
        "drafting time over one round too many",
    ),
    (
        "support/fitting.py",
        "agreed = agreed and token == truth",
        "agreed = token == truth",
        "copies: right after a wrong one",
    ),
    (
        "support/fitting.py",
        "lookup.find(ids[:, :end])",
        "lookup.find(ids[:, : end + 1])",
        "copies: the answer is seen",
    ),
    (
        "support/fitting.py",
        "n = next((n for n in lengths if found[n]), None)",
        "n = next((n for n in lengths[::-1] if found[n]), None)",
        "copies: the shortest match",
    ),
    (
        "support/fitting.py",
        '"share": matches[n] / max(1, places)',
        '"share": matches[n] / max(1, sum(matches.values()))',
        "copies: share of matches, not of places",
    ),
    (
        "support/fitting.py",
        "if tokens / verify_ms[1 + length] > best_speed:",
        "if tokens / verify_ms[length] > best_speed:",
        "copies: the root costs nothing",
    ),
    (
        "support/fitting.py",
        "reached = [first**step for step in range(gamma)]",
        "reached = [first**step for step in range(1, gamma + 1)]",
        "refit: steps are reached one acceptance late",
    ),
    (
        "support/fitting.py",
        "slope = verify_ms[1 + high] - verify_ms[1 + low]",
        "slope = verify_ms[high] - verify_ms[low]",
        "refit: slope of other counts",
    ),
    (
        "support/fitting.py",
        'options = {"tree": falcon.layered_tree([4] * k * n), "best_nodes": 0, "copies": 0}',
        'options = {"tree": falcon.layered_tree([4] * n), "best_nodes": 0, "copies": 0}',
        "refit of Falcon: n levels are timed as n passes of k levels",
    ),
    (
        "support/fitting.py",
        "hit += share * float(row[1 : 1 + size].sum())",
        "hit += share * float(row[:size].sum())",
        "refit: the first extra counts as the drafter's first choice",
    ),
    (
        "support/fitting.py",
        "ms_of_a_node = max(0.0, times[1 + nodes] - times[1]) / nodes",
        "ms_of_a_node = max(0.0, times[1 + nodes] - times[1])",
        "refit: all nodes of a round are paid by each",
    ),
    (
        "support/fitting.py",
        "found[arm.name] = found.get(arm.name, {}) | fitted",
        "found[arm.name] = fitted",
        "refit: the last fit hides the others",
    ),
    (
        "support/fitting.py",
        "counts = counts + tree_acceptance(",
        "counts = tree_acceptance(",
        "refit of Falcon: acceptance counted on the last answer only",
    ),
    (
        "support/fitting.py",
        "judged += [",
        "judged = [",
        "refit of CAPE: confidences and ranks of the last answer only",
    ),
    (
        "support/fitting.py",
        "queries, queries - length + 1]",
        "queries, queries - length]",
        "induction: attention to the same token, not to what followed it",
    ),
    (
        "support/fitting.py",
        "        target.set_attn_implementation(usual)\n",
        "        pass\n",
        "induction: the target keeps the slow attention",
    ),
    (
        "support/fitting.py",
        "here = ranks[ranges == index].clamp(max=most)",
        "here = ranks[ranges == index].clamp(max=most - 1)",
        "rank_acceptance: all ranks beyond the table count as its last",
    ),
    (
        "support/fitting.py",
        "/ max(1, stats.target_forwards - 1))",
        "/ stats.target_forwards)",
        "draft_ms: divides by the first round too, whose draft was timed with the prefill",
    ),
]
