"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["tools/gpu.py"]
MUTANTS = [
    ("support/graphs.py", "        self.graph.replay()\n", "", "graphs: no replay"),
    (
        "support/graphs.py",
        "            fixed.copy_(new)",
        "            pass",
        "graphs: inputs of the recording",
    ),
    (
        "support/graphs.py",
        "self.target.dtype).to(device)",
        "self.target.dtype)",
        "graphs: the mask stays on the CPU",
    ),
    ("common.py", "mask.to(fed.device) if", "mask if", "verify: the mask stays on the CPU"),
    (
        "glide.py",
        "place = torch.arange(own.fed.shape[1], device=ids.device)",
        "place = torch.arange(own.fed.shape[1])",
        "drafting mask made on the CPU",
    ),
]
