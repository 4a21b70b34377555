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
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from tqdm import tqdm

import common
from support import checkpoints, cli, data, pictures, talks
from support.features import Features, check_trainable

ANSWERS = cli.ROOT / "conversations" / "answers.jsonl.gz"  # of the default target; see --eval

# --------------------------------------------------------------------------- what a run needs


def read_data(args, target, tokenizer) -> tuple[list, list, list]:
    """Sequences to train on, held-out ones, and those of `--eval`.

    Each is (token ids (T,), loss mask (T,)).
    """
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 2**31
    sequences = []
    for path in args.data:
        sequences += data.read_conversations(path, tokenizer, min(args.max_length, context))
    held_out, sequences = data.hold_out(sequences, min(args.held_out, len(sequences) // 2))
    path = args.eval
    if path is None and args.target is None and ANSWERS.is_file():
        path = str(ANSWERS)
    measured = data.read_conversations(path, tokenizer, context) if path else []
    return data.join_turns(sequences), held_out, measured


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


# --------------------------------------------------------------------------- a step of training


def learning_rate(progress: float, warmup: float) -> float:
    """Share of the peak: linear rise, flat, linear fall in the last fifth."""
    rise = (progress + 1e-3) / warmup if warmup else 1.0
    return min(rise, 1.0, (1 - progress) / 0.2)


class LossStep(nn.Module):
    """The method's loss as a module's forward, for DistributedDataParallel."""

    def __init__(self, module, drafter, target):
        super().__init__()
        self.drafter = drafter
        self.loss = partial(module.loss, drafter, target)

    def forward(self, batch: common.Batch) -> tuple[Tensor, Tensor]:
        total, weight = self.loss(batch)
        return total, torch.as_tensor(weight, dtype=total.dtype, device=total.device)


def backward(accelerator, model, parts: list) -> float:
    """Compute the gradient of one step; returns the mean loss.

    The losses of all parts and processes are summed. The gradient is divided
    once, by the step's total weight, and so does not depend on the split.

    parts: functions that make the batches of this process.
    """
    sums = torch.zeros(2, device=next(model.parameters()).device)  # loss and weight
    for part in parts:
        # DistributedDataParallel averages over the processes in the last part.
        last = part is parts[-1]
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            total, weight = model(part())
            accelerator.backward(total)
        sums += torch.stack([total.detach(), weight]).float()
    total, weight = accelerator.reduce(sums, "sum").tolist()
    weight = weight or 1.0  # the step may have nothing to learn
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= accelerator.num_processes / weight
    return total / weight


def check_finite(args, step: int, **numbers: float) -> None:
    """Raise a Mistake if a number is nan or infinite."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise common.Mistake(
                f"{name} is {value} at step {step}: train anew with a lower --lr than {args.lr} "
                f"(what {args.out} holds stays as it is)"
            )


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

    def note(*_):
        caught.append(True)
        text = "train.py: measuring and saving; the same command with --resume goes on"
        print(text, file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def check(args) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    out = Path(args.out)
    if not args.data:
        raise common.Mistake("training needs --data, files of conversations (--make-data N)")
    if ANSWERS.resolve() in (Path(path).resolve() for path in args.data):
        raise common.Mistake(
            f"{ANSWERS.name} is what eval_alpha is measured on: leave it out of --data, for "
            "example by conversations/smollm2_*.jsonl.gz"
        )
    if (args.steps is None) == (args.minutes is None):
        raise common.Mistake("give --steps or --minutes, one of the two")
    if args.resume and args.init:
        raise common.Mistake("--resume goes on with the weights in --out: leave out --init")
    if args.resume and not (out / "training_state.pt").is_file():
        raise common.Mistake(f"nothing to resume in {out}: leave out --resume to begin")
    if out.is_file():
        raise common.Mistake(f"--out {out} is a file; name a folder for the drafter")
    if (out / "config.json").is_file() and not args.resume:
        begun = (out / "training_state.pt").is_file()
        remedy = "pass --resume to go on with it" if begun else f"start from it with --init {out}"
        raise common.Mistake(f"{out} already holds a drafter; {remedy}, or give another --out")


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


class Run:
    """One training run: its drafter, data, optimizer and progress."""

    def __init__(self, args, module, overrides: dict):
        self.args = args
        self.out = Path(args.out)
        self.accelerator = launch(args)
        # 1. The frozen target and the conversations.
        dtype = getattr(torch, args.dtype)
        target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
        check_trainable(target, tokenizer)
        self.sequences, *other = read_data(args, target, tokenizer)
        self.identity = checkpoints.identity(args, target, self.sequences)

        # 2. The drafter, and the progress of a resumed run.
        state, self.at = None, checkpoints.Progress()
        if args.resume:
            state, self.at = checkpoints.read(self.out, module, self.identity, overrides)
        counts = data.token_counts(self.sequences, common.target_shape(target)["vocab_size"])
        torch.manual_seed(args.seed)
        drafter = start_drafter(args, module, target, counts, overrides, state)
        self.drafter = drafter.to(target.device).float().train()
        self.finished = self.at.share(args) >= 1
        if self.finished:
            return
        self.out.mkdir(parents=True, exist_ok=True)  # fails early
        if self.accelerator.is_main_process:
            tokens = sum(int(mask.sum()) for _, mask in self.sequences)
            text = f"train.py: {len(self.sequences)} conversations, {tokens} tokens to learn"
            print(text, file=sys.stderr, flush=True)

        # 3. The target's features of all sequences.
        measured = {}
        for name, part in zip(("alpha", "eval_alpha"), other):
            measured[name] = Features(target, part, drafter.kv_layers, args.features).batches(name)
        self.measure = partial(measure, module, drafter, target, measured)
        self.features = Features(target, self.sequences, drafter.kv_layers, args.features)
        self.features.compute_all()

        # 4. The optimizer, which accelerate wraps together with the loss.
        weights = [p for p in drafter.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        if state:
            optimizer.load_state_dict(state["optimizer"])
        model = LossStep(module, drafter, target)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        lengths = [len(ids) for ids, _ in self.sequences]
        self.order = data.Order(lengths, args.batch_size, args.seed)

    def step(self, share: float) -> None:
        """One optimizer step; `share` is the completed part of the run."""
        args = self.args
        at = self.at
        # 1. Take this process's sequences, in `--accumulate` parts.
        chosen, seeds = self.order.step(at.step)
        size = args.batch_size // self.accelerator.num_processes // args.accumulate
        first = self.accelerator.process_index * args.accumulate * size
        parts = []
        for start in range(first, first + args.accumulate * size, size):
            mine = slice(start, start + size)
            parts.append(partial(self.features.batch, chosen[mine], seeds[mine], share))

        # 2. Compute the gradient of the whole step.
        loss = backward(self.accelerator, self.model, parts)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), args.clip)
        check_finite(args, at.step, loss=loss, gradient=float(norm))

        # 3. Update the weights.
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(share, args.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        at.step += 1
        at.tokens += sum(int(self.sequences[i][1].sum()) for i in chosen)
        at.average = loss if at.average is None else 0.95 * at.average + 0.05 * loss

    def record(self) -> dict:
        """Add a row to the curve."""
        at = self.at
        row = {"step": at.step, "tokens": at.tokens, "minutes": round(at.seconds / 60, 2)}
        row |= self.measure()
        alphas = {name: row[name] for name in ("alpha", "eval_alpha") if row[name] is not None}
        check_finite(self.args, at.step, **alphas)
        row["loss"] = at.average and round(at.average, 4)
        at.curve.append(row)
        if self.accelerator.is_main_process and not sys.stderr.isatty():
            print(row, file=sys.stderr, flush=True)  # in place of the bar
        return row

    def save(self) -> None:
        """Write a checkpoint."""
        state = {
            "identity": self.identity,
            "config": dataclasses.asdict(self.drafter.config),
            "model": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dataclasses.asdict(self.at),
        }
        checkpoints.save(self.drafter, self.out, state)

    def agree(self, *numbers: float) -> list[float]:
        """The mean of each number over processes, whose clocks may differ."""
        if self.accelerator.num_processes == 1:
            return list(numbers)
        ours = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.reduce(ours, "mean").tolist()

    def go(self) -> bool:
        """Train to the end; returns True if Ctrl-C ended it early."""
        args = self.args
        at = self.at
        main = self.accelerator.is_main_process
        begin = time.monotonic() - at.seconds  # earlier sittings count
        hide = None if main else True  # None: unless on a terminal
        bar = tqdm(total=args.steps, initial=at.step, desc=args.method, disable=hide)
        with interrupts() as caught, bar:
            while True:
                at.seconds = time.monotonic() - begin
                share, stop = self.agree(at.share(args), float(bool(caught)))
                ends = share >= 1 or stop > 0
                known = bool(at.curve) and at.curve[-1]["step"] == at.step
                if not known and (ends or (at.step and at.step % args.eval_every == 0)):
                    row = self.record()
                    shown = {name: row[name] for name in ("loss", "alpha", "eval_alpha")}
                    bar.set_postfix(shown, tok_s=int(at.tokens / max(at.seconds, 1e-9)))
                if main and (ends or (at.step and at.step % args.save_every == 0)):
                    self.save()
                if ends:
                    return share < 1
                self.step(share)
                bar.update(1)


def train(args, module, overrides: dict) -> None:
    """Train a drafter; save it every `--save-every` steps and at the end."""
    check(args)
    run = Run(args, module, overrides)
    interrupted = False
    if run.finished:
        text = f"train.py: {args.out} is finished; to continue, give more --steps or --minutes"
        print(text, file=sys.stderr)
    else:
        interrupted = run.go()
    accelerator = run.accelerator
    if accelerator.is_main_process:
        last = {"method": args.method, "out": args.out, "interrupted": interrupted}
        if run.at.curve:
            last |= run.at.curve[-1]
        print(json.dumps(last))
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
    add("--make-data", type=number(int, 1), metavar="N", help="conversations to be written")
    add("--plot", nargs="+", metavar="PATH", help="draw curves: a folder to draw in, then files")
    add("--out", help="checkpoint folder, or the file that --make-data appends to")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target")
    gpu = torch.cuda.is_available()
    add("--device", default="cuda" if gpu else "cpu", help="of torch")
    add("--seed", type=number(int, 0), default=0, help="of all random choices")

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
    add("--held-out", type=number(int, 0), default=32, help="kept to measure alpha, at most half")
    add("--eval-every", type=number(int, 1), default=100, help="steps between measurements")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")

    add = parser.add_argument_group("--make-data").add_argument
    add("--requests", metavar="FILE", help="ask these first: one a line, or FastChat's .jsonl")
    add("--second-turns", type=share, default=0.0, help="share of conversations with a second turn")
    add("--greedy", type=share, default=0.5, help="share answered greedily, the rest at T = 0.8")

    module = None
    for name in cli.method_named(argv)[:1]:
        if name in cli.present():
            module = cli.import_method(name)
            if not hasattr(module, "Drafter"):
                ours = ", ".join(cli.trainable())
                raise common.Mistake(f"{name} has nothing to train: take {ours}")
            cli.add_config_options(parser, module.Config)
    return parser.parse_args(argv), module


def make_data(args) -> None:
    """Let the target write conversations."""
    dtype = getattr(torch, args.dtype)
    requests = data.read_requests(args.requests) if args.requests else []
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
    maker = talks.Maker(target, tokenizer, args.second_turns, args.greedy)
    maker.fill(args.out, args.make_data, requests, args.seed)


def main(argv: list[str] | None = None) -> None:
    args, module = parse(sys.argv[1:] if argv is None else argv)
    if args.plot:
        folder, *curves = args.plot
        if not curves:
            raise common.Mistake("--plot: name the curves to draw after the folder")
        pictures.check(folder)
        print(*pictures.curves(curves, Path(folder)))
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
