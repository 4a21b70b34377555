"""The replay page: decoding to look at, round by round, as one HTML file that needs no network.

    python bench.py --method falcon --replay page.html --prompt "Why is the sky blue?"

The record is the decode loop's own: `common.verify` appends one to `Stats.trace` each round, with
what the method handed over by `stats.note`. Here it is made small and written as JSON into
replay.html, together with replay.css and replay.js, which draw it. Facts that a method may note,
each of them optional:

    q_nodes              the drafter's probability of every node (N,), if draft.probs does not tell
    confidences, counts  CAPE: confidence and set size of every step of the trajectory
    chances, stopped     SpecDec++: the predicted chance after every token, and why drafting ended
    q_slots, worth       CTC-drafter: probabilities (S, Vd + 1) of the slots, {prefix: probability}
    k                    Falcon: tokens predicted by a pass
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import html
import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import common

HERE = Path(__file__).parent
TITLES = {
    "glide": "GLIDE",
    "cape": "CAPE",
    "specdecpp": "SpecDec++",
    "falcon": "Falcon",
    "ctc_drafter": "CTC-drafter",
    "copies": "Copies",
}
SYMBOLS = 6  # shown of each CTC slot
COMBINATIONS = 256  # of the slots' symbols, the most probable ones, that are collapsed
WAYS = 3  # of them shown for each prefix
WARM_UP_TOKENS = 12
# options of bench.py that ask for measurements
OTHERS = ("sweep", "refit", "graphs", "cost_curve", "json", "plot", "peers", "show")
BLANK = -1  # the blank's id on the page

# ------------------------------------------------------------------------------- what a node is


def depths(parents: list[int]) -> list[int]:
    """Depth of every node, 1 for children of the root; parents come first."""
    depth: list[int] = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return depth


def paths(tokens: list[int], parents: list[int]) -> list[tuple]:
    """The tokens from the root to every node, the root's not included."""
    found: list[tuple] = []
    for token, parent in zip(tokens, parents):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def kinds(record: dict) -> list[str]:
    """Where every node is from: "draft", CAPE's "extra", or a "copy" from the context."""
    draft = record["draft"]
    drafted = len(draft.tokens) - draft.copied
    trajectory = len(record["counts"]) if "counts" in record else drafted
    kind = ["draft"] * min(trajectory, drafted)
    kind += ["extra"] * (drafted - len(kind))
    return kind + ["copy"] * draft.copied


def draft_probabilities(record: dict, draft_ids: Tensor | None) -> list[float | None]:
    """q_draft of every node given its parent; None where the drafter did not say, as of copies."""
    draft = record["draft"]
    count = len(draft.tokens)
    drafted = count - draft.copied
    q_nodes: list[float | None] = [None] * count
    if "q_nodes" in record:
        q_nodes[:drafted] = torch.as_tensor(record["q_nodes"]).tolist()[:drafted]
    elif draft.probs is not None:
        sampled = len(draft.probs)
        q_nodes[:sampled] = draft.probs.gather(1, draft.tokens[:sampled, None])[:, 0].tolist()
    elif "worth" in record:
        worth = worth_of_tokens(record, draft_ids)
        for node, path in enumerate(paths(draft.tokens.tolist(), draft.parents.tolist())):
            before = worth.get(path[:-1], 1.0)
            if path in worth and before > 0:
                q_nodes[node] = min(1.0, worth[path] / before)
    elif "confidences" in record:  # a greedy trajectory takes what the drafter is most sure of
        q_nodes[: len(record["confidences"])] = record["confidences"]
    return q_nodes


def ranks(record: dict) -> list[int | None]:
    """Which choice of the drafter every node is, from 1; None for copies.

    Read off the distribution that the node comes from, or else its place among its siblings, which
    every method lists best first.
    """
    draft = record["draft"]
    found: list[int | None] = []
    siblings: dict[int, int] = {}
    for node, parent in enumerate(draft.parents.tolist()):
        siblings[parent] = siblings.get(parent, 0) + 1
        if node >= len(draft.tokens) - draft.copied:
            found.append(None)
            continue
        if draft.probs is not None and node < len(draft.probs):
            row = draft.probs[node]  # (V,)
            found.append(1 + int((row > row[draft.tokens[node]]).sum()))
        else:
            found.append(siblings[parent])
    return found


# ---------------------------------------------------------------------- particular to CTC-drafter


def worth_of_tokens(record: dict, draft_ids: Tensor) -> dict[tuple, float]:
    """CTC's {prefix: probability} with token ids in place of indices into the draft vocabulary."""
    ids = draft_ids.tolist()
    return {tuple(ids[i] for i in path): value for path, value in record["worth"].items()}


def top_symbols(q_slots: Tensor, draft_ids: Tensor, count: int) -> list[list]:
    """The most probable symbols of every slot, [[token id or BLANK, probability], ...] each."""
    ids = [*draft_ids.tolist(), BLANK]
    slots = []
    for row in q_slots:
        best = row.topk(min(count, len(row)))
        symbols = [ids[i] for i in best.indices.tolist()]
        slots.append([list(pair) for pair in zip(symbols, best.values.tolist())])
    return slots


def ways(slots: list[list], most: int) -> list[tuple[tuple, float]]:
    """The most probable combinations of the slots' symbols, best first, with their probabilities.

    Slots are independent given the context, so keeping the best after each slot loses none.
    """
    best: list[tuple[tuple, float]] = [((), 1.0)]
    for symbols in slots:
        grown = []
        for alignment, value in best:
            grown += [((*alignment, symbol), value * q) for symbol, q in symbols]
        best = heapq.nlargest(most, grown, key=lambda way: way[1])
    return best


def ctc_facts(record: dict, draft_ids: Tensor) -> dict:
    """Slots with their top symbols, and for every node its prefix's probability and some ways."""
    draft = record["draft"]
    drafted = len(draft.tokens) - draft.copied
    slots = top_symbols(record["q_slots"].float().cpu(), draft_ids, SYMBOLS)
    facts: dict = {"slots": slots}
    if "worth" not in record:
        return facts
    from ctc_drafter import collapse  # only here: the file may be absent beside other methods

    worth = worth_of_tokens(record, draft_ids)
    collapsed = [(way, collapse(way, BLANK), value) for way, value in ways(slots, COMBINATIONS)]
    facts["prefixes"] = []
    for path in paths(draft.tokens.tolist(), draft.parents.tolist())[:drafted]:
        fits = [
            [list(way), value] for way, tokens, value in collapsed if tokens[: len(path)] == path
        ]
        facts["prefixes"].append(
            {"worth": worth.get(path), "ways": fits[:WAYS], "found": len(fits)}
        )
    return facts


# ------------------------------------------------------------------------------------- the record


class Rounds(list):
    """What a Stats.trace is here: each record is made small as it arrives."""

    def __init__(self, stats: Recorder, draft_ids: Tensor | None):
        super().__init__()
        self.stats, self.draft_ids = stats, draft_ids
        self.before: dict[str, float] = {}  # the timers after the round before

    def append(self, record: dict) -> None:
        """Keep what the page shows of a round."""
        if not self:
            self.before = {"prefill": record["seconds"].get("prefill", 0.0)}
        seconds = record["seconds"]
        spent = {name: seconds[name] - self.before.get(name, 0.0) for name in seconds}
        spent.pop("prefill", None)
        spent["other"] = max(0.0, self.stats.ended - self.stats.began - sum(spent.values()))
        super().append(describe(record, self.draft_ids) | {"ms": in_milliseconds(spent)})
        self.before = dict(seconds)
        self.stats.began = time.perf_counter()  # recording is no part of the next round


def in_milliseconds(spent: dict[str, float]) -> dict[str, float]:
    """Seconds as milliseconds."""
    return {name: 1000 * value for name, value in spent.items()}


@dataclass
class Recorder(common.Stats):
    """Stats with a trace, which know when the last timer ended and when the round began."""

    began: float = 0.0
    ended: float = 0.0

    @contextlib.contextmanager
    def timer(self, name: str):
        """As in Stats."""
        with super().timer(name):
            yield
        self.ended = time.perf_counter()
        if name == "prefill":
            self.began = self.ended


def describe(record: dict, draft_ids: Tensor | None = None) -> dict:
    """A round as the page shows it.

    Args:
        record: as common.verify makes it. draft_ids: (Vd,) of the drafter, for CTC's slots.
    """
    draft = record["draft"]
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    told = {
        "tokens": tokens,
        "parents": parents,
        "q": draft_probabilities(record, draft_ids),
        "p": record["p_target"],
        "rank": ranks(record),
        "kind": kinds(record),
        "path": list(record["path"]),
        "committed": record["committed"],
        "prefix": record["prefix"],
    }
    for name in ("confidences", "counts", "chances"):
        if name in record:
            told[name] = torch.as_tensor(record[name]).tolist()
    if "stopped" in record:
        told["stopped"] = str(record["stopped"])
    if "k" in record:
        told["pass"] = [1 + (depth - 1) // record["k"] for depth in depths(parents)]
        told["slot"] = [1 + (depth - 1) % record["k"] for depth in depths(parents)]
    if "q_slots" in record and draft_ids is not None:
        told["ctc"] = ctc_facts(record, draft_ids)
    return told


def settings(arm) -> dict:
    """The options of a method that matter while decoding, as this arm uses them."""
    if arm.module is None:
        return {}
    config = getattr(arm.kwargs.get("drafter"), "config", None)
    if not isinstance(config, arm.module.Config):
        config = arm.module.Config()
    used = {}
    for option in dataclasses.fields(arm.module.Config):
        value = getattr(config, option.name)
        if arm.kwargs.get(option.name) is not None:
            value = arm.kwargs[option.name]
        if option.metadata.get("decode") and isinstance(value, bool | int | float | str | list):
            used[option.name] = value
    return used


def play(arm, target, encoded: dict, options: dict) -> tuple[dict, Recorder]:
    """Answer a prompt with one arm (bench.Arm): its part of the page's data, and the Stats.

    Args:
        encoded: input_ids (1, T) and attention_mask. options: of `target.generate`.
    """
    drafter = next((x for x in arm.drafters if hasattr(x, "draft_ids")), None)
    reads = sorted({layer for x in arm.drafters for layer in getattr(x, "kv_layers", ())})
    stats = Recorder(sync=target.device.type == "cuda")
    stats.trace = Rounds(stats, None if drafter is None else drafter.draft_ids.cpu())
    stats.began = time.perf_counter()  # of a prompt of one token, which has no prefill
    output = target.generate(**encoded, **options, **(arm.kwargs | {"stats": stats}))
    method = arm.name.partition(":")[0].partition("@")[0]
    told = {
        "name": arm.name,
        "method": method,
        "title": arm.name.replace(method, TITLES.get(method, method), 1),
        "settings": settings(arm),
        "reads": reads,
        "answer": output[0, encoded["input_ids"].shape[1] :].tolist(),
        "rounds": list(stats.trace),
        "stats": {
            "target_forwards": stats.target_forwards,
            "drafted": stats.drafted,
            "emitted": stats.emitted,
            "offered": stats.offered,
            "accepted": stats.accepted,
            "copies": stats.copies,
            "seconds": stats.seconds,
        },
    }
    return told, stats


# --------------------------------------------------------------------------------------- the page


def token_text(tokenizer, token: int) -> str:
    """The text of one token; of a part of a letter, the tokenizer's own name for it."""
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return text


def used_tokens(methods: list[dict], prompt_ids: list[int]) -> set[int]:
    """Every token id that the page shows."""
    used = set(prompt_ids)
    for method in methods:
        for told in method["rounds"]:
            used.update(told["tokens"], told["committed"])
            for symbols in told.get("ctc", {}).get("slots", []):
                used.update(symbol for symbol, _ in symbols)
    return used - {BLANK}


def shortened(value):
    """Floats to four decimals, all the way down; what is no number becomes null."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def as_json(value) -> str:
    """JSON that may stand inside <script>: nothing in it can end that element or open another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plain_table(method: dict, texts: dict[int, str]) -> str:
    """The rounds as an HTML table, for readers without scripts."""
    rows, emitted = [], 0
    for number, told in enumerate(method["rounds"], 1):
        kept = told["committed"][: len(method["answer"]) - emitted]
        emitted += len(kept)
        new = html.escape("".join(texts[token] for token in kept))
        cells = [number, len(told["tokens"]), len(told["path"]), new, emitted]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ["round", "drafted", "accepted", "new text", "tokens so far"]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    caption = f"<caption>{html.escape(method['title'])}</caption>"
    return f"<table>{caption}<tr>{head}</tr>\n" + "\n".join(rows) + "</table>"


def page(methods: list[dict], tokenizer, prompt_ids: list[int], about: dict) -> str:
    """The page as HTML text.

    Args:
        methods: as `play` tells them. prompt_ids: of the prompt, chat template included.
        about: "prompt", the text that was asked; "target", "device", "sampled" of the run.
    """
    texts = {n: token_text(tokenizer, n) for n in sorted(used_tokens(methods, prompt_ids))}
    data = {"about": about, "prompt": prompt_ids, "texts": texts, "methods": methods}
    names = ", ".join(method["title"] for method in methods)
    parts = {
        "{{title}}": html.escape(f"Replay: {names}"),
        "{{style}}": (HERE / "replay.css").read_text(),
        "{{script}}": (HERE / "replay.js").read_text(),
        "{{tables}}": "\n".join(plain_table(method, texts) for method in methods),
        "{{data}}": as_json(shortened(data)),
    }
    template = (HERE / "replay.html").read_text()
    # one pass: a token that spells a mark stays text
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], template)


def check(args) -> None:
    """ValueError for options of bench.py that do not go with --replay."""
    if not args.method:
        raise ValueError("--replay shows how a method decodes; give --method NAME")
    others = {name: getattr(args, name) for name in OTHERS}
    others["batch_size"] = args.batch_size > 1
    for name, given in others.items():
        if given or given == []:  # --sweep alone
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"--replay answers one prompt and measures nothing; leave out {option}"
            )
    path = Path(args.replay)
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ValueError(f"--replay {path}: no such folder or not a file; make the folder first")


def write(
    path: str, target, tokenizer, arms: list, text: str, encoded: dict, options: dict
) -> dict:
    """Answer one prompt with every arm and write the page; prints and returns the counts.

    Args:
        arms: bench.Arm; those that do not report their Stats are left out. text: the prompt;
            encoded: the same as the target reads it. options: of `target.generate`.
    """
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    methods, counts = [], {}
    for arm in (arm for arm in arms if arm.reports):
        play(arm, target, encoded, short)  # warm-up, discarded
        told, stats = play(arm, target, encoded, options)
        methods.append(told)
        tau = round(stats.emitted / stats.target_forwards, 4)
        rounds = stats.target_forwards
        counts[arm.name] = {"tokens": stats.emitted, "rounds": rounds, "tau": tau}
        print(f"{arm.name}: {stats.emitted} tokens in {rounds} rounds, {tau:.2f} each")
    about = {
        "prompt": text,
        "target": Path(str(target.config._name_or_path)).name or type(target).__name__,
        "device": target.device.type,
        "sampled": bool(options.get("do_sample")),
    }
    whole = page(methods, tokenizer, encoded["input_ids"][0].tolist(), about)
    part = Path(f"{path}.{os.getpid()}")
    try:
        part.write_text(whole, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    print(f"{path}: {len(whole) // 1024} KB, to be opened in a browser")
    return {"replay": str(path), "arms": counts}
