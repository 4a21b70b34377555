"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_pictures.py"]
MUTANTS = [
    (
        "support/pictures.py",
        "xerr=[below, above]",
        "xerr=[above, below]",
        "speedup.svg: the 95% intervals are drawn mirrored",
    ),
    (
        "support/pictures.py",
        "left = [a + b for a, b in zip(left, widths)]",
        "left = widths",
        "arm_pictures: the third part of a bar begins inside the ones before",
    ),
]
