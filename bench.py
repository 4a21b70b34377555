"""Measure the methods side by side: one process, one target, the same prompts, answers interleaved.

    python bench.py --method glide                          # the shipped drafter against plain
    decoding python bench.py --method glide cape:all --num-prompts 40 --json results/run.json
    python bench.py --method all                            # the shipped drafters, Medusa,
    transformers' own methods python bench.py --cost-curve                            # milliseconds
    of one target forward python bench.py --table results/*.json                  # tables of
    earlier runs, as in the README

An arm is `method` or `method:variant`, a variant being a name in the module's VARIANTS
(`method:all` takes every one), and `@DIR` after it takes another trained drafter than
checkpoints/method. This file times arms and knows nothing about any method; report.py defines the
figures and makes the tables.

Protocol: one process, one target, one dtype. Each turn of each prompt is answered by every arm
before the next turn begins, in rotating order because machines drift, with the baseline's answers
as the earlier turns for all arms alike. A warm-up is discarded. The baseline is the faster of
transformers' greedy `generate` and a plain loop over our cache.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib
import inspect
import json
import os
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
from support import batching, cli, data, fitting, graphs, packed, replay, report, stopping

ALSO = (
    "cape:cpu",
    f"ctc_drafter:none@{cli.ROOT / 'checkpoints' / 'medusa'}",
)  # in `all`: CAPE with S(p) fitted; Medusa
# its draft model is an ordinary causal LM, which transformers can use as an assistant
PEER_DRAFTER = "specdecpp"
# transformers' assisted generation: tokens at first, their schedule, the confidence at which to
# stop
ASSISTED = {
    "constant": (5, "constant", 0.0),
    "heuristic": (5, "heuristic", 0.0),
    "confidence": (20, "constant", 0.4),
}
ALPHA_ANSWERS = 32  # at most so many of the baseline's answers are used for alpha
WARM_UP_TOKENS = 12

# ------------------------------------------------------------------------------------------- clocks


def mark(cuda: bool):
    """A moment: seconds on the CPU; on a GPU an event in its queue, so that taking the time does
    not wait for it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start, end) -> float:
    """Seconds from one mark to another; on a GPU only after synchronising."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


@dataclass
class Clock(common.Stats):
    """Stats that remember when each timer ran and how long the watched modules were inside their
    forward."""

    cuda: bool = False
    timers: list[tuple] = field(default_factory=list)  # (name, start, end)
    calls: list[tuple] = field(
        default_factory=list
    )  # (kind, start, end, tokens fed, belongs to the prefill)
    phase: str = ""
    own_prefill: bool = (
        True  # the arm marks its prefill with a timer; otherwise the target's first forward is it
    )
    _open: list[tuple] = field(default_factory=list)

    @contextlib.contextmanager
    def timer(self, name: str):
        """Record the block as time of `name`, whatever is nested in a prefill belonging to the
        prefill."""
        outer, start = self.phase, mark(self.cuda)
        self.phase = outer if outer == "prefill" else name
        yield
        self.phase = outer
        self.timers.append((name, start, mark(self.cuda)))

    @contextlib.contextmanager
    def watch(self, modules: dict[str, list[nn.Module]]):
        """Time the forward of the modules, {kind: modules}; a watched call inside another belongs
        to the outer one."""
        handles = []
        for kind, module in ((kind, module) for kind, group in modules.items() for module in group):
            handles.append(
                module.register_forward_pre_hook(partial(self._enter, kind), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, kind, _module, args, kwargs) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        self._open.append(
            (kind, mark(self.cuda), ids.shape[1] if ids is not None and ids.ndim > 1 else 0)
        )

    def _leave(self, *_) -> None:
        kind, start, fed = self._open.pop()
        if not self._open:
            first = not any(call[0] == "target" for call in self.calls)
            prefill = self.phase == "prefill" if self.own_prefill else first
            self.calls.append((kind, start, mark(self.cuda), fed, prefill))

    def total(self, kind: str) -> float:
        """Seconds inside the forward of `kind`, prefill excluded."""
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
    decode_seconds: float  # wall, prefill excluded
    timers: dict[str, float]  # of the arm's own timers, prefill excluded
    in_target: float
    in_drafter: float
    forwards: int  # target forwards that emitted tokens
    rounds: int  # those of them that belong to decode_seconds
    drafted: int
    offered: list[int]  # per round; empty where unknown
    accepted: list[int]
    memory: int = 0  # peak bytes on the GPU


@dataclass
class Arm:
    """One way of decoding: the keyword arguments of `target.generate`, and which modules are its
    drafter."""

    name: str
    kwargs: dict
    drafters: list[nn.Module] = field(default_factory=list)
    module: object = None  # the method's module
    base: dict = field(default_factory=dict)
    reports: bool = False  # generate takes `stats`
    assistant_config: object = (
        None  # generation_config that the assistant must carry while this arm runs
    )
    answers: list[Answer] = field(default_factory=list)
    same: list[dict | None] = field(
        default_factory=list
    )  # per answer None, or where it left greedy decoding

    def play(self, target, encoded: dict, **options) -> Answer:
        """Answer one prompt."""
        cuda = target.device.type == "cuda"
        clock, kwargs = Clock(cuda=cuda, own_prefill=self.reports), dict(self.kwargs)
        if self.reports:
            kwargs["stats"] = clock
        if self.assistant_config is not None:
            kwargs["assistant_model"].generation_config = self.assistant_config
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start, first = time.perf_counter(), mark(cuda)
        with clock.watch({"target": [target], "drafter": self.drafters}):
            output = target.generate(**encoded, **options, **kwargs)
        last = mark(cuda)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        tokens = output[0, encoded["input_ids"].shape[1] :].tolist()

        targets = [call for call in clock.calls if call[0] == "target"]
        rounds = len(clock.accepted) if self.reports else sum(not call[4] for call in targets)
        answer = Answer(
            tokens,
            seconds,
            0.0,
            {},
            clock.total("target"),
            clock.total("drafter"),
            rounds,
            rounds,
            clock.drafted,
            clock.offered,
            clock.accepted,
            torch.cuda.max_memory_allocated() if cuda else 0,
        )
        if self.reports:
            assert clock.emitted == len(tokens), (
                f"{self.name} counts {clock.emitted} of {len(tokens)} tokens"
            )
            prefills = [end for name, _, end in clock.timers if name == "prefill"]
            for name, begin, end in clock.timers:
                if name != "prefill":
                    answer.timers[name] = answer.timers.get(name, 0.0) + between(begin, end)
        else:  # transformers' own loops: the first forward takes the prompt and emits tokens too
            prefills, answer.forwards = [targets[0][2]], len(targets)
            answer.drafted = (
                sum(call[3] for call in targets)
                - (encoded["input_ids"].shape[1] - 1)
                - len(targets)
            )
            answer.timers = {"draft": answer.in_drafter, "verify": answer.in_target}
        answer.decode_seconds = between(prefills[-1] if prefills else first, last)
        return answer


@torch.no_grad()
def plain_generate(
    target, input_ids, logits_processor, stopping_criteria, generation_config, stats, **model_kwargs
):
    """Plain decoding over the same growing cache as the methods, the other candidate for the
    baseline."""
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    done = False
    while not done:
        with stats.timer("verify"):
            logits = common.forward(target, input_ids[:, -1:], cache)[0][:, -1]
            if logits_processor or generation_config.do_sample:
                logits = logits_processor(input_ids, logits.to(copy=True, dtype=torch.float32))
            sample = generation_config.do_sample
            token = (
                torch.multinomial(logits.softmax(-1), 1)
                if sample
                else logits.argmax(-1, keepdim=True)
            )  # (1, 1)
            stats.offered.append(0)
            stats.accepted.append(0)
        input_ids, done = common.commit(input_ids, token, stopping_criteria, stats)
    return input_ids


def import_method(name: str):
    """The module of a method; ValueError for an unknown one."""
    if name not in cli.METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(cli.METHODS)}, and all")
    return importlib.import_module(name)


def decode_fields(module) -> list[dataclasses.Field]:
    """Config fields that can be changed while decoding."""
    return [option for option in dataclasses.fields(module.Config) if option.metadata.get("decode")]


class Loader:
    """Makes arms; a drafter that several arms use is read once."""

    def __init__(self, target, args):
        self.target, self.args, self.drafters = target, args, {}
        self.draft_model = None
        if args.draft_model:
            self.draft_model, _ = common.load_target(
                args.draft_model, dtype=target.dtype, device=str(target.device)
            )
            mine, theirs = (
                common.target_shape(model)["vocab_size"] for model in (target, self.draft_model)
            )
            if mine != theirs:
                raise ValueError(
                    f"--draft-model {args.draft_model} has {theirs} tokens and the target {mine}; "
                    "take one of the same vocabulary"
                )

    def drafter(self, module, checkpoint: str | None = None):
        """The trained drafter of a method, in the target's dtype."""
        path = Path(checkpoint or cli.ROOT / "checkpoints" / module.__name__)
        if path not in self.drafters:
            with contextlib.redirect_stdout(sys.stderr):  # the hub's loader prints
                drafter = common.load_drafter(module.Drafter, path, self.target)
                self.drafters[path] = packed.pack(drafter) if self.args.pack else drafter
        return self.drafters[path]

    def arms(self, spec: str) -> list[Arm]:
        """The arms of `method`, `method:variant` or `method:all`, perhaps with the drafter of
        another folder, @DIR."""
        spec, _, folder = spec.partition("@")
        name, _, chosen = spec.partition(":")
        checkpoint, mark = folder or self.args.checkpoint, f"@{Path(folder).name}" if folder else ""
        module = import_method(name)
        variants = {"": {}, **getattr(module, "VARIANTS", {})}
        if chosen not in (*variants, "all"):
            known = ", ".join(list(variants)[1:]) or "none"
            raise ValueError(f"{name} has no variant {chosen!r}; its variants: {known}")
        takes = inspect.signature(module.generate).parameters
        options = {option.name: getattr(self.args, option.name) for option in decode_fields(module)}
        options = {option: value for option, value in options.items() if value is not None}
        kwargs, base, config = {"custom_generate": module.generate}, {}, None
        if self.draft_model is not None and "draft_model" in takes:
            kwargs["draft_model"] = self.draft_model
        if hasattr(module, "Drafter"):
            kwargs["drafter"] = self.drafter(module, checkpoint)
            config = kwargs["drafter"].config
        base_name = options.pop("base", None) or getattr(config or module.Config(), "base", "")
        if base_name:
            base["base"] = cli.chain_proposer(base_name)
            base["base_drafter"] = self.drafter(
                base["base"], None if "drafter" in kwargs else checkpoint
            )
            kwargs |= {key: value for key, value in base.items() if key in takes}
            if "drafter" in takes and "drafter" not in kwargs:
                kwargs["drafter"] = base["base_drafter"]
        drafters = list(
            {id(value): value for value in kwargs.values() if isinstance(value, nn.Module)}.values()
        )
        return [
            Arm(
                (f"{name}:{variant}" if variant else name) + mark,
                kwargs | options | variants[variant],
                drafters,
                module,
                base,
                reports=True,
            )
            for variant in (variants if chosen == "all" else [chosen])
        ]

    def peers(self) -> list[Arm]:
        """transformers' assisted generation and prompt lookup."""
        arms, assistant = [Arm("prompt-lookup", {"prompt_lookup_num_tokens": 10})], self.draft_model
        try:
            if assistant is None:
                module = import_method(PEER_DRAFTER)
                assistant = self.drafter(module).causal_lm(self.target)
        except ValueError as problem:
            print(f"bench.py: no assisted generation among the peers: {problem}", file=sys.stderr)
            return arms
        for name, (
            count,
            schedule,
            threshold,
        ) in ASSISTED.items():  # on the target's config they would be ignored
            config = copy.deepcopy(assistant.generation_config)
            config.update(
                num_assistant_tokens=count,
                num_assistant_tokens_schedule=schedule,
                assistant_confidence_threshold=threshold,
            )
            arms.append(
                Arm(
                    f"assisted:{name}",
                    {"assistant_model": assistant},
                    [assistant],
                    assistant_config=config,
                )
            )
        return arms


def make_arms(target, args) -> list[Arm]:
    """The two plain loops, then what was asked for."""
    loader = Loader(target, args)
    arms = [
        Arm("transformers", {}),
        Arm("plain", {"custom_generate": plain_generate}, reports=True),
    ]
    wanted = list(dict.fromkeys(args.method))
    if args.checkpoint and (len(wanted) != 1 or wanted == ["all"]):
        raise ValueError("--checkpoint goes with exactly one --method")
    for spec in wanted:
        for name in (*cli.METHODS, *ALSO) if spec == "all" else [spec]:
            try:
                arms += loader.arms(name)
            except ValueError as problem:
                if spec != "all":
                    raise
                print(f"bench.py: without {name.partition('@')[0]}: {problem}", file=sys.stderr)
    if len(arms) == 2 and not args.peers:
        raise ValueError(
            "nothing to compare with plain decoding: no method has a drafter; make one with "
            "train.py"
        )
    arms += loader.peers() if args.peers or "all" in wanted else []
    if (
        loader.draft_model is not None
        and not args.peers
        and not any("draft_model" in arm.kwargs for arm in arms)
    ):
        raise ValueError(
            f"--draft-model: {', '.join(wanted)} drafts with a network of its own; leave the "
            "option out"
        )
    names = [arm.name for arm in arms]
    return [arm for place, arm in enumerate(arms) if arm.name not in names[:place]]


def compile_drafters(arms: list[Arm]) -> None:
    """Compiled drafters in the arms of our methods, each once though several arms use it."""
    compiled: dict[int, nn.Module] = {}
    for arm in (arm for arm in arms if arm.module):
        for drafter in arm.drafters:
            compiled.setdefault(id(drafter), graphs.compiled(drafter))
        arm.kwargs, arm.base = (
            {name: compiled.get(id(value), value) for name, value in options.items()}
            for options in (arm.kwargs, arm.base)
        )
        arm.drafters = [compiled[id(drafter)] for drafter in arm.drafters]


# ------------------------------------------------------------------------------------------ prompts


def encode(tokenizer, messages: list[str], device) -> dict:
    """Model inputs of a conversation whose user and assistant messages alternate, the user's
    first."""
    if tokenizer.chat_template:
        chat = [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(messages)
        ]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n".join(messages) + "\n", return_tensors="pt")
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}


def check_lengths(target, tokenizer, prompts: list[dict], max_new_tokens: int) -> int:
    """Most tokens of a conversation; ValueError, before anything is measured, if it could outgrow
    the target."""
    limit, most = getattr(target.config.get_text_config(), "max_position_embeddings", None), 0
    for prompt in prompts:
        messages = [text for turn in prompt["turns"] for text in (turn, "")][:-1]
        longest = encode(tokenizer, messages, "cpu")["input_ids"].shape[1] + max_new_tokens * len(
            prompt["turns"]
        )
        if limit and longest > limit:
            raise ValueError(
                f"prompt {prompt['question_id']} may take {longest} tokens and the target's "
                "context is "
                f"{limit}; lower --max-new-tokens or leave the prompt out"
            )
        most = max(most, longest)
    return most


# ---------------------------------------------------------------------------------------- measuring


def run(
    target, tokenizer, arms: list[Arm], prompts: list[dict], options: dict, rehearse: bool = False
) -> list[dict]:
    """Play all turns with all arms, filling `arm.answers`; returns a record of each turn. Ctrl-C
    ends it early.

    Args: rehearse: warm up with all first turns, since compiled drafters compile when they meet
    another shape.
    """
    greedy, turns = not options["do_sample"], []
    total = len(arms) * sum(len(prompt["turns"]) for prompt in prompts)
    bar = tqdm(
        total=total, desc="answers", mininterval=0.5 if sys.stderr.isatty() else 20
    )  # a log gets few lines
    try:
        short = {**options, "max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
        for prompt in prompts if rehearse else prompts[:1]:
            warm_up = encode(tokenizer, prompt["turns"][:1], target.device)
            for arm in arms:
                arm.play(target, warm_up, **(options if rehearse else short))
        for index, prompt in enumerate(prompts):
            messages: list[str] = []
            for turn in prompt["turns"]:
                messages.append(turn)
                encoded, order = encode(tokenizer, messages, target.device), {}
                first = len(turns) % len(arms)
                for arm in arms[first:] + arms[:first]:
                    bar.set_postfix_str(arm.name)
                    order[arm.name] = arm.play(target, encoded, **options)
                    bar.update(1)
                reference = order[arms[0].name].tokens
                for arm in arms:
                    arm.answers.append(order[arm.name])
                    arm.same.append(
                        divergence(target, encoded, reference, order[arm.name].tokens)
                        if greedy
                        else None
                    )
                messages.append(tokenizer.decode(reference, skip_special_tokens=True))
                turns.append(
                    {
                        "prompt": index,
                        "question_id": prompt["question_id"],
                        "category": prompt["category"],
                        "input_ids": encoded["input_ids"],
                        "answer": reference,
                    }
                )
    except KeyboardInterrupt:
        print(f"bench.py: interrupted; the figures are of {len(turns)} answers", file=sys.stderr)
        for arm in arms:
            del arm.answers[len(turns) :], arm.same[len(turns) :]
    finally:
        bar.close()
    return turns


@torch.no_grad()
def divergence(target, encoded: dict, reference: list[int], tokens: list[int]) -> dict | None:
    """None if the answers are the same, else the first position that differs and the target's top-2
    margin there."""
    if tokens == reference:
        return None
    same = [a == b for a, b in zip(tokens, reference)]
    place = same.index(False) if False in same else len(same)
    ids = torch.cat(
        [encoded["input_ids"], encoded["input_ids"].new_tensor([reference[:place]])], dim=1
    )
    best = target(ids).logits[0, -1].float().topk(2).values.tolist()
    return {"position": place, "top2_margin": best[0] - best[1]}


@torch.no_grad()
def acceptance_rate(arm: Arm, target, turns: list[dict]) -> float | None:
    """alpha by the method's own definition, over the baseline's answers; None where the method has
    none."""
    drafter = arm.kwargs.get("drafter")
    if not hasattr(arm.module, "alpha") or drafter is None:
        return None
    import train  # for the batches that a method's alpha takes

    sequences = []
    for turn in turns[:ALPHA_ANSWERS]:
        ids = torch.cat(
            [turn["input_ids"][0].cpu(), torch.tensor(turn["answer"], dtype=torch.long)]
        )
        sequences.append((ids, torch.arange(len(ids)) >= turn["input_ids"].shape[1]))
    layers = [layer for each in arm.drafters for layer in getattr(each, "kv_layers", ())]
    features = train.Features(target, sequences, layers, None)
    total = count = 0
    for index in range(len(sequences)):
        batch = train.make_batch(
            [index], sequences, features, torch.tensor([index]), 0.0, target.device
        )
        part, number = arm.module.alpha(drafter, target, batch, **arm.base)
        total, count = total + float(part), count + int(number)
    return round(total / count, 4) if count else None


def cost_curve(target, context: int, repeats: int = 5) -> dict:
    """Milliseconds of a target forward over a chain draft, as verification runs it: medians,
    warm-up discarded.

    Returns:
        {"context", "by_tokens": {n: ms at that context}, "by_context": {P: {n: ms}}}.
    """
    config, shape = target.config.get_text_config(), common.target_shape(target)
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if context + 64 > limit:
        raise ValueError(
            f"--context {context} + 64 tokens exceed the target's context of {limit}; lower "
            "--context"
        )
    cache, ids = common.GrowingCache(shape["num_layers"]), torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(shape["vocab_size"], (1, n), generator=ids).to(target.device)
    cuda, result = (
        target.device.type == "cuda",
        {"context": context, "by_tokens": {}, "by_context": {}},
    )

    @torch.no_grad()
    def milliseconds(rows: int, tokens: int) -> float:
        held = cache.get_seq_length()
        if rows < held:
            cache.crop(rows - held)
        elif rows > held:
            common.forward(target, draw(rows - held), cache, logits_to_keep=1)
        times = []
        for _ in range(repeats + 1):
            fed = draw(tokens)
            start = mark(cuda)
            mask = common.ancestor_mask(torch.arange(tokens - 1) - 1, rows, target.dtype).to(
                target.device
            )
            common.forward(
                target,
                fed,
                cache,
                attention_mask=mask if tokens > 1 else None,
                position_ids=rows + torch.arange(tokens, device=target.device)[None],
            )
            end = mark(cuda)
            if cuda:
                torch.cuda.synchronize()
            times.append(1000 * between(start, end))
            cache.crop(-tokens)
        return round(statistics.median(times[1:]), 3)

    plan = [(context, n, "by_tokens") for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    plan += [(rows, n, "by_context") for rows in (128, 256, 512, 1024, 2048, 4096) for n in (1, 8)]
    for rows, n, kind in tqdm(
        sorted(row for row in plan if row[0] + 64 <= limit), desc="cost curve", disable=None
    ):
        place = result[kind] if kind == "by_tokens" else result[kind].setdefault(str(rows), {})
        place[str(n)] = milliseconds(rows, n)
    return result


# ------------------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    """Options, those of the methods' Config fields that can be changed while decoding included."""
    parser = cli.OneLineParser(
        description=f"{__doc__}\nFigures\n\n{report.__doc__.partition('timing.')[2].strip()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    number = cli.number
    parser.add_argument(
        "--method",
        nargs="+",
        default=[],
        metavar="NAME[:VARIANT][@DIR]",
        help=f"{', '.join(cli.METHODS)}; all: those with a checkpoint, Medusa, --peers; "
        "NAME:all: all variants; DIR: another drafter than checkpoints/NAME",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also transformers' assisted generation and prompt lookup",
    )
    parser.add_argument(
        "--target", help="Hugging Face id, folder or .gguf (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16", "float64")
    )
    parser.add_argument(
        "--device", type=cli.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="packed weights on a CPU",
    )
    parser.add_argument(
        "--graphs", action="store_true", help="CUDA graphs and compiled drafters (graphs.py)"
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="FILE", help="FastChat JSONL (default: all of prompts/)"
    )
    parser.add_argument(
        "--num-prompts", type=number(int, 0), default=6, help="spread over all files; 0: all (6)"
    )
    parser.add_argument(
        "--max-new-tokens", type=number(int, 1), default=64, help="per turn (default 64)"
    )
    parser.add_argument(
        "--temperature", type=number(float, 0), default=0.0, help="0 is greedy (default)"
    )
    parser.add_argument("--top-p", type=number(float, 0, 1), default=1.0)
    parser.add_argument("--seed", type=number(int, 0), default=0, help="for temperatures above 0")
    parser.add_argument(
        "--batch-size", type=number(int, 1), default=1, help="prompts answered at once (default 1)"
    )
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="drafter to measure (default: checkpoints/METHOD)"
    )
    parser.add_argument(
        "--draft-model", metavar="NAME", help="causal LM of the target's vocabulary to draft with"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print an answer of each method, accepted draft on green",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="ask this instead of a prompt file")
    parser.add_argument(
        "--replay", metavar="FILE", help="answer one prompt and write a page that replays it"
    )
    parser.add_argument(
        "--cost-curve",
        action="store_true",
        help="measure a target forward by tokens and by context",
    )
    parser.add_argument(
        "--context", type=number(int, 1), default=256, help="of the cost curve (default 256 tokens)"
    )
    parser.add_argument(
        "--sweep",
        nargs="*",
        metavar="DIR",
        help="replay every stop rule on the first method's chains "
        "(Figure 4 of SpecDec++); DIR: more heads for the same draft model",
    )
    parser.add_argument(
        "--refit",
        action="store_true",
        help="fit CAPE's S(p) or Falcon's tree to drafter and machine",
    )
    parser.add_argument(
        "--table", nargs="+", metavar="FILE", help="only print the tables of these results"
    )
    parser.add_argument("--plot", metavar="DIR", help="draw pictures (needs matplotlib)")
    known, _ = parser.parse_known_args([flag for flag in argv if flag not in ("-h", "--help")])
    names = [spec.partition("@")[0].partition(":")[0] for spec in known.method if spec != "all"]
    if "all" in known.method:
        names += cli.METHODS
    for module in map(import_method, dict.fromkeys(names)):
        cli.add_config_options(parser, module.Config, decode=True)
    args = parser.parse_args(argv)
    args.argv = argv
    if not (args.method or args.peers or args.cost_curve or args.table):
        raise ValueError(
            f"nothing to do: give --method NAME ({', '.join(cli.METHODS)}, all), --cost-curve or "
            "--table FILE"
        )
    if (args.sweep is not None or args.refit) and (not args.method or args.temperature):
        raise ValueError(
            "--sweep and --refit look at greedy drafts of a --method; leave out --temperature"
        )
    if args.batch_size > 1 and (args.sweep is not None or args.refit or args.show or args.peers):
        raise ValueError(
            "--sweep, --refit, --show and --peers take one sequence at a time; leave out "
            "--batch-size"
        )
    if args.graphs and (args.batch_size > 1 or args.cost_curve or args.refit):
        raise ValueError(
            "--graphs holds one sequence; leave out --batch-size, --cost-curve and --refit"
        )
    if args.graphs and not args.device.startswith(("cuda", "cpu")):
        raise ValueError(f"--graphs records on CUDA devices, not on {args.device}; leave it out")
    if not args.top_p:
        raise ValueError("--top-p must be above 0 and at most 1")
    if args.json and (Path(args.json).is_dir() or not Path(args.json).resolve().parent.is_dir()):
        raise ValueError(f"--json {args.json}: no such folder or not a file; make the folder first")
    if args.replay:
        replay.check(args)
    if args.plot and Path(args.plot).exists() and not Path(args.plot).is_dir():
        raise ValueError(f"--plot {args.plot} is not a folder; give another one")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.table:
        results = [report.read_result(path) for path in args.table]
        print("\n\n".join(map(report.tables, results)))
        return print(*report.plot(results, Path(args.plot)), file=sys.stderr) if args.plot else None
    prompts = []
    if args.method or args.peers:
        paths = (
            [Path(path) for path in args.prompts]
            if args.prompts
            else sorted((cli.ROOT / "prompts").glob("*.jsonl"))
        )
        asked = {"question_id": "prompt", "category": "prompt", "turns": [args.prompt]}
        prompts = [asked] if args.prompt else data.read_prompts(paths, args.num_prompts)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    target, tokenizer = common.load_target(
        args.target, dtype=getattr(torch, args.dtype), device=args.device
    )
    target = packed.pack(target) if args.pack else target
    result, arms, turns = report.header(args, target, len(prompts)), [], []
    if prompts:
        arms = make_arms(target, args)
        longest = check_lengths(target, tokenizer, prompts, args.max_new_tokens)
        swept = (
            stopping.chain_and_heads(arms[2], target, args.sweep)
            if args.sweep is not None
            else None
        )
        fit = fitting.fitter(arms[2].module) if args.refit else None
        sampling = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": 0,
        }
        options = sampling if args.temperature else {"do_sample": False}
        torch.manual_seed(args.seed)
    if args.replay:
        first = prompts[0]["turns"][0]
        encoded = encode(tokenizer, [first], target.device)
        options = {"max_new_tokens": args.max_new_tokens, **options}
        ours = [arm for arm in arms if arm.module]
        return print(replay.write(args.replay, target, tokenizer, ours, first, encoded, options))
    if prompts and args.batch_size > 1:
        result["batch"] = batching.measure(
            target,
            tokenizer,
            arms,
            prompts,
            args.batch_size,
            encode,
            {"max_new_tokens": args.max_new_tokens, **options},
        )
    elif prompts:
        if args.graphs:
            compile_drafters(arms)
        with (
            graphs.use(target, longest + graphs.SIZES[-1])
            if args.graphs
            else contextlib.nullcontext()
        ):
            turns = run(
                target,
                tokenizer,
                arms,
                prompts,
                {"max_new_tokens": args.max_new_tokens, **options},
                rehearse=args.graphs,
            )
        if not turns:
            sys.exit(130)
        result["prompts"], result["arms"] = turns[-1]["prompt"] + 1, {}
        baseline, alphas = max(arms[:2], key=report.speed), {}
        for arm in (baseline, *arms[2:]):
            numbers = report.figures(arm, baseline, turns, not args.temperature)
            key = (arm.module, id(arm.kwargs.get("drafter")))
            numbers["alpha"] = alphas[key] = (
                alphas[key] if key in alphas else acceptance_rate(arm, target, turns)
            )
            if arm is baseline:
                numbers |= {
                    "loop": arm.name,
                    "loops": report.rounded({a.name: report.speed(a) for a in arms[:2]}),
                }
            result["arms"]["baseline" if arm is baseline else arm.name] = numbers
        if len(turns) < sum(len(prompt["turns"]) for prompt in prompts):
            result["interrupted"] = True
    if args.cost_curve or args.refit:
        result["cost_curve"] = cost_curve(target, args.context)
    if args.refit:
        result["fitted"] = {
            arms[2].name: report.rounded(fit(arms[2], target, turns, result["cost_curve"]))
        }
    if args.sweep is not None:
        result["sweep"] = report.rounded(
            stopping.sweep(*swept, target, turns, stopping.measured(arms[2:]))
        )
    print(report.tables(result))
    for arm in (arm for arm in arms if args.show and arm.module):
        print(
            f"\n{arm.name}, accepted draft tokens "
            f"highlighted:\n{report.highlight(tokenizer, arm.answers[0])}"
        )
    if args.json:
        part = Path(f"{args.json}.{os.getpid()}")
        try:
            part.write_text(json.dumps(result, indent=1) + "\n")
            part.replace(args.json)
        finally:
            part.unlink(missing_ok=True)
    if args.plot:
        print(*report.plot([result], Path(args.plot)), file=sys.stderr)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    cli.run(main)
