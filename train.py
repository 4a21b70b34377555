"""Train the drafter of any method against a frozen target, or let the target write the data.

    python train.py --method glide --data conversations.jsonl.gz --minutes 30 --out checkpoints/mine
    python train.py --make-data 2000 --out conversations.jsonl
    torchrun --nproc-per-node 2 train.py --method glide --data FILES --steps 1000 --out DIR

The method's module supplies Config, build, loss and alpha; this file supplies data, optimizer,
resume and checkpoints, and knows nothing about any method. `--method NAME --help` lists its
options.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common
from support import cli, data, pictures, stopping
from support.features import Features, fingerprint

# ------------------------------------------------------------------------------------------ batches


def make_batch(
    indices: list[int], sequences, features: Features, seed: Tensor, progress: float, device
) -> common.Batch:
    """Collate the sequences `indices` with their features."""
    ids = pad_sequence([sequences[i][0] for i in indices], batch_first=True).to(device)  # (B, T)
    mask = pad_sequence([sequences[i][1] for i in indices], batch_first=True).to(device)  # (B, T)
    hidden, kv = features.of(indices, ids)
    return common.Batch(ids, mask, hidden, kv, seed.to(device), progress)


class Order:
    """Which sequences a step trains on: nothing but the step's number decides.

    Every epoch is another permutation. So that little is computed for padding, WINDOW batches at a
    time are sorted by length, cut into batches, and shuffled as batches.

    Args: lengths: tokens of each sequence.
    """

    WINDOW = 32

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epochs: dict[int, list[int]] = {}

    def epoch(self, number: int) -> list[int]:
        """The permutation of an epoch; its first sequences complete the last one's last batch."""
        if number not in self.epochs:
            count = len(self.lengths)
            size = self.batch_size
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            order = torch.randperm(count, generator=generator)
            begun = -number * count % size
            parts = [order[:begun]]
            for window in order[begun:].split(self.WINDOW * size):
                window = window[self.lengths[window].argsort(stable=True)]
                whole = len(window) // size
                shuffled = torch.randperm(whole, generator=generator).tolist()
                parts += [window[i * size : (i + 1) * size] for i in shuffled]
                parts.append(window[whole * size :])
            self.epochs[number] = torch.cat(parts).tolist()
        return self.epochs[number]

    def step(self, step: int) -> tuple[list[int], Tensor]:
        """The sequences of a step (batch_size,), and a fresh seed (batch_size,) for each."""
        size = self.batch_size
        count = len(self.lengths)
        places = range(step * size, (step + 1) * size)
        chosen = [self.epoch(place // count)[place % count] for place in places]
        generator = torch.Generator().manual_seed(self.seed * 7_368_787 + step)
        return chosen, torch.randint(2**31, (size,), generator=generator)


def token_counts(sequences, vocab_size: int) -> Tensor:
    """How often each token (V,) is to be predicted; prompts do not count."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, mask in sequences:
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


# ---------------------------------------------------------------------------------------- processes


@dataclasses.dataclass
class Place:
    """Which process this is, of how many, and its device; torchrun sets RANK and WORLD_SIZE."""

    rank: int
    world: int
    device: str

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all processes, which so agree."""
        if self.world == 1:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return shared.tolist()


def shard(target, device: str, world: int) -> None:
    """Split the target's layers over the processes (FSDP2); the rest stays whole.

    A layer is gathered while it runs.
    """
    mesh = dist.init_device_mesh(device.partition(":")[0], (world,))
    parts = target.get_decoder().children()
    for layer in next(part for part in parts if isinstance(part, nn.ModuleList)):
        # each layer a root of its own, and roots stay gathered unless told
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    target.to(device)


class LossStep(nn.Module):
    """The method's loss as a module's forward, the form that DistributedDataParallel wants."""

    def __init__(self, module, drafter, target, base: dict):
        super().__init__()
        self.drafter = drafter
        self.loss = partial(module.loss, drafter, target, **base)

    def forward(self, batch: common.Batch) -> Tensor:
        return self.loss(batch)


# -------------------------------------------------------------------------------------- checkpoints


def save(drafter, out: Path, state: dict | None) -> None:
    """Write the training state, model.safetensors (bfloat16) and config.json, in this order.

    Each file appears by one rename; config.json, by which a drafter is known, comes last.

    Raises:
        ValueError: it cannot be written; what was in `out` is as before.
    """
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(part)
        (part / "README.md").unlink(missing_ok=True)  # the hub's model card template
        if state is not None:
            torch.save(state, part / "training_state.pt")
            (part / "curve.json").write_text(json.dumps(state["curve"]) + "\n")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk may raise any of these
        shutil.rmtree(part, ignore_errors=True)
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot save to {out} ({reason}); make room, then go on with --resume"
        ) from error
    for file in sorted(part.iterdir(), reverse=True):
        file.replace(out / file.name)
    part.rmdir()


@contextlib.contextmanager
def fitting(path):
    """One line for a file that is damaged, of another method, or at odds with the options."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot go on from {path} ({reason}); check --method, --target and the method's "
            "options, or train anew with another --out"
        ) from error


def start_drafter(args, module, target, counts: Tensor, overrides: dict, device: str):
    """The drafter to train: a new one, --resume's or --init's in a new one; a state or None."""
    shape = common.target_shape(target)
    out = Path(args.out)
    if args.resume:
        if not (out / "training_state.pt").is_file():
            raise ValueError(f"nothing to resume in {out}: no training_state.pt")
        with fitting(f"{out}/training_state.pt"):
            state = torch.load(out / "training_state.pt", map_location=device, weights_only=True)
            config = module.Config(**{**state["config"], **overrides})
            drafter = module.Drafter(config)
            drafter.load_state_dict(state["model"])
            if config.target != shape:
                raise ValueError("it was trained for another target")
        return drafter, state
    if args.init:
        start = common.load_drafter(module.Drafter, args.init, target)
        drafter = module.build(dataclasses.replace(start.config, **overrides), target, counts)
        with fitting(args.init):
            missing, surplus = drafter.load_state_dict(start.state_dict(), strict=False)
        other = sorted({*missing, *surplus})
        if other:
            words = f"{args.init} has no weights for these options, or more: {', '.join(other)}"
            print(f"train.py: {words}", file=sys.stderr)
        return drafter, None
    return module.build(module.Config(target=shape, **overrides), target, counts), None


def load_base(args, config, target) -> dict:
    """The method and drafter that this one builds on, as arguments of its loss; mostly none."""
    if not getattr(config, "base", ""):
        return {}
    base = cli.chain_proposer(config.base, "training_logits")
    path = args.base_checkpoint or f"checkpoints/{config.base}"
    return {"base": base, "base_drafter": common.load_drafter(base.Drafter, path, target)}


# --------------------------------------------------------------------------------------- evaluation


def evaluation_sequences(args, target, tokenizer, mark: str, place: Place) -> list:
    """The target's greedy answers to prompts, made once; alpha on these decides between recipes.

    Args: mark: the target's fingerprint. Returns: (token ids (T,), loss mask (T,)) of each.
    """
    paths = args.eval_prompts or sorted((cli.ROOT / "prompts").glob("*.jsonl"))
    paths = [Path(path) for path in paths]
    if not paths or not args.eval_answers:
        return []
    prompts = data.read_prompts(paths, 0)
    turns = sum(len(prompt["turns"]) for prompt in prompts)
    prompts = data.read_prompts(paths, max(1, len(prompts) * args.eval_answers // turns))
    mark = hashlib.sha256(repr((mark, prompts)).encode()).hexdigest()[:16]
    path = Path(args.features or args.out) / f"answers-{mark}.jsonl"
    if any(place.largest(float(not path.is_file()))):  # a sharded target needs all processes
        records = data.evaluation_answers(target, tokenizer, prompts)
        if not records:
            return []
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{place.rank}")
        part.write_text("".join(json.dumps(record) + "\n" for record in records))
        part.replace(path)
    return data.read_conversations(str(path), tokenizer, 2**31)


def in_batches(sequences, features: Features, device: str, size: int = 8) -> list[common.Batch]:
    """All sequences in order, to measure alpha on."""
    batches = []
    for start in range(0, len(sequences), size):
        part = list(range(start, min(start + size, len(sequences))))
        batches.append(make_batch(part, sequences, features, torch.tensor(part), 0.0, device))
    return batches


def acceptance(module, drafter, target, batches: list[common.Batch], base: dict) -> float | None:
    """The method's acceptance rate: over all positions of all batches, None if there are none."""
    if not batches:
        return None
    drafter.eval()
    with torch.no_grad():
        totals = [module.alpha(drafter, target, batch, **base) for batch in batches]
    drafter.train()
    count = sum(int(count) for _, count in totals)
    return round(float(sum(total for total, _ in totals)) / max(1, count), 4)


# ----------------------------------------------------------------------------------------- training


def learning_rate(args, progress: float) -> float:
    """Linear warm-up, then a cosine to zero over the run."""
    rise = min(1.0, (progress + 1e-3) / args.warmup) if args.warmup else 1.0
    return args.lr * rise * 0.5 * (1 + math.cos(math.pi * progress))


def backward(args, model, place: Place, chosen, sequences, features, seeds, progress):
    """The gradient of one step, of all processes together; returns (mean loss, loss tokens).

    A process takes its share of the `chosen` sequences in `--accumulate` parts. The losses of all
    parts are summed and divided by the tokens of the whole step. So how it is split up makes no
    difference to a loss that is a sum over tokens. One that is a mean over its own part, times the
    part's tokens (an acceptance head's, ctc_drafter's), becomes an average of the parts' means,
    weighed by their tokens, and does depend on it.
    """
    autocast = args.bf16 if args.bf16 is not None else place.device.startswith("cuda")
    total = sum(int(sequences[i][1].sum()) for i in chosen)
    loss_sum = torch.zeros((), device=place.device)
    size = args.batch_size // place.world // args.accumulate
    for part in range(args.accumulate):
        start = (place.rank * args.accumulate + part) * size
        mine = slice(start, start + size)
        batch = make_batch(chosen[mine], sequences, features, seeds[mine], progress, place.device)
        later = place.world > 1 and part < args.accumulate - 1  # gradients are averaged once
        with model.no_sync() if later else contextlib.nullcontext():
            with torch.autocast(place.device.split(":")[0], torch.bfloat16, enabled=autocast):
                loss = model(batch)
            (loss * place.world / total).backward()  # as an average over the processes is taken
        loss_sum += loss.detach()
    if place.world > 1:
        dist.all_reduce(loss_sum)
    return float(loss_sum) / total, total


def check(args) -> Place:
    """Refuse options that do not go together, before anything is loaded."""
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if (args.steps is None) == (args.minutes is None):
        raise ValueError("give either --steps or --minutes")
    if args.batch_size % world or (args.batch_size // world) % args.accumulate:
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of processes x --accumulate"
        )
    out = Path(args.out)
    if out.is_file():
        raise ValueError(f"--out {out} is a file; name a folder for the drafter")
    if (out / "config.json").is_file() and not args.resume:
        begun = (out / "training_state.pt").is_file()
        remedy = "pass --resume to go on with it" if begun else f"start from it with --init {out}"
        raise ValueError(f"{out} already holds a drafter; {remedy}, or give another --out")
    if args.shard_target and (world == 1 or args.features):
        raise ValueError(
            "--shard-target needs torchrun with two processes or more, and goes without --features"
        )
    many = world > 1 and args.device != "cpu"
    local = int(os.environ.get("LOCAL_RANK", rank))  # of several machines each counts its own
    return Place(rank, world, f"cuda:{local}" if many else args.device)


def load(args, place: Place):
    """The target, its tokenizer, and the sequences to train on and to hold out."""
    dtype = getattr(torch, args.dtype)
    device = "cpu" if args.shard_target else place.device
    target, tokenizer = common.load_target(args.target, dtype=dtype, device=device)
    vocab_size = common.target_shape(target)["vocab_size"]
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {args.target} has {len(tokenizer)} tokens and the model only "
            f"{vocab_size}; give a --target whose files belong together"
        )
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    length = min(args.max_length, context or args.max_length)
    sequences = []
    for path in args.data:
        sequences += data.read_conversations(path, tokenizer, length)
    held_out, sequences = data.hold_out(sequences, min(args.held_out, len(sequences) // 2))
    return target, tokenizer, data.join_turns(sequences), held_out


def train(args, overrides: dict) -> None:
    """Train one drafter; args.out has it after every `--save-every` steps and at the end."""
    module = importlib.import_module(args.method)
    place = check(args)
    out = Path(args.out)
    target, tokenizer, sequences, held_out = load(args, place)
    counts = token_counts(sequences, common.target_shape(target)["vocab_size"])
    torch.manual_seed(args.seed)
    drafter, state = start_drafter(args, module, target, counts, overrides, place.device)
    if place.world > 1:
        dist.init_process_group("nccl" if place.device.startswith("cuda") else "gloo")
    out.mkdir(parents=True, exist_ok=True)  # better to fail now than when there is much to lose
    mark = fingerprint(target) if args.features or args.eval_answers else ""
    if args.shard_target:
        shard(target, place.device, place.world)
    drafter = drafter.to(place.device).float().train()
    base = load_base(args, drafter.config, target)
    layers = [*drafter.kv_layers, *getattr(base.get("base_drafter"), "kv_layers", [])]
    answers = evaluation_sequences(args, target, tokenizer, mark, place)
    features = Features(target, sequences, layers, args.features, mark)
    features.compute_all()
    measured = {}
    for name, part in (("alpha", held_out), ("eval_alpha", answers)):
        own = Features(target, part, layers, args.features, mark)
        own.compute_all()
        measured[name] = in_batches(part, own, place.device)

    model = LossStep(module, drafter, target, base)
    if place.world > 1:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    order = Order([len(ids) for ids, _ in sequences], args.batch_size, args.seed)
    if state is None:
        state = {"step": 0, "tokens": 0, "curve": [], "seconds": 0.0, "average": None}
    else:
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    tokens = state["tokens"]
    curve = state["curve"]
    spent = state["seconds"]
    average = state["average"]

    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    begin = time.monotonic() - spent  # as if the run had never been away
    bar = tqdm(total=args.steps, initial=step, desc=args.method, disable=place.rank > 0 or None)
    while True:
        seconds = time.monotonic() - begin
        progress = step / args.steps if args.steps else seconds / 60 / args.minutes
        progress, stop = place.largest(progress, float(bool(interrupted)))
        ends = progress >= 1 or stop > 0
        known = bool(curve) and curve[-1]["step"] == step  # measured before it was interrupted
        if not known and (ends or (step and step % args.eval_every == 0)):
            row = {"step": step, "tokens": tokens, "minutes": round(seconds / 60, 2)}
            for name, batches in measured.items():
                row[name] = acceptance(module, drafter, target, batches, base)
            if hasattr(module, "labelled"):  # an acceptance head is judged on held-out data, too
                quality = stopping.head_quality(module, drafter, target, measured["alpha"], **base)
                row |= {name: round(value, 4) for name, value in quality.items()}
            row["loss"] = average and round(average, 4)
            curve.append(row)
            bar.set_postfix(
                {name: row[name] for name in ("loss", *measured)},
                tok_s=int(tokens / max(seconds, 1e-9)),
            )
            if place.rank == 0 and not sys.stderr.isatty():  # a log gets lines instead of a bar
                print(curve[-1], file=sys.stderr, flush=True)
        if place.rank == 0 and (ends or (step and step % args.save_every == 0)):
            state = {"config": dataclasses.asdict(drafter.config), "model": drafter.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "step": step, "tokens": tokens}
            state |= {"curve": curve, "seconds": seconds, "average": average}
            save(drafter, out, state)
        if ends:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, progress)
        chosen, seeds = order.step(step)
        loss, count = backward(args, model, place, chosen, sequences, features, seeds, progress)
        nn.utils.clip_grad_norm_(weights, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        average = loss if average is None else 0.95 * average + 0.05 * loss
        step += 1
        tokens += count
        bar.update(1)
    bar.close()
    if place.rank == 0:
        last = {"method": args.method, "out": str(out), "interrupted": stop > 0}
        print(json.dumps(last | curve[-1]))
    if place.world > 1:
        # were it the last to hold the process group, it could wait forever for a thread that wants
        # the GIL
        del model
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- command line


def parse(argv: list[str]):
    """The options, those of the `--method` in argv among them, and the method's module or None."""
    number = cli.number
    share = number(float, 0, 1)
    gpu = torch.cuda.is_available()
    parser = cli.OneLineParser(description=__doc__)

    add = parser.add_argument_group("what to do").add_argument
    add("--method", choices=cli.trainable(), help="whose drafter to train")
    add("--make-data", type=number(int, 1), metavar="N", help="have N conversations in --out")
    add("--out", help="checkpoint folder, or the file that --make-data appends to")
    add("--plot", nargs="+", metavar="PATH", help="draw curves: a folder to draw in, curve files")
    add("--target", type=cli.target, help=cli.TARGET_HELP)
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target")
    add("--device", type=cli.device, default="cuda" if gpu else "cpu", help="of torch")
    add("--seed", type=number(int, 0), default=0, help="of everything drawn")

    add = parser.add_argument_group("training").add_argument
    add("--data", nargs="+", metavar="FILE", help="conversations, .jsonl or .jsonl.gz")
    add("--steps", type=number(int, 1), help="optimizer steps")
    add("--minutes", type=number(float, 1e-3), help="train for this long instead")
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--init", metavar="DIR", help="start from this drafter")
    add("--base-checkpoint", metavar="DIR", help="drafter that the method builds on, if it does")
    add("--features", metavar="DIR", help="keep the target's features here (2 kB a token)")
    add("--batch-size", type=number(int, 1), default=4, help="conversations a step, in all")
    add("--accumulate", type=number(int, 1), default=1, help="parts of a process's share of a step")
    add("--lr", type=number(float, 0), default=2e-3, help="peak learning rate")
    add("--warmup", type=share, default=0.02, help="share of the run that warms up")
    add("--clip", type=number(float, 0), default=1.0, help="largest gradient norm")
    add("--max-length", type=number(int, 2), default=512, help="tokens kept of a conversation")
    add("--bf16", action=argparse.BooleanOptionalAction, help="autocast (default: on a GPU)")
    add("--shard-target", action="store_true", help="split a large target over processes (FSDP2)")
    add("--held-out", type=number(int, 0), default=32, help="last conversations, kept for alpha")
    add("--eval-prompts", nargs="+", metavar="FILE", help="for eval_alpha (default: prompts/)")
    add("--eval-answers", type=number(int, 0), default=32, help="target's answers to these, about")
    add("--eval-every", type=number(int, 1), default=100, help="steps between measurements")
    add("--save-every", type=number(int, 1), default=500, help="steps between checkpoints")

    add = parser.add_argument_group("--make-data").add_argument
    add("--requests", metavar="FILE", help="asked first: one a line, or FastChat's .jsonl")
    add("--openings", metavar="FILE", help="lines with which the target's own requests begin")
    add("--second-turns", type=share, default=0.0, help="share of conversations with a second turn")
    add("--greedy", type=share, default=0.5, help="share answered greedily, the rest at T = 0.8")
    add("--data-batch", type=number(int, 1), default=64, help="conversations at a time")

    module = None
    for name in cli.method_named(argv)[:1]:
        if name in cli.METHODS:
            module = cli.import_method(name)
            if not hasattr(module, "build"):
                raise ValueError(f"{name} has nothing to train: it works on another's drafter")
            cli.add_config_options(parser, module.Config)
    return parser.parse_args(argv), module


def main(argv: list[str] | None = None) -> None:
    args, module = parse(sys.argv[1:] if argv is None else argv)
    if args.plot:
        folder, *curves = args.plot
        print(*pictures.curves(curves, Path(folder)))
        return
    if not (args.method or args.make_data):
        raise ValueError(
            "nothing to do: give --method NAME with --data and --out, --make-data N with --out, or "
            "--plot"
        )
    if not args.out:
        raise ValueError("give --out, a folder for the drafter or a file for conversations")
    if args.make_data:
        requests = data.read_requests(args.requests) if args.requests else []
        openings = data.read_lines(args.openings) if args.openings else []
        dtype = getattr(torch, args.dtype)
        target, tokenizer = common.load_target(args.target, dtype=dtype, device=args.device)
        rest = (args.seed, args.data_batch, requests, openings, args.second_turns, args.greedy)
        data.make_conversations(target, tokenizer, args.make_data, args.out, *rest)
        return
    if not args.data:
        raise ValueError("training needs --data, files of conversations (--make-data N makes one)")
    fields = {option.name for option in dataclasses.fields(module.Config)} - {"target"}
    given = {name: value for name, value in vars(args).items() if value is not None}
    train(args, {name: value for name, value in given.items() if name in fields})


if __name__ == "__main__":
    cli.run(main)
