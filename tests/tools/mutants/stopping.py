"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

STOPPING = "support/stopping.py"
TESTS = ["test_stopping.py"]
MUTANTS = [
    (
        STOPPING,
        "place = (predicted * bins).long().clamp(max=bins - 1)",
        "place = (predicted * bins).long()",
        "calibration: p = 1 gets an eleventh bin",
    ),
    (
        STOPPING,
        "error += rows[-1][2] * abs(said - true)",
        "error += len(predicted) / bins * abs(said - true)",
        "calibration: every bin weighs the same",
    ),
    (
        STOPPING,
        "error += rows[-1][2] * abs(said - true)",
        "error += rows[-1][2] * (said - true)",
        "calibration: errors cancel",
    ),
    (
        STOPPING,
        "n_draft = sum(answer.offered[1:])",
        "n_draft = sum(answer.offered)",
        "t_draft: the first, untimed draft counts",
    ),
    (
        STOPPING,
        'if alike and not arm.kwargs.get("copies", arm.facts.get("copies")):',
        "if alike:",
        "t_draft: copied levels count as passes",
    ),
    (
        STOPPING,
        "alike = arm.drafters == arms[0].drafters and arm.module is arms[0].module",
        "alike = True",
        "t_draft: of other drafters, too",
    ),
    (
        STOPPING,
        "return 1 + first(1 - product > h for product in products)",
        "return first(1 - product > h for product in products)",
        "rates: the newest token is judged",
    ),
    (
        STOPPING,
        "products = itertools.accumulate(chances[n][i], float.__mul__)",
        "products = chances[n][i]",
        "rates: no product of chances",
    ),
    (STOPPING, "place += kept + 1", "place += max(1, kept)", "replay: no bonus token"),
    (
        STOPPING,
        "n_discarded += drafted - kept",
        "n_discarded += lengths[place] - kept",
        "replay: discards what had no room",
    ),
    (
        STOPPING,
        "return n_target / tokens, n_discarded / tokens",
        "return n_target / tokens / len(recordings), n_discarded / tokens / len(recordings)",
        "rates: divided by the answers, too",
    ),
    (
        STOPPING,
        "sum(1 + sum(not each.agreed for each in rounds[:-1])",
        "sum(1 + sum(not each.agreed for each in rounds)",
        "oracle: the last token counts",
    ),
    (
        STOPPING,
        "for i, value in enumerate(row[: each.agreed + 1]):",
        "for i, value in enumerate(row):",
        "judged: tokens after a refusal count",
    ),
    (
        STOPPING,
        "of_q = each.hidden.new_tensor(each.confidence[:-1])",
        "of_q = each.hidden.new_tensor(each.confidence[1:])",
        "recorded heads: q of the token after",
    ),
    (
        STOPPING,
        "hidden = [state for _, _, state in steps[1:]]",
        "hidden = [state for _, _, state in steps[:-1]]",
        "recorded heads: e of the token before",
    ),
    (
        STOPPING,
        "return (logits + math.log(w_rej)).sigmoid()",
        "return (logits * w_rej).sigmoid()",
        "true chance: w_rej multiplied",
    ),
    (
        STOPPING,
        "predicted.append(unbiased(logits, drafter.config.w_rej).cpu())",
        "predicted.append(logits.sigmoid().cpu())",
        "head quality: of the biased score",
    ),
    (
        STOPPING,
        "(lower + refused / 2)",
        "(lower + refused)",
        "AUC: a tie is a win",
    ),
    (
        STOPPING,
        "lower = refused.cumsum(0) - refused",
        "lower = refused.sum() - refused.cumsum(0)",
        "AUC: upside down",
    ),
    (STOPPING, '"kl": float(bce - entropy)', '"kl": float(bce)', "KL: with the labels' entropy"),
    (
        STOPPING,
        "t_draft + t_draft * discard + (t_target - t_draft) * verification",
        "t_draft + t_draft * discard + t_target * verification",
        "Eq. 2.3: t_target instead of c2",
    ),
    (
        STOPPING,
        "t_target = (sum(seconds) - sum(drafting)) / max(1, sum(n_target))",
        "t_target = sum(seconds) / max(1, sum(n_target))",
        "times by the timer: drafting counts twice",
    ),
    (
        "support/stopping.py",
        "first(e > most for e in",
        "first(e < most for e in",
        "entropy rule upside down",
    ),
    (
        "support/stopping.py",
        "        if min(fitted[:2]) > 0:\n",
        "        if True:\n",
        "negative times of a forward",
    ),
    ("support/stopping.py", "and all(same)", "and any(same)", "a head of another draft model"),
    (
        STOPPING,
        'source = arm.kwargs.get("draft_model")',
        "source = None",
        "--sweep with --draft-model replays the chains of another model than was timed",
    ),
    (
        STOPPING,
        "count = min(longest, len(answer) - place - 1)",
        "count = min(longest, len(answer) - place)",
        "recordings draft the bonus token, too",
    ),
    (
        STOPPING,
        "counts = torch.tensor([list(n_draft), list(n_target)], dtype=torch.float64).T",
        "counts = torch.tensor([list(n_target), list(n_draft)], dtype=torch.float64).T",
        "fit_times: t_draft and t_target exchanged",
    ),
]
