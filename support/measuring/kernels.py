"""The fastest packed kernels, measured once on a machine and then remembered.

`packed.fastest` takes about a second. What it finds is kept next to the default target,
in a file that may be deleted to measure again.
"""

import contextlib
import json
import sys
import zlib
from pathlib import Path

import torch

from support import default_target, files, packed
from support.measuring import report


def fastest(model, possible: list[str]) -> tuple[str, str]:
    """As `packed.fastest`; stderr says so if the choice is remembered."""
    path = default_target.cache() / "kernels.json"
    here = situation(model, possible)
    remembered = read(path)
    found = remembered.get(here)
    whole = isinstance(found, list) and len(found) == 2
    if whole and all(name in possible for name in found):
        names = ", ".join(found)
        print(
            f"kernels for one token and for several: {names}, as measured here before "
            f"(in {path})",
            file=sys.stderr,
        )
        return tuple(found)
    found = packed.fastest(model, possible)
    with contextlib.suppress(OSError):  # it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps(remembered | {here: found}, indent=1) + "\n")
    return found


def situation(model, possible: list[str]) -> str:
    """Everything that the measurement depends on, except the machine's load."""
    weights = [layer.weight for layer in packed.linear_layers(model).values()]
    # packed.fastest times the first layers only, so their order matters.
    shapes = str([(str(weight.dtype), *weight.shape) for weight in weights])
    code = Path(packed.__file__).read_bytes()  # a kernel may change and keep its name
    parts = report.processor(), torch.__version__, torch.get_num_threads(), *possible
    sums = [zlib.crc32(text) for text in (shapes.encode(), code)]
    return " | ".join(map(str, [*parts, *sums]))


def read(path: Path) -> dict:
    """What is remembered: {} if the file is missing, broken or something else."""
    try:
        remembered = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return remembered if isinstance(remembered, dict) else {}
