"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_report.py"]
MUTANTS = [
    (
        "support/report.py",
        '        sums[turn["prompt"]] += torch.tensor(row, dtype=torch.float64)\n',
        '        sums[turn["prompt"]] += torch.tensor(row, dtype=torch.float64)\n'
        "    sums = torch.tensor([[len(a.tokens), a.seconds, len(b.tokens), b.seconds] for a, b in "
        "zip(arm.answers, other.answers)], dtype=torch.float64)\n",
        "the bootstrap redraws turns, not prompts",
    ),
    ("support/report.py", "[0.025, 0.975]", "[0.05, 0.95]", "an interval of 90%"),
    (
        "support/report.py",
        "ratios = tokens / seconds * other_seconds / other_tokens",
        "ratios = tokens / seconds * other_tokens / other_seconds",
        "the interval is not one of ratios",
    ),
    (
        "support/report.py",
        "sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers)",
        "sum(len(a.tokens) / a.seconds for a in answers) / len(answers)",
        "tokens/s as the mean of answers",
    ),
    (
        "support/report.py",
        '"tau": emitted / forwards,',
        '"tau": emitted / (forwards + len(answers)),',
        "tau counts the prompt's forward",
    ),
    (
        "support/report.py",
        "taken / forwards if drafts else None",
        "taken / rounds if drafts else None",
        "accepted per round without the first forward",
    ),
    (
        "support/report.py",
        "else emitted - forwards  #",
        "else emitted  #",
        "unreported: bonus tokens count as accepted",
    ),
    (
        "support/report.py",
        "(drafted - taken) / emitted",
        "drafted / emitted",
        "N_d/N counts accepted tokens",
    ),
    (
        "support/report.py",
        "reached / sum(count >= level for count in offered)",
        "reached / len(offered)",
        "acceptance over rounds that offered less",
    ),
    (
        "support/report.py",
        '- each["draft"] - each["verify"],',
        '- each["verify"],',
        "the rest of a round holds its drafting",
    ),
    (
        "support/report.py",
        'in_forward = add("in_target") + add("in_drafter")',
        'in_forward = add("in_target")',
        "overhead: the drafter's time is overhead",
    ),
    (
        "support/report.py",
        'not left if greedy else None,\n        "diverged"',
        'True if greedy else None,\n        "diverged"',
        "every answer is greedy decoding's",
    ),
    (
        "support/report.py",
        '"tokens_per_s": emitted / add("seconds"),',
        '"tokens_per_s": emitted / add("decode_seconds"),',
        "tokens/s without the prefill",
    ),
    (
        "support/report.py",
        "accepts = sum(accepted > 0 for _, accepted in rounds)",
        "accepts = sum(accepted for _, accepted in rounds)",
        "copies: tokens, not rounds",
    ),
    (
        "support/report.py",
        'rows = [i for i, turn in enumerate(turns) if turn["category"] == category]',
        "rows = range(len(turns))",
        "every category is all of them",
    ),
    (
        "support/report.py",
        ' and not settings.get("copies")',
        "",
        "papers: beside an arm that copies",
    ),
    (
        "support/report.py",
        "facts.items() <= settings.items()",
        "facts.keys() <= settings.keys()",
        "papers: beside any drafter",
    ),
    (
        "support/report.py",
        '{"k": 3, "csgd": True}, {"accepted": 2.52,',
        '{"k": 3, "csgd": True}, {"tau": 2.52,',
        "papers: Falcon's tau beside one with the bonus",
    ),
    (
        "support/report.py",
        "drafted += [True] * count + [False]",
        "drafted += [True] * (count + 1)",
        "the bonus token is shown as drafted",
    ),
    (
        "support/report.py",
        "        part.unlink(missing_ok=True)",
        "        pass",
        "half a result is left behind",
    ),
    (
        "support/report.py",
        "speed(arm, rows) / speed(baseline, rows)",
        "speed(arm, rows) / speed(baseline)",
        "a category against the baseline of all",
    ),
    (
        "support/report.py",
        'rounds = max(1, add("rounds"))',
        "rounds = max(1, forwards)",
        "ms a round over the prefill, too",
    ),
    (
        "support/report.py",
        'row.append(f"{percent(shares[0])} ({percent(shares[1])})")',
        'row.append(f"{percent(shares[1])} ({percent(shares[0])})")',
        "copies by category: accepted (offered) under the title offered (accepted)",
    ),
    (
        "support/report.py",
        '"describe", "--always", "--dirty"]',
        '"describe", "--always"]',
        "a result of edited code names the clean commit",
    ),
    (
        "support/report.py",
        "predicted, accepted, counts = zip(*bins)",
        "accepted, predicted, counts = zip(*bins)",
        "calibration tables: prediction and outcome exchanged",
    ),
    (
        "support/report.py",
        "torch.tensor([0.025, 0.975], dtype=torch.float64)",
        "torch.tensor([0.05, 0.95], dtype=torch.float64)",
        "the 95% interval is one of 90%",
    ),
    (
        "support/report.py",
        "return [offers / len(rounds), accepts / len(rounds)]",
        "return [offers / len(rounds), accepts / offers]",
        "copies: accepted as a share of the offers, not of the rounds",
    ),
    (
        "support/report.py",
        "positions.append(reached / sum(count >= level for count in offered))",
        "positions.append(reached / len(offered))",
        "figures: acceptance by position counts rounds that drafted less",
    ),
]
