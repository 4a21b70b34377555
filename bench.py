"""Measure the methods side by side: one process, one target, the same prompts.

    python bench.py --method glide                      # the shipped drafter
    python bench.py --method glide cape:cpu --num-prompts 40 --json run.json
    python bench.py --method falcon falcon+copies       # and tokens copied from the context
    python bench.py --method all                        # all shipped drafters, and rivals
    python bench.py --cost-curve                        # milliseconds of a target forward
    python bench.py --table results/*.json              # tables of earlier runs
    python bench.py --method falcon --help              # with the options of that method

An arm is NAME[:VARIANT[+VARIANT]][+copies][@DIR]. NAME is a method or a
rival (medusa, beam, lookup), VARIANT is one of its VARIANTS, DIR holds a
drafter to use instead of checkpoints/NAME.

Protocol: all arms answer a turn before the next turn begins. Their order
is drawn anew for each turn, because a machine's speed drifts. All arms see
the same earlier answers, those of transformers' `generate`. A warm-up is
discarded. The baseline is the fastest plain loop, transformers' or ours.

Figures: tokens/s includes the prefill. speedup is relative to the
baseline, with a 95% bootstrap interval over five or more prompts. tau is
tokens per target forward, without the prefill; `accepted` leaves out bonus
tokens. alpha is the method's acceptance rate on the baseline's answers.
Times are milliseconds per round: drafting, verifying and the rest.
"""

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import common
from common import Mistake
from support import batching, cli, data, packed, pictures, replay, report
from support.arms import Answer, Arm, clock, decode, make_arms, method_of, plain_loops
from support.prompts import check_lengths, encode

ALPHA_ANSWERS = 32  # most answers of the baseline to measure alpha on
WARM_UP_TOKENS = 12
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the cost curve

# ------------------------------------------------------------------------------ answering


@dataclass
class Turn:
    """What was asked, and every arm's answer."""

    prompt: int  # number of the prompt, or of the batch
    asked: list[Tensor]  # token ids (1, T) of each sequence
    answers: dict[str, Answer]  # by name of the arm
    diverged: dict[str, list[dict]]  # where answers leave the greedy ones


def play(arm: Arm, target, asked: list[dict], options: dict) -> Answer:
    """Let an arm answer a prompt: input_ids (1, T) and attention_mask."""
    [encoded] = asked
    stats = common.Stats(sync=target.device.type == "cuda")
    given = arm.peer
    if arm.module is not None:
        given = {"custom_generate": decode, "arm": arm, "stats": stats}

    # A hook counts the tokens of each target forward, for transformers' loops.
    fed = []

    def note(_module, args, kwargs):
        fed.append((args[0] if args else kwargs["input_ids"]).shape[1])

    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    start = clock(target)
    try:
        output = target.generate(**encoded, **options, **given)
    finally:
        hook.remove()
    seconds = clock(target) - start

    length = encoded["input_ids"].shape[1]
    tokens = output[0, length:].tolist()
    if arm.module is None:
        # The first forward reads the prompt, the others a token and a draft.
        stats.target_forwards = len(fed)
        stats.drafted = sum(fed) - (length - 1) - len(fed)
        stats.emitted = len(tokens)
    assert stats.emitted == len(tokens), f"{arm.name} counts {stats.emitted} of {len(tokens)}"
    return Answer([tokens], seconds, [stats])


def run(
    target, tokenizer, arms: list[Arm], groups: list, options: dict, seed: int, play=play
) -> list[Turn]:
    """Let every arm answer every turn of every prompt.

    Args:
        arms: the first one's answers are the reference and the earlier turns.
        groups: lists of prompts that are answered at once.
        options: of target.generate.
        play: answers the turns of a group with one arm.
    Returns:
        The turns that every arm has answered; Ctrl-C ends the run early.
    """
    rounds = [max(len(prompt["turns"]) for prompt in group) for group in groups]
    often = 0.5 if sys.stderr.isatty() else 20  # a log gets few lines
    bar = tqdm(total=len(arms) * sum(rounds), desc="answers", mininterval=often)
    turns = []
    shuffle = random.Random(seed)
    try:
        opening = [encode(tokenizer, each["turns"][:1], target.device) for each in groups[0]]
        short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
        for arm in arms:
            play(arm, target, opening, short)
        for number, group in enumerate(groups):
            said: list[list[str]] = [[] for _ in group]
            for place in range(rounds[number]):
                # 1. Ask the prompts of the group that have another turn.
                rows = [row for row, each in enumerate(group) if place < len(each["turns"])]
                for row in rows:
                    said[row].append(group[row]["turns"][place])
                asked = [encode(tokenizer, said[row], target.device) for row in rows]
                answers = {}
                for arm in shuffle.sample(arms, len(arms)):
                    bar.set_postfix_str(arm.name)
                    answers[arm.name] = play(arm, target, asked, options)
                    bar.update(1)

                # 2. Compare, and go on with the reference's answers.
                ids = [each["input_ids"] for each in asked]
                reference = answers[arms[0].name].rows
                diverged: dict[str, list[dict]] = {name: [] for name in answers}
                if not options["do_sample"]:
                    names = [group[row]["question_id"] for row in rows]
                    for name, answer in answers.items():
                        for pair in zip(names, ids, reference, answer.rows):
                            diverged[name] += divergence(target, *pair)
                for row, tokens in zip(rows, reference):
                    said[row].append(tokenizer.decode(tokens, skip_special_tokens=True))
                turns.append(Turn(number, ids, answers, diverged))
    except KeyboardInterrupt:
        print(f"bench.py: interrupted; the figures cover {len(turns)} turns", file=sys.stderr)
    finally:
        bar.close()
    return turns


@torch.no_grad()
def divergence(target, question_id, ids: Tensor, reference: list[int], tokens: list[int]) -> list:
    """Find the first token where an answer differs from the reference.

    Returns: [] if none differs, else [{"question_id", "position",
        "top2_margin"}], with the gap of the target's two best logits there.
    """
    if tokens == reference:
        return []
    same = [a == b for a, b in zip(tokens, reference)]
    place = same.index(False) if False in same else len(same)
    ids = torch.cat([ids, ids.new_tensor([reference[:place]])], dim=1)
    best = target(ids).logits[0, -1].float().topk(2).values.tolist()
    return [{"question_id": question_id, "position": place, "top2_margin": best[0] - best[1]}]


# -------------------------------------------------------------------------------- figures


@torch.no_grad()
def acceptance_rate(arm: Arm, target, turns: list[Turn], reference: str) -> float | None:
    """alpha as the method defines it, on the baseline's answers.

    None for an arm without a drafter, or whose draft model drafts instead.
    """
    drafter = arm.kwargs.get("drafter")
    if drafter is None or arm.kwargs.get("draft_model") is not None:
        return None
    pairs = []
    for turn in turns:
        pairs += zip(turn.asked, turn.answers[reference].rows)
    total = 0.0
    count = 0
    for number, (prompt, answer) in enumerate(pairs[:ALPHA_ANSWERS]):
        ids = torch.cat([prompt, prompt.new_tensor([answer])], dim=1)  # (1, T)
        answered = (torch.arange(ids.shape[1], device=ids.device) >= prompt.shape[1])[None]
        hidden, kv = common.target_features(target, ids, drafter.kv_layers)
        batch = common.Batch(ids, answered, hidden, kv, ids.new_tensor([number]), progress=0.0)
        accepted, positions = arm.module.acceptance(drafter, target, batch)
        total += float(accepted)
        count += int(positions)
    return total / count if count else None


def summary(arms: list[Arm], loops: list[Arm], target, turns: list[Turn], greedy: bool) -> dict:
    """{NAME: figures} of all arms; the baseline is the fastest of `loops`."""
    speeds = {}
    for loop in loops:
        sums = report.total([turn.answers[loop.name] for turn in turns])
        speeds[loop.name] = sums["tokens"] / sums["seconds"]
    baseline = max(speeds, key=speeds.get)
    result = {}
    alphas = {}  # by drafter: many variants share one
    for arm in [loop for loop in loops if loop.name == baseline] + arms:
        numbers = report.figures(arm, baseline, turns, greedy)
        key = id(arm.kwargs.get("drafter"))
        if key not in alphas:
            alphas[key] = acceptance_rate(arm, target, turns, baseline)
        numbers["alpha"] = alphas[key]
        result[arm.name] = numbers
    first = result.pop(baseline) | {"loop": baseline, "loops": speeds}
    return report.rounded({"baseline": first, **result})


@torch.no_grad()
def cost_curve(target, context: int) -> dict:
    """Time the target forward over chains of several lengths.

    Returns:
        {"context", "by_tokens": {n: ms}}, medians of five after a warm-up.
    """
    config = target.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit and context + COUNTS[-1] > limit:
        raise Mistake(
            f"--context {context} + {COUNTS[-1]} tokens exceed the target's context of {limit}; "
            "lower --context"
        )
    # 1. Cache random tokens; the last ones serve as root and draft.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, context + COUNTS[-1]), generator=generator)
    ids = ids.to(target.device)
    cache = common.GrowingCache(config.num_hidden_layers)
    target.get_decoder()(ids[:, :context], past_key_values=cache, use_cache=True)

    # 2. Feed a growing number of tokens.
    by_tokens = {}
    for count in tqdm(COUNTS, desc="cost curve", disable=None):
        root, draft_ids = ids[:, context : context + count].split([1, count - 1], dim=1)
        draft = common.Draft(draft_ids[0], torch.arange(count - 1) - 1)
        times = []
        for _ in range(6):
            start = clock(target)
            fed, mask, positions = common.tree_inputs(root, draft, context, target.dtype)
            common.forward(target, fed, cache, mask, positions)
            times.append(1000 * (clock(target) - start))
            cache.cut(context)
        by_tokens[str(count)] = round(statistics.median(times[1:]), 3)
    return {"context": context, "by_tokens": by_tokens}


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
    add("--draft-model", metavar="NAME", help="causal LM of the target's vocabulary to draft with")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=dtypes, help="of target and drafters")
    add("--device", default=cuda, help="of torch, such as cpu or cuda:1")
    packing = argparse.BooleanOptionalAction
    add("--pack", action=packing, default=True, help="faster layers on a CPU (support/packed.py)")

    add = parser.add_argument_group("what to measure").add_argument
    add("--prompts", nargs="+", metavar="FILE", help="FastChat JSONL (default: all of prompts/)")
    add("--prompt", metavar="TEXT", help="ask this instead of a prompt file")
    add("--num-prompts", type=number(int, 0), default=6, help="spread over all files; 0: all")
    add("--max-new-tokens", type=number(int, 1), default=64, help="per turn")
    add("--temperature", type=number(float, 0), default=0.0, help="0 is greedy")
    add("--top-p", type=number(float, 0.001, 1), default=1.0, help="share of the likeliest tokens")
    add("--seed", type=number(int, 0), default=0, help="of sampling, and of the order of arms")
    add("--batch-size", type=number(int, 1), default=1, help="prompts answered at once")
    add("--cost-curve", action="store_true", help="time target forwards over 1 to 64 tokens")
    add("--context", type=number(int, 1), default=256, help="of the cost curve, in tokens")
    add("--sweep", action="store_true", help="replay every stop rule on the first arm's chains")

    add = parser.add_argument_group("what to print and write").add_argument
    add("--json", metavar="FILE", help="write the result and all answers")
    help = "only answer the first turn of one prompt, and write a page that shows it"
    add("--replay", metavar="FILE", help=help)
    add("--table", nargs="+", metavar="FILE", help="only print the tables of these results")
    add("--plot", metavar="DIR", help="draw pictures (needs matplotlib)")

    names = [method_of(text) for text in cli.method_named(argv)]
    if "all" in names:
        names += cli.present()
    for name in dict.fromkeys(names):
        if name != "all":
            cli.add_config_options(parser, cli.import_method(name).Config, decode=True)
    args = parser.parse_args(argv)
    args.argv = argv
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise a Mistake if options do not go together; nothing is loaded yet."""
    if not (args.method or args.peers or args.cost_curve or args.table):
        methods = ", ".join(cli.METHODS)
        raise Mistake(f"nothing to do: give --method ({methods}, all), --cost-curve or --table")
    if args.table and (args.method or args.peers or args.cost_curve or args.sweep or args.json):
        raise Mistake("--table measures nothing: leave out everything but --plot")
    if args.sweep and (not args.method or args.temperature):
        raise Mistake("--sweep replays greedy drafts: give a --method, leave out --temperature")
    if args.top_p < 1 and not args.temperature:
        raise Mistake("--top-p goes with --temperature: greedy decoding draws nothing")
    if args.prompt is not None and args.prompts:
        raise Mistake("--prompt is asked instead of --prompts: give one of the two")
    if args.batch_size > 1 and (args.sweep or args.peers or "all" in args.method):
        raise Mistake("--sweep, --peers and all take one sequence at a time: drop --batch-size")
    if args.checkpoint and (len(set(args.method)) != 1 or args.method[0] == "all"):
        raise Mistake("--checkpoint goes with exactly one --method")
    if args.checkpoint and "@" in args.method[0]:
        raise Mistake("--checkpoint and @DIR both name the drafter: leave one out")
    if args.replay and not args.method:
        raise Mistake("--replay shows how a method decodes: give --method NAME")
    measuring = args.json or args.plot or args.sweep or args.cost_curve or args.batch_size > 1
    if args.replay and measuring:
        raise Mistake(
            "--replay measures nothing: leave out --json, --plot, --sweep, --cost-curve and "
            "--batch-size"
        )
    for option in ("json", "replay"):
        path = getattr(args, option)
        if path and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
            raise Mistake(f"--{option} {path}: name a file in a folder that is there")
    if args.plot:
        pictures.check(args.plot)


def measure(args) -> dict:
    """Measure, print the tables and write --json; returns the result."""
    prompts = []
    if args.method or args.peers:
        if args.prompt is not None:
            prompts = [{"question_id": 1, "turns": [args.prompt]}]
        else:
            paths = args.prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
            prompts = data.read_prompts([Path(path) for path in paths], args.num_prompts)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    busy = ""
    if prompts and load > (os.cpu_count() or 1):
        busy = (
            f"bench.py: other programs are using this machine (load {load:.1f}), so speedups are "
            "not to be trusted: stop them, or set OMP_WAIT_POLICY=passive, so that waiting threads "
            "do not spin"
        )
        print(busy, file=sys.stderr)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    if args.pack:
        target = packed.pack(target)
    result = report.header(args, target, len(prompts))
    if args.cost_curve:
        result["cost_curve"] = cost_curve(target, args.context)
    if prompts:
        arms = make_arms(target, args)
        check_lengths(target, tokenizer, prompts, args.max_new_tokens)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
        if args.temperature:
            options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
        torch.manual_seed(args.seed)
        if args.replay:
            text = prompts[0]["turns"][0]
            encoded = encode(tokenizer, [text], target.device)
            replay.write(args.replay, target, tokenizer, arms, text, encoded, options)
            return {"replay": args.replay}
        compare(args, target, tokenizer, arms, prompts, options, result)
    print(report.tables(result))
    if busy:
        print(f"\n{busy}")
    if args.json:
        report.write_result(result, args.json)
    for numbers in report.arms_of(result).values():
        del numbers["answers"]  # too long for the last line of the output
    return result


def compare(args, target, tokenizer, arms, prompts, options, result) -> None:
    """Let the arms answer, and add their figures to the result."""
    size = args.batch_size
    loops = plain_loops()
    groups = [[prompt] for prompt in prompts]
    answering = play
    if size > 1:
        loops.append(batching.PADDED)
        groups = batching.groups(prompts, size)
        answering = batching.play
    if args.sweep:
        from support import stopping  # needs specdecpp.py

        stopping.chain_of(arms[0])  # a Mistake comes before the long run
    turns = run(target, tokenizer, [*loops, *arms], groups, options, args.seed, answering)
    if not turns:
        sys.exit(130)

    figures = summary(arms, loops, target, turns, not args.temperature)
    count = turns[-1].prompt + 1  # prompts or batches
    result["prompts"] = min(count * size, len(prompts))
    if size > 1:
        result["batch"] = {"size": size, "batches": count, "arms": figures}
    else:
        result["arms"] = figures
    if len(turns) < sum(max(len(prompt["turns"]) for prompt in group) for group in groups):
        result["interrupted"] = True
    if args.sweep:
        stats = [turn.answers[arms[0].name].stats[0] for turn in turns]
        asked = [{"input_ids": turn.asked[0], **options} for turn in turns]
        result["sweep"] = report.rounded(stopping.sweep(arms[0], target, asked, stats))


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.table:
        results = [report.read_result(path) for path in args.table]
        print("\n\n".join(report.tables(result) for result in results))
    else:
        results = [measure(args)]
    if args.plot:
        print(*pictures.plot(results, Path(args.plot)), file=sys.stderr)
    if not args.table and not sys.stdout.isatty():
        print("\n" + json.dumps(results[0]))


if __name__ == "__main__":
    cli.run(main)
