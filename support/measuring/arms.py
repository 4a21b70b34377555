"""The arms of bench.py, whose docstring says how they are written."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import common
from common import UserError
from support import cli, packed
from support.cli import PEERS
from support.interop import export
from support.rivals import lookup

FORM = "[BASE+]NAME[:SETTINGS][+copies][@DIR]"
COPIES = 16  # most tokens that +copies adds to a draft
BASES = {"cape": "glide", "beam": "glide"}  # methods that use another one's drafter


@dataclass
class Arm:
    """One way of decoding."""

    name: str
    target: object  # what it decodes with: packed, or as load_target returns it
    drafts: Callable | None = None  # a generator for a Decoding; None: transformers
    module: object = None  # of the method
    drafter: object = None  # of the method, to measure alpha; None: it has no weights
    settings: dict = field(default_factory=dict)  # those that may change after training
    kwargs: dict = field(default_factory=dict)  # of target.generate, for transformers


def plain_loops(stock, target) -> list[Arm]:
    """All our ways of plain decoding; the fastest is the baseline.

    stock: the target as loaded.
    target: the packed one, or `stock` again.
    """
    # The first is what a user has without this repository, and the reference for greedy
    # answers. The others decode with the packed target. If only those were compared,
    # our packing might slow the baseline and make every speedup look better.
    loops = [Arm("stock", stock)]
    if target is not stock:
        loops.append(Arm("transformers", target))
    return [*loops, Arm("plain", target, plain_drafts)]


def plain_drafts(decoding):
    """Yield empty drafts: plain decoding over our cache."""
    while not decoding.done:
        yield common.chain([], decoding.ids)


# --------------------------------------------------------------- the text of an arm


class Parts(NamedTuple):
    """What the text of an arm says."""

    name: str  # of the method
    base: str  # the method whose drafter it uses, for most the same
    changes: dict  # settings of the method
    chain: dict  # settings of the chains that CAPE expands
    window: dict  # {"window": how much of a text its drafter sees}, see common.windowed
    copies: bool
    folder: str  # of the drafter; "": the shipped one


def parse(text: str) -> Parts:
    """Take the text of an arm apart.

    Raises UserError if it is not an arm, or for an unknown method, variant or setting.
    """
    words, _, folder = text.partition("@")
    if folder.endswith("+copies"):
        raise UserError(f"{text} is not an arm: write +copies before @DIR")
    method, _, settings = words.removesuffix("+copies").partition(":")
    base, plus, name = method.rpartition("+")
    if plus and (name != "cape" or base not in cli.CHAINS):
        bases = " or ".join(cli.CHAINS)
        raise UserError(
            f"{text} is not an arm: write {FORM}; BASE is {bases}, only for cape"
        )
    module = cli.import_method(name)
    base = base or BASES.get(name, name)
    source = cli.import_method(base)
    if folder and not hasattr(source, "Drafter"):
        raise UserError(f"{name} has no weights: leave out @{folder}")

    changes = read_settings(name, settings, source, module)
    window = {}
    if hasattr(source, "Drafter"):
        size = changes.pop("window", common.WINDOW)
        window = {"window": None if size in ("none", "None") else size}
    chain = {}
    if name == "cape":  # what is not its own is a setting of the chains
        own = common.decode_fields(module.Config)
        chain = {"gamma": 4}  # as the authors' code fixes it
        chain |= {key: value for key, value in changes.items() if key not in own}
        changes = {key: value for key, value in changes.items() if key in own}
        common.changed(source.Config(), chain)  # a wrong setting is refused here
    common.changed(module.Config(), changes)
    copies = words.endswith("+copies")
    return Parts(name, base, changes, chain, window, copies, folder)


def read_settings(name: str, text: str, *modules) -> dict:
    """The fields and values of a text such as cpu,gamma=3, where cpu is a variant.

    name: of the method, for messages.
    modules: those whose Config has the fields.
    """
    variants = {}
    defaults = {}
    for module in modules:
        variants |= module.VARIANTS
        defaults |= vars(module.Config())
    changes = {}
    for part in filter(None, text.split(",")):
        key, given, value = part.partition("=")
        if given and isinstance(defaults.get(key), list):
            changes[key] = read_list(part, value)
        elif given and key:
            changes[key] = read_value(value)
        elif key in variants:
            changes |= variants[key]
        else:
            known = ", ".join(variants) or "none"
            raise UserError(
                f"{name} has no variant {key!r} (it has {known}); or write FIELD=VALUE"
            )
    return changes


def read_list(part: str, value: str) -> list:
    """The numbers of a value such as 2-1-1-0, perhaps none; `part` is for messages."""
    numbers = [read_value(each) for each in value.split("-") if value]
    if any(isinstance(each, str) for each in numbers):
        raise UserError(f"{part!r}: write a list as numbers, as in sizes=2-1-1-0")
    return numbers


def read_value(text: str):
    """A number, or else the word itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# ----------------------------------------------------------------- from text to arm


def make_arms(texts: list[str], target, shipped=cli.ROOT / "checkpoints") -> list[Arm]:
    """The arms of some texts, each once, to decode with `target`.

    shipped: the folder of the shipped drafters.
    Raises UserError for an arm that is impossible.
    """

    @functools.cache
    def load(method: str, folder: str):
        Drafter = cli.import_method(method).Drafter
        drafter = common.load_drafter(Drafter, folder or shipped / method, target)
        return packed.pack(drafter, getattr(target, "kernels", None))

    arms: dict[str, Arm] = {}  # by text
    for text in texts:
        make = peer if text in PEERS else make_arm
        arms[text] = make(text, target, load)
    return list(arms.values())


def make_arm(text: str, target, load) -> Arm:
    """The arm of a text, see `parse`.

    load: a function of a method and a folder ("": the shipped one), which returns the
        drafter.
    """
    name, base, changes, chain, window, copies, folder = parse(text)
    module = cli.import_method(name)
    source = cli.import_method(base)
    drafter = load(base, folder) if hasattr(source, "Drafter") else None
    own = drafter if source is module else None  # no drafter of another method
    settings = decode_settings(module, own, changes)
    if name == "cape":
        of_chain = decode_settings(source, drafter, chain)
        settings = {"base": base} | of_chain | settings
    settings |= window
    if copies:
        settings["copies"] = COPIES

    def drafts(decoding):
        given = [decoding] if drafter is None else [decoding, drafter]
        if name == "cape":
            chains = source.drafts(*given, **chain, **window)
            proposals = module.drafts(chains, **changes)
        else:
            proposals = module.drafts(*given, **changes, **window)
        if copies:
            return lookup.with_copies(proposals, decoding, COPIES)
        return proposals

    return Arm(text, target, drafts, module, own, settings)


def decode_settings(module, drafter, changes: dict) -> dict:
    """The settings of a method that may change after training, with these changes."""
    config = module.Config() if drafter is None else drafter.config
    config = common.changed(config, changes)
    return {name: getattr(config, name) for name in common.decode_fields(config)}


def peer(name: str, target, load) -> Arm:
    """Transformers' prompt lookup, or its assisted generation (SpecDec++'s layers)."""
    if name == "prompt-lookup":
        return Arm(name, target, kwargs={"prompt_lookup_num_tokens": 10})
    kernels = getattr(target, "kernels", None)
    assistant = packed.pack(export.causal_lm(load("specdecpp", ""), target), kernels)
    return Arm(name, target, kwargs={"assistant_model": assistant})
