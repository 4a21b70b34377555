"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_batching.py"]
MUTANTS = [
    (
        "support/batching.py",
        "mask = torch.full((sum(sizes), sum(sizes) + sum(prefixes)), torch.finfo(target.dtype).min,",
        "mask = torch.full((sum(sizes), sum(sizes) + sum(prefixes)), 0.0,",
        "joint mask: rows see each other",
    ),
    (
        "support/batching.py",
        "top, left = top + size, left + prefix + size",
        "top, left = top + size, left + size",
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
]
