"""A drafter's training folder: how it is written, and when it may resume."""

import copy
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

import common
from support import cli
from support.features import fingerprint

# Options that a resumed run must keep. The length may change: a run can be
# made longer while its learning rate is constant.
DECIDING = "method dtype bf16 seed batch_size lr warmup clip max_length held_out".split()


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0  # response tokens trained on, repetitions included
    seconds: float = 0.0  # over all sittings
    average: float | None = None  # running mean of the loss
    curve: list[dict] = field(default_factory=list)  # a row for every measurement

    def fraction(self, args) -> float:
        """The completed fraction of a run of args.steps or args.minutes."""
        return self.step / args.steps if args.steps else self.seconds / 60 / args.minutes


def identity(args, target, sequences) -> dict:
    """What decides a run, beside the options of its method."""
    content = hashlib.sha256()
    for ids, mask in sequences:
        content.update(ids.numpy().tobytes() + mask.numpy().tobytes())
    decides = {name: getattr(args, name) for name in DECIDING}
    decides["target"] = f"of content {fingerprint(target)}"
    decides["data"] = f"of content {content.hexdigest()[:16]}"
    return decides


def read(out: Path, module, identity: dict, overrides: dict) -> dict:
    """The training state in the folder `out`, its "progress" as a Progress.

    Args:
        identity: what decides the run that is to continue.
        overrides: {field: value} of the Config, from the command line.
    Raises:
        UserError: it is damaged, or of another run.
    """
    path = out / "training_state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        module.Config(**state["config"])  # fails if a version had other fields
        begun = state["config"] | state["identity"]
        state["progress"] = Progress(**state["progress"])
    except Exception as error:  # torch raises many kinds on a damaged file
        reason = str(error).strip().split("\n")[0]
        raise common.UserError(
            f"{path} is damaged or of another version ({reason}); train anew with another --out"
        ) from error
    free = cli.decode_fields(module)
    now = identity | {name: value for name, value in overrides.items() if name not in free}
    for name, value in now.items():
        if value != begun.get(name):
            raise common.UserError(
                f"{out} was started with --{name.replace('_', '-')} {begun.get(name)}, now "
                f"{value}; resume with the same, or train anew with another --out"
            )
    return state


def save(out: Path, drafter, optimizer, progress: Progress, identity: dict) -> None:
    """Write training state, curve, bfloat16 weights and config.json.

    Each file appears by one rename, config.json, which marks a drafter, last.

    Raises: UserError: it cannot be written; what was in `out` is as before.
    """
    state = {
        "identity": identity,
        "config": asdict(drafter.config),
        "model": drafter.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    part = out / ".part"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(part)
        torch.save(state, part / "training_state.pt")
        (part / "curve.json").write_text(json.dumps(progress.curve) + "\n")
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk
        shutil.rmtree(part, ignore_errors=True)
        reason = str(error).strip().split("\n")[0]
        raise common.UserError(
            f"cannot save to {out} ({reason}); make room, then continue with --resume"
        ) from error
    for name in ("training_state.pt", "model.safetensors", "curve.json", "config.json"):
        (part / name).replace(out / name)
    shutil.rmtree(part)  # with the hub's template of a model card
