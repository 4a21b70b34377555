"""Decode with copied method files where nothing else is; test_copying.py starts this.

    python alone.py FOLDER...     FOLDER is called METHOD, and holds METHOD.py, ...

FOLDER/../target is a tiny saved target. Prints one line of JSON: what happened in each
folder.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import os
import runpy
import sys
from pathlib import Path

import torch


def make_drafter(module, common, target):
    """A small drafter that was saved and loaded again."""
    fields = {field.name for field in dataclasses.fields(module.Config)}
    small = {"intermediate_size": 16, "draft_vocab": 16, "stage": "head"}
    config = module.Config(**{name: small[name] for name in small if name in fields})
    counts = torch.arange(target.config.vocab_size)
    module.build(config, target, counts).save_pretrained("drafter")
    return common.load_drafter(module.Drafter, "drafter", target)


def decode(method: str) -> dict:
    """Compare a method's greedy answer with plain decoding."""
    common = importlib.import_module("common")
    module = importlib.import_module(method)
    target, tokenizer = common.load_target("../target")
    takes = inspect.signature(module.drafts).parameters
    owner = importlib.import_module("glide") if "chains" in takes else module
    given = []
    if hasattr(owner, "Drafter"):
        given = [make_drafter(owner, common, target)]

    def drafts(decoding):
        own = owner.drafts(decoding, *given)
        return module.drafts(own) if "chains" in takes else own

    ids = tokenizer("w1 w2 w3 w1 w2", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False}
    stats = common.Stats()
    decoder = common.speculate(drafts, callback=stats)
    output = target.generate(ids, custom_generate=decoder, **options)
    same = torch.equal(output, target.generate(ids, **options))
    return {"same": same, "drafted": stats.drafted}


def start(script: str) -> tuple:
    """The exit code and stderr of `python SCRIPT` in this folder."""
    sys.argv = [script]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            return ended.code, errors.getvalue()
    return 0, errors.getvalue()


def main() -> None:
    top = Path.cwd()
    told = {}
    for name in sys.argv[1:]:
        folder = top / name
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        told[name] = {"support": importlib.util.find_spec("support") is not None}
        with contextlib.redirect_stdout(io.StringIO()):
            told[name]["script"] = start(f"{folder.name}.py")
            if not name.startswith("incomplete"):
                told[name] |= decode(folder.name)
        sys.path.remove(str(folder))
        for file in folder.glob("*.py"):
            sys.modules.pop(file.stem, None)  # the next folder has its own
    print(json.dumps(told))


if __name__ == "__main__":
    main()
