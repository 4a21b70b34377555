"""Command lines: methods by name, options from a Config, exit codes.

torch, transformers and common.py take seconds to import, and --help needs none of them.
The functions that need them import them.
"""

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys
from pathlib import Path

from support import default_target

METHODS = ("glide", "cape", "specdecpp", "falcon", "ctc_drafter")  # add yours
RIVALS = ("medusa", "eagle", "beam", "lookup")  # in support/rivals/
PEERS = ("prompt-lookup", "assisted")  # transformers' own methods
CHAINS = ("glide", "specdecpp")  # their drafts are chains, which CAPE expands
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Generation settings that change no answer; transformers saves them with every model.
IDLE = ("output_attentions", "output_hidden_states", "use_cache")
ROOT = Path(__file__).resolve().parent.parent
DEVICE_HELP = "torch device, such as cpu or cuda:1; auto: cuda if there is one"
TARGET_HELP = f"Hugging Face id, folder or .gguf (default: {default_target.NAME})"


# ---------------------------------------------------------------------------- methods


def import_method(name: str):
    """The module of a method or rival; a UserError if it is not here."""
    if name not in present():
        names = ", ".join(present())
        raise mistake(f"unknown method {name!r}: take {names}")
    return importlib.import_module(f"support.rivals.{name}" if name in RIVALS else name)


def present() -> list[str]:
    """The methods and rivals whose files are here."""
    return [name for name in (*METHODS, *RIVALS) if file_of(name).is_file()]


def file_of(name: str) -> Path:
    """Where the file of a method or rival belongs."""
    folder = ROOT / "support" / "rivals" if name in RIVALS else ROOT
    return folder / f"{name}.py"


def trainable() -> list[str]:
    """The methods and rivals here that have weights to train."""
    texts = {name: file_of(name).read_text(encoding="utf-8") for name in present()}
    return [name for name, text in texts.items() if "\nclass Drafter(" in text]


def method_named(argv: list[str]) -> str | None:
    """The word after --method, whatever else is on the command line."""
    parser = OneLineParser(add_help=False)
    parser.add_argument("--method")
    return parser.parse_known_args(argv)[0].method


# ---------------------------------------------------------------------------- options


class OneLineParser(argparse.ArgumentParser):
    """Options without abbreviations; a wrong one raises a UserError."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def parse_args(self, args=None, namespace=None):
        """What argparse does; then --device auto is decided, which imports torch."""
        options = super().parse_args(args, namespace)
        if hasattr(options, "device"):
            options.device = device(options.device)
        return options

    def error(self, message: str):
        raise mistake(f"{message}; see --help")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description as it is and shows an option's default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        nothing = str(action.default) in ("None", "False", "[]", argparse.SUPPRESS)
        if "(default" in text or nothing:
            return text
        return f"{text} (default: {action.default})"


def add_config_options(parser: argparse.ArgumentParser, config_class) -> None:
    """Add an option for each field of a Config that the parser does not have yet.

    Fields that are filled in elsewhere, as their help says, get none. An option that is
    not given is None. The Config checks the values.
    """
    module = config_class.__module__.rpartition(".")[2]
    group = parser.add_argument_group(f"{module} options")
    taken = {action.dest for action in parser._actions}
    defaults = config_class()
    for option in dataclasses.fields(config_class):
        default = getattr(defaults, option.name)
        help = option.metadata["help"]
        if option.name in taken or "filled in by" in help:
            continue
        kind = {"type": json_list if isinstance(default, list) else type(default)}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        shown = default if isinstance(default, str) else json.dumps(default)
        text = f"{help} (default: {shown})".replace("%", "%%")
        group.add_argument("--" + option.name.replace("_", "-"), help=text, **kind)


# The following read the text of an option, as its `type=`.


def number(kind: type, low: float, high: float = math.inf):
    """A reader of an int or float from low to high, never nan."""

    def read(text: str):
        value = kind(text)
        if not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read


def json_list(text: str) -> list:
    """A list, written as JSON."""
    value = json.loads(text)
    if not isinstance(value, list) or any(isinstance(x, str) for x in value):
        raise ValueError
    return value


json_list.__name__ = "JSON list"  # argparse says "invalid JSON list value"


def device(name: str) -> str:
    """The name of a device; "auto" stands for cuda if there is one, else the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def target(name: str) -> str | None:
    """The name of a target; None for the default one by its name."""
    named = name == default_target.NAME and not Path(name).exists()
    return None if named else name


def plain_settings(target) -> None:
    """Drop the saved generation settings of a target, except its special tokens.

    Beams, penalties or stop strings that somebody saved with a model would change what
    is measured, or written as greedy answers. stderr names those that are not used.
    """
    from transformers import GenerationConfig

    saved = target.generation_config
    tokens = {name: getattr(saved, name) for name in SPECIAL}
    unused = saved.to_diff_dict().keys() - {*SPECIAL, *IDLE, "transformers_version"}
    unused = sorted(name for name in unused if not name.startswith("_"))
    if unused:
        names = ", ".join(f"{name} {getattr(saved, name)}" for name in unused)
        print(f"not used from the target's generation_config: {names}", file=sys.stderr)
    target.generation_config = GenerationConfig(**tokens)


def check_writable(path: str) -> None:
    """Raise a UserError if `path` cannot become a file, before hours of work."""
    place = Path(path)
    # A folder, a device, or a pipe, whose resolved link points nowhere.
    special = place.exists() and not place.is_file()
    folder = place.resolve().parent
    if special or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise mistake(
            f"cannot write {path}: name a file in a folder where you may write"
        )


# ---------------------------------------------------------------------------- running


class Mistake(Exception):
    """A user's mistake that is noticed before common is imported."""


def mistake(text: str) -> Exception:
    """A common.UserError, or a Mistake if common has not been imported yet."""
    return getattr(sys.modules.get("common"), "UserError", Mistake)(text)


def run(main):
    """What `main` returns. A user's mistake: one line and code 2. Ctrl-C: code 130."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.stem == "__main__" else path.name  # python -m
    try:
        return main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as problem:
        # A module that is not imported has raised nothing.
        common, torch = map(sys.modules.get, ("common", "torch"))
        mistakes = (
            Mistake,
            OSError,
            getattr(common, "UserError", Mistake),
            getattr(torch, "OutOfMemoryError", Mistake),
        )
        if not isinstance(problem, mistakes):
            raise
        print(f"{name}: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)
