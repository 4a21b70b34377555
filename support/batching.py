"""Several sequences at once with any method: their target forwards become one.

This is what GLIDE's appendix E and Table 4 measure. Each sequence keeps the method's own
`generate`, its own caches and its own pace, so the method files know nothing of batches. Whenever a
sequence wants the target to look at its draft it waits until the others want that too. Then the
target runs once over all drafts, laid side by side in one row, and the mask keeps the sequences
apart:

                         sequence 0          sequence 1
                      prefix  root n0   prefix  root n0 n1
        0  root        x  x    x   .     .  .    .   .  .
           n0          x  x    x   x     .  .    .   .  .
        1  root        .  .    .   .     x  x    x   .  .
           n0          .  .    .   .     x  x    x   x  .
           n1          .  .    .   .     x  x    x   x  x

There is no padding, and a sequence that has ended is simply no longer there. Drafters run one
sequence after another.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers.cache_utils import DynamicCache, DynamicLayer

import common
from support import report


class Abandoned(BaseException):
    """Ends a sequence's loop when another one has failed."""


class Sequence(threading.Thread):
    """One decode loop, held in a thread so that it can be left while it waits for the target.

    Only one runs at a time, and always in the same order: nothing depends on chance.
    """

    def __init__(self, target, call):
        super().__init__(daemon=True)
        self.target = target
        self.call = call  # its decode loop
        self.request = None  # what it asks of the target
        self.answer = None  # and gets
        self.output = None  # of the loop
        self.error = None
        self.turn = threading.Semaphore(0)  # released to let it run
        self.back = threading.Semaphore(0)  # released when it waits again, or ends

    def run(self) -> None:
        self.turn.acquire()
        try:
            with common.forward_by(self.target, self.ask):
                self.output = self.call()
        except BaseException as error:  # handed to the caller of `generate`
            self.error = error
        self.back.release()

    def ask(self, *request):
        """What common.forward does in this thread: wait for the joint forward."""
        self.request = request
        self.back.release()
        self.turn.acquire()
        if self.answer is None:
            raise Abandoned
        return self.answer

    def go_on(self, answer) -> None:
        """Let the loop run until it asks again or ends."""
        self.request, self.answer = None, answer
        self.turn.release()
        self.back.acquire()


class JointLayer(DynamicLayer):
    """Layer `index` of several caches as one: each gets its new rows, all rows are attended to."""

    def __init__(self, caches: list, sizes: list[int], index: int):
        super().__init__()
        self.parts = [cache.layers[index] for cache in caches]
        self.sizes = sizes  # new rows of each

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Rows (1, Hkv, sum of n, Dh) of all; returns keys, values (1, Hkv, sum of P + n, Dh)."""
        new = zip(self.parts, key_states.split(self.sizes, 2), value_states.split(self.sizes, 2))
        keys, values = zip(*(part.update(k, v) for part, k, v in new))
        return torch.cat(keys, 2), torch.cat(values, 2)


def joint_forward(target, requests: list[tuple]) -> list[tuple[Tensor, Tensor]]:
    """One target forward for several calls of common.forward.

    Args: requests: of each call (input_ids (1, n), cache, options).
    Returns: of each call what it would return: logits (1, n, V), or (1, 1, V) if one was asked for,
        and hidden states (1, n, D).
    """
    sizes = [ids.shape[1] for ids, _, _ in requests]
    prefixes = [past.get_seq_length() for _, past, _ in requests]
    rows, columns = sum(sizes), sum(sizes) + sum(prefixes)
    like = {"dtype": target.dtype, "device": target.device}
    mask = torch.full((rows, columns), torch.finfo(target.dtype).min, **like)
    positions, scored, top, left = [], [], 0, 0
    for (_, _, options), size, prefix in zip(requests, sizes, prefixes):
        own = options.get("attention_mask")
        if own is None:
            parents = torch.arange(size - 1) - 1
            own = common.ancestor_mask(parents, prefix, target.dtype)
        mask[top : top + size, left : left + prefix + size] = own[0, 0]
        top += size
        left += prefix + size
        chain = torch.arange(prefix, prefix + size, device=target.device)[None]
        positions.append(options.get("position_ids", chain))
        scored.append(torch.arange(size) >= size - (options.get("logits_to_keep") or size))
    caches = [past for _, past, _ in requests]
    cache = DynamicCache()
    cache.layers = [JointLayer(caches, sizes, index) for index in range(len(caches[0].layers))]
    wanted = torch.cat(scored).nonzero()[:, 0]
    logits, hidden = common.forward(
        target,
        torch.cat([ids for ids, _, _ in requests], dim=1),
        cache,
        attention_mask=mask[None, None],
        logits_to_keep=wanted.to(target.device),
        position_ids=torch.cat(positions, dim=1),
    )
    counts = [int(each.sum()) for each in scored]
    return list(zip(logits.split(counts, dim=1), hidden.split(sizes, dim=1)))


@torch.no_grad()
def generate(
    target, prompts: list[Tensor], options: list[dict] | None = None, **shared
) -> list[Tensor]:
    """`target.generate` for several prompts at once, each as if alone: lossless with every method.

    Args:
        prompts: token ids (1, T) each, of any lengths, without padding.
        options: further keyword arguments for each prompt, such as its own `stats`. shared: those
            of all prompts, `custom_generate` and `drafter` among them.
    Returns:
        For each prompt (1, T') prompt and new tokens.
    Raises:
        What the first failing `generate` raises; the others are given up.
    """

    def call(ids: Tensor, own: dict):
        return target.generate(ids, attention_mask=torch.ones_like(ids), **shared, **own)

    each = options or [{} for _ in prompts]
    sequences = [Sequence(target, partial(call, *pair)) for pair in zip(prompts, each)]
    for sequence in sequences:
        sequence.start()
    try:
        for sequence in sequences:
            sequence.go_on(None)
        while waiting := [sequence for sequence in sequences if sequence.request]:
            if error := next((sequence.error for sequence in sequences if sequence.error), None):
                raise error
            answers = joint_forward(target, [sequence.request for sequence in waiting])
            for sequence, answer in zip(waiting, answers):
                sequence.go_on(answer)
    finally:
        for sequence in sequences:
            if sequence.is_alive() and sequence.request:
                sequence.go_on(None)
    if error := next((sequence.error for sequence in sequences if sequence.error), None):
        raise error
    return [sequence.output for sequence in sequences]


# ---------------------------------------------------------------------------------------- measuring


def padded_generate(target, prompts: list[Tensor], **options) -> list[Tensor]:
    """Plain decoding of a batch by transformers, padded on the left; returned without padding."""
    pad = target.generation_config.pad_token_id or 0
    flat = [row[0] for row in prompts]
    left = {"batch_first": True, "padding_side": "left"}
    ids = pad_sequence(flat, padding_value=pad, **left)
    mask = pad_sequence([torch.ones_like(row) for row in flat], **left)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    longest = ids.shape[1]
    output = target.generate(ids, attention_mask=mask, pad_token_id=pad, **options)
    rows = []
    for row, prompt in zip(output.tolist(), flat):
        end = next((i + 1 for i in range(longest, len(row)) if row[i] in ends), len(row))
        rows.append(ids.new_tensor([row[longest - len(prompt) : end]]))
    return rows


def timed(arm, target, ids: list[Tensor], options: dict) -> list[list[int]]:
    """Answer a batch with one arm; adds its tokens and seconds to the arm's answers.

    Returns: the new tokens of each row.
    """
    stats = [common.Stats() for _ in ids]
    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    if arm.name == "alone":
        output = [target.generate(x, attention_mask=torch.ones_like(x), **options) for x in ids]
    elif arm.reports:
        own = [{"stats": each} for each in stats]
        output = generate(target, ids, own, **arm.kwargs, **options)
    else:
        output = padded_generate(target, ids, **options)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    tokens = [row[0, x.shape[1] :].tolist() for row, x in zip(output, ids)]
    answer = SimpleNamespace(tokens=sum(tokens, []), seconds=seconds)
    answer.forwards = sum(each.target_forwards for each in stats)
    arm.answers.append(answer)
    return tokens


def measure(
    target, tokenizer, arms: list, prompts: list[dict], size: int, encode, options: dict
) -> dict:
    """Answer `size` prompts at a time with every arm, turn by turn, in rotating order.

    The baseline is the faster of transformers' padded batch and a plain loop over joint forwards.
    Fewer prompts than `size` are repeated; those after the last whole batch are left out.

    Args:
        arms: of bench.make_arms; those that take one sequence only are left out.
        encode: prompts.encode.
    Returns:
        {"size", "batches", "arms": {NAME: {"tokens_per_s", "speedup", "speedup_ci", "tau",
        "identical_to_greedy", "diverged"}}}, "alone" being transformers' own loop, one sequence at
        a time.
    """
    if left_out := [arm.name for arm in arms[1:] if not arm.reports]:
        print(f"bench.py: one sequence at a time only: {', '.join(left_out)}", file=sys.stderr)
    alone = SimpleNamespace(name="alone", reports=False)
    arms = [alone, *(arm for arm in arms if arm.reports or arm is arms[0])]
    starts = range(0, len(prompts) - size + 1, size)
    groups = [prompts[start : start + size] for start in starts]
    if not groups:
        groups = [list(itertools.islice(itertools.cycle(prompts), size))]
    openings = [[prompt["turns"][0]] for prompt in groups[0]]
    ids = [encode(tokenizer, said, target.device)["input_ids"] for said in openings]

    def begin() -> None:
        for arm in arms:
            arm.answers = []
            arm.diverged = 0

    begin()
    for arm in arms:
        timed(arm, target, ids, options | {"max_new_tokens": 4})  # a warm-up, discarded
    begin()
    turns: list[dict] = []
    rounds = [max(len(prompt["turns"]) for prompt in group) for group in groups]
    bar = tqdm(total=len(arms) * sum(rounds), desc="batches")
    for number, group in enumerate(groups):
        said: list[list[str]] = [[] for _ in group]
        for turn in range(rounds[number]):
            rows = [row for row, prompt in enumerate(group) if turn < len(prompt["turns"])]
            for row in rows:
                said[row].append(group[row]["turns"][turn])
            ids = [encode(tokenizer, said[row], target.device)["input_ids"] for row in rows]
            outputs = {}
            first = len(turns) % len(arms)
            for arm in arms[first:] + arms[:first]:
                bar.set_postfix_str(arm.name)
                outputs[arm.name] = timed(arm, target, ids, options)
                bar.update(1)
            for arm in arms:
                pairs = zip(outputs[arm.name], outputs["alone"])
                arm.diverged += sum(ours != plain for ours, plain in pairs)
            for row, tokens in zip(rows, outputs["alone"]):
                said[row].append(tokenizer.decode(tokens, skip_special_tokens=True))
            turns.append({"prompt": number})
    bar.close()
    return {"size": size, "batches": len(groups), "arms": summary(arms, turns, options)}


def summary(arms: list, turns: list[dict], options: dict) -> dict:
    """The figures of all arms; the first is `alone`, the faster of the next two the baseline."""
    baseline = max(arms[1:3], key=report.speed)
    greedy = not options["do_sample"]
    result = {}
    for arm in (arms[0], baseline, *arms[3:]):
        emitted = sum(len(each.tokens) for each in arm.answers)
        forwards = sum(each.forwards for each in arm.answers)
        ratio, *bounds = report.paired_ratio(arm, baseline, turns)
        numbers = {
            "tokens_per_s": report.speed(arm),
            "speedup": ratio,
            "speedup_ci": bounds,
            "tau": 1.0 if arm in arms[:3] else emitted / forwards,
            "identical_to_greedy": not arm.diverged if greedy else None,
            "diverged": arm.diverged if greedy else None,
        }
        result["baseline" if arm is baseline else arm.name] = report.rounded(numbers)
    result["baseline"]["loop"] = "padded" if baseline is arms[1] else "joint"
    return result
