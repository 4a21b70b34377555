"""Files that appear whole or not at all."""

import contextlib
import os
import tempfile
import uuid
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path):
    """Yield a path next to `path` to write to; this file replaces `path` at the end.

    If writing fails or is interrupted, `path` stays as it was. A link stays a link.
    It gets the permissions of any new file.
    """
    path = path.resolve()
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        yield part
        _open(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path):
    """Yield a new folder to write to, which becomes `path` if all goes well.

    The parent of `path` must exist.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        part.mkdir()
        yield part
        open_weights(part)
        part.rename(path)


def open_weights(folder: Path) -> None:
    """Give the weights in a folder the permissions of ordinary new files."""
    for path in folder.rglob("*.safetensors"):
        _open(path)


def _open(path: Path) -> None:
    # safetensors 0.8 writes files that only their owner may read, so in a shared folder
    # they would be of no use to anybody else.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")
