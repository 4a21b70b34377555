"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_specdecpp.py"]
MUTANTS = [
    (
        "specdecpp.py",
        "labels.append(torch.where(of_p < of_q, of_p / of_q, 1.0))",
        "labels.append(torch.ones_like(of_p))",
        "labels: all accepted",
    ),
    (
        "specdecpp.py",
        "drafter.config.w_rej * (1 - accepted)",
        "(1 - accepted)",
        "loss, head: w_rej",
    ),
    (
        "specdecpp.py",
        "total / (accepted + refused).sum().clamp(min=1e-6)",
        "total / len(accepted)",
        "loss, head: normalisation",
    ),
    ("specdecpp.py", "F.logsigmoid(-scores)", "F.logsigmoid(scores)", "loss, head: sign"),
    (
        "specdecpp.py",
        "(noise[:, :, 1] >= config.keep)",
        "(noise[:, :, 1] < config.keep)",
        "mixed sequence: r and 1 - r",
    ),
    (
        "specdecpp.py",
        "mixed = torch.where(taken, drafted, ids)",
        "mixed = ids",
        "mixed sequence: only the target's",
    ),
    (
        "specdecpp.py",
        "        where = F.pad(batch.loss_mask[:, 1:], (0, 1))\n        labels",
        "        where = batch.loss_mask\n        labels",
        "loss, draft: rows off by one",
    ),
    ("specdecpp.py", "accepted *= float(", "accepted = float(", "stop rule: no product"),
    (
        "specdecpp.py",
        "1 - accepted > config.threshold",
        "1 - accepted < config.threshold",
        "stop rule: sign",
    ),
    (
        "specdecpp.py",
        "sum(not agree for agree in agrees[:-1])",
        "sum(not agree for agree in agrees)",
        "oracle",
    ),
]
