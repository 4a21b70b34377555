"""What the arms of bench.py decode with: a method with its drafter and options, or a peer."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from pathlib import Path

from torch import nn

import common
from support import cli, packed

# what --method all takes: every method, CAPE with S(p) fitted to a CPU, and Medusa
ALL = (*cli.METHODS, "cape:cpu", f"ctc_drafter:none@{cli.ROOT / 'checkpoints' / 'medusa'}")
ALONE = ("copies", "prompt-lookup")  # arms that are no method and have no drafter
PROMPT_LOOKUP = {"name": "prompt-lookup", "kwargs": {"prompt_lookup_num_tokens": 10}}
# transformers' assisted generation: (tokens at first, schedule, confidence at which to stop)
ASSISTED = {
    "constant": (5, "constant", 0.0),
    "heuristic": (5, "heuristic", 0.0),
    "confidence": (20, "constant", 0.4),
}


def wanted(specs: list[str], variants: list[str]) -> dict[str, bool]:
    """The arms asked for on the command line, and whether each must be there.

    Those that come with `all`, and variants asked of every method, are left out where a method
    has no drafter or no such variant.
    """
    found: dict[str, bool] = {}
    for spec in specs:
        for each in ALL if spec == "all" else [spec]:
            found.setdefault(each, spec != "all")
            name, at, folder = each.partition("@")
            if ":" not in name and name not in ALONE:
                for variant in variants:
                    found.setdefault(f"{name}:{variant}{at}{folder}", False)
    return found


class Loader:
    """Finds out what an arm needs; a drafter that several arms use is read once."""

    def __init__(self, target, args):
        self.target = target
        self.args = args
        self.drafters: dict[Path, nn.Module] = {}
        self.draft_model = None
        if args.draft_model:
            self.draft_model = self._load_draft_model(args.draft_model)

    def _load_draft_model(self, name: str):
        like = {"dtype": self.target.dtype, "device": str(self.target.device)}
        model, _ = common.load_target(name, **like)
        ours = common.target_shape(self.target)["vocab_size"]
        theirs = common.target_shape(model)["vocab_size"]
        if ours != theirs:
            raise ValueError(
                f"--draft-model {name} has {theirs} tokens and the target {ours}; take one of the "
                "same vocabulary"
            )
        return model

    def drafter(self, module, checkpoint: str | None = None):
        """The trained drafter of a method, in the target's dtype."""
        path = Path(checkpoint or cli.ROOT / "checkpoints" / module.__name__)
        if path not in self.drafters:
            with contextlib.redirect_stdout(sys.stderr):  # the hub's loader prints
                drafter = common.load_drafter(module.Drafter, path, self.target)
            self.drafters[path] = packed.pack(drafter) if self.args.pack else drafter
        return self.drafters[path]

    def method(self, spec: str) -> list[dict]:
        """The fields of bench.Arm for `method`, `method:variant` or `method:all`, perhaps @DIR.

        Variants are names in the module's VARIANTS; `one+other` takes the options of both.
        """
        spec, _, folder = spec.partition("@")
        name, _, chosen = spec.partition(":")
        module = cli.import_method(name)
        variants = {"": {}, **getattr(module, "VARIANTS", {})}
        parts = chosen.split("+")
        if chosen != "all" and not variants.keys() >= set(parts):
            known = ", ".join(list(variants)[1:]) or "none"
            raise ValueError(f"{name} has no variant {chosen!r}; its variants: {known}")
        if chosen != "all":
            merged = {}
            for part in parts:
                merged |= variants[part]
            variants = {chosen: merged}
        mark = f"@{Path(folder).name}" if folder else ""
        fields = self._decoding(module, folder or self.args.checkpoint)
        found = []
        for variant, options in variants.items():
            own = {
                "name": (f"{name}:{variant}" if variant else name) + mark,
                "variant": variant,
                "plain": name + mark if variant else None,
                "kwargs": fields["kwargs"] | options,
            }
            if "+" in variant:  # what its last part adds
                own["plain"] = f"{name}:{variant.rpartition('+')[0]}{mark}"
            found.append(fields | own)
        return found

    def _decoding(self, module, checkpoint: str | None) -> dict:
        """What all variants of a method share: kwargs, drafters, module, base, facts, reports."""
        takes = inspect.signature(module.generate).parameters
        options = {each.name: getattr(self.args, each.name) for each in cli.decode_fields(module)}
        options = {option: value for option, value in options.items() if value is not None}
        kwargs, base, config = {"custom_generate": module.generate}, {}, module.Config()
        if self.draft_model is not None and "draft_model" in takes:
            kwargs["draft_model"] = self.draft_model
        if hasattr(module, "Drafter"):
            kwargs["drafter"] = self.drafter(module, checkpoint)
            config = kwargs["drafter"].config
        base_name = options.pop("base", None) or getattr(config, "base", "")
        if base_name:
            base["base"] = cli.chain_proposer(base_name)
            own = None if "drafter" in kwargs else checkpoint
            base["base_drafter"] = self.drafter(base["base"], own)
            kwargs |= {key: value for key, value in base.items() if key in takes}
            if "drafter" in takes and "drafter" not in kwargs:
                kwargs["drafter"] = base["base_drafter"]
        facts = vars(base["base_drafter"].config) if base else {}
        facts = facts | vars(config) | {"base": base_name}
        modules = {id(x): x for x in kwargs.values() if isinstance(x, nn.Module)}
        return {
            "kwargs": kwargs | options,
            "drafters": list(modules.values()),
            "module": module,
            "base": base,
            "facts": facts,
            "reports": True,
        }

    def peers(self) -> list[dict]:
        """The fields of bench.Arm for transformers' prompt lookup and assisted generation."""
        found = [PROMPT_LOOKUP]
        try:
            assistant = self._assistant()
        except ValueError as problem:
            print(f"bench.py: no assisted generation among the peers: {problem}", file=sys.stderr)
            return found
        for name, (count, schedule, threshold) in ASSISTED.items():
            config = copy.deepcopy(assistant.generation_config)
            config.update(
                num_assistant_tokens=count,
                num_assistant_tokens_schedule=schedule,
                assistant_confidence_threshold=threshold,
            )
            found.append(
                {
                    "name": f"assisted:{name}",
                    "kwargs": {"assistant_model": assistant},
                    "drafters": [assistant],
                    "assistant_config": config,  # on the target's own they would be ignored
                }
            )
        return found

    def _assistant(self):
        """The draft model given, or the first method's whose drafter is an ordinary causal LM."""
        if self.draft_model is not None:
            return self.draft_model
        for module in map(cli.import_method, cli.present()):
            if hasattr(getattr(module, "Drafter", None), "causal_lm"):
                return self.drafter(module).causal_lm(self.target)
        raise ValueError("no method here drafts with a causal LM; give --draft-model NAME")
