"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_replay.py"]
MUTANTS = [
    (
        "support/replay.py",
        "        self.before = dict(seconds)\n",
        "",
        "replay: a round's milliseconds are those of all rounds so far",
    ),
]
