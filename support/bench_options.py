"""The command line of bench.py: its options, those of the methods named, and what goes together."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

from support import arms, cli, replay, report


def parse(argv: list[str], description: str) -> argparse.Namespace:
    """Read the command line, with those fields of the methods' Config that matter while decoding.

    Raises: ValueError: an option that is unknown, out of range, or does not go with another.
    """
    parser = cli.OneLineParser(
        description=f"{description}\n{report.__doc__.partition(chr(10) * 2)[2].strip()}"
    )
    _what_to_decode(parser)
    _what_to_measure(parser)
    _where_results_go(parser)
    named = cli.method_named(argv)
    names = [spec.partition("@")[0].partition(":")[0] for spec in named]
    if "all" in named:
        names += cli.present()
    for name in dict.fromkeys(names):
        if name not in ("all", *arms.ALONE):
            cli.add_config_options(parser, cli.import_method(name).Config, decode=True)
    args = parser.parse_args(argv)
    args.argv = argv
    _check(args)
    return args


def _what_to_decode(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to decode, and how")
    group.add_argument(
        "--method",
        nargs="+",
        default=[],
        metavar="NAME[:VARIANT][@DIR]",
        help=f"{', '.join(cli.METHODS)}, copies or prompt-lookup (ours and transformers', from the "
        "context, no drafter), or all: those with a checkpoint, Medusa, --peers. NAME:all takes "
        "all variants, DIR another drafter than checkpoints/NAME. --method NAME --help also shows "
        "the options of that method",
    )
    group.add_argument(
        "--variants",
        nargs="+",
        default=[],
        metavar="VARIANT",
        help="measure these variants, too, of every method named that has them",
    )
    group.add_argument(
        "--peers", action="store_true", help="also transformers' own methods, and copies"
    )
    group.add_argument(
        "--checkpoint", metavar="DIR", help="drafter to measure (default: checkpoints/METHOD)"
    )
    group.add_argument(
        "--draft-model", metavar="NAME", help="causal LM of the target's vocabulary to draft with"
    )
    group.add_argument("--target", type=cli.target, help=cli.TARGET_HELP)
    group.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of target and drafters",
    )
    group.add_argument(
        "--device",
        type=cli.device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of torch, such as cpu or cuda:1",
    )
    group.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="packed weights on a CPU (support/packed.py)",
    )
    group.add_argument(
        "--graphs",
        action="store_true",
        help="CUDA graphs and compiled drafters (support/graphs.py)",
    )


def _what_to_measure(parser: argparse.ArgumentParser) -> None:
    number = cli.number
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--prompts", nargs="+", metavar="FILE", help="FastChat JSONL (default: all of prompts/)"
    )
    group.add_argument("--prompt", metavar="TEXT", help="ask this instead of a prompt file")
    group.add_argument(
        "--num-prompts", type=number(int, 0), default=6, help="spread over all files; 0: all"
    )
    group.add_argument("--max-new-tokens", type=number(int, 1), default=64, help="per turn")
    group.add_argument("--temperature", type=number(float, 0), default=0.0, help="0 is greedy")
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1),
        default=1.0,
        help="sample from the most likely tokens of this share",
    )
    group.add_argument("--seed", type=number(int, 0), default=0, help="for temperatures above 0")
    group.add_argument(
        "--batch-size", type=number(int, 1), default=1, help="prompts answered at once"
    )
    group.add_argument(
        "--cost-curve",
        action="store_true",
        help="measure a target forward by tokens and by context",
    )
    group.add_argument(
        "--context", type=number(int, 1), default=256, help="tokens before those of the cost curve"
    )
    group.add_argument(
        "--sweep",
        nargs="*",
        metavar="DIR",
        help="replay every stop rule on the first method's chains (Figure 4 of SpecDec++); DIR: "
        "more heads for the same draft model",
    )
    group.add_argument(
        "--refit",
        action="store_true",
        help="fit the first method (CAPE's S(p), Falcon's tree, least_worth, lengths of copies) to "
        "drafter and machine",
    )


def _where_results_go(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to print and write")
    group.add_argument(
        "--json",
        metavar="FILE",
        help="write the result here, - for the last line of the output, where it stands anyway "
        "unless that is a terminal",
    )
    group.add_argument(
        "--show",
        action="store_true",
        help="print the first question and the answers, accepted draft tokens marked",
    )
    group.add_argument(
        "--replay", metavar="FILE", help="only answer one prompt, and write a page that replays it"
    )
    group.add_argument(
        "--table", nargs="+", metavar="FILE", help="only print the tables of these results"
    )
    group.add_argument("--plot", metavar="DIR", help="draw pictures (needs matplotlib)")


def _check(args: argparse.Namespace) -> None:
    """ValueError for options that do not go together, before anything is loaded."""
    if not (args.method or args.peers or args.cost_curve or args.table):
        raise ValueError(
            f"nothing to do: give --method NAME ({', '.join(cli.METHODS)}, all), --cost-curve or "
            "--table FILE"
        )
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty; give the text of a question")
    one_by_one = args.sweep is not None or args.refit
    if one_by_one and (not args.method or args.temperature):
        raise ValueError(
            "--sweep and --refit look at greedy drafts of a --method; leave out --temperature"
        )
    if args.batch_size > 1 and (one_by_one or args.show or args.peers):
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
    if args.checkpoint and (len(set(args.method)) != 1 or "all" in args.method):
        raise ValueError("--checkpoint goes with exactly one --method")
    if not args.top_p:
        raise ValueError("--top-p must be above 0 and at most 1")
    if args.json and args.json != "-":
        if Path(args.json).is_dir() or not Path(args.json).resolve().parent.is_dir():
            raise ValueError(
                f"--json {args.json}: no such folder or not a file; make the folder first"
            )
    if args.replay:
        replay.check(args)
    if args.plot and Path(args.plot).exists() and not Path(args.plot).is_dir():
        raise ValueError(f"--plot {args.plot} is not a folder; give another one")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
