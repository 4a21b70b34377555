# ruff: noqa: E402 (what takes seconds to import is imported after the command line)
"""Train a drafter against a frozen target, or let the target write the data.

    python train.py --make-data 2000 --out data.jsonl
    python train.py --method glide --data data.jsonl --minutes 30 --out checkpoints/mine
    torchrun --nproc-per-node 2 train.py --method glide --data FILES --steps 1000 ...

Each method's file has its own Config, build, loss and acceptance.
What they share is in the function `train`, whose loop takes a batch, computes loss and
gradients, and steps; from time to time it measures and saves. accelerate takes care of
processes, devices and mixed precision, so `accelerate launch` works like torchrun.
`--method NAME --help` lists the options of the method as well.

Random numbers are seeded for each step and each process, so a resumed run draws the
same numbers as an uninterrupted one. With a different number of processes a step draws
other numbers, so its result is not the same to the bit.
"""

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from support import cli

# ------------------------------------------------------------- options, with defaults


def options() -> cli.OneLineParser:
    """The options of all methods."""
    parser = cli.OneLineParser(description=__doc__)
    number = cli.number
    count, share = number(int, 1), number(float, 0, 1)
    dtypes = ("float32", "bfloat16")

    group = parser.add_argument_group("what to do")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add("--method", choices=cli.trainable(), help="whose drafter to train")
    add("--make-data", type=count, metavar="N", help="write answers until --out has N")
    add = group.add_argument
    text = "checkpoint folder, or the file that --make-data appends to"
    add("--out", required=True, help=text)
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    text = "of the target, and of matrix products in training"
    add("--dtype", default="float32", choices=dtypes, help=text)
    add("--device", default="auto", help=cli.DEVICE_HELP)
    add("--seed", type=number(int, 0, 2**31), default=0, help="of all random choices")

    add = parser.add_argument_group("--method").add_argument
    add("--data", nargs="+", metavar="FILE", help="conversations, .jsonl or .jsonl.gz")
    text = "conversations to measure eval_alpha on, such as the target's own answers"
    add("--eval", metavar="FILE", help=text)
    add("--steps", type=count, help="optimizer steps")
    text = "minutes to train instead, resumed runs included"
    add("--minutes", type=number(float, 1e-3), help=text)
    add("--resume", action="store_true", help="continue the run in --out")
    text = "start from this drafter (--draft-vocab chooses a new vocabulary)"
    add("--init", metavar="DIR", help=f"{text}; --resume ignores it")
    text = "keep the target's features here, in bfloat16 (3 kB a token for the default "
    add("--features", metavar="DIR", help=f"{text}target)")
    add("--batch-size", type=count, default=4, help="conversations per step")
    add("--lr", type=number(float, 0), default=2e-3, help="peak learning rate")
    add("--warmup", type=share, default=0.02, help="share of the run that warms up")
    text = "largest norm of the gradient"
    add("--clip", type=number(float, 1e-6), default=1.0, help=text)
    text = "cut conversations of --data to this many tokens"
    add("--max-length", type=number(int, 2), default=512, help=text)
    text = "last conversations of --data, kept for measuring alpha (at most half)"
    add("--held-out", type=number(int, 0), default=32, help=text)
    add("--eval-every", type=count, default=100, help="steps between measurements")
    add("--save-every", type=count, default=500, help="steps between checkpoints")

    add = parser.add_argument_group("--make-data").add_argument
    add("--requests", metavar="FILE", help="prompts whose first turns to ask first")
    text = "share of conversations with a second turn"
    add("--second-turns", type=share, default=0.0, help=text)
    text = "share answered greedily, the rest at T = 0.8"
    add("--greedy", type=share, default=0.5, help=text)
    add("--max-new-tokens", type=count, default=320, help="most tokens of an answer")
    return parser


def parse(argv: list[str]):
    """The options, with those of `--method`, and its module or None."""
    parser = options()
    # A method's options are known only once its name is, so the name is read first.
    name = cli.method_named(argv)
    module = None
    if name in cli.trainable():  # else argparse refuses it below
        module = cli.import_method(name)
        cli.add_config_options(parser, module.Config)
    args = parser.parse_args(argv)
    absent = "--method" if args.make_data else "--make-data"
    [group] = [group for group in parser._action_groups if group.title == absent]
    for action in group._group_actions:
        if getattr(args, action.dest) != action.default:
            raise cli.mistake(f"{action.option_strings[0]} goes with {absent}")
    return args, module


if __name__ == "__main__":
    # --help and mistakes end here, because the imports below take seconds.
    cli.run(lambda: parse(sys.argv[1:]))

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import broadcast_object_list
from torch import nn
from tqdm import tqdm

import common
from support.prompts import context_of
from support.training import checkpoints, data, self_written
from support.training.features import Features

# --------------------------------------------------------------------------- training


def train(args, module, overrides: dict) -> None:
    """Train the drafter of a method and save it in the folder `args.out`.

    module: the method's file, imported.
    overrides: {field: value} of its Config, as the command line gives them.
    Raises UserError for options or data that cannot be used, and for a loss that is
    not finite.
    """
    check(args)
    if not (args.resume or args.init):  # then the saved settings are needed too
        # A wrong value is reported before the target is loaded.
        module.Config(**overrides)
    out = Path(args.out)
    accelerator = launch(args)
    target, tokenizer = load_target(args, accelerator)
    sequences, held_out, answers = read_data(args, target, tokenizer)

    # `run` says how far the training has come; --resume continues from what was saved.
    identity = checkpoints.identity(args, target, sequences)
    state = checkpoints.read(out, module, identity, overrides) if args.resume else None
    run = state["progress"] if state else checkpoints.Run()
    drafter, optimizer = start(args, module, overrides, target, sequences, state)
    model, optimizer = accelerator.prepare(Loss(module, drafter, target), optimizer)
    out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, fail before training

    announce(args, run, drafter, sequences, held_out)
    features = Features(target, drafter.kv_layers, args.features)
    check_learned(args, model, features, sequences)
    lengths = [len(ids) for ids, _ in sequences]
    order = data.batch_order(lengths, args.batch_size, args.seed, run.step)
    fraction, stop = run.fraction(args), False  # a run goes from 0 to 1
    measured = {}
    if fraction < 1:
        measured = read_measured(features, held_out, answers)
    # The time before a resumption counts as well.
    begin = time.monotonic() - run.seconds
    hide = None if accelerator.is_main_process else True  # None: only on a terminal
    bar = tqdm(total=args.steps, initial=run.step, desc=args.method, disable=hide)
    with interrupts() as caught, bar:
        while fraction < 1 and not stop:
            chosen = next(order)
            size = len(chosen) // accelerator.num_processes
            part = chosen.split(size)[accelerator.process_index]
            batch = features.batch([sequences[i] for i in part], fraction)
            seed_step(accelerator, args.seed, run.step)
            loss = gradients(accelerator, model, batch)
            # This returns the norm before clipping, which is inf or nan if any gradient
            # is. Such a step is not taken, nor saved.
            norm = float(accelerator.clip_grad_norm_(model.parameters(), args.clip))
            check_finite(args, run, loss, norm)
            optimizer.param_groups[0]["lr"] = args.lr * schedule(fraction, args.warmup)
            optimizer.step()
            optimizer.zero_grad()

            learned = sum(int(sequences[i][1].sum()) for i in chosen)
            run.add_step(learned, loss, seconds=time.monotonic() - begin)
            bar.update(1)
            # Clocks and signals differ between processes, so the first one decides.
            fraction, stop = broadcast_object_list([run.fraction(args), bool(caught)])
            last = fraction >= 1

            # After SIGTERM only seconds are left (10 in Docker, 30 with torchrun), less
            # than a measurement takes, so a stop only saves.
            if last and not stop and accelerator.is_main_process:
                # A second signal, or SIGKILL, may end the last measurement.
                checkpoints.save(out, drafter, optimizer, run, identity)
            if not stop and (last or run.step % args.eval_every == 0):
                heard = [] if last else caught
                if rates := measure(module, drafter, target, measured, heard):
                    point = run.add_point(rates)
                    say(", ".join(f"{key} {value}" for key, value in point.items()))
            due = last or stop or run.step % args.save_every == 0
            if due and accelerator.is_main_process:
                checkpoints.save(out, drafter, optimizer, run, identity)

    # Free the wrapped model while every process is alive. Later, it could hang.
    del model, optimizer
    accelerator.free_memory()
    accelerator.end_training()
    if fraction < 1:  # the exit code of Ctrl-C, so that a script stops as well
        sys.exit(130)


class Loss(nn.Module):
    """A method's loss as a module, because accelerate wraps the forward of a module.

    That is where DistributedDataParallel and autocast to bfloat16 do their work.
    """

    def __init__(self, module, drafter, target):
        super().__init__()
        self.drafter = drafter
        # A partial, so that the target does not become a part of this module.
        self.loss = partial(module.loss, drafter, target)

    def forward(self, batch: common.Batch):
        """The summed loss, and the weight to divide it by."""
        return self.loss(batch)


def seed_step(accelerator, seed: int, step: int) -> None:
    """Seed torch's random numbers; each step of each process has its own."""
    number = seed * 1_000_003 + step
    number = number * accelerator.num_processes + accelerator.process_index
    torch.manual_seed(number)


def gradients(accelerator, model, batch) -> float:
    """Compute the gradient of a step's mean loss; returns that loss.

    batch: the part of this process. However a step is split, its gradient is that of
    the whole batch, even where the parts have different weights.
    """
    loss, weight = model(batch)
    loss.backward()
    # Losses and gradients are summed over all processes and divided once, by the total
    # weight.
    sums = torch.tensor([loss.item(), float(weight)])
    device = next(model.parameters()).device
    loss_sum, weight_sum = accelerator.reduce(sums.to(device), "sum").tolist()
    weight_sum = weight_sum or 1.0  # there may be nothing to learn in a step
    for parameter in model.parameters():
        if parameter.grad is not None:
            # DistributedDataParallel has averaged over the processes.
            parameter.grad *= accelerator.num_processes / weight_sum
    return loss_sum / weight_sum


def check_finite(args, run, loss: float, norm: float) -> None:
    """Raise a UserError unless the loss and the norm of its gradient are finite."""
    if not math.isfinite(loss + norm):
        raise common.UserError(
            f"at step {run.step} the loss is {loss} and the norm of its gradient "
            f"{norm}: train again, or from the last checkpoint (--init), with a lower "
            f"--lr than {args.lr}"
        )


def schedule(fraction: float, warmup: float) -> float:
    """The share of the peak learning rate after a fraction of the run.

    It rises linearly to 1, stays there, and falls linearly in the last fifth.
    """
    # `fraction` is of the steps or of the minutes, so the rate falls to 0 at the end of
    # either. The 1e-3 keeps the rate of the first step above 0.
    rise = (fraction + 1e-3) / warmup if warmup else 1.0
    return min(rise, 1.0, (1 - fraction) / 0.2)


def read_measured(features: Features, held_out: list, answers: list) -> dict:
    """{name: batches} for `measure`: always the same, so computed once."""
    say(
        f"reading the {len(held_out) + len(answers)} conversations on which alpha is "
        "measured (--held-out, --eval); --minutes begins after that"
    )
    rates = {"alpha": held_out, "eval_alpha": answers}
    return {name: features.batches(rates[name]) for name in rates}


@torch.no_grad()
def measure(module, drafter, target, measured: dict, caught: list) -> dict | None:
    """The acceptance rate on each of {name: batches}, None where there is no batch.

    Its random numbers are the same each time, and training continues with its own.
    Returns None if a signal was caught meanwhile.
    """
    rates = {}
    drafter.eval()
    for name, batches in measured.items():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            totals = []
            for batch in batches:
                if caught:
                    break
                totals.append(module.acceptance(drafter, target, batch))
        accepted = sum(float(total) for total, _ in totals)
        count = sum(int(count) for _, count in totals)
        rates[name] = round(accepted / max(1, count), 4) if batches else None
    drafter.train()
    return None if caught else rates


# ------------------------------------------------------------- what a run begins with


def check(args) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    out = Path(args.out)
    begun = (out / "training_state.pt").is_file()
    learned = {Path(path).resolve() for path in args.data or []}
    files = [*(args.data or []), *([args.eval] if args.eval else [])]
    absent = next((path for path in files if not Path(path).exists()), None)
    # Alpha on answers that were learned would look better than it is.
    learned_too = args.eval and Path(args.eval).resolve() in learned
    another = "continue with --resume, or" if begun else f"use it with --init {out} and"
    closed = out.is_dir() and not os.access(out, os.W_OK)
    common.refuse(
        (not args.data, "training needs --data, files of conversations"),
        (absent, f"no file {absent}: check the path"),
        (
            learned_too,
            f"eval_alpha is measured on {args.eval}: leave it out of --data",
        ),
        (bool(args.steps) == bool(args.minutes), "give either --steps or --minutes"),
        (args.resume and not begun, f"nothing to resume in {out}: leave out --resume"),
        # A drafter that took hours is not written over.
        (
            not args.resume and (out / "config.json").is_file(),
            f"{out} already holds a drafter: {another} give another --out",
        ),
        (out.is_file(), f"--out {out} is a file; name a folder for the drafter"),
        (closed, f"cannot write to {out}: name a folder where you may write"),
    )


@torch.no_grad()
def check_learned(args, model, features: Features, sequences: list) -> None:
    """Raise a UserError if the loss finds nothing to learn, in the longest answer.

    CTC-drafter, for instance, learns only where `labels` tokens follow an anchor.
    """

    def longest(sequence) -> int:  # the tokens of its longest answer
        learned, counts = sequence[1].unique_consecutive(return_counts=True)
        return int(counts[learned].max())

    most = max(sequences, key=longest)
    if not model(features.batch([most], 0.0))[1] > 0:
        raise common.UserError(
            f"nothing to learn for {args.method}: all answers are too short"
        )


def launch(args) -> Accelerator:
    """Join the other processes, if torchrun or accelerate started several."""
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        device_placement=False,  # everything goes where the target is
        # Not fp16, whose gradients need scaling; bf16 has the range of float32.
        mixed_precision="bf16" if args.dtype == "bfloat16" else "no",
        # Otherwise a process waits for gradients of weights that a step did not use.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    count = accelerator.num_processes
    if args.batch_size % count:
        raise common.UserError(
            f"--batch-size {args.batch_size} must be a multiple of {count}, the number "
            "of processes"
        )
    return accelerator


def load_target(args, accelerator) -> tuple:
    """The target, frozen, and its tokenizer, on this process's device."""
    # With several processes, accelerate gives each its own GPU.
    device = accelerator.device if accelerator.num_processes > 1 else args.device
    dtype = getattr(torch, args.dtype)
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=str(device))
    common.check_target(target)
    return target, tokenizer


def read_data(args, target, tokenizer) -> tuple[list, list, list]:
    """Sequences to train on, held-out ones, and those of --eval.

    Each sequence is (token ids (T,), loss mask (T,)).
    """
    context = context_of(target)
    length = min(args.max_length, context)
    sequences = []
    for path in args.data:
        sequences += data.read_conversations(path, tokenizer, length, target)
    sequences = data.join_turns(sequences)
    # The last conversations are held out, at most half of them all. This comes after
    # join_turns: a first turn by itself is never learned if its second one is held out.
    border = len(sequences) - min(args.held_out, len(sequences) // 2)

    answers = []
    if args.eval:
        answers = data.read_conversations(args.eval, tokenizer, context, target)
    return sequences[:border], sequences[border:], answers


def start(args, module, overrides: dict, target, sequences: list, state: dict | None):
    """The drafter to train and its optimizer.

    state: from `checkpoints.read`, to continue from; None in a new run.
    """
    torch.manual_seed(args.seed)  # of the weights; each step has a seed of its own
    if state:
        drafter = module.Drafter(module.Config(**state["config"] | overrides))
        drafter.load_state_dict(state["model"])
    else:
        drafter = new_drafter(args, module, overrides, target, sequences)
    # Weights are trained in float32, whatever the target's dtype is.
    drafter = drafter.to(target.device).float().train()
    optimizer = torch.optim.AdamW(
        [weight for weight in drafter.parameters() if weight.requires_grad],
        lr=args.lr,
        betas=(0.9, 0.95),  # Falcon's (4.3), for all methods
        weight_decay=0.01,
        fused=True,  # one pass over weights, gradients and moments instead of many
    )
    if state:
        optimizer.load_state_dict(state["optimizer"])
    return drafter, optimizer


def new_drafter(args, module, overrides: dict, target, sequences: list):
    """A drafter as the method builds it, with the weights of --init where it has them.

    Raises UserError if those have other shapes.
    """
    # The draft vocabulary is made of the tokens that are learned most often.
    learned = torch.cat([ids[mask] for ids, mask in sequences])
    vocab = common.target_shape(target)["vocab_size"]
    counts = torch.bincount(learned, minlength=vocab)
    if not args.init:
        return module.build(module.Config(**overrides), target, counts)

    first = common.load_drafter(module.Drafter, args.init, target)
    config = dataclasses.replace(first.config, **overrides)
    # The new settings may ask for parts that the first drafter does not have, such as
    # SpecDec++'s head: those begin as `build` makes them.
    drafter = module.build(config, target, counts)
    weights = first.state_dict()
    if "draft_vocab" in overrides:
        # It is chosen anew for this data. No weight depends on which tokens can be
        # drafted, because embedding and LM head are the target's.
        weights["vocab_ids"] = drafter.vocab_ids
    try:
        missing, surplus = drafter.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # weights of other shapes
        reason = common.one_line(error)
        raise common.UserError(
            f"--init {args.init} does not fit the options: {reason}"
        ) from error
    for names, what in ((missing, "lacks"), (surplus, "has, but there is no use for")):
        if names:
            say(f"{args.init} {what}: {', '.join(names)}")
    return drafter


# --------------------------------------------------------------- what the user sees


def announce(args, run, drafter, sequences: list, held_out: list) -> None:
    """Say how much there is to learn, or that the run is finished."""
    learned = torch.cat([ids[mask] for ids, mask in sequences])
    text = f"{len(sequences)} conversations, {len(learned)} tokens to learn"
    say(f"{text}; {len(held_out)} held out")
    share = torch.isin(learned, drafter.vocab_ids.cpu()).float().mean()
    size = len(drafter.vocab_ids)
    say(f"the draft vocabulary has {size} tokens and covers {share:.1%} of these")
    if run.fraction(args) >= 1:
        say(
            f"{args.out} is finished. With more --steps or --minutes the learning rate "
            f"rises again; else give --init {args.out}, another --out and a lower --lr"
        )


def say(text: str) -> None:
    """Print a line above the progress bar, in the first process only."""
    if PartialState().is_main_process:
        tqdm.write(f"train.py: {text}", file=sys.stderr)


@contextlib.contextmanager
def interrupts():
    """Yield a list that Ctrl-C and SIGTERM add to, instead of ending the program."""
    caught = []
    text = b"train.py: saving; the same command with --resume continues\n"

    def note(*given):
        if caught:  # the second time, end at once
            signal.default_int_handler(*given)
        caught.append(True)
        if PartialState().is_main_process:
            os.write(2, text)  # not print, which the signal may have interrupted

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield caught
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


# ----------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> None:
    """Train, or make data."""
    args, module = parse(sys.argv[1:] if argv is None else argv)
    if args.make_data:
        make_data(args)
        return
    overrides = {}
    for field in dataclasses.fields(module.Config):
        value = getattr(args, field.name, None)
        # The field `target` is a shape, and --target a name.
        if field.name != "target" and value is not None:
            overrides[field.name] = value
    train(args, module, overrides)


def make_data(args) -> None:
    """Let the target write conversations."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise common.UserError("--make-data runs in one process: leave out torchrun")
    # If --out is a file of another kind, this is said before the target is loaded.
    with self_written.alone(args.out):
        asked = data.read_prompts([Path(args.requests)], 0) if args.requests else []
        requests = [prompt["turns"][0] for prompt in asked]
        dtype, device = getattr(torch, args.dtype), args.device
        target, tokenizer = common.load_target(args.target, dtype=dtype, device=device)
        cli.plain_settings(target)
        options = args.second_turns, args.greedy, args.max_new_tokens
        maker = self_written.Maker(target, tokenizer, *options)
        held = maker.fill(args.out, args.make_data, requests, args.seed)
    print(f"train.py: {args.out} holds {len(held)} answers", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
