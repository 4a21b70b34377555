"""The arms of bench.py, whose docstring says how they are written."""

import copy
import dataclasses
import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoConfig, AutoModelForCausalLM

import common
from common import UserError
from support import cli, packed

COPIES = 16  # most tokens a round that `+copies` copies
PEERS = ("prompt-lookup", "assisted")  # transformers' own methods
ALL = (*cli.METHODS, "cape:cpu", "medusa", "lookup", *PEERS)  # those that do not fit are skipped


@dataclass
class Arm:
    """One way of decoding: a method's drafts, or a loop of transformers."""

    name: str
    target: object  # what it decodes with: packed, or as load_target returns it
    module: object = None  # of the method; None: transformers decodes
    kwargs: dict = field(default_factory=dict)  # of module.drafts, or of generate
    copies: int = 0
    padded: bool = False  # transformers decodes a whole batch, padded


def plain_drafts(decoding):
    """Yield empty drafts: plain decoding over our cache."""
    while not decoding.done:
        yield common.chain([], decoding.ids)


def plain_arm(target) -> Arm:
    return Arm("plain", target, SimpleNamespace(drafts=plain_drafts))


def plain_loops(stock, target, batch_size: int = 1) -> list[Arm]:
    """Plain decoding in every way at hand; the fastest of them is the baseline.

    The first is what a user has without this repository, and the reference of
    greedy answers: transformers' `generate` on the target as load_target returns it.
    The others decode with the packed target. A baseline among them alone could be
    slowed by our own packing, and every speedup would flatter us.

    Args: stock: the target as loaded. target: the packed one, or `stock` again.
    """
    batch = batch_size > 1
    loops = [Arm("stock", stock, padded=batch)]
    if target is not stock:
        loops.append(Arm("transformers", target, padded=batch))
    if batch:
        loops.append(Arm("one by one", target))
    return [*loops, plain_arm(target)]


def make_arms(target, args) -> list[Arm]:
    """The arms that the command line asks for, each once, to decode with `target`.

    Raises: UserError: an impossible arm, or two different ones of one name.
    """

    @functools.cache
    def load(method: str, folder: str | None):
        path = Path(folder or cli.ROOT / "checkpoints" / method)
        drafter = common.load_drafter(cli.import_method(method).Drafter, path, target)
        return packed.pack(drafter, getattr(target, "kernels", None))

    texts: list[str] = []
    for text in args.method:
        texts += ALL if text == "all" else [text]
    if args.peers:
        texts += PEERS
    optional = ALL if "all" in args.method else PEERS
    arms: dict[str, Arm] = {}
    for text in texts:
        try:
            arm = peer(text, target, load) if text in PEERS else make_arm(text, target, args, load)
        except UserError as problem:
            if text not in optional:
                raise
            print(f"bench.py: without {text}: {problem}", file=sys.stderr)
            continue
        if arms.setdefault(arm.name, arm).kwargs != arm.kwargs:
            raise UserError(f"two arms would be called {arm.name}; rename one of the folders")
    return list(arms.values())


def make_arm(text: str, target, args, load) -> Arm:
    """The arm NAME[:VARIANT][+copies][@DIR].

    Args: load: gives the drafter of a method and a folder (None: the shipped one).
    """
    # 1. Take the text apart.
    parts = re.fullmatch(r"(\w+)(?::([^+@]+))?(\+copies)?(?:@(.+))?", text)
    if parts is None:
        raise UserError(f"{text} is no arm: write NAME[:VARIANT][+copies][@DIR]")
    name, variant, copies, folder = parts.groups()
    shown = text.removesuffix(folder) + Path(folder).name if folder else text
    folder = folder or args.checkpoint

    # 2. Collect what differs from the drafter's Config.
    module = cli.import_method(name)
    given = {option: getattr(args, option) for option in cli.decode_fields(module)}
    changes = {option: value for option, value in given.items() if value is not None}
    if variant:
        if variant not in module.VARIANTS:
            known = ", ".join(module.VARIANTS) or "none"
            raise UserError(f"{name} has no variant {variant!r}; its variants: {known}")
        changes.update(module.VARIANTS[variant])

    # 3. Load its drafter. Without weights it may expand another method's chains.
    if hasattr(module, "Drafter"):
        drafter = load(name, folder)
        config = dataclasses.replace(drafter.config, **changes)
        kwargs = {"drafter": drafter, "config": config}
    else:
        config = module.Config(**changes)
        kwargs = {"config": config}
        if hasattr(config, "base"):
            if config.base not in cli.CHAINS:
                chains = " or ".join(cli.CHAINS)
                raise UserError(f"base {config.base!r} drafts no chains: take {chains}")
            kwargs["base"] = cli.import_method(config.base)
            kwargs["base_drafter"] = load(config.base, folder)
    return Arm(shown, target, module, kwargs, COPIES if copies else 0)


def peer(name: str, target, load) -> Arm:
    """Transformers' prompt lookup, or its assisted generation with SpecDec++'s layers."""
    if name == "prompt-lookup":
        return Arm(name, target, kwargs={"prompt_lookup_num_tokens": 10})
    kernels = getattr(target, "kernels", None)
    assistant = packed.pack(causal_lm(load("specdecpp", None), target), kernels)
    return Arm(name, target, kwargs={"assistant_model": assistant})


def causal_lm(drafter, target):
    """SpecDec++'s copied layers as a causal LM, for `assistant_model=`.

    It drafts from the whole vocabulary.
    """
    if drafter.body is None:
        raise UserError(f"the drafter holds only a head: load {drafter.config.draft_model}")
    config = AutoConfig.for_model(**drafter.config.model)
    model = AutoModelForCausalLM.from_config(config, dtype=target.dtype).to(target.device)
    layers = drafter.body.get_decoder().state_dict()
    model.get_decoder().load_state_dict(layers, strict=False)  # without an embedding
    model.set_input_embeddings(target.get_input_embeddings())
    model.set_output_embeddings(target.get_output_embeddings())
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval().requires_grad_(False)
