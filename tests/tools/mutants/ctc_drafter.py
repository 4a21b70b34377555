"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_ctc_drafter.py"]
MUTANTS = [
    (
        "ctc_drafter.py",
        "[..., None] >= torch.arange(length, device=anchors.device)",
        "[..., None] + 1 >= torch.arange(length, device=anchors.device)",
        "slot mask: sees a row ahead",
    ),
    (
        "ctc_drafter.py",
        "own = (group[:, None] == group)",
        "own = (group[:, None] >= group)",
        "slot mask: sees other anchors",
    ),
    (
        "ctc_drafter.py",
        'labels, frames, counts, log_q.shape[-1] - 1, "sum"',
        'labels, frames, counts, 0, "sum"',
        "loss: blank",
    ),
    (
        "ctc_drafter.py",
        "learns = batch.loss_mask & (torch.arange(ids.shape[1], device=ids.device) > 1)",
        "learns = batch.loss_mask.clone()",
        "windows: rows that are not there",
    ),
    (
        "ctc_drafter.py",
        "(pick(learns) & (places < ids.shape[1])).long().cumprod(-1).sum(-1)",
        "(places < ids.shape[1]).long().sum(-1)",
        "windows: learns prompts",
    ),
    (
        "ctc_drafter.py",
        "weight = 0.8**place * (place < counts[:, None])",
        "weight = (place < counts[:, None]) + 0.0",
        "Medusa: weights",
    ),
    (
        "ctc_drafter.py",
        "if new != old and new != blank",
        "if new != blank",
        "collapse: repeats stay",
    ),
    (
        "ctc_drafter.py",
        "entering = after_blank * q",
        "pass",
        "prefix search: repeats without a blank",
    ),
    ("ctc_drafter.py", "and path[:-1] in place:", "and True:", "trie: orphans"),
    ("ctc_drafter.py", "own.crop(-slots)", "pass", "drafting: slots stay in the cache"),
    (
        "ctc_drafter.py",
        "value=1.0).cumprod(-1)",
        "value=1.0)",
        "alpha: only the slot before must be blank",
    ),
]
