"""The arms of bench.py: how they are written, and what they decode with.

falcon                a method or a rival with the drafter in checkpoints/NAME
glide:gamma2          one of its VARIANTS; NAME:ONE+OTHER combines two
falcon+copies         with up to 16 tokens per round copied from the context
falcon@runs/mine      another drafter
all                   all that fits this target, and transformers' own methods
"""

import copy
import dataclasses
import inspect
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common
from common import Mistake
from support import cli, packed

COPIES = 16  # most tokens a round that `+copies` copies
ALL = (*cli.METHODS, "cape:cpu", "medusa", "lookup")


@dataclass
class Arm:
    """One way of decoding: a method's drafts, or a loop of transformers."""

    name: str
    module: object = None  # of the method; None: transformers decodes
    kwargs: dict = field(default_factory=dict)  # of module.drafts, with config
    copies: int = 0
    peer: dict = field(default_factory=dict)  # of generate, if no module


@dataclass
class Answer:
    """An arm's answer to a turn, for one sequence or a whole batch."""

    rows: list[list[int]]  # the new tokens of each sequence
    seconds: float  # wall time, prefill included
    stats: list[common.Stats]  # of each sequence


def clock(target) -> float:
    """The time in seconds, once the GPU has done what was asked of it."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def plain_drafts(decoding):
    """Yield empty drafts: plain decoding over our cache."""
    while not decoding.done:
        yield common.chain([], decoding.ids)


def plain_loops() -> list[Arm]:
    """The candidates for the baseline: transformers' loop, and a plain one."""
    ours = SimpleNamespace(__name__="plain", drafts=plain_drafts)
    return [Arm("transformers"), Arm("plain", ours)]


@torch.no_grad()
def decode(target, input_ids, arm: Arm, stats, **given):
    """A `custom_generate` function for every arm with a module."""
    decoding = common.Decoding(target, input_ids, arm.copies, stats, **given)
    for draft in arm.module.drafts(decoding, **arm.kwargs):
        decoding.verify(draft)
    return decoding.ids


def causal_lm(drafter, target):
    """SpecDec++'s copied layers as a causal LM, for `assistant_model=`.

    It drafts from the whole vocabulary.
    """
    if drafter.body is None:
        raise Mistake(f"the drafter holds only a head: load {drafter.config.draft_model}")
    config = AutoConfig.for_model(**drafter.config.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    # Share the layers. Copy only the module around them, to set its embedding.
    shared = {id(part): part for part in drafter.body.children()}
    body = copy.deepcopy(drafter.body, shared)
    body.set_input_embeddings(target.get_input_embeddings())
    setattr(model, model.base_model_prefix, body)
    model.set_output_embeddings(target.get_output_embeddings())
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def method_of(text: str) -> str:
    """The method's name in an arm as it is written on the command line."""
    return text.partition("@")[0].partition("+")[0].partition(":")[0]


def make_arms(target, args) -> list[Arm]:
    """The arms that the command line asks for, each once.

    Raises: Mistake: an impossible arm, or two different ones of one name.
    """
    loader = Loader(target, args)
    arms = []
    for text in args.method:
        for each in ALL if text == "all" else (text,):
            try:
                arms.append(loader.arm(each))
            except Mistake as problem:
                if text != "all":
                    raise
                print(f"bench.py: without {each}: {problem}", file=sys.stderr)
    if args.peers or "all" in args.method:
        arms += loader.peers()
    used = any("draft_model" in arm.kwargs or "assistant_model" in arm.peer for arm in arms)
    if args.draft_model and not used:
        methods = ", ".join(args.method)
        raise Mistake(f"--draft-model: {methods} cannot use a draft model; leave it out")

    found: dict[str, Arm] = {}
    for arm in arms:
        if found.setdefault(arm.name, arm).kwargs != arm.kwargs:
            raise Mistake(f"two arms would be called {arm.name}; rename one of the folders")
    return list(found.values())


class Loader:
    """Loads what an arm decodes with; arms share a drafter of one folder."""

    def __init__(self, target, args):
        self.target = target
        self.args = args
        self.drafters: dict[Path, torch.nn.Module] = {}
        self.draft_model = None
        if args.draft_model:
            specdecpp = cli.import_method("specdecpp")
            model = specdecpp.load_draft_model(args.draft_model, target.dtype, target.device)
            specdecpp.DraftModel(model, target)  # checks the vocabulary
            self.draft_model = self.faster(model)

    def faster(self, model):
        """The model with packed layers, unless --no-pack was given."""
        return packed.pack(model) if self.args.pack else model

    def drafter(self, name: str, folder: str | None = None):
        """A method's trained drafter, from `folder` or checkpoints/NAME."""
        path = Path(folder or cli.ROOT / "checkpoints" / name)
        if path not in self.drafters:
            drafter = common.load_drafter(cli.import_method(name).Drafter, path, self.target)
            self.drafters[path] = self.faster(drafter)
        return self.drafters[path]

    def arm(self, text: str) -> Arm:
        """The arm NAME[:VARIANT[+VARIANT]][+copies][@DIR]."""
        # 1. Take the text apart.
        spec, at, folder = text.partition("@")
        if at and not folder:
            raise Mistake(f"{text} names no folder after the @")
        first, *more = spec.split("+")
        name, _, variant = first.partition(":")
        copies = 0
        if more and more[-1] == "copies":
            copies = COPIES
            more.pop()
        module = cli.import_method(name)

        # 2. Collect what differs from the drafter's Config.
        changes = {}
        for option in cli.decode_fields(module):
            value = getattr(self.args, option.name, None)
            if value is not None:
                changes[option.name] = value
        for each in [variant, *more]:
            if each and each not in module.VARIANTS:
                known = ", ".join(module.VARIANTS) or "none"
                raise Mistake(f"{name} has no variant {each!r}; its variants: {known}")
            changes.update(module.VARIANTS.get(each, {}))

        # 3. Load what it decodes with.
        kwargs = self.kwargs(name, module, folder or self.args.checkpoint, changes)
        shown = f"{spec}@{Path(folder).name}" if at else spec
        return Arm(shown, module, kwargs, copies)

    def kwargs(self, name: str, module, folder: str | None, changes: dict) -> dict:
        """The arguments of module.drafts."""
        # 1. A method without weights may expand the chains of another method.
        if not hasattr(module, "Drafter"):
            config = module.Config(**changes)
            base = getattr(config, "base", None)
            if base is None:
                if folder:
                    raise Mistake(f"{name} has no weights to load from {folder}")
                return {"config": config}
            proposer = cli.chain_proposer(base)
            drafter = self.drafter(base, folder)
            return {"base": proposer, "base_drafter": drafter, "config": config}

        # 2. A drafter of its own, which may be missing beside a draft model.
        kwargs = {}
        if self.draft_model and "draft_model" in inspect.signature(module.drafts).parameters:
            kwargs["draft_model"] = self.draft_model
        try:
            kwargs["drafter"] = self.drafter(name, folder)
            config = kwargs["drafter"].config
        except Mistake:
            if folder or not kwargs:
                raise
            kwargs["drafter"] = None
            config = module.Config(stop="fixed")  # there is no head
        return kwargs | {"config": dataclasses.replace(config, **changes)}

    def peers(self) -> list[Arm]:
        """Transformers' prompt lookup and assisted generation."""
        arms = [Arm("prompt-lookup", peer={"prompt_lookup_num_tokens": 10})]
        try:
            assistant = self.draft_model
            if assistant is None:
                assistant = causal_lm(self.drafter("specdecpp"), self.target)
            arms.append(Arm("assisted", peer={"assistant_model": assistant}))
        except Mistake as problem:
            print(f"bench.py: without assisted generation: {problem}", file=sys.stderr)
        return arms
