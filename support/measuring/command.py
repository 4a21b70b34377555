"""The command line of bench.py, and what other commands share with it.

Nothing here imports torch before an option needs it, so that --help comes at once.
"""

import argparse

from support import cli


def read(parser: cli.OneLineParser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv` with --json, whose file is checked before hours of work."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the result and all answers",
    )
    args = parser.parse_args(argv)
    args.argv = argv
    if args.json:
        cli.check_writable(args.json)
    return args


def options(description: str) -> cli.OneLineParser:
    """What to decode, how, and what to ask: options of all that runs arms."""
    number = cli.number
    parser = cli.OneLineParser(description=description)

    add = parser.add_argument_group("what to decode, and how").add_argument
    names = ", ".join((*cli.METHODS, *cli.RIVALS, *cli.PEERS))
    add(
        "--method",
        nargs="+",
        default=[],
        metavar="ARM",
        help=f"{names}; see above",
    )
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add(
        "--dtype",
        default="float32",
        choices=dtypes,
        help="dtype of target and drafters",
    )
    add("--device", default="auto", help=cli.DEVICE_HELP)
    add(
        "--max-new-tokens",
        type=number(int, 1),
        default=48,
        help="tokens of a turn, at most",
    )
    add("--temperature", type=number(float, 0), default=0.0, help="0 is greedy")
    add(
        "--top-p",
        type=number(float, 0.001, 1),
        default=1.0,
        help="share of the likeliest tokens",
    )
    add(
        "--seed",
        type=number(int, 0, 2**31),
        default=0,
        help="seed of sampling and of the order of arms",
    )

    group = parser.add_argument_group("what to ask")
    group.add_argument(
        "--num-prompts",
        type=number(int, 0),
        default=5,
        help="spread over all files; 0: all",
    )
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="FastChat JSONL (default: all of prompts/)",
    )
    add("--prompt", metavar="TEXT", help="a question of your own, no prompt file")
    return parser
