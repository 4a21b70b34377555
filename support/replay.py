"""The replay page: one answer, round by round, as a single HTML file.

    python bench.py --method glide falcon --prompt "Why is the sky blue?" --replay page.html

`record` runs a method and describes its rounds by plain lists. `page` puts
them as JSON into replay.html, with replay.css and replay.js, which draws.
"""

import html
import inspect
import itertools
import json
import re
import time
from pathlib import Path

import torch
from torch import Tensor

import common
from support import cli, report
from support.arms import plain_drafts

HERE = Path(__file__).parent
BLANK = -1  # the id of CTC's blank on the page
SYMBOLS = 5  # shown of each CTC slot
WARM_UP_TOKENS = 12


# ---------------------------------------------------------------------------------- the record


def opened(target, encoded: dict, options: dict, copies: int = 0) -> common.Decoding:
    """A Decoding of the prompt, whose clock waits for a GPU."""
    stats = common.Stats(sync=target.device.type == "cuda")
    return common.open_decoding(target, **encoded, **options, copies=copies, stats=stats)


@torch.no_grad()
def record(decoding: common.Decoding, drafts) -> list[dict]:
    """Decode to the end and describe every round.

    Args:
        drafts: the generator of a method, made for `decoding`.
    """
    rounds = []
    for draft in drafts:
        # 1. Add copies here, since `verify` does not return the larger draft.
        draft = decoding.with_copies(draft)
        # 2. Verify the draft. The clock's differences are this round's times.
        before = dict(decoding.stats.seconds)
        ids = decoding.ids
        room = decoding.room
        verified = decoding.verify(draft)
        after = decoding.stats.seconds
        # 3. Describe the round, while the clock stands still.
        told = describe(draft, verified)
        told["p"] = target_probs(ids, draft, verified.logits[0], decoding.logits_processor)
        told["kept"] = decoding.ids.shape[1] - ids.shape[1]
        told["room"] = room
        told["seconds"] = {name: after[name] - before.get(name, 0.0) for name in after}
        rounds.append(told)
        decoding.clock_start = time.perf_counter()
    return rounds


def describe(draft: common.Draft, verified: common.Verified) -> dict:
    """Describe a draft and its outcome.

    Returns: per node `tokens`, `parents`, `kinds` ("draft", CAPE's "extra"
        or "copy") and `q`; per round `path`, `committed` and the method's
        `notes`.
    """
    count = len(draft.tokens)
    own = count - draft.copied
    drafted = own if draft.probs is None else len(draft.probs)  # no probs: no extras
    kinds = ["draft"] * drafted + ["extra"] * (own - drafted) + ["copy"] * draft.copied
    return {
        "tokens": draft.tokens.tolist(),
        "parents": draft.parents.tolist(),
        "kinds": kinds,
        "q": [None] * count if draft.q is None else draft.q.tolist(),
        "path": verified.path,
        "committed": verified.tokens[0].tolist(),
        "notes": plain_notes(draft.notes),
    }


def target_probs(ids: Tensor, draft: common.Draft, logits: Tensor, processor) -> list[float]:
    """The target's processed probability of each node after its parent.

    Args:
        ids: (1, T) committed tokens before the round.
        logits: (N + 1, V) of root and nodes.
        processor: the logits processors, or None.
    """
    scores = logits.float()  # (N + 1, V)
    if processor:
        prefixes = [ids]  # of the root and each node
        for token, parent in zip(draft.tokens, draft.parents.tolist()):
            prefixes.append(torch.cat([prefixes[parent + 1], token.view(1, 1)], dim=1))
        rows = [processor(prefix, row[None]) for prefix, row in zip(prefixes, scores)]
        scores = torch.cat(rows)
    p_target = scores.softmax(-1)
    parents = draft.parents.to(scores.device)
    return p_target[parents + 1, draft.tokens].tolist()


def plain_notes(notes: dict) -> dict:
    """A method's notes as lists and numbers; of CTC slots the top symbols."""
    told = {}
    for name, value in notes.items():
        if name == "q_slots":
            told["slots"] = top_symbols(value, notes["draft_ids"])
        elif name != "draft_ids":
            told[name] = value.tolist() if isinstance(value, Tensor) else value
    return told


def top_symbols(q_slots: Tensor, draft_ids: Tensor) -> list[list]:
    """Each slot's likeliest symbols, as [token id or BLANK, probability].

    Args:
        q_slots: (S, Vd + 1) probabilities; the last column is the blank's.
        draft_ids: (Vd,) token ids of the other columns.
    """
    ids = [*draft_ids.tolist(), BLANK]
    best = q_slots.topk(min(SYMBOLS, len(ids)), dim=-1)
    slots = []
    for columns, probabilities in zip(best.indices.tolist(), best.values.tolist()):
        slots.append([[ids[i], q] for i, q in zip(columns, probabilities)])
    return slots


def play(arm, target, encoded: dict, options: dict) -> dict:
    """Answer a prompt with an arm; returns its part of the page's data."""
    decoding = opened(target, encoded, options, arm.copies)
    rounds = record(decoding, arm.module.drafts(decoding, **arm.kwargs))
    config = arm.kwargs["config"]
    settings = {field.name: getattr(config, field.name) for field in cli.decode_fields(arm.module)}
    return {
        "name": arm.name,
        "idea": (inspect.getdoc(arm.module) or "").split("\n")[0],
        "settings": settings,
        "rounds": rounds,
    }


# ------------------------------------------------------------------------------------ the page


def token_text(tokenizer, token: int) -> str:
    """The text of a token, or its name if it is a part of a letter."""
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return str(tokenizer.convert_ids_to_tokens(token))
    return text


def shown_tokens(methods: list[dict], prompt_ids: list[int]) -> set[int]:
    """Every token id that is on the page."""
    shown = set(prompt_ids)
    for method in methods:
        for told in method["rounds"]:
            shown.update(told["tokens"], told["committed"])
            for symbols in told["notes"].get("slots", []):
                shown.update(token for token, _ in symbols)
    return shown - {BLANK}


def as_json(value) -> str:
    """JSON that is safe in a <script> element, without < > &."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def page(methods: list[dict], tokenizer, prompt_ids: list[int], about: dict) -> str:
    """The page as HTML text.

    Args:
        methods: as `play` returns them.
        prompt_ids: of the whole prompt, with the chat template.
        about: "prompt"; "target", "device" and "sampled" of the run;
            "plain": seconds from the start to each token of plain decoding.
    """
    shown = sorted(shown_tokens(methods, prompt_ids))
    texts = {token: token_text(tokenizer, token) for token in shown}
    data = {"about": about, "prompt": prompt_ids, "texts": texts, "methods": methods}
    names = ", ".join(method["name"] for method in methods)
    parts = {
        "{{title}}": html.escape(f"Replay: {names}"),
        "{{style}}": (HERE / "replay.css").read_text(encoding="utf-8"),
        "{{script}}": (HERE / "replay.js").read_text(encoding="utf-8"),
        "{{data}}": as_json(report.rounded(data, digits=5)),
    }
    template = (HERE / "replay.html").read_text(encoding="utf-8")
    # One pass replaces all marks, so a token that spells a mark stays text.
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], template)


def write(
    path: str, target, tokenizer, arms: list, text: str, encoded: dict, options: dict
) -> None:
    """Answer one prompt with every arm that is a method, and write the page.

    Args:
        arms: of support/arms.py.
        text: the prompt as the user wrote it.
        encoded: input_ids (1, T) and attention_mask of the prompt.
        options: of `target.generate`, among them max_new_tokens.
    """
    # 1. Decode without a method and with each, both after a short warm-up.
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    for given in (short, options):
        decoding = opened(target, encoded, given)
        plain_rounds = record(decoding, plain_drafts(decoding))
    methods = []
    for arm in arms:
        if arm.module is None:  # transformers decodes
            continue
        play(arm, target, encoded, short)
        told = play(arm, target, encoded, options)
        methods.append(told)
        tokens = sum(each["kept"] for each in told["rounds"])
        print(f"{arm.name}: {tokens} tokens in {len(told['rounds'])} rounds")

    # 2. Write the page, whole or not at all.
    seconds = [sum(told["seconds"].values()) for told in plain_rounds]
    about = {
        "prompt": text,
        "target": Path(target.config.name_or_path).name,
        "device": target.device.type,
        "sampled": bool(options.get("do_sample")),
        "plain": list(itertools.accumulate(seconds)),
    }
    whole = page(methods, tokenizer, encoded["input_ids"][0].tolist(), about)
    report.write_whole(whole, Path(path))
    print(f"{path}: {len(whole) // 1024} KB, open it in a browser")
