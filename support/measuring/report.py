"""From timed answers to figures, and from figures to tables."""

import json
import platform
import re
import shlex
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import common
from support import default_target, files

# The figures of an arm: their names in the JSON, with the heading of a table's column
# and the format of its numbers.
COLUMNS = {
    "tokens_per_s": ("tokens/s", ".1f"),
    "speedup": ("speedup", ".2f"),
    "speedup_ci": ("95%", ".2f"),
    "vs_stock": ("x stock", ".2f"),
    "vs_stock_ci": ("95%", ".2f"),
    "tau": ("tau", ".2f"),
    "alpha": ("alpha", ".2f"),
    "n_discarded_per_token": ("N_d/N", ".2f"),
    "draft_ms": ("draft ms", ".1f"),
    "verify_ms": ("verify ms", ".1f"),
    "other_ms": ("other ms", ".1f"),
    "identical_to_greedy": ("= greedy", ""),
}
LEGEND = (
    "speedup: over the baseline, the fastest plain decoding. x stock: over "
    "transformers on the target as loaded. tau: tokens per target forward. alpha: "
    "acceptance rate at temperature 1. N_d/N: draft tokens discarded per token. ms: "
    "per round; other: neither drafting nor verifying."
)


# -------------------------------------------------------------------------- an answer


@dataclass
class Answer(common.Stats):
    """What an arm answered to a turn of a conversation, counted and timed.

    Where transformers decodes, rounds are not known one by one: `accepted` holds one
    sum, `offered` is empty, and there are no phases but "other".
    """

    prompt: int = 0  # its number
    question_id: object = None  # of the prompt
    tokens: list[int] = field(default_factory=list)  # the new ones
    # By phase: "prefill" up to the first draft, "draft", "verify" and "other".
    seconds: Counter = field(default_factory=Counter)


def clock(target) -> float:
    """The time in seconds, once the GPU has finished its queued work."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


# ---------------------------------------------------------------- figures of an arm


def sums(answers: list[Answer]) -> Counter:
    """Totals over answers; what was not counted is 0."""
    total = Counter()
    for each in answers:
        total.update(each.seconds)  # by phase
        total["seconds"] += each.seconds.total()
        total["tokens"] += len(each.tokens)
        total["forwards"] += each.target_forwards
        total["drafts"] += each.target_forwards - 1  # the first is part of the prefill
        total["drafted"] += each.drafted
        total["accepted"] += sum(each.accepted)
        total["discarded"] += each.drafted - sum(each.accepted)
    return total


FIGURES = {  # functions of the totals over an arm's answers
    "tokens_per_s": lambda total: total["tokens"] / total["seconds"],
    "tau": lambda total: total["tokens"] / total["forwards"],
    "n_discarded_per_token": lambda total: total["discarded"] / total["tokens"],
    "draft_ms": lambda total: 1000 * total["draft"] / max(1, total["drafts"]),
    "verify_ms": lambda total: 1000 * total["verify"] / total["forwards"],
    "other_ms": lambda total: 1000 * total["other"] / total["forwards"],
}
OF_DRAFTS = {"n_discarded_per_token", "draft_ms"}
OF_PHASES = {"draft_ms", "verify_ms", "other_ms"}


def figures(answers: list[Answer]) -> dict:
    """The figures of an arm, None where one does not apply, or is added by bench.py."""
    total = sums(answers)
    unknown = set()
    if not total["drafted"]:
        unknown |= OF_DRAFTS
    if not all("verify" in each.seconds for each in answers):
        unknown |= OF_PHASES
    found = dict.fromkeys((*COLUMNS, "diverged", "first_divergence"))
    found |= {name: FIGURES[name](total) for name in FIGURES.keys() - unknown}
    found |= {
        name: total[name] for name in ("tokens", "forwards", "drafted", "accepted")
    }
    return found | {
        "by_prompt": by_prompt(answers),
        "answers": [vars(answer) for answer in answers],
    }


def by_prompt(answers: list[Answer]) -> dict[str, list]:
    """What `paired` needs: totals over the turns of each prompt."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt, []).append(answer)
    totals = [sums(group) for group in groups.values()]
    names = ("tokens", "seconds", "forwards")
    return {name: [total[name] for total in totals] for name in names}


# --------------------------------------------------------------- figures of two arms


def speed_ratio(name: str, ours: dict, theirs: dict) -> dict:
    """{NAME: an arm's speed over another's, NAME_ci: its interval}; see `paired`."""
    value, interval = paired(ours["by_prompt"], theirs["by_prompt"])
    return {name: value, f"{name}_ci": interval}


def paired(ours: dict, theirs: dict) -> tuple[float, list[float] | None]:
    """The ratio of two arms' tokens per second, and its 95% interval.

    ours, theirs: figure "by_prompt" of the two.
    Returns the ratio and [lower, upper], None below five prompts.
    """
    columns = [ours["tokens"], ours["seconds"], theirs["tokens"], theirs["seconds"]]
    prompts = torch.tensor(columns, dtype=torch.float64).T  # (prompts, 4)

    def ratio(totals):  # (..., 4) to (...)
        tokens, seconds, their_tokens, their_seconds = totals.unbind(-1)
        return tokens / seconds * their_seconds / their_tokens

    if len(prompts) < 5:
        return float(ratio(prompts.sum(0))), None
    value, *ends = bootstrap(ratio, prompts)
    return value, ends


def bootstrap(figure, *sums: torch.Tensor) -> tuple[float, float, float]:
    """A figure of the sums over prompts, and its 95% interval.

    figure: a function of (..., n) sums of each arm. sums: (prompts, n) of each arm.
    """
    # A prompt is redrawn with all its turns, and the same ones for all arms, because
    # what makes one prompt slower than another slows all of them down.
    count = len(sums[0])
    assert all(len(each) == count for each in sums), "not the same prompts"
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(count, (2000, count), generator=generator)
    resampled = figure(*(each[draws].sum(1) for each in sums))
    ends = torch.tensor([0.025, 0.975], dtype=resampled.dtype)
    low, high = resampled.quantile(ends).tolist()
    return float(figure(*(each.sum(0) for each in sums))), low, high


def rounded(value, digits: int = 6):
    """The same data as JSON holds it: floats with few digits, None for NaN."""
    return json.loads(
        json.dumps(value),
        parse_float=lambda text: float(f"{float(text):.{digits}g}"),
        parse_constant=lambda name: None,
    )


# ------------------------------------------------------------------------------ tables


def tables(result: dict) -> str:
    """All tables of a result."""
    parts = [about(result)]
    if arms := result.get("arms"):
        parts += [markdown(*arm_table(arms)), LEGEND]
        parts += [line for name in arms if (line := departure(name, arms[name]))]
    return "\n\n".join(parts)


def about(result: dict) -> str:
    """What was measured, in a line."""
    place = f"{result['dtype']}, {result['device']}"
    if result["commit"]:  # None outside git
        place += f", commit {result['commit']}"
    text = f"**{result['target']}**, {place}"
    if not result.get("arms"):
        return text
    count = result["prompts"]
    text += (
        f"; {count} prompt{'s' * (count != 1)}, up to {result['max_new_tokens']} tokens"
    )
    text += f" a turn, temperature {result['temperature']:g}"
    return text + ("; some turns not answered" if result.get("interrupted") else "")


def arm_table(arms: dict, names=None, columns=None) -> tuple[list[str], list[list]]:
    """Headings and rows of a table of arms.

    arms: {name: figures}.
    names: some of them; None: all.
    columns: names of figures; None: those that any arm has.
    """
    if columns is None:
        columns = []
        for column in COLUMNS:
            if any(numbers.get(column) is not None for numbers in arms.values()):
                columns.append(column)
    heads = ["arm", *(COLUMNS[column][0] for column in columns)]
    rows = []
    for name in names or arms:
        loop = arms[name].get("loop")
        shown = [cell(arms[name].get(column), COLUMNS[column][1]) for column in columns]
        rows.append([f"{name} ({loop})" if loop else name, *shown])
    return heads, rows


def departure(name: str, numbers: dict) -> str | None:
    """Where an arm's answers leave greedy decoding first; None if they never do."""
    gone = numbers.get("first_divergence")
    if not gone:
        return None
    count, place = numbers["diverged"], gone["position"] + 1
    answers = "answer" if count == 1 else "answers"
    margin = cell(gone["top2_margin"], ".2g") or "unknown"  # if it was not finite
    return (
        f"{name} leaves greedy decoding in {count} {answers}, first in prompt "
        f"{gone['question_id']} at new token {place}, where the target's top-2 margin "
        f"is {margin}"
    )


def cell(value, form: str = ".2f") -> str | None:
    """A figure or an interval as text; None stays None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "-".join(format(each, form) for each in value)
    return None if value is None else format(value, form)


def speedups(head: str, runs: dict, names=None) -> str:
    """A table of the speedups of arms, and of intervals over five prompts or more.

    runs: {heading of a column: {arm's name: figures}}. names: of some arms; None: all.
    """
    rows = []
    for name in names or next(iter(runs.values())):
        rows.append([name])
        for arm in (arms[name] for arms in runs.values()):
            interval = f" ({cell(arm['speedup_ci'])})" if arm["speedup_ci"] else ""
            rows[-1].append(cell(arm["speedup"]) + interval)
    return markdown([head, *runs], rows)


def markdown(heads: list[str], rows: list[list]) -> str:
    """A Markdown table, aligned to be read as text; None is a dash."""
    text = [["-" if x is None else str(x) for x in row] for row in [heads, *rows]]
    width = [max(map(len, column)) for column in zip(*text)]
    lines = []
    for first, *others in text:
        cells = [first.ljust(width[0])]
        cells += [other.rjust(w) for other, w in zip(others, width[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    left, *right = ["-" * w for w in width]
    rule = f"|-{left}-|" + "".join(f"-{dashes}:|" for dashes in right)
    return "\n".join([lines[0], rule, *lines[1:]])


# ------------------------------------------------------------------------- a result


def header(args, target, program: str = "bench.py") -> dict:
    """Where, when and how a result was made."""
    cuda = target.device.type == "cuda"
    name = torch.cuda.get_device_name(target.device) if cuda else processor()
    return {
        "target": args.target or default_target.NAME,
        "device": f"{target.device.type} ({name}, {torch.get_num_threads()} threads)",
        "dtype": str(target.dtype).removeprefix("torch."),
        "kernels": getattr(target, "kernels", None),  # for one token, and for several
        "commit": commit(),
        "command": f"python {program} {shlex.join(args.argv)}",
        "prompts": 0,
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


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    found = re.search(r"model name\s*: (.+)", text)
    return found[1] if found else platform.machine()


def commit() -> str | None:
    """The measured commit, "-dirty" if edited; None outside git."""
    folder = str(Path(__file__).parent)
    git = ["git", "-C", folder, "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None


def write_result(result: dict, path: str) -> None:
    """Write a result as JSON, the numbers of a list on one line."""
    text = json.dumps(result, indent=1)
    numbers = re.compile(r"\[\n([-+\d.e,\s]+)\]")
    text = numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    files.write(Path(path), text + "\n")
