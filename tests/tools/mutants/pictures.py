"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_pictures.py"]
MUTANTS = [
    (
        "support/pictures.py",
        "xerr=[below, above]",
        "xerr=[above, below]",
        "speedup.svg: the 95% intervals are drawn mirrored",
    ),
]
