"""From timed answers to figures, tables and pictures; bench.py does the timing.

Figures:

    tokens/s    new tokens per second of wall time, prefill included
    speedup     its ratio to the baseline's, with a 95% bootstrap interval over prompts
    tau         tokens emitted per target forward, bonus included, the prompt's forward not counted
    accepted    draft tokens accepted per round (one target forward), bonus excluded
    alpha       the method's acceptance rate at temperature 1, on the baseline's answers
    N_t/N       target forwards per emitted token
    N_d/N       draft tokens thrown away per emitted token
    ms          wall time a round spends drafting, verifying, and otherwise; prefill excluded
    overhead    decode time / time inside the drafter's and the target's forward, 1.00 being none;
                prefill excluded
    position i  share of the rounds offering i or more levels of draft that accepted i or more
    copies      share of rounds in which tokens copied from the context were offered, and in which
                one or more were accepted
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path

import torch
import transformers

from support import default_target

# ------------------------------------------------------------------------------------------ figures


def header(args, target, prompts: int) -> dict:
    """Where, when and how a result was made."""
    if target.device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        if target.device.type == "cpu":
            info = Path("/proc/cpuinfo").read_text()
            name = info.split("model name")[1].split("\n")[0].strip("\t: ")
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    git = subprocess.run(describe, capture_output=True, text=True)
    return {
        "target": args.target or default_target.NAME,
        "device": f"{target.device.type} ({name}, {torch.get_num_threads()} threads)",
        "dtype": str(target.dtype).removeprefix("torch."),
        "commit": git.stdout.strip() or None if git.returncode == 0 else None,
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "command": "python bench.py " + shlex.join(args.argv),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def speed(arm, rows=None) -> float:
    """Tokens per second over the answers `rows`, or all."""
    answers = arm.answers if rows is None else [arm.answers[i] for i in rows]
    return sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers)


def by_prompt(arm, turns: list[dict]) -> dict[str, list]:
    """What an arm did for each prompt, all its turns together: RATES are made of these sums."""
    sums = {name: [0] * (turns[-1]["prompt"] + 1) for name in ("tokens", "seconds", "forwards")}
    for turn, answer in zip(turns, arm.answers):
        sums["tokens"][turn["prompt"]] += len(answer.tokens)
        sums["seconds"][turn["prompt"]] += answer.seconds
        sums["forwards"][turn["prompt"]] += answer.forwards
    return sums


RATES = {
    "speed": ("tokens", "seconds"),
    "tau": ("tokens", "forwards"),
    "alpha": ("alpha_sum", "alpha_count"),
}


def paired(ours: dict, theirs: dict, rate: str = "speed", resamples: int = 2000) -> list[float]:
    """How many times one arm's tokens a second, tau or alpha another's is, on the same prompts.

    Prompts, with all their turns, are what the bootstrap redraws, for both arms alike.

    Args:
        ours, theirs: `by_prompt` of the two, of a run or of its JSON.
        rate: of RATES.
    Returns: [ratio, lower, upper], the bounds those of a 95% interval.
    """
    over, under = RATES[rate]
    columns = [ours[over], ours[under], theirs[over], theirs[under]]
    sums = torch.tensor(columns, dtype=torch.float64).T  # (prompts, 4)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(sums), (resamples, len(sums)), generator=generator)
    ups, downs, other_ups, other_downs = sums[picks].sum(1).unbind(1)  # (resamples,)
    ratios = ups / downs * other_downs / other_ups
    bounds = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    up, down, other_up, other_down = sums.sum(0).tolist()
    return [up / down * other_down / other_up, *bounds.tolist()]


def paired_ratio(arm, other, turns: list[dict], resamples: int = 2000) -> list[float]:
    """`paired` tokens a second of two arms that have just been timed."""
    return paired(by_prompt(arm, turns), by_prompt(other, turns), resamples=resamples)


def copied(answers: list) -> list[float] | None:
    """Share of rounds in which a copy was offered, and in which one was accepted; None: never."""
    rounds = [pair for answer in answers for pair in answer.copies]
    if not any(offered for offered, _ in rounds):
        return None
    offers = sum(offered > 0 for offered, _ in rounds)
    accepts = sum(accepted > 0 for _, accepted in rounds)
    return [offers / len(rounds), accepts / len(rounds)]


def figures(arm, baseline, turns: list[dict], greedy: bool) -> dict:
    """The numbers of one arm, null where one does not apply.

    Args:
        arm, baseline: bench.Arm, each with an answer per turn.
        turns: what was asked, {"prompt", "question_id", "category", ...} each.
        greedy: whether the answers should equal plain greedy decoding.
    """
    answers = arm.answers

    def add(name: str):
        return sum(getattr(answer, name) for answer in answers)

    emitted = sum(len(answer.tokens) for answer in answers)
    forwards, drafted = add("forwards"), add("drafted")
    rounds = max(1, add("rounds"))
    accepted = [count for answer in answers for count in answer.accepted]
    offered = [count for answer in answers for count in answer.offered]
    drafts = any(offered) or drafted > 0
    taken = sum(accepted) if accepted else emitted - forwards  # unreported: all but one a forward
    names = {"draft", "verify"}.union(*(answer.timers for answer in answers))
    each = {}
    for name in sorted(names):
        each[name] = 1000 * sum(answer.timers.get(name, 0.0) for answer in answers) / rounds
    in_forward = add("in_target") + add("in_drafter")
    if not add("in_target"):  # a replayed graph does not report
        in_forward = None
    positions = []
    for level in range(1, max(offered, default=0) + 1):
        reached = sum(count >= level for count in accepted)
        positions.append(reached / sum(count >= level for count in offered))
    left = [{**turns[i], **gone} for i, gone in enumerate(arm.same) if gone]
    first = None
    if left:
        first = {key: left[0][key] for key in ("question_id", "position", "top2_margin")}
    ratio, *bounds = paired_ratio(arm, baseline, turns)
    numbers = {
        "method": getattr(arm.module, "__name__", None),
        "variant": arm.variant,
        "settings": settings(arm),
        "tokens_per_s": emitted / add("seconds"),
        "speedup": ratio,
        "speedup_ci": bounds,
        "tau": emitted / forwards,
        "accepted_per_round": taken / forwards if drafts else None,
        "alpha": None,
        "acceptance_by_position": positions,
        "draft_ms": each["draft"] if drafts else None,
        "verify_ms": each["verify"],
        "other_ms": 1000 * add("decode_seconds") / rounds - each["draft"] - each["verify"],
        "n_target_per_token": forwards / emitted,
        "n_discarded_per_token": (drafted - taken) / emitted if drafts else None,
        "overhead": add("decode_seconds") / in_forward if in_forward else None,
        "identical_to_greedy": not left if greedy else None,
        "diverged": len(left) if greedy else None,
        "first_divergence": first,
        "copies": copied(answers),
        "timers_ms": each,
        "tokens": emitted,
        "memory_mb": max(answer.memory for answer in answers) / 2**20 or None,
        "by_category": by_category(arm, baseline, turns),
        "by_prompt": by_prompt(arm, turns),
    }
    return rounded(numbers)


def by_category(arm, baseline, turns: list[dict]) -> dict:
    """{category: {"speedup", "tau", "copies"}} of one arm."""
    found = {}
    for category in dict.fromkeys(turn["category"] for turn in turns):
        rows = [i for i, turn in enumerate(turns) if turn["category"] == category]
        answers = [arm.answers[i] for i in rows]
        emitted = sum(len(answer.tokens) for answer in answers)
        found[category] = {
            "speedup": speed(arm, rows) / speed(baseline, rows),
            "tau": emitted / sum(answer.forwards for answer in answers),
            "copies": copied(answers),
        }
    return found


def settings(arm) -> dict:
    """What the drafter's Config and the arm's own options say: numbers, words, lists, not paths."""
    found = {}
    for name, value in (*arm.facts.items(), *arm.kwargs.items()):
        if isinstance(value, bool | int | float | str | list) and "/" not in str(value):
            found[name] = value
    return found


def rounded(value):
    """Floats to four decimals, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------- tables


def markdown(heads: list[str], rows: list[list]) -> str:
    """A Markdown table, also aligned for reading as text; None is a dash."""
    text = [["-" if cell is None else str(cell) for cell in row] for row in [heads, *rows]]
    width = [max(map(len, column)) for column in zip(*text)]
    lines = []
    for row in text:
        cells = [row[0].ljust(width[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], width[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    rule = "|" + "-" * (width[0] + 2) + "|" + "".join("-" * (w + 1) + ":|" for w in width[1:])
    return "\n".join([lines[0], rule, *lines[1:]])


def shown(value: float | None, digits: int = 2) -> str | None:
    """A figure for a table; None, an empty cell, stays None."""
    return None if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str | None:
    """A share for a table, in whole percent."""
    return None if share is None else f"{100 * share:.0f}%"


def verdict(numbers: dict) -> str | None:
    """Whether all answers are those of greedy decoding, for a table."""
    if numbers["identical_to_greedy"] is None:
        return None
    return "yes" if numbers["identical_to_greedy"] else f"{numbers['diverged']} differ"


def interval(bounds: list[float]) -> str:
    """A range for a table."""
    return "-".join(shown(bound) for bound in bounds)


def label(name: str, numbers: dict) -> str:
    """The name of an arm for a table; the baseline's says which loop it is."""
    return f"{name} ({numbers['loop']})" if "loop" in numbers else name


# What the papers report: (method, variant, what its drafter's Config says, their figures). An arm
# has them beside it if all three are so and it copies nothing from the context. GLIDE, CAPE,
# SpecDec++ and CTC-drafter count the bonus in tau; Falcon does not: its tau is our `accepted`.
GLIDE_ALONE = {"speedup": 1.96, "draft_ms": 5.3}
WITH_KV = {"cross_attention": True}  # GLIDE, not the paper's vanilla drafter
ON_GLIDE = {"base": "glide", **WITH_KV}
PAPERS = [
    ("glide", "", WITH_KV, GLIDE_ALONE),
    ("cape", "none", ON_GLIDE, GLIDE_ALONE),
    ("cape", "", ON_GLIDE, {"speedup": 2.5, "draft_ms": 5.5}),
    ("cape", "beam4", ON_GLIDE, {"draft_ms": 10.9}),
    ("cape", "beam8", ON_GLIDE, {"draft_ms": 14.8}),
    ("specdecpp", "", {"base": "", "stop": "head"}, {"speedup": 2.04}),
    ("falcon", "", {"k": 2, "csgd": True}, {"accepted": 3.34, "speedup": 3.10}),
    ("falcon", "paper", {"k": 2, "csgd": True}, {"accepted": 3.34, "speedup": 3.10}),
    ("falcon", "chain", {"k": 2, "csgd": True}, {"accepted": 2.13, "speedup": 2.27}),
    ("falcon", "", {"k": 2, "csgd": False}, {"accepted": 2.78, "speedup": 2.65}),
    ("falcon", "chain", {"k": 2, "csgd": False}, {"accepted": 1.64, "speedup": 2.06}),
    ("falcon", "", {"k": 3, "csgd": True}, {"accepted": 2.52, "speedup": 2.96}),
    ("falcon", "", {"k": 4, "csgd": True}, {"accepted": 2.35, "speedup": 2.86}),
    ("ctc_drafter", "alignments", {"kind": "ctc"}, {"tau": 3.56, "speedup": 2.78}),
    ("ctc_drafter", "none", {"kind": "ctc"}, {"tau": 3.02, "speedup": 2.25}),
    ("ctc_drafter", "alignments", {"kind": "medusa"}, {"tau": 2.38, "speedup": 1.71}),
    ("ctc_drafter", "none", {"kind": "medusa"}, {"tau": 2.58, "speedup": 2.13}),
]
SETUPS = {
    "glide": "GLIDE: Vicuna-7B, one H800, fp16, batch 1 (tables 3 and 4, which do not say on what)",
    "cape": "CAPE: the least speedup of three Vicuna models, one H800, fp16 (section 1; table 3)",
    "specdecpp": "SpecDec++: Llama-2-chat-7B for 70B, Alpaca, sampled (abstract); 1.90 with the "
    "best fixed K",
    "falcon": "Falcon: Vicuna-7B, MT-Bench, H800, greedy (tables 4, 5); its tau leaves out the "
    "bonus, so it stands beside `accepted`",
    "ctc_drafter": "CTC-drafter: Vicuna-7B, MT-Bench (table 2)",
}


def papers_figures(numbers: dict) -> dict | None:
    """What the paper reports for an arm of this method, variant and drafter; None: nothing."""
    settings = numbers.get("settings") or {}
    for method, variant, facts, figures in PAPERS:
        same = (numbers.get("method"), numbers.get("variant")) == (method, variant)
        if same and facts.items() <= settings.items() and not settings.get("copies"):
            return figures
    return None


def _paper_tables(arms: dict) -> list[str]:
    """Ours beside the papers' figures, with the share of a round's time by part."""
    ours, theirs = ("tau", "accepted", "speedup"), ("tau", "accepted", "speedup")
    parts = ("verify", "draft", "transform")
    heads = ["arm", *ours, "draft ms", *parts]
    heads += [f"paper's {figure}" for figure in (*theirs, "draft ms")]
    rows, setups = [], {}
    for name, a in arms.items():
        paper = papers_figures(a)
        if paper is None:
            continue
        setups[SETUPS[a["method"]]] = True
        total = (a["draft_ms"] or 0.0) + a["verify_ms"] + a["other_ms"]
        shares = [a["timers_ms"].get(part, 0.0) / total for part in parts]
        row = [name, shown(a["tau"]), shown(a["accepted_per_round"]), shown(a["speedup"])]
        row += [shown(a["draft_ms"], 1), *(percent(share or None) for share in shares)]
        row += [shown(paper.get(figure)) for figure in theirs]
        rows.append([*row, shown(paper.get("draft_ms"), 1)])
    if not rows:
        return []
    kept = [i for i in range(len(heads)) if any(row[i] is not None for row in rows)]
    return [
        f"Beside the papers' figures. {'. '.join(setups)}.",
        markdown([heads[i] for i in kept], [[row[i] for i in kept] for row in rows]),
    ]


def tables(result: dict) -> str:
    """All tables of a result, as printed after a run and by `bench.py --table`."""
    about = f"**{result['target']}**, {result['dtype']}, {result['device']}, commit "
    about += str(result["commit"])
    parts = []
    if result.get("arms"):
        several = result["prompts"] > 1
        about += f"; {result['prompts']} prompts" if several else "; 1 prompt (no interval)"
        about += f", up to {result['max_new_tokens']} tokens a turn, "
        about += f"temperature {result['temperature']:g}"
        about += "; interrupted" if result.get("interrupted") else ""
        arms = result["arms"]
        parts += [*_arm_tables(arms), *_copy_tables(arms), *_paper_tables(arms)]
    if batch := result.get("batch"):
        about += f"; {batch['batches']} batches of {batch['size']} prompts, up to "
        about += f"{result['max_new_tokens']} tokens a turn, temperature {result['temperature']:g}"
        parts.append(_batch_table(batch))
    if curve := result.get("cost_curve"):
        parts += _cost_tables(curve)
    if sweep := result.get("sweep"):
        parts += _sweep_tables(sweep)
    for name, fitted in (result.get("fitted") or {}).items():
        parts += _fitted_tables(name, fitted)
    return "\n\n".join([about, *parts])


def _arm_tables(arms: dict) -> list[str]:
    heads = ["arm", "tokens/s", "speedup", "95%", "tau", "accepted", "alpha", "N_t/N", "N_d/N"]
    heads += ["draft ms", "verify ms", "other ms", "overhead", "= greedy"]
    rows = []
    for name, a in arms.items():
        row = [label(name, a), shown(a["tokens_per_s"], 1), shown(a["speedup"])]
        row += [interval(a["speedup_ci"]), shown(a["tau"]), shown(a["accepted_per_round"])]
        row += [shown(a[key]) for key in ("alpha", "n_target_per_token", "n_discarded_per_token")]
        row += [shown(a[key], 1) for key in ("draft_ms", "verify_ms", "other_ms")]
        rows.append([*row, shown(a["overhead"]), verdict(a)])
    parts = [markdown(heads, rows)]
    for name, a in arms.items():
        if gone := a["first_divergence"]:
            where = f"prompt {gone['question_id']} at new token {gone['position'] + 1}"
            parts.append(
                f"{name} leaves greedy decoding in {a['diverged']} answers, first in {where}, "
                f"where the target's top-2 margin is {gone['top2_margin']:.2g}"
            )
    positions = {name: a["acceptance_by_position"] for name, a in arms.items()}
    positions = {name: rates for name, rates in positions.items() if rates}
    if positions:
        most = min(12, max(map(len, positions.values())))
        rows = [
            [name, *map(shown, rates[:most]), *[None] * (most - len(rates))]
            for name, rates in positions.items()
        ]
        heads = ["arm", *(str(i + 1) for i in range(most))]
        parts += ["Acceptance by draft position", markdown(heads, rows)]
    categories = arms["baseline"]["by_category"]
    if len(categories) > 1 and len(arms) > 1:
        rows = []
        for name, a in arms.items():
            if name != "baseline":
                each = a["by_category"].values()
                rows.append([name, *(f"{c['speedup']:.2f} ({c['tau']:.2f})" for c in each)])
        parts += ["Speedup (tau) by category", markdown(["arm", *categories], rows)]
    rows = []
    for name, a in arms.items():
        for plain, (ratio, *bounds) in (a.get("against") or {}).items():
            rows.append([name, plain, shown(ratio), interval(bounds)])
    if rows:
        heads = ["arm", "against", "ratio", "95%"]
        parts += [
            "Tokens/s against the same method without the variant, or with the shipped drafter",
            markdown(heads, rows),
        ]
    return parts


def _copy_tables(arms: dict) -> list[str]:
    """In how many rounds a copy was offered, and accepted: over all, and by category."""
    categories = list(arms["baseline"]["by_category"])
    if len(categories) == 1:
        categories = []
    rows = []
    for name, a in arms.items():
        if a.get("copies"):
            row = [name, *map(percent, a["copies"])]
            for category in categories:
                shares = a["by_category"][category].get("copies") or [0.0, 0.0]
                row.append(f"{percent(shares[0])} ({percent(shares[1])})")
            rows.append(row)
    if not rows:
        return []
    title = "Rounds with a copy from the context: offered, accepted"
    title += "; and offered (accepted) by category" if categories else ""
    return [title, markdown(["arm", "offered", "accepted", *categories], rows)]


def _batch_table(batch: dict) -> str:
    rows = []
    for name, a in batch["arms"].items():
        row = [label(name, a), shown(a["tokens_per_s"], 1), shown(a["speedup"])]
        rows.append([*row, interval(a["speedup_ci"]), shown(a["tau"]), verdict(a)])
    return markdown(["arm", "tokens/s", "speedup", "95%", "tau", "= greedy"], rows)


def _cost_tables(curve: dict) -> list[str]:
    counts, lengths = curve["by_tokens"], curve["by_context"]
    rows = []
    for count in next(iter(lengths.values()), {}):
        rows.append([f"{count} tokens", *(shown(ms[count], 1) for ms in lengths.values())])
    return [
        f"Milliseconds of a target forward by tokens, at {curve['context']} tokens of context",
        markdown(["tokens", *counts], [["ms", *(shown(ms, 1) for ms in counts.values())]]),
        "and by tokens of context",
        markdown(["ms", *lengths], rows),
    ]


def _fitted_tables(name: str, fitted: dict) -> list[str]:
    if "by_match" not in fitted:
        keys = [key for key in ("sizes", "paper", "bounds", "tree", "least_worth") if key in fitted]
        facts = "; ".join(f"{key} {json.dumps(fitted[key])}" for key in keys)
        return [f"Fitted to this machine, {name}: {facts}"]
    rows, most = [], 0
    for length, found in fitted["by_match"].items():
        rates = found["acceptance"]
        most = max(most, len(rates))
        rows.append([length, percent(found["share"]), str(found["copy"]), *map(shown, rates)])
    rows = [row + [None] * (3 + most - len(row)) for row in rows]
    heads = ["match", "of positions", "copy", *(str(i + 1) for i in range(most))]
    title = "Copies from the context, by tokens that match: how often there is one, how many "
    title += "tokens to copy for most tokens/s on this machine, and acceptance by position"
    return [title, markdown(heads, rows)]


def _sweep_tables(sweep: dict) -> list[str]:
    rows = []
    for rule, points in sweep["points"].items():
        for setting, (n_target, n_discarded, speed) in points.items():
            rows.append([rule, setting, shown(n_target), shown(n_discarded), shown(speed, 1)])
    fitted = "mean times; too few draft lengths to fit"
    if sweep["r2"] is not None:
        fitted = f"R^2 {sweep['r2']:.2f}"
    parts = [
        f"Stop rules, replayed; modelled tokens/s from T = {sweep['t_draft_ms']:.1f} ms N_draft + "
        f"{sweep['t_target_ms']:.1f} ms N_target ({fitted})",
        markdown(["rule", "setting", "N_t/N", "N_d/N", "tokens/s"], rows),
    ]
    if sweep["calibration"]:
        rows = []
        for name, errors in sweep["calibration"].items():
            numbers = [shown(errors.get(key), 0) for key in ("w_rej", "head_depth")]
            numbers += [shown(errors.get(key)) for key in ("ece", "ece_reweighted")]
            rows.append([name, *numbers])
        heads = ["head", "w_rej", "D", "ECE", "ECE, log w_rej added"]
        parts += ["Calibration of the heads", markdown(heads, rows)]
        name, errors = next(iter(sweep["calibration"].items()))
        for kind, title in (("bins", ""), ("bins_reweighted", ", log w_rej added")):
            if errors.get(kind):
                parts.append(_bins(f"{name}{title}: predicted", errors[kind]))
    if sweep["acceptance_by_confidence"]:
        parts.append("Acceptance by the drafter's confidence")
        parts.append(_bins("confidence", sweep["acceptance_by_confidence"]))
    return parts


def _bins(title: str, bins: list) -> str:
    """A table of bins, (mean prediction, share accepted, count) each, side by side."""
    predicted, accepted, counts = zip(*bins)
    rows = [["accepted", *map(shown, accepted)], ["tokens", *map(str, counts)]]
    return markdown([title, *map(shown, predicted)], rows)


# ---------------------------------------------------------------------------------- files and texts


def write_result(result: dict, path: str) -> None:
    """Write a result as JSON; the file appears whole or not at all."""
    part = Path(f"{path}.{os.getpid()}")
    try:
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_result(path: str) -> dict:
    """A result written by `bench.py --json`; ValueError if it is something else."""
    try:
        result = json.loads(Path(path).read_bytes())
        tables(result).encode()
        return result
    except OSError:
        raise
    except Exception:  # whatever another file makes the tables raise
        raise ValueError(f"{path} is not a result of bench.py --json") from None


def answers(tokenizer, arms: list, turn: dict, colour: bool) -> str:
    """The first question and all answers to it, the accepted draft tokens marked.

    Args:
        arms: of bench.make_arms, the first two plain. turn: of bench.run. colour: mark by colour,
            for terminals, not by brackets.
    """
    plain = tokenizer.decode(turn["answer"], skip_special_tokens=True)
    how = "on green" if colour else "in brackets"
    parts = [f"question:\n{turn['question']}", f"plain decoding:\n{plain}"]
    for arm in arms[2:]:
        if arm.reports:
            text = highlight(tokenizer, arm.answers[0], colour)
            parts.append(f"{arm.name}, accepted draft tokens {how}:\n{text}")
    return "\n\n".join(parts)


def highlight(tokenizer, answer, colour: bool = True) -> str:
    """The text of a bench.Answer, its accepted draft tokens marked, the target's own plain."""
    begin, end = ("\x1b[30;42m", "\x1b[0m") if colour else ("[", "]")
    drafted: list[bool] = []
    for count in answer.accepted:
        drafted += [True] * count + [False]
    drafted = drafted[: len(answer.tokens)]  # the last round may have been cut short
    changes = [i for i in range(1, len(drafted)) if drafted[i] != drafted[i - 1]]
    borders = [0, *changes, len(drafted)]
    text = ""
    for start, stop in zip(borders, borders[1:]):
        before = tokenizer.decode(answer.tokens[:start], skip_special_tokens=True)
        after = tokenizer.decode(answer.tokens[:stop], skip_special_tokens=True)
        piece = after[len(before) :]
        text += begin + piece + end if drafted[start] else piece
    return text
