"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_batching.py"]
MUTANTS = [
    (
        "support/batching.py",
        "mask = torch.full((rows, columns), torch.finfo(target.dtype).min, **like)",
        "mask = torch.full((rows, columns), 0.0, **like)",
        "joint mask: rows see each other",
    ),
    (
        "support/batching.py",
        "left += prefix + size",
        "left += size",
        "joint mask: blocks out of place",
    ),
    (
        "support/batching.py",
        "torch.arange(prefix, prefix + size, device",
        "torch.arange(0, size, device",
        "joint positions",
    ),
    (
        "support/batching.py",
        "scored.append(torch.arange(size) >= size - (options",
        "scored.append(torch.arange(size) < (options",
        "joint forward: logits of the wrong row",
    ),
    (
        "support/batching.py",
        "for i in range(longest, len(row)) if row[i] in ends",
        "for i in range(len(row)) if row[i] in ends",
        "a padded row is cut at an end inside its prompt",
    ),
    (
        "support/batching.py",
        "answer.forwards = sum(each.target_forwards for each in stats)",
        "answer.forwards = max(each.target_forwards for each in stats)",
        "tau of batches: the largest of forwards",
    ),
    (
        "support/batching.py",
        "baseline = max(arms[1:3], key=report.speed)",
        "baseline = min(arms[1:3], key=report.speed)",
        "batches: the slower baseline",
    ),
    (
        "support/batching.py",
        "starts = range(0, len(prompts) - size + 1, size)",
        "starts = range(0, len(prompts), size)",
        "batches: a last one that is smaller",
    ),
    (
        "support/batching.py",
        'pairs = zip(outputs[arm.name], outputs["alone"])',
        "pairs = zip(outputs[arm.name], outputs[arm.name])",
        "batches: compared with themselves",
    ),
    (
        "support/batching.py",
        "seconds = time.perf_counter() - start",
        "seconds = 1.0",
        "batches: no clock",
    ),
    (
        "support/batching.py",
        'for row, tokens in zip(rows, outputs["alone"]):',
        'for row, tokens in enumerate(outputs["alone"]):',
        "answers go to another conversation",
    ),
    (
        "support/batching.py",
        'turns.append({"prompt": number})',
        'turns.append({"prompt": len(turns)})',
        "batches: the bootstrap redraws turns",
    ),
    (
        "support/batching.py",
        "target.generate(ids, attention_mask=mask, pad",
        "target.generate(ids, attention_mask=torch.ones_like(ids), pad",
        "padded baseline: padding is read",
    ),
    (
        "support/batching.py",
        "first = len(turns) % len(arms)",
        "first = 0",
        "batches: arms in one order",
    ),
    (
        "support/batching.py",
        "said[row].append(tokenizer.decode(tokens, skip_special_tokens=True))",
        "said[row].append(tokenizer.decode(tokens, skip_special_tokens=False))",
        "batches, second turn: an answer keeps its end token",
    ),
    (
        "support/batching.py",
        'positions.append(options.get("position_ids", chain))',
        "positions.append(chain)",
        "joint_forward: nodes of a tree get positions of a chain",
    ),
    (
        "support/batching.py",
        "starts = range(0, len(prompts) - size + 1, size)",
        "starts = range(0, len(prompts) - size, size)",
        "measure: the last whole batch is left out where the prompts divide evenly",
    ),
]
