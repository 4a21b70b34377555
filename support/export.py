"""Write a drafter and its code as a folder that transformers decodes with.

    python -m support.export falcon checkpoints/falcon OUT
    python -m support.export falcon checkpoints/falcon OUT --target your/model

The first writes the drafter alone, for programs that have the target. The second
writes the target, too: whoever loads OUT with trust_remote_code=True decodes with
drafts. Both may be uploaded to the hub. OUT/custom_generate has relative imports, so it
also works as a part of a package.
"""

import re
import tempfile
from pathlib import Path

import common
from support import cli

# It runs from a cache of transformers and is not told which folder it came from.
GENERATE = '''"""`generate` with drafts of {method}.py; support/export.py wrote this."""

import weakref
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import StoppingCriteriaList, StopStringCriteria

from .common import UserError, load_drafter, speculate
from .{method} import Drafter, drafts

DRAFTER = {drafter!r}  # None: beside the weights of the target
loaded = weakref.WeakKeyDictionary()  # {{model: {{(path, device, dtype): drafter}}}}


def generate(
    inputs=None, *, model, drafter=DRAFTER, settings=None, streamer=None,
    generation_config=None, stopping_criteria=None, stop_strings=None, tokenizer=None,
    **given,
):
    """As that of transformers, for one prompt and without beams.

    drafter: a folder, or an id of the hub. settings: of the method, as {{"gamma": 3}}.
    """
    known = loaded.setdefault(model, {{}})
    key = drafter, model.device, model.dtype
    if key not in known:
        folder = Path(drafter or model.name_or_path)
        if not drafter and not folder.is_dir():  # the target is on the hub
            folder = Path(snapshot_download(str(folder), allow_patterns="drafter/*"))
        path = drafter or folder / "drafter"
        known[key] = load_drafter(Drafter, path, model)
    given = {{name: value for name, value in given.items() if value is not None}}
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if texts := stop_strings or getattr(generation_config, "stop_strings", None):
        if tokenizer is None:
            raise UserError("stop_strings need tokenizer=...")
        criteria.append(StopStringCriteria(tokenizer, texts))
        given["stop_strings"] = None  # of transformers, which would want the tokenizer
    given |= {{"stopping_criteria": criteria, "generation_config": generation_config}}
    decode = speculate(drafts, known[key], streamer=streamer, **settings or {{}})
    # Not model.generate, which may be this function.
    return type(model).generate(model, inputs, custom_generate=decode, **given)
'''


def write(method: str, drafter: str, out: Path, target: str | None) -> None:
    """Write the folder `out` for a method's drafter, given by its folder or id."""
    if out.exists():
        raise common.UserError(f"{out} exists already: give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        part = Path(folder) / out.name  # becomes `out` when it is whole
        Drafter = cli.import_method(method).Drafter
        if target is None:
            network = common.read_drafter(Drafter, drafter)
            place = part
        else:
            model, tokenizer = common.load_target(cli.target(target), dtype="auto")
            network = common.load_drafter(Drafter, drafter, model)
            place = part / "drafter"
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        network.bfloat16().save_pretrained(place)  # with a card, README.md
        code = part / "custom_generate"
        code.mkdir(parents=True)
        for name in (method, "common"):
            text = (cli.ROOT / f"{name}.py").read_text()
            text = re.sub(r"^import common$", "from . import common", text, flags=re.M)
            text = re.sub(r"^from common ", "from .common ", text, flags=re.M)
            (code / f"{name}.py").write_text(text)
        known = str(out.resolve()) if target is None else None
        (code / "generate.py").write_text(GENERATE.format(method=method, drafter=known))
        part.rename(out)


def main() -> None:
    parser = cli.OneLineParser(description=__doc__)
    ours = [name for name in cli.METHODS if name in cli.trainable()]
    parser.add_argument("method", choices=ours)
    parser.add_argument("drafter", help="its folder, or an id of the hub")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument(
        "--target", help="write this target as well: " + cli.TARGET_HELP
    )
    args = parser.parse_args()
    write(**vars(args))
    print(f"export.py: wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
