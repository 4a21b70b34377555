"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_glide.py"]
MUTANTS = [
    (
        "glide.py",
        "return (block[:, :, None] > block[:, None, :])[:, None]",
        "return (block[:, :, None] >= block[:, None, :])[:, None]",
        "block mask: sees its own block",
    ),
    (
        "glide.py",
        "+ phase[:, None]) // block_size",
        "+ 0 * phase[:, None]) // block_size",
        "block mask: no phase",
    ),
    ("glide.py", "out = out if some is None else out * some", "pass", "rows without keys"),
    (
        "glide.py",
        "self_mask = (positions.mT >= rows)[None, None]",
        "self_mask = (positions.mT >= rows - 1)[None, None]",
        "drafting mask: sees ahead",
    ),
    (
        "glide.py",
        "cross_mask = (positions.mT > rows[",
        "cross_mask = (positions.mT >= rows[",
        "drafting mask: reads its own row",
    ),
    (
        "glide.py",
        "where = F.pad(batch.loss_mask[:, 1:], (0, 1))",
        "where = batch.loss_mask",
        "loss: rows off by one",
    ),
    (
        "glide.py",
        "labels = inside[batch.input_ids[:, 1:][where[:, :-1]]]",
        "labels = inside[batch.input_ids[:, :-1][where[:, :-1]]]",
        "loss, hard: learns its input",
    ),
    (
        "glide.py",
        "labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).softmax(-1)",
        "labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).mul(2).softmax(-1)",
        "loss, distilled: sharper labels",
    ),
    (
        "glide.py",
        "return torch.minimum(p_target, logits.softmax(-1)).sum(), len(logits)",
        "return torch.maximum(p_target, logits.softmax(-1)).sum(), len(logits)",
        "alpha",
    ),
]
