"""What the replay page shows: every round of an answer, as plain lists.

`record` decodes with a method's drafts and describes its rounds. `write` does so twice
for each method, greedily and with sampling, and `html` puts all of it as JSON into
replay.html, with replay.css and replay.js, which draws.
"""

import copy
import inspect
import itertools
import json
from pathlib import Path

import torch
from torch import Tensor

import common
from support import files
from support.measuring import report
from support.measuring.report import clock
from support.prompts import encode

HERE = Path(__file__).parent
SYMBOLS = 5  # shown of each CTC slot
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
WARM_UP_TOKENS = 12


# --------------------------------------------------------------------------- the record


@torch.no_grad()
def record(target, drafts, encoded: dict, options: dict, text) -> list[dict]:
    """Decode to the end and describe every round.

    drafts: a function of a Decoding, which returns the generator of its drafts.
    encoded: input_ids (1, T) and attention_mask of the prompt.
    options: of target.generate.
    text: a function that returns the text of a token id.
    """
    rounds = []
    phase = "prefill"  # up to the first draft: the drafter also reads the prompt
    begin = clock(target)
    decoding = common.start(target, **encoded, **options)
    for draft in drafts(decoding):
        drafted = clock(target)
        before = copy.copy(decoding)  # a commit replaces ids, it does not write there
        logits, hidden = common.score(target, decoding.ids, draft, decoding.cache)
        path = decoding.commit(draft, logits, hidden)
        verified = clock(target)
        committed = decoding.ids[0, before.ids.shape[1] :].tolist()
        drawn = sampled_nodes(draft) if decoding.do_sample else 0
        q = draft_probs(draft)
        p = target_probs(before, draft, logits)
        rounds.append(
            {
                "tokens": [text(token) for token in draft.tokens.tolist()],
                "parents": draft.parents,
                "kinds": kinds(draft),
                "drawn": drawn,
                "q": q,
                "p": p,
                "acceptance": acceptance(draft.parents, drawn, p, q),
                "notes": shown_notes(draft.notes, text),
                "path": path,
                "committed": [text(token) for token in committed],
                "room": before.max_depth,
                "seconds": {phase: drafted - begin, "verify": verified - drafted},
            }
        )
        phase = "draft"
        begin = clock(target)
    return rounds


def kinds(draft: common.Draft) -> list[str]:
    """Where each node comes from: "draft", CAPE's "extra" or "copy"."""
    copied = draft.notes.get("copied", 0)
    own = len(draft.tokens) - copied
    counts = draft.notes.get("counts")  # CAPE's, one for each token of the chain
    drafted = own if counts is None else len(counts)
    return ["draft"] * drafted + ["extra"] * (own - drafted) + ["copy"] * copied


def sampled_nodes(draft: common.Draft) -> int:
    """M, how many nodes come with the distribution that they were drawn from."""
    return 0 if draft.probs is None else len(draft.probs)


def draft_probs(draft: common.Draft) -> list[float | None]:
    """q of each node, after its parent (of CTC-drafter: of the branch down to it)."""
    drawn = sampled_nodes(draft)
    noted = draft.notes.get("q")  # by methods whose trees are not sampled
    found = []
    nodes = zip(kinds(draft), draft.tokens.tolist(), draft.parents)
    for node, (kind, token, parent) in enumerate(nodes):
        if node < drawn:
            found.append(float(draft.probs[node, token]))
        elif kind == "extra":  # another token of the row that its sibling is from
            found.append(float(draft.probs[parent + 1, token]))
        else:
            found.append(noted[node] if noted else None)
    return found


def target_probs(
    before: common.Decoding, draft: common.Draft, logits: Tensor
) -> list[float]:
    """The target's processed probability of each node after its parent.

    before: the Decoding before the round.
    logits: (N + 1, V) of root and nodes.
    """
    paths = [[]]  # tokens from the root down to it, of the root and of each node
    found = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents):
        above = paths[parent + 1]
        scores = before.process(logits[parent + 1], above)
        found.append(float(scores.softmax(-1)[token]))
        paths.append([*above, token])
    return found


def acceptance(parents: list[int], drawn: int, p: list, q: list) -> list:
    """min(1, p/q), the chance of each drawn node; None for the others.

    It is also None after a drawn sibling, where what is left of p is judged instead.
    """
    found = []
    for node, parent in enumerate(parents):
        judged_by_p = node < drawn and parent not in parents[:node]
        found.append(min(1.0, p[node] / q[node]) if judged_by_p else None)
    return found


def shown_notes(notes: dict, text) -> dict:
    """A method's notes; of CTC-drafter's slots the likeliest symbols.

    A symbol is [text of the token, or None for the blank, its probability].
    """
    if "q_slots" not in notes:
        return {name: notes[name] for name in notes if name not in ("q", "copied")}
    ids = notes["vocab_ids"].tolist()
    best = notes["q_slots"].topk(SYMBOLS, dim=-1)  # (S, 5)
    slots = []
    for columns, probabilities in zip(best.indices.tolist(), best.values.tolist()):
        names = [text(ids[i]) if i < len(ids) else None for i in columns]
        slots.append(list(zip(names, probabilities)))
    return {"slots": slots}


def plain_answer(arm, encoded: dict, options: dict, text) -> dict:
    """Plain decoding after a short warm-up: its tokens, and the seconds up to each."""
    if arm.drafts is not None:  # our own loop, which commits one token a round
        rounds = play(arm, encoded, options, text)
        tokens = [told["committed"][0] for told in rounds]
        taken = (sum(told["seconds"].values()) for told in rounds)
        return {"tokens": tokens, "seconds": list(itertools.accumulate(taken))}
    moments = []

    def note(ids, _scores):  # a stopping criterion, called after each token
        moments.append(clock(arm.target))
        return ids.new_zeros(len(ids), dtype=torch.bool)

    for given in warm_up_and(options):
        moments[:] = [clock(arm.target)]
        output = arm.target.generate(**encoded, **given, stopping_criteria=[note])
    new = output[0, encoded["input_ids"].shape[1] :].tolist()
    seconds = [moment - moments[0] for moment in moments[1:]]
    return {"tokens": [text(token) for token in new], "seconds": seconds}


def play(arm, encoded: dict, options: dict, text) -> list[dict]:
    """The rounds of an arm's answer to a prompt, after a short warm-up."""
    for given in warm_up_and(options):
        rounds = record(arm.target, arm.drafts, encoded, given, text)
    return rounds


def warm_up_and(options: dict) -> list[dict]:
    """The options of a short answer, and of the whole one."""
    most = options["max_new_tokens"]
    return [options | {"max_new_tokens": min(WARM_UP_TOKENS, most)}, options]


# ----------------------------------------------------------------------------- the page


def html(data: dict) -> str:
    """The page as HTML text.

    data: "prompt" (the texts of its tokens), "about" and "runs", as in `write`.
    """
    text = json.dumps(report.rounded(data, digits=5), separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no token can end the <script> element
    whole = (HERE / "replay.html").read_text(encoding="utf-8")
    for mark, file in (("{{style}}", "replay.css"), ("{{script}}", "replay.js")):
        whole = whole.replace(mark, (HERE / file).read_text(encoding="utf-8"))
    # Last, so that a token that spells a mark stays text.
    return whole.replace("{{data}}", text)


def write(path: str, tokenizer, loops: list, arms: list, text: str, options: dict):
    """Answer one prompt with every arm that is a method, and write the page.

    loops: of plain decoding; the methods race against the fastest.
    arms: of support/measuring/arms.py.
    text: the prompt as the user wrote it.
    options: of `target.generate`, among them max_new_tokens. The page shows greedy
        decoding, and sampling with these options, or else at temperature 1.
    """

    def token_text(token: int) -> str:
        word = tokenizer.decode([token])
        if not word or "\ufffd" in word:  # a part of a character: its name
            return str(tokenizer.convert_ids_to_tokens(token))
        return word

    target = loops[0].target
    encoded = encode(tokenizer, [text], target.device)
    common.check_ids(target, encoded["input_ids"])
    sampling = options if options.get("do_sample") else options | SAMPLING
    greedy = {name: options[name] for name in options if name not in SAMPLING}
    greedy["do_sample"] = False
    name = f"temperature {sampling['temperature']:g}"
    if sampling["top_p"] < 1:
        name += f", top-p {sampling['top_p']:g}"
    runs = [
        {"name": "greedy", **answers(loops, arms, encoded, greedy, token_text)},
        {"name": name, **answers(loops, arms, encoded, sampling, token_text)},
    ]
    about = {
        "prompt": text,
        "target": Path(target.config.name_or_path).name,
        "device": target.device.type,
    }
    prompt = [token_text(token) for token in encoded["input_ids"][0].tolist()]
    whole = html({"about": about, "prompt": prompt, "runs": runs})
    files.write(Path(path), whole)
    print(f"{path}: {len(whole) // 1024} KB, open it in a browser")


def answers(loops: list, arms: list, encoded: dict, options: dict, text) -> dict:
    """One run of the page: the answers of the fastest plain loop and of all methods."""
    raced = [plain_answer(loop, encoded, options, text) for loop in loops]
    methods = []
    for arm in arms:
        if arm.drafts is None:  # transformers decodes
            continue
        methods.append(
            {
                "name": arm.name,
                "idea": (inspect.getdoc(arm.module) or "").split("\n")[0],
                "settings": arm.settings,
                "rounds": play(arm, encoded, options, text),
            }
        )
    return {
        "sampled": options["do_sample"],
        "plain": min(
            raced, key=lambda each: each["seconds"][-1] / len(each["seconds"])
        ),
        "methods": methods,
    }
