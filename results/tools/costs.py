"""Time the target: reading prompts, and forwards over chains: results/*_cost.json.

    python results/tools/costs.py --json results/cpu_cost.json

The target is packed, as in bench.py, so this is what a verification costs there.
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import common  # noqa: E402
from support import cli  # noqa: E402
from support.measuring import command, report  # noqa: E402
from support.measuring.report import clock  # noqa: E402

CONTEXT = 256  # tokens
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LENGTHS = (256, 1024, 2048, 4096, 7000)


@torch.no_grad()
def cost_curve(target) -> dict:
    """Returns {"context", "by_tokens": {n: ms}}, medians of five after a warm-up."""
    config = target.config.get_text_config()
    # Any tokens will do, because the time depends only on their number.
    ids = torch.arange(CONTEXT + COUNTS[-1], device=target.device)[None]
    ids = ids % config.vocab_size
    cache = common.GrowingCache(config.num_hidden_layers)
    common.last_hidden(target, ids[:, :CONTEXT], cache)
    committed = ids[:, : CONTEXT + 1]  # the newest is the root of the drafts
    by_tokens = {}
    for count in tqdm(COUNTS, desc="cost curve", disable=None):
        tokens = ids[0, CONTEXT + 1 : CONTEXT + count]
        draft = common.Draft(tokens, list(range(-1, count - 2)))
        times = []
        for _ in range(6):
            start = clock(target)
            common.score(target, committed, draft, cache)
            times.append(1000 * (clock(target) - start))
            cache.cut(CONTEXT)  # each time begins with the same cache
        by_tokens[str(count)] = round(statistics.median(times[1:]), 3)
    return {"context": CONTEXT, "by_tokens": by_tokens}


@torch.no_grad()
def reading(target) -> dict:
    """{length of a prompt: seconds to read it}, medians of three."""
    config = target.config.get_text_config()
    found = {}
    context = getattr(config, "max_position_embeddings", None) or math.inf
    lengths = [length for length in LENGTHS if length <= context]
    for length in tqdm(lengths, desc="reading", disable=None):
        ids = torch.arange(length, device=target.device)[None] % config.vocab_size
        times = []
        for _ in range(3):
            cache = common.GrowingCache(config.num_hidden_layers)
            start = clock(target)
            common.last_hidden(target, ids, cache)
            times.append(clock(target) - start)
        found[str(length)] = round(statistics.median(times), 3)
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the result."""
    argv = sys.argv[1:] if argv is None else argv
    parser = cli.OneLineParser(description=__doc__)
    parser.add_argument("--target", type=cli.target, help=cli.TARGET_HELP)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", help=cli.DEVICE_HELP)
    parser.add_argument("--json", metavar="FILE", help="write the result")
    # The other options of bench.py, which the header of a result has, are as always.
    args = parser.parse_args(argv, command.read(command.options(__doc__), []))
    args.argv = argv
    if args.json:
        cli.check_writable(args.json)
    _, target, _ = bench.load(args)
    result = report.header(args, target, "results/tools/costs.py")
    curve = result["cost_curve"] = cost_curve(target)
    result["reading"] = reading(target)
    heads = [f"tokens, at {curve['context']} tokens of context", "ms"]
    rows = [[n, report.cell(ms, ".1f")] for n, ms in curve["by_tokens"].items()]
    print(report.about(result), report.markdown(heads, rows), sep="\n\n")
    print("\n".join(f"reading {n} tokens: {s} s" for n, s in result["reading"].items()))
    if args.json:
        report.write_result(result, args.json)


if __name__ == "__main__":
    cli.run(main)
