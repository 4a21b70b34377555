"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_falcon.py"]
MUTANTS = [
    (
        "falcon.py",
        "return (block[:, :, None] >= block[:, None, :])[:, None]",
        "return (torch.arange(length)[:, None] >= torch.arange(length)).expand(len(phase), 1, -1, -1)",
        "relaxed mask: plain causal",
    ),
    ("falcon.py", "+ phase[:, None]) // k", "+ 0 * phase[:, None]) // k", "relaxed mask: no phase"),
    (
        "falcon.py",
        "(block[fed, None] >= block)[None, None]",
        "(fed[:, None] >= slots)[None, None]",
        "drafting mask: plain causal",
    ),
    (
        "falcon.py",
        "return torch.cat([sight[parent], own], dim=1)",
        "return torch.cat([sight[parent].new_ones(sight[parent].shape), own], dim=1)",
        "tree mask: sees other branches",
    ),
    (
        "falcon.py",
        "own = torch.eye(len(parent), dtype=torch.bool, device=sight.device)",
        "own = torch.ones(len(parent), len(parent), dtype=torch.bool)",
        "tree mask: sees its siblings",
    ),
    (
        "falcon.py",
        "tuple(x[:, parent] for x in state)",
        "tuple(x[:, :1].expand(-1, len(parent), -1).contiguous() for x in state)",
        "LSTM state of the wrong branch",
    ),
    (
        "falcon.py",
        "round(rate * int(wrong[row].sum()))",
        "round(rate * int(learns[row].sum()))",
        "CSGD: number of answers shown",
    ),
    ("falcon.py", "where = where & ~replaced", "pass", "CSGD: learns slots that hold their answer"),
    (
        "falcon.py",
        "answers = F.pad(hidden, (0, 0, 0, k))[:, k : k + length - 1]",
        "answers = F.pad(hidden, (0, 0, 0, k))[:, k - 1 : k + length - 2]",
        "loss: features of the wrong position",
    ),
    ("falcon.py", "(0.9 * soft + 0.1 * hard)", "(0.1 * soft + 0.9 * hard)", "loss: alpha"),
    (
        "falcon.py",
        "F.kl_div(log_q, log_p, log_target=True",
        "F.kl_div(log_p, log_q, log_target=True",
        "loss: KL the other way",
    ),
    (
        "falcon.py",
        'l1 = F.smooth_l1_loss(features, answers, reduction="sum") / answers.shape[-1]',
        "l1 = 0.0",
        "loss: no regression",
    ),
]
