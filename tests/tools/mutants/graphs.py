"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_graphs.py"]
MUTANTS = [
    (
        "support/graphs.py",
        "mask = own.new_full((1, 1, n, self.length), torch.finfo(own.dtype).min)",
        "mask = own.new_zeros((1, 1, n, self.length))",
        "graphs: sees rows that are not there",
    ),
    (
        "support/graphs.py",
        "place = torch.arange(start, start + rounded,",
        "place = torch.arange(0, rounded,",
        "graphs: rows out of place",
    ),
    ("support/graphs.py", "clamp(max=n - 1)", "clamp(max=0)", "graphs: the wrong tokens"),
    (
        "support/graphs.py",
        "outgrown = moved or start",
        "outgrown = start",
        "graphs: a cache that has moved away",
    ),
    (
        "support/graphs.py",
        "layer.adopt(buffer, start + n)",
        "layer.adopt(buffer, start + rounded)",
        "graphs: rows of the rounding stay",
    ),
    (
        "support/graphs.py",
        "        assert cache is self.owner",
        "        assert True",
        "graphs: two sequences in one memory",
    ),
    (
        "support/graphs.py",
        "mask[..., : start + n] = own",
        "mask[..., : start + n] = 0",
        "Graphs: the mask of a tree is lost, all nodes see each other",
    ),
]
