"""Train the drafter of any method against a frozen target, or let the target write the training
data.

    python train.py --method glide --data conversations.jsonl.gz --minutes 30 --out
    checkpoints/glide python train.py --make-data 2000 --out conversations.jsonl
    torchrun --nproc-per-node 2 train.py --method glide --data ... --steps 1000 --out ...

The method's module supplies Config, build, loss and alpha; this file supplies data, features of the
target, optimizer, resume and checkpoints, and knows nothing about any method.
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
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import common
from support import cli, data

# --------------------------------------------------------------------------------------------- data


class Features:
    """The frozen target's view of the training sequences, computed when needed or once and kept in
    `folder`.

    With a folder, sequences are taken in order of length, 32 to a file of bfloat16 tensors; a file
    is written whole or not at all, serves every later run with the same data and target, and grows
    when other layers' K/V are wanted.
    """

    GROUP = 32

    def __init__(self, target, sequences, layers: list[int], folder: str | None):
        self.target, self.ids, self.layers = (
            target,
            [ids for ids, _ in sequences],
            sorted(set(layers)),
        )
        self.folder = None
        if folder:
            mark = hashlib.sha256(repr((common.target_shape(target), str(target.dtype))).encode())
            mark.update(common.head_weight(target)[0].float().cpu().numpy().tobytes())
            for ids in self.ids:
                mark.update(ids.numpy().tobytes())
            self.folder = Path(folder) / mark.hexdigest()[:16]
            self.folder.mkdir(parents=True, exist_ok=True)
            order = sorted(range(len(self.ids)), key=lambda i: (len(self.ids[i]), i))
            self.groups = [order[i : i + self.GROUP] for i in range(0, len(order), self.GROUP)]
            self.place = {
                index: (g, row)
                for g, group in enumerate(self.groups)
                for row, index in enumerate(group)
            }
            self.files: dict[int, object] = {}

    def compute_all(self) -> None:
        """Write the files that are missing, with a progress bar."""
        for group in (
            tqdm(range(len(self.groups)), desc="target features", disable=None)
            if self.folder
            else ()
        ):
            self._open(group)

    def _open(self, group: int):
        names = ["hidden", *(f"{kind}{layer}" for layer in self.layers for kind in "kv")]
        path = self.folder / f"{group:05d}.safetensors"
        if group not in self.files:
            have = []
            with (
                contextlib.suppress(FileNotFoundError, SafetensorError),
                safe_open(path, "pt") as file,
            ):
                have = list(file.keys())  # a damaged file is written anew
            if set(names) - set(have):
                layers = sorted(
                    set(self.layers) | {int(name[1:]) for name in have if name != "hidden"}
                )
                ids = pad_sequence([self.ids[i] for i in self.groups[group]], batch_first=True)
                hidden, kv = common.target_features(self.target, ids.to(self.target.device), layers)
                tensors = (
                    {"hidden": hidden}
                    | {f"k{n}": kv[n][0] for n in layers}
                    | {f"v{n}": kv[n][1] for n in layers}
                )
                part = path.with_suffix(f".{os.getpid()}")
                try:
                    save_file(
                        {
                            name: x.to("cpu", torch.bfloat16).contiguous()
                            for name, x in tensors.items()
                        },
                        part,
                    )
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
            self.files[group] = safe_open(path, "pt")
        return self.files[group]

    def of(self, indices: list[int], input_ids: Tensor) -> tuple[Tensor, dict]:
        """hidden (B, T, D) and kv {layer: (K, V)} of the right-padded sequences `input_ids` (B,
        T)."""
        if self.folder is None:
            return common.target_features(self.target, input_ids, self.layers)
        columns: dict[str, list[Tensor]] = {}
        for index in indices:
            group, row = self.place[index]
            for name in ["hidden", *(f"{kind}{layer}" for layer in self.layers for kind in "kv")]:
                part, n = self._open(group).get_slice(name), len(self.ids[index])
                rows = part[row, :n] if name == "hidden" else part[row, :, :n].transpose(0, 1)
                columns.setdefault(name, []).append(rows)  # (T_i, ...)
        stacked = {
            name: pad_sequence(rows, batch_first=True).to(input_ids.device)
            for name, rows in columns.items()
        }
        kv = {
            n: (stacked[f"k{n}"].transpose(1, 2), stacked[f"v{n}"].transpose(1, 2))
            for n in self.layers
        }
        return stacked["hidden"], kv


# ----------------------------------------------------------------------------------------- training


class LossStep(nn.Module):
    """The method's loss as a module's forward, the shape that DistributedDataParallel wants."""

    def __init__(self, module, drafter, target, base: dict):
        super().__init__()
        self.drafter = drafter
        self.call = lambda batch: module.loss(drafter, target, batch, **base)

    def forward(self, batch: common.Batch) -> Tensor:
        return self.call(batch)


def make_batch(
    indices: list[int], sequences, features: Features, seed: Tensor, progress: float, device
) -> common.Batch:
    """Collate the sequences `indices` with their features."""
    ids = pad_sequence([sequences[i][0] for i in indices], batch_first=True).to(device)
    mask = pad_sequence([sequences[i][1] for i in indices], batch_first=True).to(device)
    lengths = torch.tensor([len(sequences[i][0]) for i in indices], device=device)
    hidden, kv = features.of(indices, ids)
    return common.Batch(ids, mask, lengths, hidden, kv, seed.to(device), progress)


def sequences_of_step(
    step: int, count: int, batch_size: int, seed: int
) -> tuple[list[int], Tensor]:
    """Which sequences step `step` trains on, and a fresh seed for each. Every epoch is a new
    permutation."""
    chosen = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place // count)
        chosen.append(int(torch.randperm(count, generator=generator)[place % count]))
    seeds = torch.randint(
        2**31, (batch_size,), generator=torch.Generator().manual_seed(seed * 7_368_787 + step)
    )
    return chosen, seeds


def held_out_alpha(module, drafter, target, batches: list[common.Batch], base: dict) -> float:
    """The method's acceptance rate on held-out conversations."""
    drafter.eval()
    with torch.no_grad():
        totals = [module.alpha(drafter, target, batch, **base) for batch in batches]
    drafter.train()
    return float(sum(total for total, _ in totals)) / max(1, int(sum(count for _, count in totals)))


def save(drafter, out: Path, state: dict | None) -> None:
    """Write the training state, model.safetensors (bfloat16) and config.json, each file by one
    rename, in this order.

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
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # what a full disk makes of each of these
        shutil.rmtree(part, ignore_errors=True)
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot save to {out} ({reason}); make room, then go on with --resume"
        ) from error
    for file in sorted(
        part.iterdir(), reverse=True
    ):  # config.json, by which a drafter is known, comes last
        file.replace(out / file.name)
    part.rmdir()


def shard(target, device: str, world: int) -> None:
    """Split the target's layers over the processes (FSDP2): each is gathered while it runs. The
    rest stays whole."""
    mesh = dist.init_device_mesh(device.partition(":")[0], (world,))
    for layer in next(
        part for part in target.base_model.children() if isinstance(part, nn.ModuleList)
    ):
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=True
        )  # a root of its own; roots stay gathered unless told
    target.to(device)


@contextlib.contextmanager
def fitting(path):
    """One line for a file that is damaged, of another method, or at odds with the options."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot go on from {path} ({reason}); check --method, --target and the method's "
            "options, or "
            "train anew with another --out"
        ) from error


def train(args, config_overrides: dict) -> None:
    """Train one drafter; see the options. The result is in args.out after every `--save-every`
    steps and at the end."""
    module = importlib.import_module(args.method)
    if not hasattr(module, "build"):
        raise ValueError(
            f"{args.method} has nothing to train: it works on another method's drafter"
        )
    if (args.steps is None) == (args.minutes is None):
        raise ValueError("give either --steps or --minutes")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    out, device = (
        Path(args.out),
        args.device if world == 1 or args.device == "cpu" else f"cuda:{rank}",
    )
    if args.batch_size % world or (args.batch_size // world) % args.accumulate:
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of processes x --accumulate"
        )
    if (out / "config.json").is_file() and not args.resume:
        raise ValueError(
            f"{out} already holds a drafter; pass --resume to go on with it, or another --out"
        )
    if args.shard_target and (world == 1 or args.features):
        raise ValueError(
            "--shard-target needs torchrun with two processes or more, and goes without --features"
        )
    place = "cpu" if args.shard_target else device
    target, tokenizer = common.load_target(
        args.target, dtype=getattr(torch, args.dtype), device=place
    )
    shape, context = (
        common.target_shape(target),
        getattr(target.config, "max_position_embeddings", None),
    )
    if len(tokenizer) > shape["vocab_size"]:
        raise ValueError(
            f"the tokenizer of {args.target} has {len(tokenizer)} tokens and the model only "
            f"{shape['vocab_size']}; give a --target whose files belong together"
        )
    length = min(args.max_length, context or args.max_length)
    sequences = [
        each for path in args.data for each in data.read_conversations(path, tokenizer, length)
    ]
    held = min(args.held_out, len(sequences) // 2)
    held_out, sequences = data.hold_out(sequences, held)

    counts = torch.zeros(shape["vocab_size"], dtype=torch.long)
    for ids, mask in sequences:
        counts += torch.bincount(ids[mask], minlength=len(counts))
    torch.manual_seed(args.seed)
    state = None
    if args.resume:
        if not (out / "training_state.pt").is_file():
            raise ValueError(f"nothing to resume in {out}: no training_state.pt")
        with fitting(f"{out}/training_state.pt"):
            state = torch.load(out / "training_state.pt", map_location=device, weights_only=True)
            config = module.Config(**{**state["config"], **config_overrides})
            drafter = module.Drafter(config)
            drafter.load_state_dict(state["model"])
            if config.target != shape:
                raise ValueError("it was trained for another target")
    elif args.init:
        start = common.load_drafter(module.Drafter, args.init, target)
        config = dataclasses.replace(start.config, **config_overrides)
        drafter = module.Drafter(config)
        with fitting(args.init):
            drafter.load_state_dict(start.state_dict(), strict=False)
    else:
        config = module.Config(target=shape, **config_overrides)
        drafter = module.build(config, target, counts)
    if world > 1:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    if args.shard_target:
        shard(target, device, world)
    drafter = drafter.to(device).float().train()
    base = {}
    if getattr(config, "base", ""):
        base["base"] = cli.chain_proposer(config.base, "training_logits")
        path = args.base_checkpoint or f"checkpoints/{config.base}"
        base["base_drafter"] = common.load_drafter(base["base"].Drafter, path, target)
    out.mkdir(
        parents=True, exist_ok=True
    )  # better to fail now than when there is something to lose
    layers = [*drafter.kv_layers, *getattr(base.get("base_drafter"), "kv_layers", [])]
    features = Features(target, sequences, layers, args.features)
    held_features = Features(target, held_out, layers, args.features)
    for each in (features, held_features):
        each.compute_all()
    parts = [list(range(i, min(i + 8, held))) for i in range(0, held, 8)]
    held_batches = [
        make_batch(part, held_out, held_features, torch.tensor(part), 0.0, device) for part in parts
    ]

    model = LossStep(module, drafter, target, base)
    model = (
        nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        if world > 1
        else model
    )
    weights = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    step, tokens, curve, spent, average = 0, 0, [], 0.0, None
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        step, tokens, curve, spent, average = (
            state[key] for key in ("step", "tokens", "curve", "seconds", "average")
        )

    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(True))
    begin, autocast = (
        time.monotonic() - spent,
        args.bf16 if args.bf16 is not None else device.startswith("cuda"),
    )
    bar = tqdm(
        total=args.steps, initial=step, desc=args.method, disable=None if rank == 0 else True
    )
    while True:
        seconds = time.monotonic() - begin
        progress = step / args.steps if args.steps else seconds / 60 / args.minutes
        if world > 1:  # all processes must agree on the clock and on an interrupt
            shared = torch.tensor([progress, float(bool(stop))], device=device)
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            progress, stop = float(shared[0]), [True] if shared[1] else []
        finished = progress >= 1
        if (
            finished
            or stop
            or (step and step % args.eval_every == 0 and not (curve and curve[-1]["step"] == step))
        ):
            alpha = held_out_alpha(module, drafter, target, held_batches, base)
            curve.append(
                {
                    "step": step,
                    "tokens": tokens,
                    "minutes": round(seconds / 60, 2),
                    "alpha": round(alpha, 4),
                    "loss": average and round(average, 4),
                }
            )
            bar.set_postfix(
                loss=curve[-1]["loss"], alpha=f"{alpha:.3f}", tok_s=int(tokens / max(seconds, 1e-9))
            )
            if rank == 0 and not sys.stderr.isatty():  # a log gets lines instead of a bar
                print(curve[-1], file=sys.stderr, flush=True)
        if rank == 0 and (finished or stop or (step and step % args.save_every == 0)):
            save(
                drafter,
                out,
                {
                    "config": dataclasses.asdict(config),
                    "model": drafter.state_dict(),
                    "step": step,
                    "tokens": tokens,
                    "optimizer": optimizer.state_dict(),
                    "curve": curve,
                    "seconds": seconds,
                    "average": average,
                },
            )
        if finished or stop:
            break
        for group in optimizer.param_groups:  # linear warm-up, then cosine to zero
            rise = min(1.0, (progress + 1e-3) / args.warmup) if args.warmup else 1.0
            group["lr"] = args.lr * rise * 0.5 * (1 + math.cos(math.pi * progress))
        chosen, seeds = sequences_of_step(step, len(sequences), args.batch_size, args.seed)
        total = sum(
            int(sequences[i][1].sum()) for i in chosen
        )  # loss tokens of the whole step, over all processes
        loss_sum = torch.zeros((), device=device)
        micro = args.batch_size // world // args.accumulate
        for part in range(args.accumulate):
            mine = range(
                (rank * args.accumulate + part) * micro, (rank * args.accumulate + part + 1) * micro
            )
            batch = make_batch(
                [chosen[i] for i in mine], sequences, features, seeds[list(mine)], progress, device
            )
            more = world > 1 and part < args.accumulate - 1
            with model.no_sync() if more else contextlib.nullcontext():
                with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=autocast):
                    loss = model(batch)
                (loss * world / total).backward()  # DistributedDataParallel averages over processes
            loss_sum += loss.detach()
        if world > 1:
            dist.all_reduce(loss_sum)
        nn.utils.clip_grad_norm_(weights, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        now = float(loss_sum) / total
        average = now if average is None else 0.95 * average + 0.05 * now
        step, tokens = step + 1, tokens + total
        bar.update(1)
    bar.close()
    if rank == 0:
        print(
            json.dumps(
                {"method": args.method, "out": str(out), "interrupted": bool(stop), **curve[-1]}
            )
        )
    if world > 1:
        # were it the last to hold the process group, it could wait forever for a thread that wants
        # the GIL
        del model
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> None:
    parser = cli.OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = cli.number
    parser.add_argument("--method", choices=cli.METHODS, help="whose drafter to train")
    parser.add_argument(
        "--target", help="Hugging Face id, folder or .gguf (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--data", nargs="+", help="conversations, files of .jsonl or .jsonl.gz")
    parser.add_argument(
        "--out", required=True, help="checkpoint folder, or the file that --make-data appends to"
    )
    parser.add_argument(
        "--make-data", type=number(int, 1), metavar="N", help="have N conversations in --out"
    )
    parser.add_argument("--steps", type=number(int, 1), help="optimizer steps")
    parser.add_argument("--minutes", type=number(float, 1e-3), help="train for this long instead")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--init", metavar="DIR", help="start from this drafter")
    parser.add_argument(
        "--base-checkpoint", metavar="DIR", help="drafter that the method builds on, if it does"
    )
    parser.add_argument(
        "--features", metavar="DIR", help="keep the target's features here (2 kB a token)"
    )
    parser.add_argument(
        "--batch-size",
        type=number(int, 1),
        default=4,
        help="conversations a step, over all processes",
    )
    parser.add_argument(
        "--accumulate", type=number(int, 1), default=1, help="parts of a process's share of a step"
    )
    parser.add_argument("--lr", type=number(float, 0), default=2e-3, help="peak learning rate")
    parser.add_argument(
        "--warmup", type=number(float, 0, 1), default=0.02, help="share of the run that warms up"
    )
    parser.add_argument("--clip", type=number(float, 0), default=1.0, help="largest gradient norm")
    parser.add_argument(
        "--max-length", type=number(int, 2), default=512, help="tokens kept of a conversation"
    )
    parser.add_argument(
        "--held-out",
        type=number(int, 0),
        default=32,
        help="last conversations, to measure alpha on",
    )
    parser.add_argument(
        "--eval-every", type=number(int, 1), default=100, help="steps between measurements of alpha"
    )
    parser.add_argument(
        "--save-every", type=number(int, 1), default=500, help="steps between checkpoints"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0)
    parser.add_argument(
        "--shard-target",
        action="store_true",
        help="split a large target over the processes (FSDP2)",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of the target"
    )
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="bfloat16 autocast (default: on a GPU)",
    )
    parser.add_argument(
        "--device", type=cli.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--data-batch", type=number(int, 1), default=16, help="--make-data: conversations at a time"
    )
    argv = sys.argv[1:] if argv is None else argv
    known, _ = parser.parse_known_args([flag for flag in argv if flag not in ("-h", "--help")])
    if known.method and hasattr(module := importlib.import_module(known.method), "Config"):
        cli.add_config_options(parser, module.Config)
    args = parser.parse_args(argv)
    if args.make_data:
        target, tokenizer = common.load_target(
            args.target, dtype=getattr(torch, args.dtype), device=args.device
        )
        return data.make_conversations(
            target, tokenizer, args.make_data, args.out, args.seed, args.data_batch
        )
    if not args.method or not args.data:
        raise ValueError("training needs --method and --data (or use --make-data N)")
    fields = {option.name for option in dataclasses.fields(module.Config)} - {"target"}
    train(
        args,
        {name: value for name, value in vars(args).items() if name in fields and value is not None},
    )


if __name__ == "__main__":
    cli.run(main)
