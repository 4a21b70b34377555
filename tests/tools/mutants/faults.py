"""Wrong only where a run is killed or a disk is full."""

TESTS = ["test_faults.py"]
MUTANTS = [
    (
        "train.py",
        "for file in sorted(part.iterdir(), reverse=True):",
        "for file in sorted(part.iterdir()):",
        "save: config.json comes first, so a kill half-way leaves a folder that looks complete",
    ),
    (
        "train.py",
        "        shutil.rmtree(part, ignore_errors=True)\n        reason =",
        "        reason =",
        "save: a full disk leaves half a checkpoint in .part, and the disk full",
    ),
    (
        "train.py",
        "copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(part)",
        "copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(out)",
        "save: the weights are written in place of the old ones, not renamed when whole",
    ),
]
