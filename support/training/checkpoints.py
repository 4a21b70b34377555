"""A drafter's training folder: how it is written, and when a run may be resumed."""

import copy
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

import common
from support import files
from support.training.features import fingerprint

# Options that a resumed run must keep. --steps and --minutes are not among them: a run
# that is made longer before its last fifth is the same as one that was planned so. Nor
# is --features, which only rounds the target's states to bfloat16.
DECIDING = (
    "method",
    "dtype",
    "seed",
    "batch_size",
    "lr",
    "warmup",
    "clip",
    "max_length",
    "held_out",
)


@dataclass
class Run:
    """How far a training run has come."""

    step: int = 0
    tokens: int = 0  # response tokens trained on, repetitions included
    seconds: float = 0.0  # over all runs of the command
    average: float | None = None  # running mean of the loss
    curve: list[dict] = field(default_factory=list)  # a point for every measurement

    def fraction(self, args) -> float:
        """The completed fraction of a run of args.steps or args.minutes."""
        if args.steps:
            return self.step / args.steps
        return self.seconds / 60 / args.minutes

    def add_step(self, tokens: int, loss: float, seconds: float) -> None:
        """Count a step. tokens: learned in it. seconds: of the whole run so far."""
        self.step += 1
        self.tokens += tokens
        self.seconds = seconds
        before = loss if self.average is None else self.average
        self.average = 0.95 * before + 0.05 * loss

    def add_point(self, rates: dict) -> dict:
        """Add acceptance rates to the curve; returns the new point."""
        point = {
            "step": self.step,
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 2),
            **rates,
            "loss": round(self.average, 4),
        }
        self.curve.append(point)
        return point


def identity(args, target, sequences) -> dict:
    """{option: value} of what must stay the same when a run is resumed.

    The options of the method are checked by `read`.
    """
    content = hashlib.sha256()
    for ids, mask in sequences:
        content.update(ids.numpy().tobytes() + mask.numpy().tobytes())
    decides = {name: getattr(args, name) for name in DECIDING}
    decides["target"] = f"of content {fingerprint(target)}"
    decides["data"] = f"of content {content.hexdigest()[:16]}"
    return decides


def save(out: Path, drafter, optimizer, run: Run, identity: dict) -> None:
    """Write training state, curve, bfloat16 weights and config.json.

    Raises UserError if they cannot be written; what was in `out` is then as before.
    """
    state = {
        "identity": identity,
        "config": asdict(drafter.config),
        "model": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(run),
    }
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(part)
        files.open_weights(part)
        torch.save(state, part / "training_state.pt")
        (part / "curve.json").write_text(json.dumps(run.curve) + "\n")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, torch.OutOfMemoryError):  # which says what is to be done
            raise
        reason = common.one_line(error)
        raise common.UserError(
            f"cannot save to {out} ({reason}); make room, then continue with --resume "
            "from what was saved before"
        ) from error
    # Each file appears by one rename. config.json marks a drafter, so it comes last.
    for name in ("training_state.pt", "model.safetensors", "curve.json", "config.json"):
        (part / name).replace(out / name)
    shutil.rmtree(part)  # with the hub's template of a model card


def read(out: Path, module, identity: dict, overrides: dict) -> dict:
    """The training state that `save` wrote to `out`, its "progress" as a Run.

    identity: of the run that is to continue.
    overrides: {field: value} of its Config, as the command line gives them.
    Raises UserError if the state is damaged, or of another run.
    """
    path = out / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        # Fails if a version had other fields. A Config may complete what it is given.
        config = vars(module.Config(**state["config"] | overrides))
        begun = state["config"] | state["identity"]
        state["progress"] = Run(**state["progress"])
    except Exception as error:  # torch raises many kinds on a damaged file
        reason = common.one_line(error)
        raise common.UserError(
            f"{path} is damaged or of another version ({reason}); train anew with "
            "another --out"
        ) from error
    free = common.decode_fields(module.Config)
    trained = {name: config[name] for name in overrides if name not in free}
    for name, value in (identity | trained).items():
        if value != begun.get(name):
            option = "--" + name.replace("_", "-")
            raise common.UserError(
                f"{out} was started with {option} {begun.get(name)}, now {value}; "
                "resume with the same, or train anew with another --out"
            )
    return state
