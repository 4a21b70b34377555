"""Measure the methods side by side: one process, one target, the same prompts, answers interleaved.

    python bench.py --method glide                  # the shipped drafter against plain decoding
    python bench.py --method glide cape:all --num-prompts 40 --json results/run.json
    python bench.py --method all                    # all shipped drafters, transformers' own too
    python bench.py --method falcon copies --variants copies     # what copies from the context add
    python bench.py --cost-curve                    # milliseconds of one target forward
    python bench.py --table results/*.json          # tables of earlier runs
    python bench.py --method falcon --help          # the options of that method, too

An arm is `method` or `method:variant`, a variant being a name in the module's VARIANTS
(`method:all` takes every one, `one+other` two of them), and `@DIR` after it takes another trained
drafter than checkpoints/method. This file times arms and knows nothing about any method;
support/arms.py says what they decode with, support/report.py defines the figures.

Protocol: one process, one target, one dtype. Each turn of each prompt is answered by every arm
before the next turn begins, in rotating order because machines drift, with the baseline's answers
as the earlier turns for all arms alike. A warm-up is discarded. The baseline is the faster of
transformers' greedy `generate` and a plain loop over our cache.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from tqdm import tqdm

import common
from support import arms as arms_of
from support import (
    batching,
    bench_options,
    cli,
    data,
    fitting,
    graphs,
    packed,
    pictures,
    replay,
    report,
    stopping,
)
from support.arms import Loader
from support.prompts import check_lengths, encode

ALPHA_ANSWERS = 32  # at most so many of the baseline's answers are used for alpha
WARM_UP_TOKENS = 12
COPIES = 16  # most tokens a round that the arm `copies` copies
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens fed, on the cost curve
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)

# ------------------------------------------------------------------------------------------- clocks


def mark(cuda: bool):
    """A moment: seconds on the CPU, on a GPU an event in its queue, which need not be awaited."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start, end) -> float:
    """Seconds from one mark to another; on a GPU only after synchronising."""
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000


@dataclass
class Clock(common.Stats):
    """Stats that remember when each timer ran, and when each watched module was in its forward."""

    cuda: bool = False
    own_prefill: bool = True  # a timer marks the prefill; else the target's first forward is it
    timers: list[tuple] = field(default_factory=list)  # (name, start, end)
    calls: list[tuple] = field(default_factory=list)  # (kind, start, end, tokens fed, in prefill)
    phase: str = ""  # the timer that is running
    _open: list[tuple] = field(default_factory=list)

    @contextlib.contextmanager
    def timer(self, name: str):
        """Record the block as time of `name`; all that is nested in a prefill is prefill."""
        outer = self.phase
        start = mark(self.cuda)
        self.phase = outer if outer == "prefill" else name
        yield
        self.phase = outer
        self.timers.append((name, start, mark(self.cuda)))

    @contextlib.contextmanager
    def watch(self, modules: dict[str, list[nn.Module]]):
        """Time the forwards of {kind: modules}, and of a drafter's parts; the outer one counts."""
        handles = []
        for kind, group in modules.items():
            plain = [each for each in group if not hasattr(each, "_orig_mod")]  # not compiled
            parts = [part for each in plain for part in each.children()]
            for module in {*group, *(parts if kind == "drafter" else [])}:
                enter = partial(self._enter, kind)
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, kind: str, _module, args, kwargs) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        fed = ids.shape[1] if ids is not None and ids.ndim > 1 else 0
        self._open.append((kind, None if self._open else mark(self.cuda), fed))

    def _leave(self, *_) -> None:
        kind, start, fed = self._open.pop()
        if self._open:
            return
        first = not any(call[0] == "target" for call in self.calls)
        prefill = self.phase == "prefill" if self.own_prefill else first
        self.calls.append((kind, start, mark(self.cuda), fed, prefill))

    def total(self, kind: str) -> float:
        """Seconds inside the forwards of `kind`, prefill excluded."""
        return sum(
            between(start, end)
            for name, start, end, _, prefill in self.calls
            if name == kind and not prefill
        )


# --------------------------------------------------------------------------------------------- arms


@dataclass
class Answer:
    """What one arm did for one turn of one prompt; times in seconds."""

    tokens: list[int]  # new tokens
    seconds: float  # wall, prefill included
    decode_seconds: float = 0.0  # wall, prefill excluded
    timers: dict[str, float] = field(default_factory=dict)  # of the arm itself, without prefill
    in_target: float = 0.0  # inside its forwards, prefill excluded
    in_drafter: float = 0.0
    forwards: int = 0  # target forwards that emitted tokens
    rounds: int = 0  # those of them that belong to decode_seconds
    drafted: int = 0
    offered: list[int] = field(default_factory=list)  # levels of draft a round; empty: unknown
    accepted: list[int] = field(default_factory=list)  # draft tokens a round
    copies: list[tuple] = field(default_factory=list)  # copied tokens (offered, accepted) a round
    memory: int = 0  # peak bytes on the GPU


@dataclass
class Arm:
    """One way of decoding: keyword arguments of `target.generate`, and what they consist of."""

    name: str
    kwargs: dict
    drafters: list[nn.Module] = field(default_factory=list)
    module: object = None  # the method's
    base: dict = field(default_factory=dict)  # base and base_drafter of a method on another's
    variant: str = ""
    plain: str | None = None  # the same method and drafter without the (last) variant
    facts: dict = field(default_factory=dict)  # the drafter's Config
    reports: bool = False  # generate takes `stats`
    assistant_config: object = None  # generation_config of the assistant while this arm runs
    answers: list[Answer] = field(default_factory=list)
    same: list[dict | None] = field(default_factory=list)  # None, or where an answer left greedy

    def play(self, target, encoded: dict, **options) -> Answer:
        """Answer one prompt."""
        cuda = target.device.type == "cuda"
        clock = Clock(cuda=cuda, own_prefill=self.reports)
        kwargs = dict(self.kwargs)
        if self.reports:
            kwargs["stats"] = clock
        if self.assistant_config is not None:
            kwargs["assistant_model"].generation_config = self.assistant_config
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        first = mark(cuda)
        with clock.watch({"target": [target], "drafter": self.drafters}):
            output = target.generate(**encoded, **options, **kwargs)
        last = mark(cuda)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        length = encoded["input_ids"].shape[1]
        answer = Answer(output[0, length:].tolist(), seconds)
        answer.in_target = clock.total("target")
        answer.in_drafter = clock.total("drafter")
        answer.memory = torch.cuda.max_memory_allocated() if cuda else 0
        if self.reports:
            prefilled = self._counted(answer, clock)
        else:
            prefilled = self._seen(answer, clock, length)
        answer.decode_seconds = between(first if prefilled is None else prefilled, last)
        return answer

    def _counted(self, answer: Answer, clock: Clock):
        """Take over what the arm says of itself; returns when its prefill ended, or None."""
        text = f"{self.name} counts {clock.emitted} of {len(answer.tokens)} tokens"
        assert clock.emitted == len(answer.tokens), text
        answer.forwards = len(clock.accepted)
        answer.rounds = len(clock.accepted)
        answer.drafted = clock.drafted
        answer.offered = clock.offered
        answer.accepted = clock.accepted
        answer.copies = clock.copies
        prefilled = None
        for name, begin, end in clock.timers:
            if name == "prefill" and not answer.timers.get("verify"):  # gamma 0 never drafts
                prefilled = end
            elif name != "prefill":
                answer.timers[name] = answer.timers.get(name, 0.0) + between(begin, end)
        return prefilled

    def _seen(self, answer: Answer, clock: Clock, length: int):
        """The same of transformers' loops: the first forward takes the prompt and emits, too."""
        targets = [call for call in clock.calls if call[0] == "target"]
        answer.forwards = len(targets)
        answer.rounds = sum(not prefill for *_, prefill in targets)
        fed = sum(count for *_, count, _ in targets)
        answer.drafted = fed - (length - 1) - len(targets)
        answer.timers = {"draft": answer.in_drafter, "verify": answer.in_target}
        return targets[0][2]


@torch.no_grad()
def plain_generate(
    target, input_ids, logits_processor, stopping_criteria, generation_config, stats, **model_kwargs
):
    """Plain decoding over the methods' growing cache, the other candidate for the baseline."""
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    do_sample = generation_config.do_sample
    done = False
    while not done:
        with stats.timer("verify"):
            scores = common.forward(target, input_ids[:, -1:], cache)[0][:, -1]  # (1, V)
            scores = logits_processor(input_ids, scores.to(copy=True, dtype=torch.float32))
            if do_sample:
                token = common.sample(scores[0].softmax(-1))[None]  # (1, 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            stats.offered.append(0)
            stats.accepted.append(0)
            stats.copies.append((0, 0))
        input_ids, done = common.commit(input_ids, token, stopping_criteria, stats)
    return input_ids


@torch.no_grad()
def copies_generate(
    target, input_ids, logits_processor, stopping_criteria, generation_config, stats, **model_kwargs
):
    """Copies from the context without any drafter: what they are worth alone."""
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    do_sample = generation_config.do_sample
    lookup = common.Lookup(COPIES)
    nothing = common.chain([], input_ids)
    done = False
    while not done:
        with stats.timer("draft"):
            room = generation_config.max_length - input_ids.shape[1] - 1
            draft = lookup.merge(nothing, input_ids, room)
        verified = common.verify(
            target, input_ids, draft, cache, logits_processor, do_sample, stats
        )
        input_ids, done = common.commit(input_ids, verified.tokens, stopping_criteria, stats)
    return input_ids


def make_arms(target, args) -> list[Arm]:
    """The two plain loops, then what was asked for."""
    loader = Loader(target, args)
    arms = [
        Arm("transformers", {}),
        Arm("plain", {"custom_generate": plain_generate}, reports=True),
    ]
    copies = Arm("copies", {"custom_generate": copies_generate}, reports=True)
    alone = {"copies": copies, "prompt-lookup": Arm(**arms_of.PROMPT_LOOKUP)}
    for spec, must in arms_of.wanted(args.method, args.variants).items():
        try:
            arms += [alone[spec]] if spec in alone else [Arm(**x) for x in loader.method(spec)]
        except ValueError as problem:
            if must:
                raise
            print(f"bench.py: without {spec.partition('@')[0]}: {problem}", file=sys.stderr)
    if len(arms) == 2 and not args.peers:
        raise ValueError(
            "nothing to compare with plain decoding: no method has a drafter; make one with "
            "train.py"
        )
    if args.peers or "all" in args.method:
        arms += [copies, *(Arm(**each) for each in loader.peers())]
    takes_it = args.peers or any("draft_model" in arm.kwargs for arm in arms)
    if loader.draft_model is not None and not takes_it:
        raise ValueError(
            f"--draft-model: {', '.join(args.method)} drafts with a network of its own; leave the "
            "option out"
        )
    names = [arm.name for arm in arms]
    return [arm for place, arm in enumerate(arms) if arm.name not in names[:place]]


def compile_drafters(arms: list[Arm]) -> None:
    """Compiled drafters in the arms of our methods, each once though several arms use it."""
    compiled: dict[int, nn.Module] = {}
    for arm in arms:
        if arm.module is None:
            continue
        for drafter in arm.drafters:
            compiled.setdefault(id(drafter), graphs.compiled(drafter))
        arm.kwargs = {name: compiled.get(id(x), x) for name, x in arm.kwargs.items()}
        arm.base = {name: compiled.get(id(x), x) for name, x in arm.base.items()}
        arm.drafters = [compiled[id(drafter)] for drafter in arm.drafters]


# ---------------------------------------------------------------------------------------- measuring


def run(
    target, tokenizer, arms: list[Arm], prompts: list[dict], options: dict, rehearse: bool = False
) -> list[dict]:
    """Play all turns with all arms, filling `arm.answers`; Ctrl-C ends it early.

    Args:
        rehearse: warm up with all first turns, since compiled drafters compile for each new shape.
    Returns:
        Of each turn {"prompt", "question_id", "category", "question", "input_ids", "answer"}.
    """
    turns: list[dict] = []
    total = len(arms) * sum(len(prompt["turns"]) for prompt in prompts)
    often = 0.5 if sys.stderr.isatty() else 20  # a log gets few lines
    bar = tqdm(total=total, desc="answers", mininterval=often)
    try:
        short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
        for prompt in prompts if rehearse else prompts[:1]:
            encoded = encode(tokenizer, prompt["turns"][:1], target.device)
            for arm in arms:
                arm.play(target, encoded, **(options if rehearse else short))
        for index, prompt in enumerate(prompts):
            messages: list[str] = []
            for question in prompt["turns"]:
                messages.append(question)
                encoded = encode(tokenizer, messages, target.device)
                played = {}
                first = len(turns) % len(arms)
                for arm in arms[first:] + arms[:first]:
                    bar.set_postfix_str(arm.name)
                    played[arm.name] = arm.play(target, encoded, **options)
                    bar.update(1)
                reference = played[arms[0].name].tokens
                for arm in arms:
                    answer = played[arm.name]
                    gone = None
                    if not options["do_sample"]:
                        gone = divergence(target, encoded, reference, answer.tokens)
                    arm.answers.append(answer)
                    arm.same.append(gone)
                messages.append(tokenizer.decode(reference, skip_special_tokens=True))
                turn = {"prompt": index, "question": question, "answer": reference}
                turn |= {name: prompt[name] for name in ("question_id", "category")}
                turns.append(turn | {"input_ids": encoded["input_ids"]})
    except KeyboardInterrupt:
        print(f"bench.py: interrupted; the figures are of {len(turns)} answers", file=sys.stderr)
        for arm in arms:
            del arm.answers[len(turns) :]
            del arm.same[len(turns) :]
    finally:
        bar.close()
    return turns


@torch.no_grad()
def divergence(target, encoded: dict, reference: list[int], tokens: list[int]) -> dict | None:
    """Where two answers part, and by how little the target preferred its choice there.

    Returns: None if they are the same, else {"position", "top2_margin"}, of the first token that
        differs and the target's two best logits for it.
    """
    if tokens == reference:
        return None
    same = [a == b for a, b in zip(tokens, reference)]
    place = same.index(False) if False in same else len(same)
    agreed = encoded["input_ids"].new_tensor([reference[:place]])
    ids = torch.cat([encoded["input_ids"], agreed], dim=1)
    best = target(ids).logits[0, -1].float().topk(2).values.tolist()
    return {"position": place, "top2_margin": best[0] - best[1]}


@torch.no_grad()
def acceptance_rate(arm: Arm, target, turns: list[dict]) -> dict | None:
    """alpha by the method's own definition, over the tokens of the baseline's answers.

    Returns: {"alpha_sum", "alpha_count"}, lists by prompt whose totals' quotient alpha is; None
        where the method has none, or another model than the drafter's drafts.
    """
    drafter = arm.kwargs.get("drafter")
    if not hasattr(arm.module, "alpha") or drafter is None or arm.kwargs.get("draft_model"):
        return None
    layers = [layer for each in arm.drafters for layer in getattr(each, "kv_layers", ())]
    sums = [0.0] * (turns[-1]["prompt"] + 1)
    counts = [0] * len(sums)
    for index, turn in enumerate(turns[:ALPHA_ANSWERS]):
        prompt = turn["input_ids"]
        ids = torch.cat([prompt, prompt.new_tensor([turn["answer"]])], dim=1)  # (1, T)
        answered = (torch.arange(ids.shape[1], device=ids.device) >= prompt.shape[1])[None]
        hidden, kv = common.target_features(target, ids, layers)
        seed = ids.new_tensor([index])
        batch = common.Batch(ids, answered, hidden, kv, seed, progress=0.0)
        accepted, number = arm.module.alpha(drafter, target, batch, **arm.base)
        sums[turn["prompt"]] += float(accepted)
        counts[turn["prompt"]] += int(number)
    return {"alpha_sum": sums, "alpha_count": counts} if sum(counts) else None


def summary(arms: list[Arm], target, turns: list[dict], greedy: bool) -> dict:
    """The figures of all arms, {NAME: figures}; the baseline is the faster of the first two."""
    baseline = max(arms[:2], key=report.speed)
    result = {}
    alphas = {}
    for arm in (baseline, *arms[2:]):
        numbers = report.figures(arm, baseline, turns, greedy)
        drafter = arm.module, id(arm.kwargs.get("drafter"))
        if drafter not in alphas:
            alphas[drafter] = acceptance_rate(arm, target, turns)
        if of_alpha := alphas[drafter]:
            numbers["alpha"] = sum(of_alpha["alpha_sum"]) / sum(of_alpha["alpha_count"])
            numbers["by_prompt"] |= of_alpha
        names = {arm.plain, arm.name.partition("@")[0]} - {arm.name}  # no variant; shipped
        others = [other for other in arms if other.name in names]
        numbers["against"] = {
            other.name: report.paired_ratio(arm, other, turns) for other in others
        }
        result[arm.name] = report.rounded(numbers)
    loops = {arm.name: report.rounded(report.speed(arm)) for arm in arms[:2]}
    first = result.pop(baseline.name) | {"loop": baseline.name, "loops": loops}
    return {"baseline": first, **result}


@torch.no_grad()
def cost_curve(target, context: int, repeats: int = 5) -> dict:
    """Milliseconds of a target forward over a chain draft, as verification runs it.

    Returns:
        {"context", "by_tokens": {n: ms at that context}, "by_context": {P: {n: ms}}}, medians
        without the first, which warms up.
    """
    shape = common.target_shape(target)
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if context + 64 > limit:
        raise ValueError(
            f"--context {context} + 64 tokens exceed the target's context of {limit}; lower "
            "--context"
        )
    device = target.device
    cuda = device.type == "cuda"
    cache = common.GrowingCache(shape["num_layers"])
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(shape["vocab_size"], (1, count), generator=generator).to(device)

    def milliseconds(rows: int, tokens: int) -> float:
        held = cache.get_seq_length()
        if rows < held:
            cache.crop(rows - held)
        elif rows > held:
            common.forward(target, draw(rows - held), cache, logits_to_keep=1)
        times = []
        for _ in range(repeats + 1):
            fed = draw(tokens)
            positions = rows + torch.arange(tokens, device=device)[None]
            start = mark(cuda)
            mask = None
            if tokens > 1:
                parents = torch.arange(tokens - 1) - 1
                mask = common.ancestor_mask(parents, rows, target.dtype).to(device)
            common.forward(target, fed, cache, attention_mask=mask, position_ids=positions)
            end = mark(cuda)
            if cuda:
                torch.cuda.synchronize()
            times.append(1000 * between(start, end))
            cache.crop(-tokens)
        return round(statistics.median(times[1:]), 3)

    result = {"context": context, "by_tokens": {}, "by_context": {}}
    plan = [(context, tokens, "by_tokens") for tokens in COUNTS]
    plan += [(rows, tokens, "by_context") for rows in CONTEXTS for tokens in (1, 8)]
    plan = sorted(row for row in plan if row[0] + 64 <= limit)
    for rows, tokens, kind in tqdm(plan, desc="cost curve", disable=None):
        place = result[kind]
        if kind == "by_context":
            place = place.setdefault(str(rows), {})
        place[str(tokens)] = milliseconds(rows, tokens)
    return result


# ------------------------------------------------------------------------------------- command line


def parse(argv: list[str]):
    """The options, those of the methods' Config that matter while decoding included."""
    return bench_options.parse(argv, __doc__)


def measure(args) -> dict:
    """Everything that was asked for; prints the tables, writes --json, returns the result."""
    prompts = []
    if args.method or args.peers:
        paths = args.prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
        prompts = data.read_prompts([Path(path) for path in paths], args.num_prompts)
    if args.prompt and prompts:
        prompts = [{"question_id": "prompt", "category": "prompt", "turns": [args.prompt]}]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    if args.pack:
        target = packed.pack(target)
    result = report.header(args, target, len(prompts))
    arms = []
    turns = []
    fit = None
    swept = None
    if prompts:
        arms = make_arms(target, args)
        longest = check_lengths(target, tokenizer, prompts, args.max_new_tokens)
        decoding = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
        if args.temperature:
            decoding |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
        torch.manual_seed(args.seed)
    if args.replay:
        text = prompts[0]["turns"][0]
        encoded = encode(tokenizer, [text], target.device)
        return replay.write(args.replay, target, tokenizer, arms[2:], text, encoded, decoding)
    if args.sweep is not None:
        swept = stopping.chain_and_heads(arms[2], target, args.sweep)
    if args.refit:
        fit = fitting.fitter(arms[2])
    if args.batch_size > 1 and prompts:
        size = args.batch_size
        result["batch"] = batching.measure(target, tokenizer, arms, prompts, size, encode, decoding)
    elif prompts:
        recorded = contextlib.nullcontext()
        if args.graphs:
            compile_drafters(arms)
            recorded = graphs.use(target, longest + graphs.SIZES[-1])
        with recorded:
            turns = run(target, tokenizer, arms, prompts, decoding, rehearse=args.graphs)
        if not turns:
            sys.exit(130)
        result["prompts"] = turns[-1]["prompt"] + 1
        result["arms"] = summary(arms, target, turns, not args.temperature)
        if len(turns) < sum(len(prompt["turns"]) for prompt in prompts):
            result["interrupted"] = True
    if args.cost_curve or args.refit:
        result["cost_curve"] = cost_curve(target, args.context)
    if args.refit:
        result["fitted"] = report.rounded(fit(target, turns, result["cost_curve"]))
    if args.sweep is not None:
        timed = stopping.measured(arms[2:])
        result["sweep"] = report.rounded(stopping.sweep(*swept, target, turns, timed))
    print(report.tables(result))
    if args.show:
        print("\n" + report.answers(tokenizer, arms, turns[0], sys.stdout.isatty()))
    if args.json and args.json != "-":
        report.write_result(result, args.json)
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.table:
        results = [report.read_result(path) for path in args.table]
        print("\n\n".join(report.tables(result) for result in results))
    else:
        results = [measure(args)]
    if args.plot:
        print(*pictures.plot(results, Path(args.plot)), file=sys.stderr)
    if not args.table and (args.json == "-" or not sys.stdout.isatty()):
        print("\n" + json.dumps(results[0]))


if __name__ == "__main__":
    cli.run(main)
