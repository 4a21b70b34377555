"""The command line of train.py.

Nothing here imports torch before an option needs it, so that --help comes at once.
"""

import argparse

from support import cli


def parse(argv: list[str], description: str):
    """The options, with those of `--method`, and its module or None."""
    parser = options(description)
    # A method's options are known only once its name is, so the name is read first.
    name = cli.method_named(argv)
    if name == "cape":
        import common

        raise common.UserError("cape has no weights: take another --method")
    module = None
    if name in cli.trainable():  # else argparse refuses it below
        module = cli.import_method(name)
        cli.add_config_options(parser, module.Config)
    return parser.parse_args(argv), module


def options(description: str) -> cli.OneLineParser:
    """The options of all methods."""
    parser = cli.OneLineParser(description=description)
    count = cli.number(int, 1)
    share = cli.number(float, 0, 1)

    add = parser.add_argument_group("what to do").add_argument
    add("--method", choices=cli.trainable(), help="whose drafter to train")
    add(
        "--make-data", type=count, metavar="N", help="write answers until --out holds N"
    )
    add("--out", help="checkpoint folder, or the file that --make-data appends to")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    dtypes = ("float32", "bfloat16")
    add("--dtype", default="float32", choices=dtypes, help="of the target")
    add("--device", default="auto", type=cli.device, help=cli.DEVICE_HELP)
    add(
        "--seed",
        type=cli.number(int, 0, 2**31),
        default=0,
        help="seed of all random choices",
    )

    add = parser.add_argument_group("training").add_argument
    add("--data", nargs="+", metavar="FILE", help="conversations, .jsonl or .jsonl.gz")
    add(
        "--eval",
        metavar="FILE",
        help="conversations to measure eval_alpha on (default: "
        "conversations/answers.jsonl.gz, for the default target)",
    )
    add("--steps", type=count, help="optimizer steps")
    add(
        "--minutes",
        type=cli.number(float, 1e-3),
        help="train this long instead, over all resumed runs",
    )
    add("--resume", action="store_true", help="continue the run in --out")
    add(
        "--init",
        metavar="DIR",
        help="start from this drafter, whose draft vocabulary stays unless "
        "--draft-vocab is given; --resume ignores it",
    )
    add(
        "--features",
        metavar="DIR",
        help="keep the target's features here, in bfloat16 (3 kB a token for the "
        "default target)",
    )
    add("--batch-size", type=count, default=4, help="conversations a step, in all")
    add(
        "--accumulate",
        type=count,
        default=1,
        help="micro-batches to split a batch into",
    )
    add("--lr", type=cli.number(float, 0), default=2e-3, help="peak learning rate")
    add("--warmup", type=share, default=0.02, help="share of the run that warms up")
    add(
        "--clip",
        type=cli.number(float, 1e-6),
        default=1.0,
        help="largest gradient norm",
    )
    add(
        "--max-length",
        type=cli.number(int, 2),
        default=512,
        help="tokens kept of a conversation of --data",
    )
    either = argparse.BooleanOptionalAction
    add("--bf16", action=either, help="autocast to bfloat16 (default: on a GPU)")
    add(
        "--held-out",
        type=cli.number(int, 0),
        default=32,
        help="conversations at the end of --data that alpha is measured on; at most "
        "half of them",
    )
    add("--eval-every", type=count, default=100, help="steps between measurements")
    add("--save-every", type=count, default=500, help="steps between checkpoints")

    add = parser.add_argument_group("--make-data").add_argument
    add("--requests", metavar="FILE", help="prompts to ask first, as those of bench.py")
    add(
        "--second-turns",
        type=share,
        default=0.0,
        help="share of conversations with a second turn",
    )
    add(
        "--greedy",
        type=share,
        default=0.5,
        help="share answered greedily, the rest at T = 0.8",
    )
    return parser
