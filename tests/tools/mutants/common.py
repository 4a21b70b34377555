"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_common.py", "test_properties.py"]
MUTANTS = [
    (
        "common.py",
        "see[node + 1] |= see[parent + 1]",
        "see[node + 1] |= see[0]",
        "tree mask: parents only at the root",
    ),
    (
        "common.py",
        "mask[0, 0, :, prefix:].masked_fill_(~see, torch.finfo(dtype).min)",
        "pass",
        "tree mask: none",
    ),
    (
        "common.py",
        "position_ids=(prefix + depth)",
        "position_ids=(prefix + torch.arange(len(depth)))",
        "tree positions",
    ),
    (
        "common.py",
        "taken = next((n for n in here if tokens[n] == choice), None)",
        "taken = next(iter(here), None)",
        "verify, greedy: any child",
    ),
    (
        "common.py",
        "if path != list(range(len(path))):",
        "if False:",
        "verify: accepted rows not moved",
    ),
    (
        "common.py",
        "            cache.crop(len(path) - len(tokens))",
        "            pass",
        "verify: refused rows stay",
    ),
    (
        "common.py",
        "kept = torch.tensor([-1, *path], device=device) + 1",
        "kept = torch.arange(len(path) + 1)",
        "verify: the first rows kept, not the accepted",
    ),
    (
        "common.py",
        "ids = torch.cat([ids, draft.tokens[None, taken : taken + 1]], dim=1) if logits_processor else ids",
        "pass",
        "verify: processors see the old prefix",
    ),
    (
        "common.py",
        "* q_draft[token] < p_target[token]",
        "* q_draft[token] < 2 * p_target[token]",
        "_choose: accepts too much",
    ),
    (
        "common.py",
        "residual = (p_target - q_draft).clamp(min=0)",
        "residual = p_target.clone()",
        "_choose: no residual",
    ),
    (
        "common.py",
        "p_target = residual / residual.sum() if residual.sum() > 0 else p_target",
        "pass",
        "_choose: residual unused",
    ),
    (
        "common.py",
        "choice = int(torch.multinomial(p_target, 1, generator=generator))",
        "choice = int(p_target.argmax())",
        "_choose: argmax for a draw",
    ),
    (
        "common.py",
        "for count in range(1, tokens.shape[1] + 1):",
        "for count in [tokens.shape[1]]:",
        "commit: runs past the end",
    ),
    (
        "common.py",
        "agreed = int((self.fed[0, :end] == input_ids[0, :end]).cumprod(0).sum())",
        "agreed = end",
        "DraftCache.rewind: keeps refused rows",
    ),
    ("common.py", "self.crop(agreed - self.fed.shape[1])", "pass", "DraftCache.rewind: rows stay"),
    (
        "common.py",
        "end = min(self.fed.shape[1], input_ids.shape[1] - 1)",
        "end = min(self.fed.shape[1], input_ids.shape[1])",
        "DraftCache.rewind: nothing left to feed",
    ),
    (
        "common.py",
        "(x[:, :, : start + len(rows)] for x in self.buffer)",
        "(x[:, :, : start + len(rows) + 1] for x in self.buffer)",
        "GrowingLayer.keep: a row too many",
    ),
    (
        "common.py",
        "return logits if cap is None else torch.tanh(logits / cap) * cap",
        "return logits",
        "soft-capping",
    ),
]
