"""Measure the methods side by side: one process, one target, the same prompts.

    python bench.py --method glide                      # the shipped drafter
    python bench.py --method glide cape:cpu --num-prompts 40 --json run.json
    python bench.py --method falcon falcon+copies       # and tokens copied from the context
    python bench.py --method all                        # all that fits, and transformers' own
    python bench.py --cost-curve                        # milliseconds of a target forward
    python bench.py --table results/cpu_*.json          # tables of earlier runs
    python bench.py --method falcon --help              # with the options of that method

An arm is NAME[:VARIANT][+copies][@DIR]. NAME is a method or a
rival (medusa, beam, lookup), VARIANT is one of its VARIANTS, DIR holds a
drafter to use instead of checkpoints/NAME.

Protocol: all arms answer a turn before the next turn begins. Their order
is drawn anew for each turn, because a machine's speed drifts. All arms see
the same earlier answers, those of transformers' `generate`. A warm-up is
discarded. The baseline is the fastest plain decoding that is at hand: stock
transformers on the target as it was loaded, transformers on the target with
packed layers (support/packed.py), or our own loop on it.

Figures: a legend stands below the table. tokens/s includes the prefill,
tau does not. speedup is relative to the baseline and x stock to stock
transformers, each with a 95% bootstrap interval over five or more prompts.
alpha is measured on the baseline's answers.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import common
from common import UserError
from support import batching, cli, data, packed, pictures, replay, report
from support.arms import Arm, make_arms, plain_loops
from support.prompts import answer_padded, encode

ALPHA_ANSWERS = 32  # most answers of the baseline to measure alpha on
WARM_UP_TOKENS = 12
CONTEXT = 256  # of the cost curve, in tokens
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the cost curve

# ------------------------------------------------------------------------------ answering


@dataclass
class Answer:
    """An arm's answer to a turn, for one sequence or a whole batch."""

    rows: list[list[int]]  # the new tokens of each sequence
    seconds: float  # wall time, prefill included
    stats: list[common.Stats]  # of each sequence


@dataclass
class Turn:
    """What was asked, and every arm's answer."""

    prompt: int  # number of the prompt, or of the batch
    question_ids: list  # of each sequence
    asked: list[dict]  # of each sequence input_ids (1, T) and attention_mask
    answers: dict[str, Answer]  # by name of the arm


def clock(target) -> float:
    """The time in seconds, once the GPU has done what was asked of it."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


@torch.no_grad()
def play(arm: Arm, asked: list[dict], options: dict) -> Answer:
    """Let an arm answer what is asked (see Turn), with options of target.generate."""
    target = arm.target
    sync = len(asked) == 1 and target.device.type == "cuda"  # in a batch, phases overlap
    stats = [common.Stats(sync=sync) for _ in asked]
    pairs = list(zip(asked, stats))
    start = clock(target)
    if arm.padded:
        rows = answer_padded(target, [each["input_ids"][0].tolist() for each in asked], **options)
        for row, own in zip(rows, stats):
            own.target_forwards = len(row)
    elif arm.module is None:  # one after another
        rows = [transformers_row(arm, each, options, own) for each, own in pairs]
    else:
        decodings = []
        for each, own in pairs:
            opened = common.open_decoding(target, **each, **options, copies=arm.copies, stats=own)
            decodings.append(opened)
        answers = batching.generate(target, arm.module, arm.kwargs, decodings)
        rows = [ids[0, -own.emitted :].tolist() for ids, own in zip(answers, stats)]
    return Answer(rows, clock(target) - start, stats)


def transformers_row(arm: Arm, encoded: dict, options: dict, stats) -> list[int]:
    """The new tokens of a loop of transformers; counts what the target reads."""
    fed = []  # tokens of each target forward

    def note(_module, _args, kwargs):
        fed.append(kwargs["input_ids"].shape[1])

    with arm.target.register_forward_pre_hook(note, with_kwargs=True):
        output = arm.target.generate(**encoded, **options, **arm.kwargs)
    # The first forward reads the prompt, the others a token and a draft.
    length = encoded["input_ids"].shape[1]
    stats.target_forwards = len(fed)
    stats.drafted = sum(fed) - (length - 1) - len(fed)
    return output[0, length:].tolist()


def most_turns(group: list[dict]) -> int:
    """How many turns the longest conversation of a group has."""
    return max(len(prompt["turns"]) for prompt in group)


def run(tokenizer, arms: list[Arm], groups: list, options: dict, seed: int) -> list[Turn]:
    """Let every arm answer every turn of every prompt.

    Args:
        arms: the first one's answers are the earlier turns for all.
        groups: lists of prompts that are answered at once.
    Returns:
        The turns that every arm has answered. Ctrl-C and a UserError (a prompt
        is too long) end the run early; before the first turn they are raised.
    """
    # 1. Warm up.
    device = arms[0].target.device
    opening = [encode(tokenizer, each["turns"][:1], device) for each in groups[0]]
    for arm in arms:
        play(arm, opening, options | {"max_new_tokens": WARM_UP_TOKENS})

    turns = []
    shuffle = random.Random(seed)
    bar = tqdm(total=len(arms) * sum(map(most_turns, groups)), desc="answers", disable=None)
    try:
        for number, group in enumerate(groups):
            talks = [(prompt, []) for prompt in group]  # with the messages so far
            for place in range(most_turns(group)):
                # 2. Ask the prompts that have another turn.
                talks = [(prompt, said) for prompt, said in talks if place < len(prompt["turns"])]
                for prompt, said in talks:
                    said.append(prompt["turns"][place])
                asked = [encode(tokenizer, said, device) for _, said in talks]

                # 3. Let all arms answer, in an order of this turn's own.
                answers = {}
                for arm in shuffle.sample(arms, len(arms)):
                    bar.set_postfix_str(arm.name)
                    answers[arm.name] = play(arm, asked, options)
                    bar.update(1)

                # 4. Go on with the first arm's answers.
                for (_, said), tokens in zip(talks, answers[arms[0].name].rows):
                    said.append(tokenizer.decode(tokens, skip_special_tokens=True))
                question_ids = [prompt["question_id"] for prompt, _ in talks]
                turns.append(Turn(number, question_ids, asked, answers))
    except (KeyboardInterrupt, UserError) as problem:
        if not turns:
            raise
        why = str(problem) or "interrupted"
        bar.write(f"bench.py: {why}; the figures cover {len(turns)} turns", file=sys.stderr)
    finally:
        bar.close()
    return turns


# -------------------------------------------------------------------------------- figures


def summary(arms: list[Arm], loops: list[Arm], turns: list[Turn], greedy: bool) -> dict:
    """{NAME: figures} of all arms; the baseline is the fastest of `loops`.

    Args:
        loops: of `plain_loops`; the first one is stock transformers.
        greedy: the answers should equal those of stock transformers.
    """
    stock = loops[0]
    found = {arm.name: report.figures(arm, turns) for arm in [*loops, *arms]}
    baseline = max(loops, key=lambda loop: found[loop.name]["tokens_per_s"])
    alphas = {None: None}  # by drafter: many variants share one
    result = {}
    for arm in [baseline, *arms]:
        numbers = found[arm.name]
        numbers |= report.ratio("speedup", numbers, found[baseline.name])
        drafter = arm.kwargs.get("drafter")
        if drafter not in alphas:
            alphas[drafter] = acceptance_rate(arm, drafter, turns, baseline.name)
        numbers["alpha"] = alphas[drafter]
        if greedy:
            numbers |= divergence(arm.name, stock, turns)
        result["baseline" if arm is baseline else arm.name] = numbers
    for numbers in found.values():
        numbers |= report.ratio("vs_stock", numbers, found[stock.name])
    told = ("tokens_per_s", "vs_stock", "vs_stock_ci")
    plain = {loop.name: {name: found[loop.name][name] for name in told} for loop in loops}
    result["baseline"] |= {"loop": baseline.name, "loops": plain}
    return report.rounded(result)


@torch.no_grad()
def acceptance_rate(arm: Arm, drafter, turns: list[Turn], baseline: str) -> float | None:
    """alpha as the arm's method defines it, on the baseline's answers."""
    target = arm.target
    pairs = []
    for turn in turns:
        pairs += zip(turn.asked, turn.answers[baseline].rows)
    total = 0.0
    count = 0
    for number, (asked, answer) in enumerate(pairs[:ALPHA_ANSWERS]):
        prompt = asked["input_ids"]
        ids = torch.cat([prompt, prompt.new_tensor([answer])], dim=1)  # (1, T)
        answered = (torch.arange(ids.shape[1], device=ids.device) >= prompt.shape[1])[None]
        hidden, kv = common.target_features(target, ids, drafter.kv_layers)
        batch = common.Batch(ids, answered, hidden, kv, ids.new_tensor([number]), progress=0.0)
        accepted, positions = arm.module.acceptance(drafter, target, batch)
        total += float(accepted)
        count += int(positions)
    return total / count if count else None


@torch.no_grad()
def divergence(name: str, reference: Arm, turns: list[Turn]) -> dict:
    """How many answers of an arm differ from the reference's, and where the first does.

    "top2_margin" is the gap of the target's two best logits there. At a tie
    it is 0, and rounding decides.
    """
    gone = []
    for turn in turns:
        rows = zip(turn.answers[name].rows, turn.answers[reference.name].rows)
        for question_id, asked, (ours, theirs) in zip(turn.question_ids, turn.asked, rows):
            if ours != theirs:
                gone.append((question_id, asked["input_ids"], ours, theirs))
    first = None
    if gone:
        question_id, prompt, ours, theirs = gone[0]
        place = len(os.path.commonprefix([ours, theirs]))
        ids = torch.cat([prompt, prompt.new_tensor([theirs[:place]])], dim=1)
        best, second = reference.target(ids).logits[0, -1].float().topk(2).values.tolist()
        first = {"question_id": question_id, "position": place, "top2_margin": best - second}
    return {"identical_to_greedy": not gone, "diverged": len(gone), "first_divergence": first}


@torch.no_grad()
def cost_curve(target) -> dict:
    """Time the target forward over chains of several lengths.

    Returns:
        {"context", "by_tokens": {n: ms}}, medians of five after a warm-up.
    """
    # 1. Cache some tokens.
    config = target.config.get_text_config()
    ids = torch.arange(CONTEXT + COUNTS[-1], device=target.device)[None] % config.vocab_size
    cache = common.GrowingCache(config.num_hidden_layers)
    target.get_decoder()(ids[:, :CONTEXT], past_key_values=cache, use_cache=True)
    committed = ids[:, : CONTEXT + 1]  # the newest is the root of the drafts

    # 2. Feed a growing number of tokens.
    by_tokens = {}
    for count in tqdm(COUNTS, desc="cost curve", disable=None):
        draft = common.Draft(ids[0, CONTEXT + 1 : CONTEXT + count], torch.arange(count - 1) - 1)
        times = []
        for _ in range(6):
            start = clock(target)
            fed, mask, positions = common.tree_inputs(committed, draft, target.dtype)
            common.forward(target, fed, cache, mask, positions)
            times.append(1000 * (clock(target) - start))
            cache.cut(CONTEXT)
        by_tokens[str(count)] = round(statistics.median(times[1:]), 3)
    return {"context": CONTEXT, "by_tokens": by_tokens}


# --------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the options, with the decoding options of the named methods."""
    number = cli.number
    parser = cli.OneLineParser(description=__doc__)

    add = parser.add_argument_group("what to decode, and how").add_argument
    methods = ", ".join((*cli.METHODS, *cli.RIVALS))
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add("--method", nargs="+", default=[], metavar="ARM", help=f"{methods}, or all; see above")
    add("--peers", action="store_true", help="also transformers' own methods")
    add("--checkpoint", metavar="DIR", help="drafter to measure (default: checkpoints/METHOD)")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=dtypes, help="of target and drafters")
    add("--device", default=cuda, help="of torch, such as cpu or cuda:1")
    add("--kernel", choices=packed.KERNELS, help="of linear layers (default: the fastest)")

    add = parser.add_argument_group("what to measure").add_argument
    add("--prompts", nargs="+", metavar="FILE", help="FastChat JSONL (default: all of prompts/)")
    add("--prompt", metavar="TEXT", help="ask this instead of a prompt file")
    add("--num-prompts", type=number(int, 0), default=5, help="spread over all files; 0: all")
    add("--max-new-tokens", type=number(int, 1), default=48, help="per turn")
    add("--temperature", type=number(float, 0), default=0.0, help="0 is greedy")
    add("--top-p", type=number(float, 0.001, 1), default=1.0, help="share of the likeliest tokens")
    add("--seed", type=number(int, 0, 2**31), default=0, help="of sampling and the order of arms")
    add("--batch-size", type=number(int, 1), default=1, help="prompts answered at once")
    add("--cost-curve", action="store_true", help="time target forwards over 1 to 64 tokens")
    add("--sweep", action="store_true", help="replay every stop rule on the first arm's chains")

    add = parser.add_argument_group("what to print and write").add_argument
    add("--json", metavar="FILE", help="write the result and all answers")
    add("--replay", metavar="FILE", help="only write a page that replays a prompt's first answer")
    add("--table", nargs="+", metavar="FILE", help="only print the tables of these results")
    add("--plot", metavar="DIR", help="draw pictures (needs matplotlib)")

    for text in cli.method_named(argv):
        name = re.split("[:+@]", text)[0]
        for each in cli.present() if name == "all" else [name]:
            cli.add_config_options(parser, cli.import_method(each).Config, decode=True)
    args = parser.parse_args(argv)
    args.argv = argv
    return args


def check(args: argparse.Namespace) -> None:
    """Raise a UserError if options do not go together; nothing is loaded yet."""
    asked = args.method or args.peers or args.cost_curve or args.table
    one = len(set(args.method)) == 1 and args.method != ["all"] and "@" not in args.method[0]
    together = args.sweep or args.peers or "all" in args.method
    drafts = args.sweep or args.replay
    others = args.json or args.plot or args.sweep or args.cost_curve
    file = args.json or args.replay
    nowhere = file and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir())
    common.refuse(
        (not asked, "nothing to do: give --method, --peers, --cost-curve or --table; see --help"),
        (args.table and (args.method or args.json), "--table takes no other option but --plot"),
        (args.prompt is not None and args.prompts, "give --prompt or --prompts, one of the two"),
        (drafts and not args.method, "--sweep and --replay need drafts: give a --method"),
        (args.sweep and args.temperature, "--sweep is greedy: leave out --temperature"),
        (args.top_p < 1 and not args.temperature, "--top-p needs a --temperature"),
        (args.batch_size > 1 and together, "--sweep, --peers and all need --batch-size 1"),
        (args.checkpoint and not one, "--checkpoint goes with one --method that has no @DIR"),
        (args.replay and others, "with --replay leave out --json, --plot, --sweep, --cost-curve"),
        (nowhere, f"cannot write {file}: name a file in a folder that is there"),
    )
    if args.plot:
        pictures.check(args.plot)


def measure(args) -> dict:
    """Measure, print the tables and write --json; returns the result."""
    # 1. Read the prompts and load the target.
    prompts = []
    if args.prompt is not None:
        prompts = [{"question_id": 1, "turns": [args.prompt]}]
    elif args.method or args.peers:
        paths = args.prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
        prompts = data.read_prompts([Path(path) for path in paths], args.num_prompts)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if prompts and load > os.cpu_count():
        print(
            f"bench.py: other programs are using this machine (load {load:.1f}), so speedups are "
            "not to be trusted: stop them, or set OMP_WAIT_POLICY=passive",
            file=sys.stderr,
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    stock, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    possible = packed.candidates(stock)
    if args.kernel and args.kernel not in possible:
        those = f"take one of {', '.join(possible)}" if possible else "leave it out"
        raise UserError(f"--kernel {args.kernel} does not compute this target exactly: {those}")
    target = packed.pack(stock, (args.kernel, args.kernel) if args.kernel else None)

    # 2. Measure.
    result = report.header(args, target)
    if args.cost_curve:
        result["cost_curve"] = cost_curve(target)
    if prompts:
        arms = make_arms(target, args)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
        if args.temperature:
            options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
        torch.manual_seed(args.seed)
        if args.replay:
            loops = plain_loops(stock, target)
            turn = prompts[0]["turns"][0]
            replay.write(args.replay, tokenizer, loops, arms, turn, options)
            return {"replay": args.replay}
        result |= compare(args, stock, target, tokenizer, arms, prompts, options)

    # 3. Print and write.
    print(report.tables(result))
    if args.json:
        report.write_result(result, args.json)
    for numbers in report.arms_of(result).values():
        del numbers["answers"]  # too long for the last line of the output
    return result


def compare(args, stock, target, tokenizer, arms, prompts, options) -> dict:
    """Let the arms and plain decoding answer; returns their part of the result."""
    # 1. Answer. Prompts that fill no batch are left out.
    size = args.batch_size
    starts = range(0, len(prompts) - size + 1, size)
    groups = [prompts[start : start + size] for start in starts]
    if not groups:
        raise UserError(f"{len(prompts)} prompts fill no batch: lower --batch-size")
    if args.sweep:
        from support import stopping  # needs specdecpp.py

        stopping.chain_of(arms[0])  # a UserError comes before the long run
    loops = plain_loops(stock, target, size)
    turns = run(tokenizer, [*loops, *arms], groups, options, args.seed)

    # 2. Summarize.
    figures = summary(arms, loops, turns, not args.temperature)
    count = turns[-1].prompt + 1  # prompts or batches
    result = {"prompts": count * size}
    if size > 1:
        result["batch"] = {"size": size, "batches": count, "arms": figures}
    else:
        result["arms"] = figures
    if len(turns) < sum(map(most_turns, groups)):
        result["interrupted"] = True
    if args.sweep:
        stats = [turn.answers[arms[0].name].stats[0] for turn in turns]
        asked = [turn.asked[0] | options for turn in turns]
        result["sweep"] = report.rounded(stopping.sweep(arms[0], target, asked, stats))
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    check(args)
    if args.table:
        results = [report.read_result(path) for path in args.table]
        print("\n\n".join(report.tables(result) for result in results))
    else:
        results = [measure(args)]
    if args.plot:
        pictures.plot(results, Path(args.plot))
    if not args.table and not sys.stdout.isatty():
        print("\n" + json.dumps(results[0]))


if __name__ == "__main__":
    cli.run(main)
