"""Time decoding by the length of the prompt: results/cpu_lengths.json.

    python results/tools/lengths.py --method glide falcon --json run.json

The texts of prompts/long/texts.jsonl, or the first turns of --prompts, are cut to each
length, as far as they have so many tokens. All arms answer a prompt before the next
one, in an order that is drawn anew. The target reads a prompt once: an arm takes over
the cache of the arm before it, and the times are those of the answers without the
prefill. Answers do not end at an end token, so all are equally long. Speedups are over
our own plain loop on the packed target.
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
from support.measuring import arms, command, report  # noqa: E402
from support.measuring.report import clock  # noqa: E402
from support.prompts import encode  # noqa: E402

TEXTS = cli.ROOT / "prompts" / "long" / "texts.jsonl"
LENGTHS = (256, 1024, 2048, 4096, 7000)
KEPT = ("speedup", "speedup_ci", "tau", "by_prompt")


def cut(tokenizer, text: str, length: int, device) -> dict:
    """Model inputs of about `length` tokens, which begin as the text does."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    around = encode(tokenizer, [""], device)["input_ids"].shape[1]
    return encode(tokenizer, [tokenizer.decode(ids[: length - around])], device)


@torch.no_grad()
def answers_to(prompt: dict, all_arms: list, options: dict, shuffle) -> dict:
    """{arm's name: its Answer} to one prompt."""
    answers, decoding = {}, None
    for arm in shuffle.sample(all_arms, len(all_arms)):
        decoding = common.start(arm.target, after=decoding, **prompt, **options)
        begin = clock(arm.target)
        answer = bench.timed_rounds(arm, decoding, begin, first="draft")
        answer.tokens = bench.new_tokens(decoding.ids, prompt)
        answers[arm.name] = answer
    return answers


def measure(args) -> dict:
    """The figures of all arms at all lengths."""
    stock, target, tokenizer = bench.load(args)
    result = report.header(args, target, "results/tools/lengths.py")
    plain = arms.plain_loops(stock, target)[-1]
    all_arms = [plain, *arms.make_arms(args.method, target)]
    if any(arm.drafts is None for arm in all_arms):
        raise common.UserError(
            "prompt-lookup and assisted keep no cache: leave them out"
        )
    options = bench.generate_options(args) | {"eos_token_id": None}
    texts = bench.prompts_of(args)
    result |= {"prompts": len(texts), "lengths": {}}
    shuffle = random.Random(args.seed)
    bench.warm_up(tokenizer, all_arms, [{"turns": ["Hello."]}], options)
    total = len(args.lengths) * len(texts)
    with tqdm(total=total, desc="prompts", disable=None) as bar:
        for length in args.lengths:
            found = {arm.name: [] for arm in all_arms}
            for number, text in enumerate(texts):
                prompt = cut(tokenizer, text["turns"][0], length, target.device)
                if (short := prompt["input_ids"].shape[1]) < 0.9 * length:
                    bar.write(f"lengths.py: a text for {length} has {short} tokens")
                new = answers_to(prompt, all_arms, options, shuffle)
                plain = new[all_arms[0].name]
                for name, answer in new.items():
                    answer.prompt = number
                    found[name].append(answer)
                    if not args.temperature and answer.tokens != plain.tokens:
                        bar.write(f"lengths.py: {name} leaves greedy decoding")
                bar.update(1)
            result["lengths"][str(length)] = figures_of(found)
    return report.rounded(result)


def figures_of(found: dict) -> dict:
    """{arm's name: figures}, relative to the first arm."""
    figures = {name: report.figures(answers) for name, answers in found.items()}
    first = next(iter(figures.values()))
    for arm in figures.values():
        arm |= report.speed_ratio("speedup", arm, first)
    return {name: {key: arm[key] for key in KEPT} for name, arm in figures.items()}


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table of speeds, and write the result."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command.options(__doc__)
    parser.add_argument(
        "--lengths", nargs="+", type=cli.number(int, 64), default=LENGTHS
    )
    args = command.read(parser, argv)
    bench.check(args)
    if args.prompt is None:
        args.prompts = args.prompts or [TEXTS]
    result = measure(args)
    print(report.speedups("tokens of the prompt", result["lengths"]))
    if args.json:
        report.write_result(result, args.json)


if __name__ == "__main__":
    cli.run(main)
