"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_replay.py"]
MUTANTS = [
    (
        "support/replay.py",
        "        self.before = dict(seconds)\n",
        "",
        "replay: a round's milliseconds are those of all rounds so far",
    ),
    (
        "support/replay.py",
        "self.stats.ended - self.stats.began - sum(spent.values())",
        "self.stats.ended - self.stats.began",
        "replay: a round's `other` milliseconds hold its drafting and verifying, too",
    ),
    (
        "support/replay.py",
        "if arm.kwargs.get(option.name) is not None:",
        "if arm.kwargs.get(option.name) is not None and value is None:",
        "replay: the page shows the drafter's settings whatever the command line says",
    ),
    (
        "support/replay.py",
        "q_nodes[node] = min(1.0, worth[path] / before)",
        "q_nodes[node] = min(1.0, worth[path])",
        "draft_probabilities: a CTC node's chance is the prefix's, not given its parent",
    ),
]
