"""Train a drafter against a frozen target, or let the target write data.

    python train.py --make-data 2000 --out conversations.jsonl
    python train.py --method glide --data conversations.jsonl --minutes 30 --out checkpoints/mine
    torchrun --nproc-per-node 2 train.py --method glide --data FILES --steps 1000 --out DIR

A method's module supplies Config, build, loss and acceptance. This file
supplies data, optimizer, checkpoints and resuming for all methods.
accelerate handles processes, devices and mixed precision, so `accelerate
launch` works like torchrun. `--method NAME --help` lists a method's options.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

import common
from support import checkpoints, cli, data, pictures, talks
from support.features import Features

ANSWERS = cli.ROOT / "conversations" / "answers.jsonl.gz"  # of the default target; see --eval

# --------------------------------------------------------------------------- what a run needs


def check(args) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    out = Path(args.out)
    begun = (out / "training_state.pt").is_file()
    holds = not args.resume and (out / "config.json").is_file()
    remedy = "continue with --resume, or" if begun else f"start from it with --init {out} and"
    measured = ANSWERS in [Path(path).resolve() for path in args.data or []]
    common.refuse(
        (not args.data, "training needs --data, files of conversations (--make-data N)"),
        (measured, f"{ANSWERS.name} is what eval_alpha is measured on: leave it out of --data"),
        (bool(args.steps) == bool(args.minutes), "give --steps or --minutes, one of the two"),
        (args.resume and args.init, "--resume takes the weights in --out: leave out --init"),
        (args.resume and not begun, f"nothing to resume in {out}: leave out --resume to begin"),
        (holds, f"{out} already holds a drafter: {remedy} give another --out"),
        (out.is_file(), f"--out {out} is a file; name a folder for the drafter"),
    )


def launch(args) -> Accelerator:
    """The Accelerator; sets `args.device` if there are several processes."""
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        device_placement=False,  # tensors go where the target is
        mixed_precision="bf16" if args.bf16 else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    count = accelerator.num_processes
    if args.batch_size % (count * args.accumulate):
        raise common.Mistake(
            f"--batch-size {args.batch_size} must be a multiple of {count} processes x "
            f"--accumulate {args.accumulate}"
        )
    if count > 1:
        args.device = str(accelerator.device)
    return accelerator


def read_data(args, target, tokenizer) -> tuple[list, list, list]:
    """Sequences to train on, held-out ones, and those of `--eval`.

    Each is (token ids (T,), loss mask (T,)).
    """
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 2**31
    sequences = []
    for path in args.data:
        sequences += data.read_conversations(path, tokenizer, min(args.max_length, context))
    sequences = data.join_turns(sequences)
    border = len(sequences) - min(args.held_out, len(sequences) // 2)
    path = args.eval
    if path is None and args.target is None and ANSWERS.is_file():
        path = str(ANSWERS)
    answers = data.read_conversations(path, tokenizer, context) if path else []
    return sequences[:border], sequences[border:], answers


def start_drafter(args, module, target, counts: Tensor, overrides: dict, state: dict | None):
    """The drafter to train: new, resumed, or with weights of `--init`."""
    if state:
        drafter = module.Drafter(module.Config(**{**state["config"], **overrides}))
        drafter.load_state_dict(state["model"])
        return drafter
    if not args.init:
        return module.build(module.Config(**overrides), target, counts)
    start = common.load_drafter(module.Drafter, args.init, target)
    drafter = module.build(dataclasses.replace(start.config, **overrides), target, counts)
    try:
        missing, surplus = drafter.load_state_dict(start.state_dict(), strict=False)
    except RuntimeError as error:  # weights of other shapes
        reason = " ".join(str(error).split())[:160]
        raise common.Mistake(f"--init {args.init} does not fit the options: {reason}") from error
    if missing or surplus:
        names = ", ".join(missing + surplus)
        print(f"train.py: {args.init} lacks these weights, or has more: {names}", file=sys.stderr)
    return drafter


class LossStep(nn.Module):
    """The method's loss as a module's forward, for DistributedDataParallel."""

    def __init__(self, module, drafter, target):
        super().__init__()
        self.drafter = drafter
        self.loss = partial(module.loss, drafter, target)

    def forward(self, batch: common.Batch):
        return self.loss(batch)  # (sum, weight)


def learning_rate(progress: float, warmup: float) -> float:
    """Share of the peak: linear rise, flat, linear fall in the last fifth."""
    rise = (progress + 1e-3) / warmup if warmup else 1.0
    return min(rise, 1.0, (1 - progress) / 0.2)


def measure(module, drafter, target, measured: dict) -> dict:
    """The acceptance rate on each set of batches; None for an empty one."""
    row = {}
    drafter.eval()
    with torch.no_grad():
        for name, batches in measured.items():
            totals = [module.acceptance(drafter, target, batch) for batch in batches]
            accepted = sum(float(total) for total, _ in totals)
            count = sum(int(count) for _, count in totals)
            row[name] = round(accepted / max(1, count), 4) if batches else None
    drafter.train()
    return row


@contextlib.contextmanager
def interrupts():
    """Yield a list that Ctrl-C adds to, instead of ending the program."""
    caught = []
    text = b"train.py: measuring and saving; the same command with --resume continues\n"

    def note(*_):
        caught.append(True)
        os.write(2, text)  # a signal may come inside a print

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


# ----------------------------------------------------------------------------- training


class Run:
    """One training run: its data, drafter, optimizer and progress."""

    def __init__(self, args, module, overrides: dict):
        self.args = args
        self.out = Path(args.out)
        self.accelerator = launch(args)

        # 1. The frozen target and the conversations.
        dtype = getattr(torch, args.dtype)
        target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
        common.check_target(target)
        self.sequences, held_out, answers = read_data(args, target, tokenizer)
        self.identity = checkpoints.identity(args, target, self.sequences)

        # 2. The drafter: new, or as far as an earlier run has trained it.
        state = None
        self.at = checkpoints.Progress()
        if args.resume:
            state = checkpoints.read(self.out, module, self.identity, overrides)
            self.at = state["progress"]
        learned = torch.cat([ids[mask] for ids, mask in self.sequences])
        counts = torch.bincount(learned, minlength=common.target_shape(target)["vocab_size"])
        torch.manual_seed(args.seed)
        drafter = start_drafter(args, module, target, counts, overrides, state)
        self.drafter = drafter.to(target.device).float().train()
        self.out.mkdir(parents=True, exist_ok=True)  # fails early
        text = f"{len(self.sequences)} conversations, {len(learned)} tokens to learn"
        self.say(f"{text}; {len(held_out)} held out")

        # 3. The optimizer, which accelerate wraps together with the loss.
        weights = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        if state:
            optimizer.load_state_dict(state["optimizer"])
        model = LossStep(module, drafter, target)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

        # 4. What is fed in each step, and what is measured.
        self.features = Features(target, drafter.kv_layers, args.features)
        lengths = [len(ids) for ids, _ in self.sequences]
        self.order = data.steps(lengths, args.batch_size, args.seed, self.at.step)
        measured = {
            "alpha": self.features.batches(held_out),
            "eval_alpha": self.features.batches(answers),
        }
        self.measure = partial(measure, module, drafter, target, measured)

    def say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(f"train.py: {text}", file=sys.stderr)

    def loop(self) -> bool:
        """Train, measure and save to the end; returns True if Ctrl-C ended it early."""
        args = self.args
        at = self.at
        begin = time.monotonic() - at.seconds  # earlier sittings count
        share = at.share(args)
        stop = False
        hide = None if self.accelerator.is_main_process else True  # None: unless on a terminal
        bar = tqdm(total=args.steps, initial=at.step, desc=args.method, disable=hide)
        with interrupts() as caught, bar:
            while share < 1 and not stop:
                self.step(share)
                bar.update(1)
                # Clocks and signals of several processes differ: the first one decides.
                at.seconds = time.monotonic() - begin
                share, stop = broadcast_object_list([at.share(args), bool(caught)])
                ends = share >= 1 or stop
                if ends or at.step % args.eval_every == 0:
                    self.record()
                if ends or at.step % args.save_every == 0:
                    self.save()
        return share < 1

    def step(self, share: float) -> None:
        """One optimizer step; `share` is the completed part of the run.

        The losses of all parts and processes are summed. The gradient is
        divided once, by the step's total weight, and so does not depend on the
        split.
        """
        args = self.args
        at = self.at

        # 1. Sum the gradients of this process's parts.
        chosen, seeds = next(self.order)
        processes = self.accelerator.num_processes
        size = args.batch_size // (processes * args.accumulate)
        parts = list(zip(chosen.split(size), seeds.split(size)))
        parts = parts[self.accelerator.process_index :: processes]
        sums = torch.zeros(2)  # loss and weight
        for number, (rows, row_seeds) in enumerate(parts, 1):
            batch = self.features.batch([self.sequences[i] for i in rows], row_seeds, share)
            # DistributedDataParallel averages over the processes in the last part.
            last = number == len(parts)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                total, weight = self.model(batch)
                self.accelerator.backward(total)
            sums += torch.tensor([total.item(), float(weight)])

        # 2. Divide by the weight of all parts and processes.
        total, weight = self.accelerator.reduce(sums.to(total.device), "sum").tolist()
        weight = weight or 1.0  # the step may have nothing to learn
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= processes / weight
        loss = total / weight
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), args.clip))
        if not math.isfinite(loss + norm):
            raise common.Mistake(
                f"loss is {loss} and its gradient {norm} at step {at.step}: train anew with a "
                f"lower --lr than {args.lr} (what {args.out} holds stays as it is)"
            )

        # 3. Update the weights.
        self.optimizer.param_groups[0]["lr"] = args.lr * learning_rate(share, args.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.step += 1
        at.tokens += sum(int(self.sequences[i][1].sum()) for i in chosen)
        at.average = loss if at.average is None else 0.95 * at.average + 0.05 * loss

    def record(self) -> None:
        """Add a row to the curve."""
        at = self.at
        row = {"step": at.step, "tokens": at.tokens, "minutes": round(at.seconds / 60, 2)}
        row |= self.measure()
        row["loss"] = round(at.average, 4)
        at.curve.append(row)
        self.say(str(row))

    def save(self) -> None:
        """Write a checkpoint."""
        if self.accelerator.is_main_process:
            state = {
                "identity": self.identity,
                "config": dataclasses.asdict(self.drafter.config),
                "model": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": dataclasses.asdict(self.at),
            }
            checkpoints.save(self.drafter, self.out, state)


def train(args, module, overrides: dict) -> None:
    """Train a drafter; save it every `--save-every` steps and at the end."""
    check(args)
    run = Run(args, module, overrides)
    if run.at.share(args) >= 1:
        run.say(f"{args.out} is finished; to continue, give more --steps or --minutes")
    interrupted = run.loop()
    accelerator = run.accelerator
    if accelerator.is_main_process:
        last = run.at.curve[-1] if run.at.curve else {}
        told = {"method": args.method, "out": args.out, "interrupted": interrupted}
        print(json.dumps(told | last))
    # Free the wrapped model while all processes live; later it could hang.
    del run
    accelerator.free_memory()
    accelerator.end_training()


# ----------------------------------------------------------------------------- command line


def parse(argv: list[str]):
    """The options, with those of `--method`, and its module or None."""
    number = cli.number
    share = number(float, 0, 1)
    parser = cli.OneLineParser(description=__doc__)

    add = parser.add_argument_group("what to do").add_argument
    add("--method", choices=cli.present(), help="whose drafter to train")
    add("--make-data", type=number(int, 1), metavar="N", help="answers that --out is to hold")
    add("--plot", nargs="+", metavar="PATH", help="draw curves: a folder to draw in, then files")
    add("--out", help="checkpoint folder, or the file that --make-data appends to")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target")
    gpu = torch.cuda.is_available()
    add("--device", default="cuda" if gpu else "cpu", help="of torch")
    add("--seed", type=number(int, 0, 2**31), default=0, help="of all random choices")

    add = parser.add_argument_group("training").add_argument
    add("--data", nargs="+", metavar="FILE", help="conversations, .jsonl or .jsonl.gz")
    add("--eval", metavar="FILE", help="conversations to measure eval_alpha on")
    add("--steps", type=number(int, 1), help="optimizer steps")
    add("--minutes", type=number(float, 1e-3), help="train this long instead, in all sittings")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--init", metavar="DIR", help="start from this drafter")
    add("--features", metavar="DIR", help="keep the target's features here (2 kB a token)")
    add("--batch-size", type=number(int, 1), default=4, help="conversations a step, in all")
    add("--accumulate", type=number(int, 1), default=1, help="parts that a batch is split into")
    add("--lr", type=number(float, 0), default=2e-3, help="peak learning rate")
    add("--warmup", type=share, default=0.02, help="share of the run that warms up")
    add("--clip", type=number(float, 1e-6), default=1.0, help="largest gradient norm")
    add("--max-length", type=number(int, 2), default=512, help="tokens kept of a conversation")
    add("--bf16", action=argparse.BooleanOptionalAction, default=gpu, help="autocast to bfloat16")
    add("--held-out", type=number(int, 0), default=32, help="kept to measure alpha")
    add("--eval-every", type=number(int, 1), default=100, help="steps between measurements")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")

    add = parser.add_argument_group("--make-data").add_argument
    add("--requests", metavar="FILE", help="prompts to ask first, as those of bench.py")
    add("--second-turns", type=share, default=0.0, help="share of conversations with a second turn")
    add("--greedy", type=share, default=0.5, help="share answered greedily, the rest at T = 0.8")

    named = cli.method_named(argv)
    if not named or named[0] not in cli.present():
        return parser.parse_args(argv), None
    module = cli.import_method(named[0])
    if not hasattr(module, "Drafter"):
        ours = ", ".join(cli.trainable())
        raise common.Mistake(f"{named[0]} has nothing to train: take {ours}")
    cli.add_config_options(parser, module.Config)
    return parser.parse_args(argv), module


def make_data(args) -> None:
    """Let the target write conversations."""
    dtype = getattr(torch, args.dtype)
    requests = []
    if args.requests:
        prompts = data.read_prompts([Path(args.requests)], 0)
        requests = [prompt["turns"][0] for prompt in prompts]
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    maker = talks.Maker(target, tokenizer, args.second_turns, args.greedy)
    held = maker.fill(args.out, args.make_data, requests, args.seed)
    print(f"train.py: {args.out} holds {held} answers", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    args, module = parse(sys.argv[1:] if argv is None else argv)
    if args.plot:
        folder, *curves = args.plot
        if not curves:
            raise common.Mistake("--plot: name the curves to draw after the folder")
        pictures.check(folder)
        pictures.curves(curves, Path(folder))
        return
    if not (args.method or args.make_data):
        raise common.Mistake(
            "nothing to do: give --method NAME with --data and --out, --make-data N with --out, or "
            "--plot"
        )
    if not args.out:
        raise common.Mistake("give --out, a folder for the drafter or a file for conversations")
    if args.make_data:
        make_data(args)
        return
    fields = {option.name for option in dataclasses.fields(module.Config)} - {"target"}
    given = {name: value for name, value in vars(args).items() if value is not None}
    train(args, module, {name: value for name, value in given.items() if name in fields})


if __name__ == "__main__":
    cli.run(main)
