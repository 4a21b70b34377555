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
        "or cache.layers[0].buffer[0] is not self.buffers[0][0]",
        "",
        "graphs: a cache that has moved away",
    ),
]
