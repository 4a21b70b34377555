"""Time decoding of several sequences at once, as GLIDE's Table 4 does.

    python results/tools/batches.py --method glide --num-prompts 40 --json run.json

A batch holds the first turns of prompts that follow one another. All arms answer a
batch before the next one, in an order that is drawn anew. Speedups are over the fastest
plain decoding: transformers on the target as loaded or on the packed one, where the
sequences of a batch are padded, or our own loop (support/measuring/batching.py).
Prompts that fill no batch are left out.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench  # noqa: E402
import common  # noqa: E402
from support import cli  # noqa: E402
from support.measuring import arms, batching, command, report  # noqa: E402
from support.measuring.report import clock  # noqa: E402
from support.prompts import answer_padded, encode  # noqa: E402

SIZES = (2, 4, 8)


@torch.no_grad()
def answers_to(prompts: list, arm, options: dict) -> tuple[list[list[int]], float]:
    """An arm's answers to a batch of prompts, ids (1, T) each; and the seconds."""
    begin = clock(arm.target)
    if arm.drafts is None:
        rows = [ids[0].tolist() for ids in prompts]
        answers = answer_padded(arm.target, rows, **options)
    else:
        asked = [common.start(arm.target, input_ids=ids, **options) for ids in prompts]
        outputs = batching.generate(arm.target, arm.drafts, asked)
        answers = [
            output[0, ids.shape[1] :].tolist() for output, ids in zip(outputs, prompts)
        ]
    return answers, clock(arm.target) - begin


def measure(args) -> dict:
    """The speedups of all arms in batches of all sizes."""
    prompts = bench.prompts_of(args)
    if len(prompts) < max(args.sizes):
        raise common.UserError(
            f"{len(prompts)} prompts fill no batch of {max(args.sizes)}: give more "
            "--num-prompts, or lower --sizes"
        )
    stock, target, tokenizer = bench.load(args)
    result = report.header(args, target, "results/tools/batches.py")
    loops = arms.plain_loops(stock, target)
    methods = arms.make_arms(args.method, target)
    options = bench.generate_options(args)
    asked = [
        encode(tokenizer, prompt["turns"][:1], target.device)["input_ids"]
        for prompt in prompts
    ]
    if any(arm.drafts is None for arm in methods):
        raise common.UserError(
            "prompt-lookup and assisted answer one at a time: leave them out"
        )
    result |= {"prompts": len(asked), "sizes": {}}
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    all_arms = [*loops, *methods]
    for size in args.sizes:
        warm_up = options | {"max_new_tokens": bench.WARM_UP_TOKENS}
        for arm in all_arms:  # first calls load kernels and fill caches
            answers_to(asked[:size], arm, warm_up)
        found = {arm.name: {"tokens": [], "seconds": []} for arm in all_arms}
        starts = range(0, len(asked) - size + 1, size)
        for start in tqdm(starts, desc=f"batches of {size}", disable=None):
            new = {}
            for arm in shuffle.sample(all_arms, len(all_arms)):
                batch = asked[start : start + size]
                new[arm.name], seconds = answers_to(batch, arm, options)
                found[arm.name]["tokens"].append(sum(map(len, new[arm.name])))
                found[arm.name]["seconds"].append(seconds)
            for name, answers in new.items():
                if not args.temperature and answers != new[loops[0].name]:
                    tqdm.write(f"batches.py: {name} leaves greedy", file=sys.stderr)
        result["sizes"][str(size)] = figures_of(found, [loop.name for loop in loops])
    return report.rounded(result)


def figures_of(found: dict, loops: list[str]) -> dict:
    """{arm's name: figures}, relative to the fastest of `loops`."""
    figures = {name: {"by_prompt": counts} for name, counts in found.items()}
    fastest = min(
        loops, key=lambda n: sum(found[n]["seconds"]) / sum(found[n]["tokens"])
    )
    for arm in figures.values():
        arm |= report.speed_ratio("speedup", arm, figures[fastest])
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table of speeds, and write the result."""
    parser = command.options(__doc__)
    parser.add_argument("--sizes", nargs="+", type=cli.number(int, 1), default=SIZES)
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    bench.check(args)
    result = measure(args)
    print(report.speedups("sequences", result["sizes"]))
    if args.json:
        report.write_result(result, args.json)


if __name__ == "__main__":
    cli.run(main)
