"""The arms of bench.py: how they are written, and what they decode with.

falcon                a method or a rival with the drafter in checkpoints/NAME
glide:gamma2          one of its VARIANTS; NAME:ONE+OTHER takes the settings of both
falcon+copies         beside its draft, up to 16 tokens a round copied from the context
falcon@runs/mine      another drafter
all                   everything with a drafter for this target, and transformers' own methods
"""

import contextlib
import copy
import dataclasses
import inspect
import sys
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
    kwargs: dict = field(default_factory=dict)  # of module.drafts, config included
    copies: int = 0
    peer: dict = field(default_factory=dict)  # arguments of target.generate, without a module


@dataclass
class Answer:
    """What an arm made of a turn: of one sequence, or of all in a batch."""

    rows: list[list[int]]  # the new tokens of each sequence
    seconds: float  # wall time, prefill included
    stats: list[common.Stats]  # of each sequence


def plain_drafts(decoding):
    """Yield empty drafts: plain decoding over our cache."""
    while not decoding.done:
        yield common.chain([], decoding.ids)


def plain_loops() -> list[Arm]:
    """The two candidates for the baseline: transformers' loop, and ours without drafts."""
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
    """SpecDec++'s copied layers as an ordinary causal LM, for `assistant_model=`.

    Unlike the drafter it drafts from the whole vocabulary.
    """
    if drafter.body is None:
        raise Mistake(f"the drafter holds only a head: load {drafter.config.draft_model}")
    config = AutoConfig.for_model(**drafter.config.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    # The layers are shared. Only the module around them is copied, to take an embedding.
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

    Raises: Mistake: an arm that cannot be, or two different ones of the same name.
    """
    loader = Loader(target, args)
    arms = []
    for text in dict.fromkeys(args.method):
        if text != "all":
            arms.append(loader.arm(text))
            continue
        for each in ALL:
            try:
                arms.append(loader.arm(each))
            except Mistake as problem:
                print(f"bench.py: without {each}: {problem}", file=sys.stderr)
    if args.peers or "all" in args.method:
        arms += loader.peers()
    if args.draft_model and not loader.draft_model_used:
        methods = ", ".join(args.method)
        raise Mistake(f"--draft-model: {methods} drafts with a network of its own; leave it out")

    found: dict[str, Arm] = {}
    for arm in arms:
        if found.setdefault(arm.name, arm).kwargs != arm.kwargs:
            raise Mistake(f"two arms would be called {arm.name}; rename one of the folders")
    return list(found.values())


class Loader:
    """Finds out what an arm decodes with; a drafter that several arms use is read once."""

    def __init__(self, target, args):
        self.target = target
        self.args = args
        self.drafters: dict[Path, torch.nn.Module] = {}
        self.draft_model = None
        self.draft_model_used = False
        if args.draft_model:
            self.draft_model = self._load_draft_model(args.draft_model)

    def _load_draft_model(self, name: str):
        device = str(self.target.device)
        model, _ = common.load_target(name, dtype=self.target.dtype, device=device)
        ours = common.target_shape(self.target)["vocab_size"]
        theirs = common.target_shape(model)["vocab_size"]
        if ours != theirs:
            raise Mistake(
                f"--draft-model {name} has {theirs} tokens and the target {ours}; take one of the "
                "same vocabulary"
            )
        return packed.pack(model) if self.args.pack else model

    def drafter(self, name: str, folder: str | None = None):
        """The trained drafter of a method, from `folder` or from checkpoints/NAME."""
        path = Path(folder or cli.ROOT / "checkpoints" / name)
        if path not in self.drafters:
            with contextlib.redirect_stdout(sys.stderr):  # the hub's loader prints
                drafter = common.load_drafter(cli.import_method(name).Drafter, path, self.target)
            self.drafters[path] = packed.pack(drafter) if self.args.pack else drafter
        return self.drafters[path]

    def arm(self, text: str) -> Arm:
        """The arm NAME[:VARIANT[+VARIANT]][+copies][@DIR]."""
        # 1. Take the text apart.
        spec, at, folder = text.partition("@")
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
        kwargs = self._kwargs(name, module, folder or self.args.checkpoint, changes)
        shown = f"{spec}@{Path(folder).name}" if at else spec
        return Arm(shown, module, kwargs, copies)

    def _kwargs(self, name: str, module, folder: str | None, changes: dict) -> dict:
        """The arguments of module.drafts."""
        if not hasattr(module, "Drafter"):
            return self._without_weights(name, module.Config(**changes), folder)
        kwargs = {}
        if self.draft_model and "draft_model" in inspect.signature(module.drafts).parameters:
            kwargs["draft_model"] = self.draft_model
            self.draft_model_used = True
        try:
            kwargs["drafter"] = self.drafter(name, folder)
            config = kwargs["drafter"].config
        except Mistake:
            if folder or "draft_model" not in kwargs:
                raise
            kwargs["drafter"] = None  # the draft model drafts alone
            config = module.Config()
        return kwargs | {"config": dataclasses.replace(config, **changes)}

    def _without_weights(self, name: str, config, folder: str | None) -> dict:
        """The same for a method that has no drafter, or that of its base."""
        base = getattr(config, "base", None)
        if base is None:
            return {"config": config}
        proposer = cli.chain_proposer(base)
        try:
            base_drafter = self.drafter(base, folder)
        except Mistake as problem:
            raise Mistake(
                f"{name} has no drafter of its own: train its base ({base}) and pass "
                f"--checkpoint DIR ({problem})"
            ) from problem
        return {"base": proposer, "base_drafter": base_drafter, "config": config}

    def peers(self) -> list[Arm]:
        """Prompt lookup and assisted generation, as transformers has them."""
        arms = [Arm("prompt-lookup", peer={"prompt_lookup_num_tokens": 10})]
        try:
            assistant = self.draft_model
            if assistant is None:
                assistant = causal_lm(self.drafter("specdecpp"), self.target)
            self.draft_model_used = True
            arms.append(Arm("assisted", peer={"assistant_model": assistant}))
        except Mistake as problem:
            print(f"bench.py: without assisted generation: {problem}", file=sys.stderr)
        return arms
