"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_cape.py"]
MUTANTS = [
    (
        "cape.py",
        "torch.cat([trajectory.parents, step - 1])",
        "torch.cat([trajectory.parents, step])",
        "mask: sets one too deep",
    ),
    ("cape.py", "if confidence <= bound", "if confidence < bound", "set_size: bounds"),
    (
        "cape.py",
        "worth.topk(min(max(0, max_tokens - gamma), len(worth)))",
        "worth.topk(len(worth))",
        "no limit of tokens",
    ),
    (
        "cape.py",
        "worth = torch.where(wanted & (values > 0), reached[:, None] * values, -1.0)",
        "worth = torch.where(wanted & (values > 0), values, -1.0)",
        "worth: not how likely the round gets there",
    ),
    (
        "cape.py",
        "q_draft.new_zeros(len(chosen), q_draft.shape[1])",
        "q_draft[-1:].expand(len(chosen), -1)",
        "sampling: extras claim to be sampled",
    ),
    (
        "cape.py",
        "others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)",
        "others = q_draft",
        "sets hold the trajectory",
    ),
]
