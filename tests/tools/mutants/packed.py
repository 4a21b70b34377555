"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_packed.py"]
MUTANTS = [
    (
        "support/packed.py",
        'self.packed, self.bias, "none"',
        'self.packed, None, "none"',
        "packed layers: no bias",
    ),
    (
        "support/packed.py",
        "self.weight[token_ids], requires_grad",
        "self.weight[: len(token_ids)], requires_grad",
        "a drafter's head of the first tokens",
    ),
    (
        "support/packed.py",
        "        if token_ids not in self.selected:\n",
        "        if True:\n",
        "a drafter's head is packed for every answer",
    ),
    (
        "support/packed.py",
        "WeakIdKeyDictionary()  #",
        "{}  #",
        "heads of drafters that are gone",
    ),
    (
        "support/packed.py",
        " and module.weight.dtype == torch.float32",
        "",
        "packs what is no float32",
    ),
    (
        "support/packed.py",
        "self.bias = layer.bias",
        "self.bias = None",
        "PackedLinear: biases vanish",
    ),
]
