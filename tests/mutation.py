"""Break the verifier, every mask and every loss in turn, in a copy of the repository, and see that a test goes red.

    python tests/mutation.py            # all: half an hour or so; exit code 1 if a mutant survives
    python tests/mutation.py glide      # those of one file; "gpu: glide" those that only a GPU would mind

The tests of the mutant's own file must notice it, or tests/test_gpu.py those marked so.
A mutant is one replacement of text that makes the program wrong, not merely different. Equivalent ones are left out;
for instance, a refused sampled sibling cannot be drawn again, because what is left of its probability is zero.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = [  # (file, text that occurs once, what to put in its place, what that breaks)
    ("common", "see[node + 1] |= see[parent + 1]", "see[node + 1] |= see[0]", "tree mask: parents only at the root"),
    ("common", "mask[0, 0, :, prefix:].masked_fill_(~see, torch.finfo(dtype).min)", "pass", "tree mask: none"),
    ("common", "position_ids=(prefix + depth)", "position_ids=(prefix + torch.arange(len(depth)))", "tree positions"),
    ("common", "taken = next((n for n in here if tokens[n] == choice), None)", "taken = next(iter(here), None)",
     "verify, greedy: any child"),
    ("common", "if path != list(range(len(path))):", "if False:", "verify: accepted rows not moved"),
    ("common", "            cache.crop(len(path) - len(tokens))", "            pass", "verify: refused rows stay"),
    ("common", "kept = torch.tensor([-1, *path], device=device) + 1", "kept = torch.arange(len(path) + 1)",
     "verify: the first rows kept, not the accepted"),
    ("common", "ids = torch.cat([ids, draft.tokens[None, taken : taken + 1]], dim=1) if logits_processor else ids",
     "pass", "verify: processors see the old prefix"),
    ("common", "* q_draft[token] < p_target[token]", "* q_draft[token] < 2 * p_target[token]",
     "_choose: accepts too much"),
    ("common", "residual = (p_target - q_draft).clamp(min=0)", "residual = p_target.clone()", "_choose: no residual"),
    ("common", "p_target = residual / residual.sum() if residual.sum() > 0 else p_target", "pass",
     "_choose: residual unused"),
    ("common", "choice = int(torch.multinomial(p_target, 1, generator=generator))", "choice = int(p_target.argmax())",
     "_choose: argmax for a draw"),
    ("common", "for count in range(1, tokens.shape[1] + 1):", "for count in [tokens.shape[1]]:",
     "commit: runs past the end"),
    ("common", "agreed = int((self.fed[0, :end] == input_ids[0, :end]).cumprod(0).sum())", "agreed = end",
     "DraftCache.rewind: keeps refused rows"),
    ("common", "self.crop(agreed - self.fed.shape[1])", "pass", "DraftCache.rewind: rows stay"),
    ("common", "end = min(self.fed.shape[1], input_ids.shape[1] - 1)",
     "end = min(self.fed.shape[1], input_ids.shape[1])", "DraftCache.rewind: nothing left to feed"),
    ("common", "(x[:, :, : start + len(rows)] for x in self.buffer)",
     "(x[:, :, : start + len(rows) + 1] for x in self.buffer)", "GrowingLayer.keep: a row too many"),
    ("common", "return logits if cap is None else torch.tanh(logits / cap) * cap", "return logits", "soft-capping"),

    ("batching", "mask = torch.full((sum(sizes), sum(sizes) + sum(prefixes)), torch.finfo(target.dtype).min,",
     "mask = torch.full((sum(sizes), sum(sizes) + sum(prefixes)), 0.0,", "joint mask: rows see each other"),
    ("batching", "top, left = top + size, left + prefix + size", "top, left = top + size, left + size",
     "joint mask: blocks out of place"),
    ("batching", "torch.arange(prefix, prefix + size, device", "torch.arange(0, size, device", "joint positions"),
    ("batching", "scored.append(torch.arange(size) >= size - (options", "scored.append(torch.arange(size) < (options",
     "joint forward: logits of the wrong row"),

    ("graphs", "mask = own.new_full((1, 1, n, self.length), torch.finfo(own.dtype).min)",
     "mask = own.new_zeros((1, 1, n, self.length))", "graphs: sees rows that are not there"),
    ("graphs", "place = torch.arange(start, start + rounded,", "place = torch.arange(0, rounded,",
     "graphs: rows out of place"),
    ("graphs", "clamp(max=n - 1)", "clamp(max=0)", "graphs: the wrong tokens"),
    ("graphs", "or cache.layers[0].buffer[0] is not self.buffers[0][0]", "", "graphs: a cache that has moved away"),

    ("gpu: graphs", "        self.graph.replay()\n", "", "graphs: no replay"),
    ("gpu: graphs", "            fixed.copy_(new)", "            pass", "graphs: inputs of the recording"),
    ("gpu: graphs", "self.target.dtype).to(device)", "self.target.dtype)", "graphs: the mask stays on the CPU"),
    ("gpu: common", "mask.to(device) if", "mask if", "verify: the mask stays on the CPU"),
    ("gpu: glide", "rows = torch.arange(own.fed.shape[1], device=ids.device)",
     "rows = torch.arange(own.fed.shape[1])", "drafting mask made on the CPU"),

    ("glide", "return (block[:, :, None] > block[:, None, :])[:, None]",
     "return (block[:, :, None] >= block[:, None, :])[:, None]", "block mask: sees its own block"),
    ("glide", "+ phase[:, None]) // block_size", "+ 0 * phase[:, None]) // block_size", "block mask: no phase"),
    ("glide", "out = out if some is None else out * some", "pass", "rows without keys"),
    ("glide", "self_mask = (positions.mT >= rows)[None, None]", "self_mask = (positions.mT >= rows - 1)[None, None]",
     "drafting mask: sees ahead"),
    ("glide", "cross_mask = (positions.mT > rows[", "cross_mask = (positions.mT >= rows[",
     "drafting mask: reads its own row"),
    ("glide", "where = F.pad(batch.loss_mask[:, 1:], (0, 1))", "where = batch.loss_mask", "loss: rows off by one"),
    ("glide", "labels = inside[batch.input_ids[:, 1:][where[:, :-1]]]",
     "labels = inside[batch.input_ids[:, :-1][where[:, :-1]]]", "loss, hard: learns its input"),
    ("glide", "labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).softmax(-1)",
     "labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).mul(2).softmax(-1)",
     "loss, distilled: sharper labels"),
    ("glide", "return torch.minimum(p_target, logits.softmax(-1)).sum(), len(logits)",
     "return torch.maximum(p_target, logits.softmax(-1)).sum(), len(logits)", "alpha"),

    ("cape", "torch.cat([trajectory.parents, step - 1])", "torch.cat([trajectory.parents, step])",
     "mask: sets one too deep"),
    ("cape", "if confidence <= bound", "if confidence < bound", "set_size: bounds"),
    ("cape", "worth.topk(min(max(0, max_tokens - gamma), len(worth)))", "worth.topk(len(worth))", "no limit of tokens"),
    ("cape", "worth = torch.where(wanted & (values > 0), reached[:, None] * values, -1.0)",
     "worth = torch.where(wanted & (values > 0), values, -1.0)", "worth: not how likely the round gets there"),
    ("cape", "q_draft.new_zeros(len(chosen), q_draft.shape[1])", "q_draft[-1:].expand(len(chosen), -1)",
     "sampling: extras claim to be sampled"),
    ("cape", "others = q_draft.scatter(1, trajectory.tokens[:, None], 0.0)", "others = q_draft",
     "sets hold the trajectory"),

    ("specdecpp", "labels.append(torch.where(of_p < of_q, of_p / of_q, 1.0))", "labels.append(torch.ones_like(of_p))",
     "labels: all accepted"),
    ("specdecpp", "drafter.config.w_rej * (1 - accepted)", "(1 - accepted)", "loss, head: w_rej"),
    ("specdecpp", "total / (accepted + refused).sum().clamp(min=1e-6)", "total / len(accepted)",
     "loss, head: normalisation"),
    ("specdecpp", "F.logsigmoid(-scores)", "F.logsigmoid(scores)", "loss, head: sign"),
    ("specdecpp", "(noise[:, :, 1] >= config.keep)", "(noise[:, :, 1] < config.keep)", "mixed sequence: r and 1 - r"),
    ("specdecpp", "mixed = torch.where(taken, drafted, ids)", "mixed = ids", "mixed sequence: only the target's"),
    ("specdecpp", "        where = F.pad(batch.loss_mask[:, 1:], (0, 1))\n        labels",
     "        where = batch.loss_mask\n        labels", "loss, draft: rows off by one"),
    ("specdecpp", "accepted *= float(", "accepted = float(", "stop rule: no product"),
    ("specdecpp", "1 - accepted > config.threshold", "1 - accepted < config.threshold", "stop rule: sign"),
    ("specdecpp", "sum(not agree for agree in agrees[:-1])", "sum(not agree for agree in agrees)", "oracle"),

    ("falcon", "return (block[:, :, None] >= block[:, None, :])[:, None]",
     "return (torch.arange(length)[:, None] >= torch.arange(length)).expand(len(phase), 1, -1, -1)",
     "relaxed mask: plain causal"),
    ("falcon", "+ phase[:, None]) // k", "+ 0 * phase[:, None]) // k", "relaxed mask: no phase"),
    ("falcon", "(block[fed, None] >= block)[None, None]", "(fed[:, None] >= slots)[None, None]",
     "drafting mask: plain causal"),
    ("falcon", "return torch.cat([sight[parent], own], dim=1)",
     "return torch.cat([sight[parent].new_ones(sight[parent].shape), own], dim=1)", "tree mask: sees other branches"),
    ("falcon", "own = torch.eye(len(parent), dtype=torch.bool, device=sight.device)",
     "own = torch.ones(len(parent), len(parent), dtype=torch.bool)", "tree mask: sees its siblings"),
    ("falcon", "tuple(x[:, parent] for x in state)",
     "tuple(x[:, :1].expand(-1, len(parent), -1).contiguous() for x in state)", "LSTM state of the wrong branch"),
    ("falcon", "round(rate * int(wrong[row].sum()))", "round(rate * int(learns[row].sum()))",
     "CSGD: number of answers shown"),
    ("falcon", "where = where & ~replaced", "pass", "CSGD: learns slots that hold their answer"),
    ("falcon", "answers = F.pad(hidden, (0, 0, 0, k))[:, k : k + length - 1]",
     "answers = F.pad(hidden, (0, 0, 0, k))[:, k - 1 : k + length - 2]", "loss: features of the wrong position"),
    ("falcon", "(0.9 * soft + 0.1 * hard)", "(0.1 * soft + 0.9 * hard)", "loss: alpha"),
    ("falcon", "F.kl_div(log_q, log_p, log_target=True", "F.kl_div(log_p, log_q, log_target=True",
     "loss: KL the other way"),
    ("falcon", 'l1 = F.smooth_l1_loss(features, answers, reduction="sum") / answers.shape[-1]', "l1 = 0.0",
     "loss: no regression"),

    ("ctc_drafter", "[..., None] >= torch.arange(length, device=anchors.device)",
     "[..., None] + 1 >= torch.arange(length, device=anchors.device)", "slot mask: sees a row ahead"),
    ("ctc_drafter", "own = (group[:, None] == group)", "own = (group[:, None] >= group)",
     "slot mask: sees other anchors"),
    ("ctc_drafter", 'labels, frames, counts, log_q.shape[-1] - 1, "sum"', 'labels, frames, counts, 0, "sum"',
     "loss: blank"),
    ("ctc_drafter", "learns = batch.loss_mask & (torch.arange(ids.shape[1], device=ids.device) > 1)",
     "learns = batch.loss_mask.clone()", "windows: rows that are not there"),
    ("ctc_drafter", "(pick(learns) & (places < ids.shape[1])).long().cumprod(-1).sum(-1)",
     "(places < ids.shape[1]).long().sum(-1)", "windows: learns prompts"),
    ("ctc_drafter", "weight = 0.8**place * (place < counts[:, None])", "weight = (place < counts[:, None]) + 0.0",
     "Medusa: weights"),
    ("ctc_drafter", "if new != old and new != blank", "if new != blank", "collapse: repeats stay"),
    ("ctc_drafter", "entering = after_blank * q", "pass", "prefix search: repeats without a blank"),
    ("ctc_drafter", "and path[:-1] in place:", "and True:", "trie: orphans"),
    ("ctc_drafter", "own.crop(-slots)", "pass", "drafting: slots stay in the cache"),
    ("ctc_drafter", "value=1.0).cumprod(-1)", "value=1.0)", "alpha: only the slot before must be blank"),
]


QUICK = "mask or sight or loss or hand or defin or alpha or labels or collapse or sums or trie or walk or expan or size"


def pytest(folder: Path, name: str, quick: bool = False) -> tuple[bool, str]:
    """Run the tests of a file, and for common.py the properties: whether none failed, and the first red one."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/test_{name}.py"]
    command += ["-k", QUICK] if quick else ["tests/test_properties.py"] * (name == "common")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return False, "a test that did not end"
    red = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode in (0, 5), red[0].split("::")[-1].split(" - ")[0] if red else done.stdout[-200:]


def main() -> int:
    wanted = sys.argv[1:]
    mutants = [mutant for mutant in MUTANTS if not wanted or mutant[0] in wanted]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        unneeded = shutil.ignore_patterns(".git", "checkpoints", "conversations", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=unneeded)
        for name in dict.fromkeys(mutant[0].partition(":")[0] for mutant in mutants):  # else red means nothing
            green, first = pytest(copy, name)
            if not green:
                print(f"tests/test_{name}.py fails without any mutant: {first}")
                return 1
        print(f"| {'file':11} | {'mutant':45} | noticed by")
        for name, old, new, what in mutants:
            path, name = copy / f"{name.split()[-1]}.py", name.partition(":")[0]
            text, start = path.read_text(), time.monotonic()
            if text.count(old) != 1:
                outcome, survived = f"STALE: the text occurs {text.count(old)} times", True
            else:
                path.write_text(text.replace(old, new))
                survived, first = pytest(copy, name, quick=True)  # most mutants fall here, in seconds
                survived, first = pytest(copy, name) if survived else (survived, first)
                path.write_text(text)
                outcome = "SURVIVES" if survived else f"{first} ({time.monotonic() - start:.0f} s)"
            survivors += survived
            print(f"| {name:11} | {what:45} | {outcome}", flush=True)
    print(f"{len(mutants) - survivors} of {len(mutants)} noticed")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
