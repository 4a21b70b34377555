"""Several sequences at once, with any method (GLIDE's appendix E and Table 4): their target
forwards become one.

Each sequence keeps the method's own `generate`, its own caches and its own pace, so the method
files know nothing of batches. Whenever a sequence wants the target to look at its draft it waits
until the others want that too. Then the target runs once over all drafts, laid side by side in one
row, and the mask keeps the sequences apart:

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
        self.target, self.call = target, call
        self.request = self.answer = self.output = self.error = None
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)

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
    """Layer number `index` of several caches, seen as one: new rows go to their own cache, all rows
    are attended to."""

    def __init__(self, caches: list, sizes: list[int], index: int):
        super().__init__()
        self.parts, self.sizes = [cache.layers[index] for cache in caches], sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Rows (1, Hkv, sum n, Dh) of all sequences; returns keys and values (1, Hkv, sum P + n,
        Dh)."""
        new = zip(self.parts, key_states.split(self.sizes, 2), value_states.split(self.sizes, 2))
        keys, values = zip(*(part.update(k, v) for part, k, v in new))
        return torch.cat(keys, 2), torch.cat(values, 2)


def joint_forward(target, requests: list[tuple]) -> list[tuple[Tensor, Tensor]]:
    """One target forward for several calls of common.forward, each (input_ids (1, n), cache,
    options).

    Returns: for each call what it would return: logits (1, n, V), or (1, 1, V) if one was asked
    for, and hidden states.
    """
    sizes, prefixes = (
        [ids.shape[1] for ids, _, _ in requests],
        [past.get_seq_length() for _, past, _ in requests],
    )
    mask = torch.full(
        (sum(sizes), sum(sizes) + sum(prefixes)),
        torch.finfo(target.dtype).min,
        dtype=target.dtype,
        device=target.device,
    )
    positions, scored, top, left = [], [], 0, 0
    for (_, _, options), size, prefix in zip(requests, sizes, prefixes):
        own = options.get("attention_mask")
        own = (
            common.ancestor_mask(torch.arange(size - 1) - 1, prefix, target.dtype)
            if own is None
            else own
        )
        mask[top : top + size, left : left + prefix + size] = own[0, 0]
        top, left = top + size, left + prefix + size
        positions.append(
            options.get(
                "position_ids", torch.arange(prefix, prefix + size, device=target.device)[None]
            )
        )
        scored.append(torch.arange(size) >= size - (options.get("logits_to_keep") or size))
    cache, caches = DynamicCache(), [cache for _, cache, _ in requests]
    cache.layers = [JointLayer(caches, sizes, index) for index in range(len(caches[0].layers))]
    rows = torch.cat(scored).nonzero()[:, 0]
    logits, hidden = common.forward(
        target,
        torch.cat([ids for ids, _, _ in requests], dim=1),
        cache,
        attention_mask=mask[None, None],
        logits_to_keep=rows.to(target.device),
        position_ids=torch.cat(positions, dim=1),
    )
    return list(zip(logits.split([int(each.sum()) for each in scored], 1), hidden.split(sizes, 1)))


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
    each = options or [{} for _ in prompts]
    calls = [
        lambda ids=ids, own=own: target.generate(
            ids, attention_mask=torch.ones_like(ids), **shared, **own
        )
        for ids, own in zip(prompts, each)
    ]
    sequences = [Sequence(target, call) for call in calls]
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
    """Plain decoding of a batch by transformers itself, with padding on the left; the outputs
    without it."""
    pad, flat = target.generation_config.pad_token_id or 0, [row[0] for row in prompts]
    ids = pad_sequence(flat, batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence(
        [torch.ones_like(row) for row in flat], batch_first=True, padding_side="left"
    )
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    rows, longest = [], ids.shape[1]
    output = target.generate(ids, attention_mask=mask, pad_token_id=pad, **options)
    for row, prompt in zip(output.tolist(), flat):
        end = next((i + 1 for i in range(longest, len(row)) if row[i] in ends), len(row))
        rows.append(ids.new_tensor([row[longest - len(prompt) : end]]))
    return rows


def measure(
    target, tokenizer, arms: list, prompts: list[dict], size: int, encode, options: dict
) -> dict:
    """Answer `size` prompts at a time with every arm, turn by turn, in rotating order.

    The baseline is the faster of transformers' padded batch and a plain loop over joint forwards.
    Fewer prompts than `size` are repeated; what is left over after the last whole batch is left
    out.

    Args:
        arms: of bench.make_arms; those that take one sequence only are left out. encode:
            bench.encode.
    Returns:
        {"size", "batches", "arms": {NAME: {"tokens_per_s", "speedup", "speedup_ci", "tau",
        "identical_to_greedy", "diverged"}}}, "alone" being transformers' own loop, one sequence at
        a time.
    """
    alone = SimpleNamespace(name="alone", reports=False)
    if left_out := [arm.name for arm in arms[1:] if not arm.reports]:
        print(f"bench.py: one sequence at a time only: {', '.join(left_out)}", file=sys.stderr)
    arms = [alone, *(arm for arm in arms if arm.reports or arm is arms[0])]
    for arm in arms:
        arm.answers, arm.forwards, arm.diverged = [], 0, 0
    whole = range(0, len(prompts) - size + 1, size)
    groups = [prompts[i : i + size] for i in whole] or [
        list(itertools.islice(itertools.cycle(prompts), size))
    ]

    def answer(arm, ids: list[Tensor]) -> list[list[int]]:
        stats, cuda = [common.Stats() for _ in ids], target.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        if arm is alone:
            output = [target.generate(x, attention_mask=torch.ones_like(x), **options) for x in ids]
        elif arm.reports:
            output = generate(
                target, ids, [{"stats": each} for each in stats], **arm.kwargs, **options
            )
        else:
            output = padded_generate(target, ids, **options)
        if cuda:
            torch.cuda.synchronize()
        tokens = [row[0, x.shape[1] :].tolist() for row, x in zip(output, ids)]
        arm.answers.append(
            SimpleNamespace(tokens=sum(tokens, []), seconds=time.perf_counter() - start)
        )
        arm.forwards += sum(each.target_forwards for each in stats)
        return tokens

    turns = []
    bar = tqdm(
        total=len(arms) * sum(max(len(p["turns"]) for p in group) for group in groups),
        desc="batches",
    )
    for number, group in enumerate(groups):
        said: list[list[str]] = [[] for _ in group]
        for turn in range(max(len(prompt["turns"]) for prompt in group)):
            rows = [row for row, prompt in enumerate(group) if turn < len(prompt["turns"])]
            for row in rows:
                said[row].append(group[row]["turns"][turn])
            ids = [encode(tokenizer, said[row], target.device)["input_ids"] for row in rows]
            first, outputs = len(turns) % len(arms), {}
            for arm in arms[first:] + arms[:first]:
                bar.set_postfix_str(arm.name)
                outputs[arm.name] = answer(arm, ids)
                bar.update(1)
            for arm in arms:
                arm.diverged += sum(a != b for a, b in zip(outputs[arm.name], outputs["alone"]))
            for row, tokens in zip(rows, outputs["alone"]):
                said[row].append(tokenizer.decode(tokens, skip_special_tokens=True))
            turns.append({"prompt": number})
    bar.close()
    baseline, result = max(arms[1:3], key=report.speed), {}
    for arm in (alone, baseline, *arms[3:]):
        plain, emitted = arm in arms[:3], sum(len(each.tokens) for each in arm.answers)
        result["baseline" if arm is baseline else arm.name] = report.rounded(
            {
                "tokens_per_s": report.speed(arm),
                "speedup": report.speed(arm) / report.speed(baseline),
                "speedup_ci": report.speedup_interval(arm, baseline, turns),
                "tau": 1.0 if plain else emitted / arm.forwards,
                "identical_to_greedy": None if options["do_sample"] else not arm.diverged,
                "diverged": None if options["do_sample"] else arm.diverged,
            }
        )
    result["baseline"]["loop"] = "padded" if baseline is arms[1] else "joint"
    return {"size": size, "batches": len(groups), "arms": result}
