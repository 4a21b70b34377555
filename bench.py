"""Measure the methods side by side: one process, one target, the same prompts.

    python bench.py --method glide                 # the shipped drafter
    python bench.py --method glide cape:cpu --num-prompts 40 --json run.json
    python bench.py --method falcon falcon+copies  # and tokens copied from the context
    python bench.py --method glide:gamma=2 glide:gamma=4 glide:gamma=6

An arm is [BASE+]NAME[:SETTINGS][+copies][@DIR]. NAME is a method or a rival (medusa,
eagle, beam, lookup). SETTINGS are fields of its Config that may change after training,
such as gamma=3,sizes=2-1-1-0 (with a - between the numbers of a list), or a name from
its VARIANTS, which is short for several of them. window=64 shows its drafter at least
the newest 64 tokens, and window=none the whole text. BASE is the
method whose chains CAPE expands, glide if it is left out; settings that are not CAPE's
go to that method. +copies adds tokens copied from the context to each draft. DIR holds
a drafter to use instead of checkpoints/NAME. The arms prompt-lookup and assisted are
transformers' own.

Protocol: all arms answer a turn before the next turn begins. Their order is drawn anew
for each turn, because a machine's speed drifts. All arms see the same earlier answers,
those of transformers' `generate`. A warm-up is discarded. The baseline is the fastest
plain decoding that is available: stock transformers on the target as it was loaded,
transformers on the target with packed layers (support/packed.py), or our own loop on
the packed target.

Figures: a legend follows the table. tokens/s includes the prefill, tau does not.
speedup is relative to the baseline and x stock to stock transformers, each with a 95%
bootstrap interval over five or more prompts. alpha is measured on the baseline's
answers.
"""

import os
import random
import signal
import sys
from pathlib import Path

from support import cli
from support.measuring import command

if __name__ == "__main__":
    # --help and mistakes end here, because the imports below take seconds.
    cli.run(lambda: command.read(command.options(__doc__), sys.argv[1:]))

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

import common
from common import UserError
from support import packed
from support.measuring import report
from support.measuring.arms import PEERS, Arm, make_arms, parse, plain_loops
from support.measuring.report import Answer, clock
from support.prompts import encode
from support.training import data

ALPHA_ANSWERS = 32  # most answers of the baseline to measure alpha on
WARM_UP_TOKENS = 12


# ------------------------------------------------------------------------ a whole run


def measure(args) -> dict:
    """The result of a run: how it was made, and what the arms did."""
    prompts = prompts_of(args)
    stock, target, tokenizer = load(args)
    result = report.header(args, target)
    arms = make_arms(args.method, target)
    options = generate_options(args)
    torch.manual_seed(args.seed)
    return result | compare(args, stock, target, tokenizer, arms, prompts, options)


def prompts_of(args) -> list[dict]:
    """What to ask, see `data.read_prompts`."""
    if args.prompt is not None:
        return [{"question_id": 1, "turns": [args.prompt]}]
    paths = args.prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
    return data.read_prompts([Path(path) for path in paths], args.num_prompts)


def load(args) -> tuple:
    """The target as it is loaded, the packed one to decode with, and the tokenizer."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, args.dtype)
    stock, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    cli.plain_settings(stock)
    if not tokenizer.chat_template:
        print(
            "bench.py: the target has no chat template (is it a base model?), so "
            "prompts and answers are written as plain lines",
            file=sys.stderr,
        )
    common.check_target(stock)  # first, because packing takes its layers apart
    return stock, packed.pack(stock), tokenizer


def compare(args, stock, target, tokenizer, arms, prompts, options) -> dict:
    """Let the arms and plain decoding answer; returns their part of the result."""
    loops = plain_loops(stock, target)
    asked, answers = ask(tokenizer, [*loops, *arms], prompts, options, args.seed)
    result = {
        "prompts": len({answer.prompt for answer in answers[loops[0].name]}),
        "arms": summary(arms, loops, asked, answers, not args.temperature),
    }
    if len(asked) < sum(len(prompt["turns"]) for prompt in prompts):
        result["interrupted"] = True
    return result


# -------------------------------------------------------------------------- answering


def ask(tokenizer, arms: list[Arm], prompts: list, options: dict, seed: int) -> tuple:
    """Let every arm answer every turn of every prompt.

    arms: the first one's answers are the earlier turns for all.
    options: of target.generate.
    Returns what was asked, as in `play`, and {arm's name: answers} in the same order,
    of the turns that every arm has answered. A UserError (a prompt is too long) ends
    its prompt. Ctrl-C and exhausted memory end the run early. Any of these is raised if
    nothing was answered.
    """
    warm_up(tokenizer, arms, prompts, options)
    asked = []
    answers = {arm.name: [] for arm in arms}
    shuffle = random.Random(seed)
    total = len(arms) * sum(len(prompt["turns"]) for prompt in prompts)
    bar = tqdm(total=total, desc="answers", disable=None)
    try:
        for number, prompt in enumerate(prompts):
            try:
                # A turn counts only when all arms have answered it, so that all figures
                # cover the same turns, also after an interruption.
                for turn, new in turns_of(prompt, arms, tokenizer, options, shuffle):
                    bar.update(len(new))
                    asked.append(turn)
                    for name, answer in new.items():
                        answer.prompt = number
                        answers[name].append(answer)
            except UserError as problem:
                if not asked and prompt is prompts[-1]:
                    raise
                name = prompt["question_id"]
                note = f"bench.py: prompt {name} was not answered in full: {problem}"
                bar.write(note, file=sys.stderr)
    except (KeyboardInterrupt, torch.OutOfMemoryError) as problem:
        if not asked:
            raise
        why = str(problem).split("\n")[0] or "interrupted"
        covered = f"the figures cover {len(asked)} turns"
        bar.write(f"bench.py: {why}; {covered}", file=sys.stderr)
    finally:
        bar.close()
    return asked, answers


def warm_up(tokenizer, arms: list[Arm], prompts: list, options: dict) -> None:
    """Let every arm answer once, because first calls load kernels and fill caches."""
    # Ask the shortest prompt, because one that is too long would end the run.
    easiest = min((prompt["turns"][0] for prompt in prompts), key=len)
    asked = encode(tokenizer, [easiest], arms[0].target.device)
    for arm in arms:
        play(arm, asked, options | {"max_new_tokens": WARM_UP_TOKENS})


def turns_of(prompt: dict, arms, tokenizer, options: dict, shuffle):
    """Yield what is asked in each turn of a prompt, and {arm's name: its answer}."""
    messages = []
    for turn in prompt["turns"]:
        messages.append(turn)
        asked = encode(tokenizer, messages, arms[0].target.device)
        answers = {}
        for arm in shuffle.sample(arms, len(arms)):  # in a new random order
            answers[arm.name] = play(arm, asked, options)
            answers[arm.name].question_id = prompt["question_id"]
        yield asked, answers
        # Continue with the first arm's answer.
        tokens = answers[arms[0].name].tokens
        messages.append(tokenizer.decode(tokens, skip_special_tokens=True))


@torch.no_grad()
def play(arm: Arm, asked: dict, options: dict) -> Answer:
    """Let an arm answer what is asked.

    asked: input_ids (1, T) and attention_mask.
    options: of target.generate.
    Raises UserError for tokens that the target does not have.
    """
    common.check_ids(arm.target, asked["input_ids"])
    start = clock(arm.target)
    decode = transformers_answer if arm.drafts is None else timed_answer
    answer = decode(arm, asked, options)
    # What is left of the time goes to transformers' set-up and our own bookkeeping. It
    # counts, because the user waits for it as well.
    answer.seconds["other"] = clock(arm.target) - start - answer.seconds.total()
    return answer


def timed_answer(arm: Arm, inputs: dict, options: dict) -> Answer:
    """Decode with drafts, and time each phase of each round."""
    begin = clock(arm.target)
    decoding = common.start(arm.target, **inputs, **options)
    answer = timed_rounds(arm, decoding, begin, first="prefill")
    answer.tokens = new_tokens(decoding.ids, inputs)
    return answer


def timed_rounds(arm: Arm, decoding, begin: float, first: str) -> Answer:
    """Decode to the end, and time the rounds.

    first: the phase from `begin` up to the first draft, for which the drafter reads the
        prompt.
    """
    target = arm.target
    answer = Answer()
    phase = first
    # `for` asks the generator for a draft, which is where the drafter works.
    for draft in arm.drafts(decoding):
        drafted = clock(target)
        path = decoding.verify(draft)
        verified = clock(target)
        answer.seconds[phase] += drafted - begin
        answer.seconds["verify"] += verified - drafted
        answer(decoding, draft, path)  # counts the round
        phase = "draft"
        begin = clock(target)
    return answer


def transformers_answer(arm: Arm, inputs: dict, options: dict) -> Answer:
    """Decode with a loop of transformers, and count what the target reads."""
    # transformers does not report its forwards, so a hook on the target counts them.
    fed = []  # tokens of each target forward

    def note(_module, _args, kwargs):
        fed.append(kwargs["input_ids"].shape[1])

    with arm.target.register_forward_pre_hook(note, with_kwargs=True):
        output = arm.target.generate(**inputs, **options, **arm.kwargs)
    tokens = new_tokens(output, inputs)
    length = inputs["input_ids"].shape[1]
    return Answer(
        tokens=tokens,
        target_forwards=len(fed),
        # The first forward reads the prompt and a draft, each later one a token and a
        # draft.
        drafted=sum(fed) - (length - 1) - len(fed),
        # Each adds one token of its own to those that it accepts.
        accepted=[len(tokens) - len(fed)],
    )


def new_tokens(ids: Tensor, inputs: dict) -> list[int]:
    """Ids (1, T) without the prompt."""
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


# ---------------------------------------------------------------------------- figures


def summary(arms, loops, asked: list, answers: dict, greedy: bool) -> dict:
    """{arm's name: figures}, of the baseline first: the fastest of `loops`.

    arms, loops: lists of Arms; the loops are those of `plain_loops`, of which the first
        is stock transformers.
    asked, answers: of `ask`.
    greedy: whether answers should equal those of stock transformers.
    """
    stock = loops[0]
    found = {name: report.figures(answers[name]) for name in answers}
    # A speedup over a slower loop than the fastest would be due to that loop.
    baseline = max(loops, key=lambda loop: found[loop.name]["tokens_per_s"])
    for numbers in found.values():  # what report.figures leaves open is filled in
        numbers |= report.speed_ratio("speedup", numbers, found[baseline.name])
        numbers |= report.speed_ratio("vs_stock", numbers, found[stock.name])

    alphas = {None: None}  # by drafter: many arms share one
    for arm in [baseline, *arms]:
        numbers = found[arm.name]
        if arm.drafter not in alphas:
            try:
                alpha = acceptance_rate(arm, asked, answers[baseline.name])
            except torch.OutOfMemoryError:  # it reads whole texts at once
                alpha = None
                print(f"bench.py: no memory for alpha of {arm.name}", file=sys.stderr)
            alphas[arm.drafter] = alpha
        numbers["alpha"] = alphas[arm.drafter]
        numbers["settings"] = arm.settings
        if greedy:
            ours, theirs = answers[arm.name], answers[stock.name]
            numbers |= divergence(stock.target, asked, ours, theirs)

    kept = ("tokens_per_s", "vs_stock", "vs_stock_ci", "verify_ms")
    plain = {loop.name: {key: found[loop.name][key] for key in kept} for loop in loops}
    result = {"baseline": found[baseline.name]}
    result["baseline"] |= {"loop": baseline.name, "loops": plain}
    result |= {arm.name: found[arm.name] for arm in arms}
    return report.rounded(result)


@torch.no_grad()
def acceptance_rate(arm: Arm, asked: list[dict], answers: list[Answer]) -> float | None:
    """alpha as the arm's method defines it, on answers to what was asked."""
    total = 0.0
    count = 0
    count_asked = min(len(asked), ALPHA_ANSWERS)
    # All drafters are judged on the same text (the baseline's answers), not on what
    # their arms wrote.
    for number in sorted(random.Random(0).sample(range(len(asked)), count_asked)):
        answer = answers[number]
        prompt = asked[number]["input_ids"]
        ids = torch.cat([prompt, prompt.new_tensor([answer.tokens])], dim=1)  # (1, T)
        place = torch.arange(ids.shape[1], device=ids.device)
        answered = (place >= prompt.shape[1])[None]
        hidden, kv = common.target_features(arm.target, ids, arm.drafter.kv_layers)
        batch = common.Batch(ids, answered, hidden, kv, progress=0.0)
        with torch.random.fork_rng():  # what is drawn is the same for all arms
            torch.manual_seed(number)
            accepted, positions = arm.module.acceptance(arm.drafter, arm.target, batch)
        total += float(accepted)
        count += int(positions)
    return total / count if count else None


@torch.no_grad()
def divergence(target, asked: list, answers: list[Answer], reference: list[Answer]):
    """How many answers differ from the reference's, and where the first one does.

    "top2_margin" is the gap between the target's two best logits there. At a tie it is
    0, and rounding decides.
    """
    triples = zip(asked, answers, reference)
    differing = [each for each in triples if each[1].tokens != each[2].tokens]
    first = None
    if differing:
        inputs, ours, theirs = differing[0]
        place = len(os.path.commonprefix([ours.tokens, theirs.tokens]))
        ids = inputs["input_ids"]
        ids = torch.cat([ids, ids.new_tensor([theirs.tokens[:place]])], dim=1)
        best, second = target(ids).logits[0, -1].float().topk(2).values.tolist()
        # An exact method differs only where two logits are equal but for rounding, so
        # a large margin would be a bug.
        first = {"question_id": ours.question_id, "position": place}
        first["top2_margin"] = best - second
    return {
        "identical_to_greedy": not differing,
        "diverged": len(differing),
        "first_divergence": first,
    }


# ----------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> None:
    """Measure, and print the tables."""
    argv = sys.argv[1:] if argv is None else argv
    args = command.read(command.options(__doc__), argv)
    check(args)
    result = measure(args)
    print(report.tables(result))
    if args.json:
        report.write_result(result, args.json)


def check(args) -> None:
    """Raise a UserError if options do not go together; nothing is loaded yet."""
    for text in args.method:
        if text not in PEERS:
            parse(text)  # a UserError for what is no arm
    common.refuse(
        (not args.method, "nothing to do: give --method; see --help"),
        (
            args.top_p < 1 and not args.temperature,
            "--top-p needs a --temperature",
        ),
    )


def generate_options(args) -> dict:
    """Arguments of target.generate."""
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature:
        # Without top_k=0, transformers would sample among 50 tokens only.
        options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as Ctrl-C does
    cli.run(main)
