"""From timed answers to figures, and from figures to tables.

COLUMNS defines every figure: its name in the JSON, its heading, how it is written, and how it is
computed from the sums over an arm's answers.
"""

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from common import Mistake
from support import default_target

FEWEST = 5  # prompts or batches for an interval
MOST_POSITIONS = 12  # in the table of acceptance by draft position
LEGEND = (
    "tau: tokens per target forward. accepted: draft tokens accepted per target forward. "
    "N_t/N: target forwards per token. N_d/N: draft tokens discarded per token."
)


class Column(NamedTuple):
    """A figure of an arm."""

    name: str  # in the JSON
    header: str  # in a table
    format: str  # of format(); for an interval, of both its ends
    source: Callable | None = None  # from the sums; None: `figures` computes it from more


def ratio(part: str, whole: str, scale: float = 1.0) -> Callable:
    """A source: the quotient of two sums; None where nothing is to be divided by."""
    return lambda sums: scale * sums[part] / sums[whole] if sums[whole] else None


COLUMNS = (
    Column("tokens_per_s", "tokens/s", ".1f", ratio("tokens", "seconds")),
    Column("speedup", "speedup", ".2f"),
    Column("speedup_ci", "95%", ".2f"),
    Column("tau", "tau", ".2f", ratio("tokens", "forwards")),
    Column("accepted_per_round", "accepted", ".2f", ratio("accepted", "forwards")),
    Column("alpha", "alpha", ".2f"),
    Column("n_target_per_token", "N_t/N", ".2f", ratio("forwards", "tokens")),
    Column("n_discarded_per_token", "N_d/N", ".2f", ratio("discarded", "tokens")),
    Column("draft_ms", "draft ms", ".1f", ratio("draft", "drafts", 1000)),
    Column("verify_ms", "verify ms", ".1f", ratio("verify", "forwards", 1000)),
    Column("other_ms", "other ms", ".1f", ratio("other", "forwards", 1000)),
    Column("copies_offered", "copy offered", ".0%", ratio("copies_offered", "forwards")),
    Column("copies_accepted", "taken", ".0%", ratio("copies_accepted", "forwards")),
    Column("identical_to_greedy", "= greedy", ""),
)
COUNTS = ("tokens", "forwards", "drafted", "accepted")  # sums that the JSON gives as they are


# ----------------------------------------------------------------------------------- figures


def header(args, target, prompts: int) -> dict:
    """Where, when and how a result was made."""
    if target.device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = platform.processor() or platform.machine()
        with contextlib.suppress(OSError, IndexError):
            info = Path("/proc/cpuinfo").read_text()
            name = info.split("model name")[1].split("\n")[0].strip("\t: ")
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = None
    with contextlib.suppress(OSError):  # no git
        git = subprocess.run(describe, capture_output=True, text=True)
        commit = git.stdout.strip() or None
    return {
        "target": args.target or default_target.NAME,
        "device": f"{target.device.type} ({name}, {torch.get_num_threads()} threads)",
        "dtype": str(target.dtype).removeprefix("torch."),
        "commit": commit,
        "command": "python bench.py " + shlex.join(args.argv),
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def total(answers: list) -> dict:
    """The sums over answers (arms.Answer) of one arm that its figures are quotients of."""
    sums = {"tokens": 0, "seconds": 0.0, "forwards": 0, "drafted": 0, "accepted": 0}
    sums |= {"drafts": 0, "copies_offered": 0, "copies_accepted": 0}
    clock = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
    for answer in answers:
        sums["seconds"] += answer.seconds
        for row, stats in zip(answer.rows, answer.stats):
            sums["tokens"] += len(row)
            sums["forwards"] += stats.target_forwards
            sums["drafts"] += stats.target_forwards - 1  # the first one is timed with the prefill
            sums["drafted"] += stats.drafted
            # Transformers' loops do not tell. Each of their forwards ends with a bonus token.
            sums["accepted"] += sum(stats.accepted or [len(row) - stats.target_forwards])
            sums["copies_offered"] += sum(offered > 0 for offered, _ in stats.copies)
            sums["copies_accepted"] += sum(accepted > 0 for _, accepted in stats.copies)
            for phase, seconds in stats.seconds.items():
                clock[phase] += seconds
    sums["discarded"] = sums["drafted"] - sums["accepted"]
    sums["draft"] = clock["draft"]
    sums["verify"] = clock["verify"]
    sums["other"] = sums["seconds"] - sum(clock.values())
    return sums


def quotients(sums: dict) -> dict:
    """The figures that come from an arm's sums alone; None where one does not apply."""
    found = {column.name: column.source(sums) for column in COLUMNS if column.source}
    needs = {
        "drafted": ("accepted_per_round", "n_discarded_per_token", "draft_ms"),
        "verify": ("draft_ms", "verify_ms", "other_ms"),  # transformers' loops are not timed
        "copies_offered": ("copies_offered", "copies_accepted"),
    }
    for what, names in needs.items():
        if not sums[what]:
            found |= dict.fromkeys(names)
    return found


def figures(arm, baseline: str, turns: list, greedy: bool) -> dict:
    """The numbers of one arm, null where one does not apply.

    Args:
        arm: support.arms.Arm. baseline: name of the arm to compare with.
        turns: bench.Turn, each with an answer of every arm.
        greedy: whether the answers should equal plain greedy decoding.
    """
    answers = [turn.answers[arm.name] for turn in turns]
    sums = total(answers)
    ours = by_prompt(arm.name, turns)
    speedup, *bounds = paired(ours, by_prompt(baseline, turns))
    left = [gone for turn in turns for gone in turn.diverged[arm.name]]
    numbers = quotients(sums) | {
        "speedup": speedup,
        "speedup_ci": None if bounds[0] is None else bounds,
        "alpha": None,
        "acceptance_by_position": by_position(answers),
        "identical_to_greedy": not left if greedy else None,
        "diverged": len(left) if greedy else None,
        "first_divergence": left[0] if left else None,
        "settings": settings(arm),
        "by_category": by_category(arm.name, baseline, turns),
        "by_prompt": ours,
        "answers": raw(arm.name, turns),
    }
    return numbers | {name: sums[name] for name in COUNTS}


def by_position(answers: list) -> list[float]:
    """Of the rounds that offered i or more levels of draft, the share that accepted i or more."""
    rounds = []
    for answer in answers:
        for stats in answer.stats:
            rounds += zip(stats.offered, stats.accepted)
    shares = []
    for level in range(1, max((offered for offered, _ in rounds), default=0) + 1):
        reached = [accepted >= level for offered, accepted in rounds if offered >= level]
        shares.append(sum(reached) / len(reached))
    return shares


def by_category(name: str, baseline: str, turns: list) -> dict:
    """{category: {"speedup", "tau"}} of one arm."""
    found = {}
    for category in dict.fromkeys(turn.category for turn in turns):
        some = [turn for turn in turns if turn.category == category]
        ours = quotients(total([turn.answers[name] for turn in some]))
        plain = quotients(total([turn.answers[baseline] for turn in some]))
        speedup = ours["tokens_per_s"] / plain["tokens_per_s"]
        found[category] = {"speedup": speedup, "tau": ours["tau"]}
    return found


def by_prompt(name: str, turns: list) -> dict[str, list]:
    """An arm's sums for each prompt (or batch), all its turns together."""
    prompts = dict.fromkeys(turn.prompt for turn in turns)
    sums = [total([t.answers[name] for t in turns if t.prompt == prompt]) for prompt in prompts]
    return {key: [each[key] for each in sums] for key in ("tokens", "seconds", "forwards")}


RATES = {
    "speed": ("tokens", "seconds"),
    "tau": ("tokens", "forwards"),
    "alpha": ("alpha_sum", "alpha_count"),
}


def paired(ours: dict, theirs: dict, rate: str = "speed", resamples: int = 2000) -> list:
    """How many times another arm's tokens a second, tau or alpha one arm's is.

    The bootstrap redraws prompts with all their turns, the same ones for both arms.

    Args:
        ours, theirs: `by_prompt` of the two, of a run or of its JSON. rate: of RATES.
    Returns:
        [ratio, lower, upper], the bounds of a 95% interval; None for fewer than five prompts.
    """
    over, under = RATES[rate]
    columns = [ours[over], ours[under], theirs[over], theirs[under]]
    sums = torch.tensor(columns, dtype=torch.float64).T  # (prompts, 4)

    def quotient(parts):  # (..., 4)
        up, down, other_up, other_down = parts.unbind(-1)
        return up / down * other_down / other_up

    whole = float(quotient(sums.sum(0)))
    if len(sums) < FEWEST:
        return [whole, None, None]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(sums), (resamples, len(sums)), generator=generator)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return [whole, *quotient(sums[picks].sum(1)).quantile(ends).tolist()]


def settings(arm) -> dict:
    """What an arm decodes with: its Config, without the target's shape and without paths."""
    found = {"copies": arm.copies}
    config = arm.kwargs.get("config")
    for name, value in vars(config).items() if config else ():
        if isinstance(value, bool | int | float | str | list) and "/" not in str(value):
            found[name] = value
    return found


def raw(name: str, turns: list) -> list[dict]:
    """Every answer of an arm with its token ids and counts, to compute the figures again."""
    found = []
    for turn in turns:
        answer = turn.answers[name]
        for row, stats in zip(answer.rows, answer.stats):
            counts = {"prompt": turn.prompt, "seconds": answer.seconds, "tokens": row}
            counts |= {"forwards": stats.target_forwards, "drafted": stats.drafted}
            found.append(counts | {"offered": stats.offered, "accepted": stats.accepted})
    return found


def rounded(value):
    """Floats to four decimals, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


# ------------------------------------------------------------------------------------ tables


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


def cell(value, form: str = ".2f") -> str | None:
    """A figure or an interval as text; None stays None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "-".join(format(each, form) for each in value)
    return None if value is None else format(value, form)


def arm_table(arms: dict, names=None, columns=None) -> tuple[list[str], list[list]]:
    """Headings and rows of a table of arms.

    Args:
        arms: {name: figures}. names: some of them; None: all.
        columns: names of figures; None: those of COLUMNS that any arm has.
    """
    names = list(arms) if names is None else names
    if columns is None:
        columns = []
        for column in COLUMNS:
            if any(a.get(column.name) is not None for a in arms.values()):
                columns.append(column.name)
    known = {column.name: column for column in COLUMNS}
    chosen = [known.get(name, Column(name, name, ".2f")) for name in columns]
    rows = []
    for name in names:
        loop = arms[name].get("loop")
        shown = [cell(arms[name].get(column.name), column.format) for column in chosen]
        rows.append([f"{name} ({loop})" if loop else name, *shown])
    return ["arm", *(column.header for column in chosen)], rows


def arms_of(result: dict) -> dict:
    """{NAME: figures} of a result, measured one by one or in batches; {} without arms."""
    return result.get("arms") or result.get("batch", {}).get("arms") or {}


def tables(result: dict) -> str:
    """All tables of a result, as printed after a run and by `bench.py --table`."""
    about = f"**{result['target']}**, {result['dtype']}, {result['device']}, commit "
    about += str(result["commit"])
    parts = []
    if arms := arms_of(result):
        about += f"; {result['prompts']} prompts, up to {result['max_new_tokens']} tokens a turn"
        about += f", temperature {result['temperature']:g}"
        if batch := result.get("batch"):
            about += f", {batch['batches']} batches of {batch['size']}"
        if result.get("interrupted"):
            about += "; interrupted"
        parts += _arm_tables(arms)
    if curve := result.get("cost_curve"):
        parts += _cost_tables(curve)
    if sweep := result.get("sweep"):
        parts += _sweep_tables(sweep)
    return "\n\n".join([about, *parts])


def _arm_tables(arms: dict) -> list[str]:
    parts = [markdown(*arm_table(arms)), LEGEND]
    for name, a in arms.items():
        if gone := a.get("first_divergence"):
            parts.append(
                f"{name} leaves greedy decoding in {a['diverged']} answers, first in prompt "
                f"{gone['question_id']} at new token {gone['position'] + 1}, where the target's "
                f"top-2 margin is {gone['top2_margin']:.2g}"
            )
    # The rows of three more tables.
    positions = []
    categories = []
    ratios = []
    for name, a in arms.items():
        if shares := a.get("acceptance_by_position"):
            positions.append([name, *map(cell, shares[:MOST_POSITIONS])])
        kinds = a.get("by_category") or {}
        if name != "baseline" and len(kinds) > 1:
            both = [f"{each['speedup']:.2f} ({each['tau']:.2f})" for each in kinds.values()]
            categories.append([name, *both])
        for other, (ratio, *bounds) in (a.get("against") or {}).items():
            ratios.append([name, other, cell(ratio), cell(None if None in bounds else bounds)])
    if positions:
        width = max(map(len, positions))
        rows = [row + [None] * (width - len(row)) for row in positions]
        heads = ["arm", *map(str, range(1, width))]
        parts += ["Acceptance by draft position", markdown(heads, rows)]
    if categories:
        parts += ["Speedup (tau) by category", markdown(["arm", *kinds], categories)]
    if ratios:
        heads = ["arm", "against", "ratio", "95%"]
        parts += ["Tokens/s against another arm of the same method", markdown(heads, ratios)]
    return parts


def _cost_tables(curve: dict) -> list[str]:
    counts, lengths = curve["by_tokens"], curve["by_context"]
    rows = []
    for count in next(iter(lengths.values()), {}):
        rows.append([f"{count} tokens", *(cell(ms[count], ".1f") for ms in lengths.values())])
    return [
        f"Milliseconds of a target forward by tokens, at {curve['context']} tokens of context",
        markdown(["tokens", *counts], [["ms", *(cell(ms, ".1f") for ms in counts.values())]]),
        "and by tokens of context",
        markdown(["ms", *lengths], rows),
    ]


def _sweep_tables(sweep: dict) -> list[str]:
    rows = []
    for rule, points in sweep["points"].items():
        for setting, (n_target, n_discarded, speed) in points.items():
            rows.append([rule, setting, cell(n_target), cell(n_discarded), cell(speed, ".1f")])
    errors = []
    for name, error in (sweep.get("calibration") or {}).items():
        figures = [cell(error.get(key)) for key in ("ece", "ece_reweighted")]
        errors.append([name, str(error.get("w_rej")), str(error.get("head_depth")), *figures])
    parts = [
        f"Stop rules, replayed; modelled tokens/s from T = {sweep['t_draft_ms']:.1f} ms N_draft + "
        f"{sweep['t_target_ms']:.1f} ms N_target",
        markdown(["rule", "setting", "N_t/N", "N_d/N", "tokens/s"], rows),
    ]
    if errors:
        heads = ["head", "w_rej", "D", "ECE", "ECE, w_rej undone"]
        parts += ["Calibration error of the acceptance heads", markdown(heads, errors)]
    return parts


# ------------------------------------------------------------------------------------- files


def write_result(result: dict, path: str) -> None:
    """Write a result as JSON; the file appears whole or not at all."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"(?<=\[)\n *(?=-?\d)|(?<=\d)\n *(?=\])", "", text)
    text = re.sub(r"\n *(?=-?\d)", " ", text)  # the numbers of a list stay on one line
    part = Path(f"{path}.{os.getpid()}")
    try:
        part.write_text(text + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_result(path: str) -> dict:
    """A result written by `bench.py --json`; a Mistake if it is something else."""
    try:
        result = json.loads(Path(path).read_bytes())
        tables(result).encode()
        return result
    except OSError:
        raise
    except Exception as error:  # whatever another file makes the tables raise
        raise Mistake(f"{path} is not a result of bench.py --json") from error
