"""Run copied method files where nothing else is; test_copying.py starts this in its own process.

    python alone.py FOLDER...     FOLDER is called METHOD and holds METHOD.py, common.py, and so on

FOLDER/../target is a tiny saved target. Prints one line of JSON: what happened in each folder.
"""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import runpy
import sys
from pathlib import Path

import torch


def forget(folder):
    """Drop what was imported from a folder, so that the next one starts with nothing."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
            del sys.modules[name]


def decode(method):
    """Make a drafter for the saved target, save it, load it, and compare with plain decoding."""
    common = importlib.import_module("common")
    module = importlib.import_module(method)
    target, tokenizer = common.load_target("../target")
    base = importlib.import_module("glide") if method == "cape" else module
    fields = {field.name for field in dataclasses.fields(base.Config)}
    config = base.Config(
        target=common.target_shape(target),
        **{name: 16 for name in ("intermediate_size", "draft_vocab") if name in fields},
    )
    base.build(config, target, torch.arange(len(tokenizer))).save_pretrained("drafter")
    drafter = common.load_drafter(base.Drafter, "drafter", target)
    arguments = {"custom_generate": module.generate, "drafter": drafter}
    if method == "cape":
        arguments = {"custom_generate": module.generate, "base": base, "base_drafter": drafter}
    if "stop" in fields:  # its head was not trained
        arguments["stop"] = "fixed"
    ids = tokenizer("w1 w2 w3", return_tensors="pt")["input_ids"]
    options, stats = {"max_new_tokens": 20, "do_sample": False}, common.Stats()
    output = target.generate(ids, stats=stats, **options, **arguments)
    same = torch.equal(output, target.generate(ids, **options))
    return {"same": same, "drafted": stats.drafted, "text": tokenizer.decode(output[0])}


def example():
    """Whether the README's lines run; they are about this method, and the drafter is saved."""
    readme = Path(__file__).resolve().parents[2] / "README.md"
    lines = readme.read_text().split("```python\n")[1].split("```")[0]
    for theirs, ours in (("your/model", "../chat"), ("checkpoints/mine", "drafter")):
        assert theirs in lines
        lines = lines.replace(theirs, ours)
    names = {}
    exec(lines.replace("256", "16"), names)
    return "target" in names


def start(script, *options):
    """(exit code, stderr) of `python SCRIPT OPTIONS` in the current folder."""
    sys.argv, errors = [script, *options], io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            return ended.code, errors.getvalue()
        except Exception as problem:
            return 1, f"{type(problem).__name__}: {problem}"
    return 0, errors.getvalue()


def main():
    told = {}
    for folder in map(Path, sys.argv[1:]):
        method, here = folder.name, told.setdefault(str(folder), {})
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        here["support"] = importlib.util.find_spec("support") is not None
        if (folder / "train.py").exists():
            train = ("--method", method, "--target", "../target", "--data", "../data.jsonl")
            here["train"] = start("train.py", *train, "--steps", "2", "--out", "made")
            here["files"] = sorted(path.name for path in Path("made").glob("*"))
        else:
            here |= decode(method)
            if method == "falcon":
                here["example"] = example()
            here["script"] = start(f"{method}.py")
        sys.path.remove(str(folder))
        forget(folder)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
