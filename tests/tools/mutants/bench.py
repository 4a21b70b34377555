"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_report.py", "test_bench.py"]
MUTANTS = [
    (
        "bench.py",
        "baseline = max(arms[:2], key=report.speed)",
        "baseline = min(arms[:2], key=report.speed)",
        "the baseline is the slower of the two loops",
    ),
    (
        "bench.py",
        'agreed = encoded["input_ids"].new_tensor([reference[:place]])',
        'agreed = encoded["input_ids"].new_tensor([reference[: place + 1]])',
        "the margin at a divergence, a token late",
    ),
    (
        "bench.py",
        ">= prompt.shape[1])[None]",
        ">= 1)[None]",
        "alpha over prompt tokens, too",
    ),
    (
        "bench.py",
        "        total += float(accepted)\n        count += int(number)\n",
        "        total += float(accepted) / int(number)\n        count += 1\n",
        "alpha as the mean of per-answer means",
    ),
    (
        "bench.py",
        '        drafter = arm.module, id(arm.kwargs.get("drafter"))\n',
        "        drafter = arm.module\n",
        "one alpha for all drafters of a method",
    ),
    (
        "bench.py",
        "place[str(tokens)] = milliseconds(rows, tokens)",
        "place[str(tokens)] = milliseconds(context, tokens)",
        "costs by context all measured at --context",
    ),
    (
        "bench.py",
        "statistics.median(times[1:])",
        "statistics.median(times)",
        "costs: the warm-up counts",
    ),
    (
        "bench.py",
        "            cache.crop(-tokens)\n",
        "",
        "costs: the context grows with each measurement",
    ),
    (
        "bench.py",
        "first = len(turns) % len(arms)",
        "first = 0",
        "arms in the same order for every turn",
    ),
    (
        "bench.py",
        "reference = played[arms[0].name].tokens",
        "reference = played[arms[-1].name].tokens",
        "a method's answer taken for the baseline's",
    ),
    (
        "bench.py",
        "            del arm.answers[len(turns) :], arm.same[len(turns) :]",
        "            pass",
        "an interrupt leaves the arms with unequal answers",
    ),
    (
        "bench.py",
        "if name == kind and not prefill",
        "if name == kind",
        "the prefill counts as time inside the target",
    ),
    (
        "bench.py",
        "        if self._open:\n            return\n",
        "",
        "nested modules are counted twice",
    ),
    (
        "bench.py",
        "                prefilled = end\n",
        "                prefilled = prefilled or end\n",
        "the first draft counts as decoding",
    ),
    (
        "bench.py",
        "answer.rounds = sum(not prefill for *_, prefill in targets)",
        "answer.rounds = len(targets)",
        "transformers' prefill is a round",
    ),
    (
        "bench.py",
        "answer.drafted = fed - (length - 1) - len(targets)",
        "answer.drafted = fed - len(targets)",
        "transformers' prompt counts as drafted",
    ),
    (
        "bench.py",
        "token = torch.multinomial(scores.softmax(-1), 1)",
        "token = scores.argmax(-1, keepdim=True)",
        "the plain loop never samples",
    ),
    (
        "bench.py",
        "report.paired_ratio(arm, other, turns)",
        "report.paired_ratio(other, arm, turns)",
        "a variant's ratio upside down",
    ),
    (
        "bench.py",
        "        answer.copies = clock.copies\n",
        "",
        "copies are not passed on",
    ),
    (
        "support/prompts.py",
        'longest = asked + max_new_tokens * len(prompt["turns"])',
        "longest = asked + max_new_tokens",
        "the longest conversation has one answer",
    ),
    (
        "support/prompts.py",
        "roles[i % 2]",
        "roles[0]",
        "all messages are the user's",
    ),
    (
        "support/arms.py",
        "merged |= variants[part]",
        "merged = variants[part]",
        "of two variants the last",
    ),
    (
        "support/arms.py",
        'kwargs["drafter"] = self.drafter(module, checkpoint)',
        'kwargs["drafter"] = self.drafter(module)',
        "@DIR and --checkpoint are not read",
    ),
]
