"""Command lines: options from a method's Config, and one clear line for every mistake."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError

METHODS = ("glide", "cape", "specdecpp", "falcon", "ctc_drafter")  # a sixth one adds its name here
ROOT = Path(__file__).resolve().parent.parent
LARGEST = 2**31 - 1
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
TARGET_HELP = f"Hugging Face id, folder or .gguf (default: {DEFAULT_TARGET})"


# ------------------------------------------------------------------------------------------ methods


def import_method(name: str):
    """The module of a method; ValueError for an unknown one, or one whose file is not here."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"no {name}.py here; put the method's file beside common.py")
    return importlib.import_module(name)


def present() -> list[str]:
    """The methods whose files are here."""
    return [name for name in METHODS if importlib.util.find_spec(name)]


def trainable() -> list[str]:
    """The methods whose files are here and that have something to train."""
    return [name for name in present() if hasattr(import_method(name), "build")]


def chain_proposer(name: str, *needs: str):
    """The module of a method that drafts chains for others to build on; ValueError for the rest.

    Args: needs: what else the module must hold.
    """
    ours = name.isidentifier() and (ROOT / f"{name}.py").is_file()
    module = importlib.import_module(name) if ours else None
    proposes = "cache" in inspect.signature(getattr(module, "propose", run)).parameters
    if not proposes or not all(hasattr(module, attribute) for attribute in needs):
        raise ValueError(f"base {name!r} is no method that drafts chains; take glide")
    return module


def decode_fields(module) -> list[dataclasses.Field]:
    """The fields of a method's Config that can be changed while decoding."""
    return [option for option in dataclasses.fields(module.Config) if option.metadata.get("decode")]


# ------------------------------------------------------------------------------------------ options


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description as it is, and ends every help line with the option's default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "(default" in text or action.default is argparse.SUPPRESS or action.required:
            return text
        words = {None: "none", False: "off", True: "on"}
        default = action.default
        if default is None or isinstance(default, bool):
            default = words[default]
        return f"{text} (default: {default})".replace("%", "%%").strip()


class OneLineParser(argparse.ArgumentParser):
    """Options without abbreviations; a bad one is reported as every other mistake is."""

    def __init__(self, **options):
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")

    def parse_args(self, args=None, namespace=None):
        """As in argparse, but an option of another method is reported with its owners."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if word.startswith("-")] or unknown
            owners = [f"{word}{_owners(word)}" for word in flags]
            self.error(f"unrecognized arguments: {' '.join(owners)}")
        return parsed


def _owners(word: str) -> str:
    """Which methods have an option of this name, in parentheses; nothing if none has."""
    flag = word.partition("=")[0].removeprefix("--").removeprefix("no-")
    owners = []
    for name in present() if word.startswith("--") else ():
        fields = {option.name for option in dataclasses.fields(import_method(name).Config)}
        if flag.replace("-", "_") in fields - {"target"}:
            owners.append(name)
    return f" (an option of {', '.join(owners)})" if owners else ""


def method_named(argv: list[str]) -> list[str]:
    """The words after --method, whatever else is on the command line."""
    parser = OneLineParser(add_help=False)
    parser.add_argument("--method", nargs="+", default=[])
    known, _ = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    return known.method


def number(kind: type, low: float, high: float = LARGEST):
    """A reader of numbers for `type=`: int or float, from `low` to `high`, never nan."""

    def read(text: str):
        value = kind(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        if not value <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read


def device(name: str) -> str:
    """A device of torch that this machine has, for `type=`."""
    try:
        torch.zeros(1, device=name).tolist()
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(
            f"this machine or build of torch has no {name!r}; use --device cpu"
        ) from None
    return name


def target(name: str) -> str | None:
    """A target, for `type=`; None for the default one by the name that the help gives it."""
    return None if name == DEFAULT_TARGET and not Path(name).exists() else name


def add_config_options(parser: argparse.ArgumentParser, config_class, decode: bool = False) -> None:
    """An option for every field of a method's Config that the parser does not have, with its help.

    Not given is None. Numbers must not be negative where the default is not; lists are JSON, their
    items of the default's type. `decode` takes the fields that matter while decoding only.
    """
    group = parser.add_argument_group(f"{config_class.__module__} options")
    taken = {action.dest for action in parser._actions}
    has_drafter = hasattr(sys.modules[config_class.__module__], "Drafter")
    for option in dataclasses.fields(config_class):
        default = option.default
        if default is dataclasses.MISSING:
            default = option.default_factory()
        left_out = decode and not option.metadata.get("decode")
        if option.name in taken or isinstance(default, dict) or left_out:
            continue
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, int | float):
            kind = {"type": number(type(default), min(default, 0))}
        elif isinstance(default, str):
            kind = {"type": str}
        else:
            kind = {"type": json_like(default)}
        shown = default if isinstance(default, str) else json.dumps(default)
        if decode and has_drafter:
            shown = "what config.json of the drafter says"
        text = f"{option.metadata['help']} (default: {shown})".replace("%", "%%")
        group.add_argument("--" + option.name.replace("_", "-"), default=None, help=text, **kind)


def json_like(default):
    """A reader for `type=` of JSON whose types are those of `default`."""

    def fits(value, default) -> bool:
        if isinstance(default, list):
            items = value if default else []
            return isinstance(value, list) and all(fits(item, default[0]) for item in items)
        if isinstance(value, bool):
            return False
        return isinstance(value, int) or type(value) is type(default) is float

    def read(text: str):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not fits(value, default):
            raise argparse.ArgumentTypeError(f"give JSON like {json.dumps(default)}")
        return value

    return read


# ------------------------------------------------------------------------------------------ running


def run(main) -> None:
    """Call `main`; a user's mistake ends with one line on stderr and code 2, Ctrl-C with 130."""
    name = sys.argv[0].rpartition("/")[2]
    try:
        main()
    except (ValueError, OSError, SafetensorError, torch.OutOfMemoryError) as problem:
        print(f"{name}: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as problem:
        if not isinstance(problem, torch.distributed.DistError) and "gloo" not in str(problem):
            raise
        what = "another process of this run has ended or is out of reach; go on with --resume"
        print(f"{name}: {what}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)  # an orderly end could wait for the other for ever
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
