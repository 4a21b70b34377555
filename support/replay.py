"""The replay page: one answer, round by round, as a single HTML file.

    python bench.py --method glide falcon --prompt "Why is the sky blue?" --replay page.html

`record` runs a method and describes its rounds by plain lists. `page` puts
them as JSON into replay.html, with replay.css and replay.js, which draws.
"""

import inspect
import itertools
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import common
from support import cli, report
from support.prompts import encode

HERE = Path(__file__).parent
SYMBOLS = 5  # shown of each CTC slot
WARM_UP_TOKENS = 12


# ---------------------------------------------------------------------------------- the record


@torch.no_grad()
def record(decoding: common.Decoding, drafts, text) -> list[dict]:
    """Decode to the end and describe every round.

    Args:
        drafts: the generator of a method, made for `decoding`.
        text: a function that returns the text of a token id.
    """
    rounds = []
    for draft in drafts:
        # 1. Add copies here, to show them. `verify` then finds them in the draft.
        draft = decoding.with_copies(draft)
        # 2. Verify the draft. The clock's differences are this round's times.
        before = dict(decoding.stats.seconds)
        ids = decoding.ids
        room = decoding.room
        verified = decoding.verify(draft)
        after = decoding.stats.seconds
        # 3. Describe the round, while the clock stands still.
        count = len(draft.tokens)
        rounds.append(
            {
                "tokens": [text(token) for token in draft.tokens.tolist()],
                "parents": draft.parents.tolist(),
                "kinds": kinds(draft),
                "q": [None] * count if draft.q is None else draft.q.tolist(),
                "p": target_probs(ids, draft, verified.logits[0], decoding.logits_processor),
                "notes": plain_notes(draft.notes, text),
                "path": verified.path,
                "committed": [text(token) for token in verified.tokens[0].tolist()],
                "kept": decoding.ids.shape[1] - ids.shape[1],
                "room": room,
                "seconds": {name: after[name] - before.get(name, 0.0) for name in after},
            }
        )
        decoding.clock_start = time.perf_counter()
    return rounds


def kinds(draft: common.Draft) -> list[str]:
    """Where each node comes from: "draft", CAPE's "extra" or "copy"."""
    own = len(draft.tokens) - draft.copied
    drafted = own if draft.probs is None else len(draft.probs)  # no probs: no extras
    return ["draft"] * drafted + ["extra"] * (own - drafted) + ["copy"] * draft.copied


def target_probs(ids: Tensor, draft: common.Draft, logits: Tensor, processor) -> list[float]:
    """The target's processed probability of each node after its parent.

    Args:
        ids: (1, T) committed tokens before the round.
        logits: (N + 1, V) of root and nodes.
        processor: the logits processors, or None.
    """
    prefixes = [ids]  # of the root and each node
    found = []
    for token, parent in zip(draft.tokens, draft.parents.tolist()):
        prefix = prefixes[parent + 1]
        prefixes.append(torch.cat([prefix, token.view(1, 1)], dim=1))
        scores = logits[[parent + 1]].float()  # (1, V), a copy
        if processor:
            scores = processor(prefix, scores)
        found.append(float(scores.softmax(-1)[0, token]))
    return found


def plain_notes(notes: dict, text) -> dict:
    """A method's notes; of CTC-drafter's slots the likeliest symbols.

    A symbol is [text of the token, or None for the blank, its probability].
    """
    if "q_slots" not in notes:
        return notes
    ids = notes["vocab_ids"].tolist()
    best = notes["q_slots"].topk(SYMBOLS, dim=-1)  # (S, 5)
    slots = []
    for columns, probabilities in zip(best.indices.tolist(), best.values.tolist()):
        names = [text(ids[i]) if i < len(ids) else None for i in columns]
        slots.append(list(zip(names, probabilities)))
    return {"slots": slots}


class Moments(BaseStreamer):
    """Notes when each token arrives, and first when the prompt does."""

    def __init__(self):
        self.moments = []

    def put(self, value):
        self.moments.append(time.perf_counter())

    def end(self):
        pass


def plain_seconds(arm, encoded: dict, options: dict) -> list[float]:
    """The seconds up to each token of plain decoding, after a short warm-up."""
    if arm.module is not None:  # our own loop
        rounds = play(arm, encoded, options, str)
        return list(itertools.accumulate(sum(told["seconds"].values()) for told in rounds))
    most = options["max_new_tokens"]
    for count in (min(WARM_UP_TOKENS, most), most):
        arrived = Moments()
        given = options | {"max_new_tokens": count}
        arm.target.generate(**encoded, **given, streamer=arrived)
    start, *moments = arrived.moments
    return [moment - start for moment in moments]


def play(arm, encoded: dict, options: dict, text) -> list[dict]:
    """The rounds of an arm's answer to a prompt, after a short warm-up."""
    target = arm.target
    most = options["max_new_tokens"]
    for count in (min(WARM_UP_TOKENS, most), most):
        given = options | {"max_new_tokens": count}
        stats = common.Stats(sync=target.device.type == "cuda")
        decoding = common.open_decoding(target, **encoded, **given, copies=arm.copies, stats=stats)
        rounds = record(decoding, arm.module.drafts(decoding, **arm.kwargs), text)
    return rounds


# ------------------------------------------------------------------------------------ the page


def page(data: dict) -> str:
    """The page as HTML text.

    data: "prompt" (the texts of its tokens), "methods" and "about", as in `write`.
    """
    text = json.dumps(report.rounded(data, digits=5), separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no token can end the <script> element
    whole = (HERE / "replay.html").read_text(encoding="utf-8")
    for mark, file in (("{{style}}", "replay.css"), ("{{script}}", "replay.js")):
        whole = whole.replace(mark, (HERE / file).read_text(encoding="utf-8"))
    return whole.replace("{{data}}", text)  # last: a token that spells a mark stays text


def write(path: str, tokenizer, loops: list, arms: list, text: str, options: dict) -> None:
    """Answer one prompt with every arm that is a method, and write the page.

    Args:
        loops: of plain decoding; the methods race against the fastest.
        arms: of support/arms.py.
        text: the prompt as the user wrote it.
        options: of `target.generate`, among them max_new_tokens.
    """

    def token_text(token: int) -> str:
        word = tokenizer.decode([token])
        if not word or "\ufffd" in word:  # a part of a letter: its name
            return str(tokenizer.convert_ids_to_tokens(token))
        return word

    # 1. Decode without a method and with each.
    target = loops[0].target
    encoded = encode(tokenizer, [text], target.device)
    raced = [plain_seconds(loop, encoded, options) for loop in loops]
    plain = min(raced, key=lambda seconds: seconds[-1] / len(seconds))
    methods = []
    for arm in arms:
        if arm.module is None:  # transformers decodes
            continue
        names = cli.decode_fields(arm.module)
        methods.append(
            {
                "name": arm.name,
                "idea": (inspect.getdoc(arm.module) or "").split("\n")[0],
                "settings": {name: getattr(arm.kwargs["config"], name) for name in names},
                "rounds": play(arm, encoded, options, token_text),
            }
        )

    # 2. Write the page, whole or not at all.
    about = {
        "prompt": text,
        "target": Path(target.config.name_or_path).name,
        "device": target.device.type,
        "sampled": bool(options.get("do_sample")),
        "plain": plain,  # seconds up to each token, without a method
    }
    prompt = [token_text(token) for token in encoded["input_ids"][0].tolist()]
    whole = page({"about": about, "prompt": prompt, "methods": methods})
    report.write_whole(whole, Path(path))
    print(f"{path}: {len(whole) // 1024} KB, open it in a browser")
