"""Write a page that replays an answer, round by round, as a single HTML file.

    python -m support.replay page.html --method glide falcon --prompt "Why is it blue?"

Every arm answers the first prompt twice, greedily and with sampling (--temperature, or
else 1). How an arm is written is in `python bench.py --help`.
"""

import sys

import torch

import bench
from common import UserError
from support import cli
from support.measuring import command
from support.measuring.arms import PEERS, make_arms, plain_loops
from support.replay import page


def main(argv: list[str] | None = None) -> None:
    """Write the page."""
    parser = command.options(__doc__)
    parser.prog = "python -m support.replay"
    parser.add_argument("page", metavar="FILE", help="the page to write")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if not set(args.method) - set(PEERS):  # transformers shows no drafts of its own
        raise UserError("a page needs drafts: give a --method of ours")
    bench.check(args)
    cli.check_writable(args.page)
    turn = bench.prompts_of(args)[0]["turns"][0]
    stock, target, tokenizer = bench.load(args)
    arms = make_arms(args.method, target)
    torch.manual_seed(args.seed)
    loops = plain_loops(stock, target)
    page.write(args.page, tokenizer, loops, arms, turn, bench.generate_options(args))


if __name__ == "__main__":
    cli.run(main)
