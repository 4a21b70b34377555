"""Measure the methods side by side: one process, one target, the same prompts.

    python bench.py --method glide                      # the shipped drafter
    python bench.py --method glide cape:cpu --num-prompts 40 --json run.json
    python bench.py --method falcon falcon+copies       # and tokens copied from the context
    python bench.py --method all                        # all shipped drafters, and rivals
    python bench.py --cost-curve                        # milliseconds of a target forward
    python bench.py --table results/*.json              # tables of earlier runs
    python bench.py --method falcon --help              # with the options of that method

An arm is NAME[:VARIANT[+VARIANT]][+copies][@DIR]. NAME is a method or a rival (medusa, beam,
lookup), VARIANT a name in its VARIANTS, +copies adds tokens copied from the context, and DIR holds
another drafter than checkpoints/NAME.

Protocol: every turn of every prompt is answered by every arm before the next turn begins, in an
order that is drawn anew for each turn, because machines drift. The earlier turns of a conversation
are the baseline's for all arms. A warm-up is discarded. The baseline is the faster of
transformers' greedy `generate` and a plain loop over our cache.

Figures: tokens/s counts the prefill. speedup is the ratio to the baseline's tokens/s, with a 95%
bootstrap interval over five or more prompts. tau is tokens per target forward, without the
prompt's forward; `accepted` leaves out the bonus token. alpha is the method's acceptance rate on
the baseline's answers. The milliseconds are those of a round: drafting, verifying and the rest.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import common
from common import Mistake
from support import batching, cli, data, packed, pictures, replay, report, stopping
from support.arms import Answer, Arm, decode, make_arms, method_of, plain_loops
from support.prompts import check_lengths, encode

ALPHA_ANSWERS = 32  # alpha is measured on so many of the baseline's answers
WARM_UP_TOKENS = 12
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens fed, on the cost curve
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)

# ------------------------------------------------------------------------------ answering


@dataclass
class Turn:
    """What was asked, and every arm's answer."""

    prompt: int  # number of the prompt, or of the batch
    category: str
    asked: list[Tensor]  # token ids (1, T) of each sequence
    answers: dict[str, Answer]  # by name of the arm
    diverged: dict[str, list[dict]]  # where answers leave the greedy ones


def play(arm: Arm, target, asked: list[dict], options: dict) -> Answer:
    """Let an arm answer one prompt; `asked` holds its input_ids (1, T) and attention_mask."""
    [encoded] = asked
    cuda = target.device.type == "cuda"
    stats = common.Stats(sync=cuda)
    given = arm.peer
    if arm.module is not None:
        given = {"custom_generate": decode, "arm": arm, "stats": stats}

    # Transformers' own loops do not fill `stats`: a hook notes what each target forward is fed.
    fed = []

    def note(_module, args, kwargs):
        fed.append((args[0] if args else kwargs["input_ids"]).shape[1])

    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    try:
        output = target.generate(**encoded, **options, **given)
    finally:
        hook.remove()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    length = encoded["input_ids"].shape[1]
    tokens = output[0, length:].tolist()
    if arm.module is None:
        # The first forward reads the prompt. All others read the newest token and a draft.
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
        groups: prompts that are answered at once, a list each.
        options: of target.generate.
        play: answers the turns of a group with one arm.
    Returns:
        The turns that every arm has answered: fewer than there are if Ctrl-C ended it.
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
                # 1. Ask those of the group that have another turn.
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
                turns.append(Turn(number, group[0]["category"], ids, answers, diverged))
    except KeyboardInterrupt:
        print(f"bench.py: interrupted; the figures are of {len(turns)} turns", file=sys.stderr)
    finally:
        bar.close()
    return turns


@torch.no_grad()
def divergence(target, question_id, ids: Tensor, reference: list[int], tokens: list[int]) -> list:
    """Where two answers part, and by how little the target preferred its choice there.

    Returns:
        [] if they are the same, else one {"question_id", "position", "top2_margin"} of the first
        token that differs: the difference of the target's two best logits for it.
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
def acceptance_rate(arm: Arm, target, turns: list[Turn], reference: str) -> dict | None:
    """alpha by the method's own definition, over the tokens of the baseline's answers.

    Returns:
        {"alpha_sum", "alpha_count"}, lists by prompt; alpha is the quotient of their totals. None
        where the method has no alpha, or another model than its drafter drafts.
    """
    drafter = arm.kwargs.get("drafter")
    if drafter is None or arm.kwargs.get("draft_model") is not None:
        return None
    sums = [0.0] * (turns[-1].prompt + 1)
    counts = [0] * len(sums)
    for number, turn in enumerate(turns[:ALPHA_ANSWERS]):
        [prompt] = turn.asked
        answer = turn.answers[reference].rows
        ids = torch.cat([prompt, prompt.new_tensor(answer)], dim=1)  # (1, T)
        answered = (torch.arange(ids.shape[1], device=ids.device) >= prompt.shape[1])[None]
        hidden, kv = common.target_features(target, ids, drafter.kv_layers)
        batch = common.Batch(ids, answered, hidden, kv, ids.new_tensor([number]), progress=0.0)
        accepted, count = arm.module.acceptance(drafter, target, batch)
        sums[turn.prompt] += float(accepted)
        counts[turn.prompt] += int(count)
    return {"alpha_sum": sums, "alpha_count": counts} if sum(counts) else None


def summary(arms: list[Arm], loops: list[Arm], target, turns: list[Turn], greedy: bool) -> dict:
    """{NAME: figures} of all arms; the baseline is the fastest of the plain `loops`."""
    speeds = {}
    for loop in loops:
        sums = report.total([turn.answers[loop.name] for turn in turns])
        speeds[loop.name] = sums["tokens"] / sums["seconds"]
    baseline = max(speeds, key=speeds.get)
    one_by_one = all(len(turn.asked) == 1 for turn in turns)
    result = {}
    alphas = {}
    for arm in [loop for loop in loops if loop.name == baseline] + arms:
        numbers = report.figures(arm, baseline, turns, greedy)
        key = id(arm.kwargs.get("drafter"))
        if key not in alphas and one_by_one:
            alphas[key] = acceptance_rate(arm, target, turns, baseline)
        if of_alpha := alphas.get(key):
            numbers["alpha"] = sum(of_alpha["alpha_sum"]) / sum(of_alpha["alpha_count"])
            numbers["by_prompt"] |= of_alpha
        first = next(other for other in [*loops, *arms] if other.module is arm.module)
        if first is not arm and arm.module is not None:
            theirs = report.by_prompt(first.name, turns)
            numbers["against"] = {first.name: report.paired(numbers["by_prompt"], theirs)}
        result[arm.name] = numbers
    first = result.pop(baseline) | {"loop": baseline, "loops": speeds}
    return report.rounded({"baseline": first, **result})


@torch.no_grad()
def cost_curve(target, context: int, repeats: int = 5) -> dict:
    """Milliseconds of a target forward over a chain, as verification runs it.

    Returns:
        {"context", "by_tokens": {n: ms at that context}, "by_context": {P: {n: ms}}}, medians
        without the first, which warms up.
    """
    config = target.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if context + COUNTS[-1] > limit:
        raise Mistake(
            f"--context {context} + {COUNTS[-1]} tokens exceed the target's context of {limit}; "
            "lower --context"
        )
    cuda = target.device.type == "cuda"
    cache = common.GrowingCache(config.num_hidden_layers)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        ids = torch.randint(config.vocab_size, (1, count), generator=generator)
        return ids.to(target.device)

    def milliseconds(rows: int, count: int) -> float:
        missing = rows - cache.get_seq_length()
        if missing > 0:
            target.get_decoder()(draw(missing), past_key_values=cache, use_cache=True)
        cache.cut(rows)
        times = []
        for _ in range(repeats + 1):
            ids = draw(count)
            draft = common.Draft(ids[0, 1:], torch.arange(count - 1) - 1)
            start = time.perf_counter()
            fed, mask, positions = common.tree_inputs(ids[:, :1], draft, rows, target.dtype)
            common.forward(target, fed, cache, mask, positions)
            if cuda:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
            cache.cut(rows)
        return round(statistics.median(times[1:]), 3)

    result = {"context": context, "by_tokens": {}, "by_context": {}}
    plan = [(context, count, "by_tokens") for count in COUNTS]
    plan += [(rows, count, "by_context") for rows in CONTEXTS for count in (1, 8)]
    plan = sorted(row for row in plan if row[0] + COUNTS[-1] <= limit)
    for rows, count, kind in tqdm(plan, desc="cost curve", disable=None):
        place = result[kind]
        if kind == "by_context":
            place = place.setdefault(str(rows), {})
        place[str(count)] = milliseconds(rows, count)
    return result


def heads_of(arm: Arm, target, folders: list[str]) -> dict:
    """{name: drafter} of the acceptance heads on an arm's draft model: its own, and `folders`'.

    Raises: Mistake: the arm drafts no chains, or a head belongs to another draft model.
    """
    heads = {}
    own = arm.kwargs.get("drafter")
    if own is not None and getattr(own.config, "stage", "") == "head":
        heads["head"] = own
    for folder in folders:
        name = Path(folder).name
        head = common.load_drafter(cli.import_method("specdecpp").Drafter, folder, target)
        heads[folder if name in heads else name] = head
    stopping.chain_of(arm.module, arm.kwargs, heads)
    return heads


def sweep(arms: list[Arm], heads: dict, target, turns: list[Turn], max_new_tokens: int) -> dict:
    """Figure 4 of SpecDec++: every stop rule, replayed on the first arm's chains."""
    first = arms[0]
    answers = []  # (N_draft, N_target, seconds, seconds of drafting)
    for arm in arms:
        alike = arm.module is first.module and not arm.copies
        if not alike or arm.kwargs.get("drafter") is not first.kwargs.get("drafter"):
            continue
        for turn in turns:
            [stats] = turn.answers[arm.name].stats
            n_draft = sum(stats.offered[1:])  # the first draft is timed with the prefill
            draft = stats.seconds.get("draft", 0.0)
            answers.append((n_draft, stats.target_forwards, draft + stats.seconds["verify"], draft))
    asked = []
    for turn in turns:
        asked.append({"input_ids": turn.asked[0], "max_new_tokens": max_new_tokens})
    return stopping.sweep(first.module, first.kwargs, heads, target, asked, answers)


# --------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the options, among them the named methods' that matter while decoding."""
    parser = cli.OneLineParser(description=__doc__)
    _what_to_decode(parser)
    _what_to_measure(parser)
    _where_results_go(parser)
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


def _what_to_decode(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to decode, and how")
    add = group.add_argument
    methods = ", ".join((*cli.METHODS, *cli.RIVALS))
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add("--method", nargs="+", default=[], metavar="ARM", help=f"{methods}, or all; see above")
    add("--peers", action="store_true", help="also transformers' own methods")
    add("--checkpoint", metavar="DIR", help="drafter to measure (default: checkpoints/METHOD)")
    add("--draft-model", metavar="NAME", help="causal LM of the target's vocabulary to draft with")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=dtypes, help="of target and drafters")
    add("--device", type=cli.device, default=cuda, help="of torch, such as cpu or cuda:1")
    packing = argparse.BooleanOptionalAction
    add("--pack", action=packing, default=True, help="faster layers on a CPU (support/packed.py)")


def _what_to_measure(parser: argparse.ArgumentParser) -> None:
    number = cli.number
    group = parser.add_argument_group("what to measure")
    add = group.add_argument
    add("--prompts", nargs="+", metavar="FILE", help="FastChat JSONL (default: all of prompts/)")
    add("--prompt", metavar="TEXT", help="ask this instead of a prompt file")
    add("--num-prompts", type=number(int, 0), default=6, help="spread over all files; 0: all")
    add("--max-new-tokens", type=number(int, 1), default=64, help="per turn")
    add("--temperature", type=number(float, 0), default=0.0, help="0 is greedy")
    add("--top-p", type=number(float, 0, 1), default=1.0, help="share of the likeliest tokens")
    add("--seed", type=number(int, 0), default=0, help="of sampling, and of the order of arms")
    add("--batch-size", type=number(int, 1), default=1, help="prompts answered at once")
    add("--cost-curve", action="store_true", help="time a target forward by tokens and context")
    add("--context", type=number(int, 1), default=256, help="of the cost curve, in tokens")
    help = "replay every stop rule on the first arm's chains; DIR: more heads for its draft model"
    add("--sweep", nargs="*", metavar="DIR", help=help)


def _where_results_go(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to print and write")
    add = group.add_argument
    help = "write the result and all answers; -: print the last line on a terminal, too"
    add("--json", metavar="FILE", help=help)
    add("--replay", metavar="FILE", help="only answer one prompt, and write a page that shows it")
    add("--table", nargs="+", metavar="FILE", help="only print the tables of these results")
    add("--plot", metavar="DIR", help="draw pictures (needs matplotlib)")


def check(args: argparse.Namespace) -> None:
    """Raise a Mistake for options that do not go together, before anything is loaded."""
    if not (args.method or args.peers or args.cost_curve or args.table):
        methods = ", ".join(cli.METHODS)
        raise Mistake(f"nothing to do: give --method ({methods}, all), --cost-curve or --table")
    if args.prompt is not None and not args.prompt.strip():
        raise Mistake("--prompt is empty; give the text of a question")
    if args.sweep is not None and (not args.method or args.temperature):
        raise Mistake("--sweep looks at greedy drafts of a --method; leave out --temperature")
    if args.batch_size > 1 and (args.sweep is not None or args.peers or "all" in args.method):
        raise Mistake("--sweep and --peers take one sequence at a time; leave out --batch-size")
    if args.checkpoint and (len(set(args.method)) != 1 or "all" in args.method):
        raise Mistake("--checkpoint goes with exactly one --method")
    if not args.top_p:
        raise Mistake("--top-p must be above 0 and at most 1")
    if args.json and args.json != "-":
        if Path(args.json).is_dir() or not Path(args.json).resolve().parent.is_dir():
            raise Mistake(f"--json {args.json}: no such folder, or not a file; make it first")
    for name in ("sweep", "cost_curve", "json", "plot"):
        if args.replay and getattr(args, name) not in (None, False):
            raise Mistake(f"--replay measures nothing; leave out --{name.replace('_', '-')}")
    if args.plot and Path(args.plot).exists() and not Path(args.plot).is_dir():
        raise Mistake(f"--plot {args.plot} is not a folder; give another one")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise Mistake("--plot needs matplotlib: pip install matplotlib")


def warn_of_load() -> None:
    """Say on stderr if other programs compete for the processor: they slow arms unevenly."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        print(
            f"bench.py: the machine's load is {load:.1f} on {cores} cores; other programs distort "
            "the times",
            file=sys.stderr,
        )


def measure(args) -> dict:
    """Everything that was asked for; prints the tables, writes --json, returns the result."""
    prompts = []
    if args.method or args.peers:
        paths = args.prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
        if args.prompt:
            prompts = [{"question_id": "prompt", "category": "prompt", "turns": [args.prompt]}]
        else:
            prompts = data.read_prompts([Path(path) for path in paths], args.num_prompts)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    if args.pack:
        target = packed.pack(target)
    result = report.header(args, target, len(prompts))
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
            return replay.write(args.replay, target, tokenizer, arms, text, encoded, options)
    warn_of_load()
    if prompts:
        compare(args, target, tokenizer, arms, prompts, options, result)
    if args.cost_curve:
        result["cost_curve"] = cost_curve(target, args.context)
    print(report.tables(result))
    if args.json and args.json != "-":
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
    if args.sweep is not None:
        heads = heads_of(arms[0], target, args.sweep)
    turns = run(target, tokenizer, [*loops, *arms], groups, options, args.seed, answering)
    if not turns:
        sys.exit(130)

    figures = summary(arms, loops, target, turns, not args.temperature)
    if size > 1:
        result["batch"] = {"size": size, "batches": turns[-1].prompt + 1, "arms": figures}
    else:
        result["arms"] = figures
        result["prompts"] = turns[-1].prompt + 1
    if len(turns) < sum(max(len(prompt["turns"]) for prompt in group) for group in groups):
        result["interrupted"] = True
    if args.sweep is not None:
        found = sweep(arms, heads, target, turns, args.max_new_tokens)
        result["sweep"] = report.rounded(found)


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
