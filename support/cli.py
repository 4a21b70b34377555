"""Command-line options of train.py and bench.py: those of a Config, and one clear line for every
mistake."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
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


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad option as every other mistake is reported."""

    def error(self, message: str):
        raise ValueError(f"{message}; see --help")


def number(kind: type, low: float, high: float = LARGEST):
    """A reader of numbers for `type=`: int or float, from `low` to `high`, neither nan nor
    infinite."""

    def read(text: str):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be at least {low}" if value < low else f"{text} is out of range"
            )
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


def add_config_options(parser: argparse.ArgumentParser, config_class, decode: bool = False) -> None:
    """An option for every field of a method's Config that the parser does not have, with its help.

    Not given is None. Numbers must not be negative where the default is not; lists are JSON, their
    items of the default's type. `decode` takes the fields that matter while decoding only.
    """
    group, taken = (
        parser.add_argument_group(f"{config_class.__module__} options"),
        {a.dest for a in parser._actions},
    )
    for option in dataclasses.fields(config_class):
        default = (
            option.default
            if option.default is not dataclasses.MISSING
            else option.default_factory()
        )
        if (
            option.name in taken
            or isinstance(default, dict)
            or (decode and not option.metadata.get("decode"))
        ):
            continue
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, int | float):
            kind = {"type": number(type(default), min(default, 0))}
        else:
            kind = {"type": str if isinstance(default, str) else json_like(default)}
        group.add_argument(
            "--" + option.name.replace("_", "-"),
            default=None,
            help=f"{option.metadata['help']} (default {default})",
            **kind,
        )


def json_like(default):
    """A reader for `type=` of JSON whose types are those of `default`."""

    def fits(value, default) -> bool:
        if isinstance(default, list):
            return isinstance(value, list) and all(
                fits(item, default[0]) for item in value if default
            )
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            or type(value) is type(default) is float
        )

    def read(text: str):
        try:
            if fits(value := json.loads(text), default):
                return value
        except (ValueError, RecursionError):
            pass
        raise argparse.ArgumentTypeError(f"give JSON like {json.dumps(default)}")

    return read


def chain_proposer(name: str, *needs: str):
    """The module of a method that drafts chains for others to build on; ValueError for anything
    else."""
    ours = name.isidentifier() and (ROOT / f"{name}.py").is_file()
    module = importlib.import_module(name) if ours else None
    if not (
        "cache" in inspect.signature(getattr(module, "propose", run)).parameters
        and all(hasattr(module, attribute) for attribute in needs)
    ):
        raise ValueError(f"base {name!r} is no method that drafts chains; take glide")
    return module


def run(main) -> None:
    """Call `main`; a user's mistake ends with one line on stderr and exit code 2, Ctrl-C with code
    130."""
    name = sys.argv[0].rpartition("/")[2]
    try:
        main()
    except (ValueError, OSError, SafetensorError, torch.OutOfMemoryError) as problem:
        print(f"{name}: {' '.join(str(problem).split())}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as problem:
        if not isinstance(problem, torch.distributed.DistError) and "gloo" not in str(problem):
            raise
        print(
            f"{name}: another process of this run has ended or is out of reach; go on with "
            "--resume",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(2)  # an orderly end could wait for the other for ever
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
