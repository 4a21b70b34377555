"""From timed answers to figures, tables and pictures; bench.py does the timing.

tokens/s    new tokens per second of wall time, prefill included
speedup     its ratio to the baseline's, with a 95% bootstrap interval over prompts
tau         tokens emitted per target forward, bonus included; the prompt's own forward is not
counted accepted    draft tokens accepted per round (one target forward), bonus excluded
alpha       the method's acceptance rate at temperature 1, on the baseline's answers
N_t/N       target forwards per emitted token, and N_d/N, draft tokens thrown away per emitted token
ms          wall time a round spends drafting, verifying, and otherwise; prefill excluded
overhead    decode wall time / time inside the drafter's and the target's forward; 1.00 is none;
prefill excluded position i  share of the rounds offering i or more levels of draft that accepted at
least i tokens
"""

from __future__ import annotations

import contextlib
import json
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
    name = (
        torch.cuda.get_device_name()
        if target.device.type == "cuda"
        else platform.processor() or platform.machine()
    )
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


def speedup_interval(arm, baseline, turns: list[dict], resamples: int = 2000) -> list[float]:
    """95% bootstrap interval of the ratio of tokens per second; prompts, with all their turns, are
    what is redrawn."""
    sums = torch.zeros(
        turns[-1]["prompt"] + 1, 4, dtype=torch.float64
    )  # per prompt: tokens and seconds of both arms
    for turn, ours, theirs in zip(turns, arm.answers, baseline.answers):
        sums[turn["prompt"]] += torch.tensor(
            [len(ours.tokens), ours.seconds, len(theirs.tokens), theirs.seconds]
        )
    picks = torch.randint(
        len(sums), (resamples, len(sums)), generator=torch.Generator().manual_seed(0)
    )
    total = sums[picks].sum(1)  # (resamples, 4)
    ratios = total[:, 0] / total[:, 1] * total[:, 3] / total[:, 2]
    return ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()


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

    emitted, forwards, rounds = (
        sum(len(a.tokens) for a in answers),
        add("forwards"),
        max(1, add("rounds")),
    )
    accepted, offered = (
        [n for a in answers for n in getattr(a, name)] for name in ("accepted", "offered")
    )
    drafts = any(offered) or add("drafted") > 0
    taken = (
        sum(accepted) if accepted else emitted - forwards
    )  # unreported: all but one token of each forward
    names = {"draft", "verify"}.union(*(a.timers for a in answers))
    each = {
        name: 1000 * sum(a.timers.get(name, 0.0) for a in answers) / rounds
        for name in sorted(names)
    }
    in_forward = add("in_target") and add("in_target") + add(
        "in_drafter"
    )  # a replayed graph does not report
    left = [{**turns[i], **gone} for i, gone in enumerate(arm.same) if gone]
    levels = range(1, max(offered, default=0) + 1)
    categories: dict[str, list[int]] = {}
    for i, turn in enumerate(turns):
        categories.setdefault(turn["category"], []).append(i)
    return rounded(
        {
            "tokens_per_s": emitted / add("seconds"),
            "speedup": speed(arm) / speed(baseline),
            "speedup_ci": speedup_interval(arm, baseline, turns),
            "tau": emitted / forwards,
            "accepted_per_round": taken / forwards if drafts else None,
            "alpha": None,
            "acceptance_by_position": [
                sum(n >= i for n in accepted) / sum(n >= i for n in offered) for i in levels
            ],
            "draft_ms": each["draft"] if drafts else None,
            "verify_ms": each["verify"],
            "other_ms": 1000 * add("decode_seconds") / rounds - each["draft"] - each["verify"],
            "n_target_per_token": forwards / emitted,
            "n_discarded_per_token": (add("drafted") - taken) / emitted if drafts else None,
            "overhead": add("decode_seconds") / in_forward if in_forward else None,
            "identical_to_greedy": not left if greedy else None,
            "diverged": len(left) if greedy else None,
            "first_divergence": {k: left[0][k] for k in ("question_id", "position", "top2_margin")}
            if left
            else None,
            "timers_ms": each,
            "tokens": emitted,
            "memory_mb": max(a.memory for a in answers) / 2**20 or None,
            "by_category": {
                category: {
                    "speedup": speed(arm, rows) / speed(baseline, rows),
                    "tau": sum(len(answers[i].tokens) for i in rows)
                    / sum(answers[i].forwards for i in rows),
                }
                for category, rows in categories.items()
            },
        }
    )


def rounded(value):
    """Floats to four decimals, all the way down."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------- tables


def markdown(heads: list[str], rows: list[list]) -> str:
    """A Markdown table, aligned for reading as text: the first column left, the others right; None
    is a dash."""
    text = [["-" if cell is None else str(cell) for cell in row] for row in [heads, *rows]]
    width = [max(map(len, column)) for column in zip(*text)]
    lines = []
    for row in text:
        cells = [row[0].ljust(width[0]), *(cell.rjust(w) for cell, w in zip(row[1:], width[1:]))]
        lines.append("| " + " | ".join(cells) + " |")
    rule = "|" + "-" * (width[0] + 2) + "|" + "".join("-" * (w + 1) + ":|" for w in width[1:])
    return "\n".join([lines[0], rule, *lines[1:]])


def shown(value: float | None, digits: int = 2) -> str | None:
    """A figure for a table; None, an empty cell, stays None."""
    return None if value is None else f"{value:.{digits}f}"


# what the papers report for an arm; their tau is ours except Falcon's, which leaves out the bonus
PAPERS = {
    "glide": {"speedup": 1.96, "draft_ms": 5.3},
    "cape:none": {"speedup": 1.96, "draft_ms": 5.3},
    "cape": {"speedup": 2.5, "draft_ms": 5.5},
    "cape:beam4": {"draft_ms": 10.9},
    "cape:beam8": {"draft_ms": 14.8},
    "specdecpp": {"speedup": 2.04},
    "falcon": {"tau": 3.34, "alpha": 0.776, "speedup": 3.10},
    "falcon@k2": {"tau": 3.34, "alpha": 0.776, "speedup": 3.10},
    "falcon:chain@k2": {"tau": 2.13, "alpha": 0.687, "speedup": 2.27},
    "falcon@k2-no-csgd": {"tau": 2.78, "alpha": 0.744, "speedup": 2.65},
    "falcon:chain@k2-no-csgd": {"tau": 1.64, "alpha": 0.629, "speedup": 2.06},
    "falcon@k3": {"tau": 2.52, "alpha": 0.722, "speedup": 2.96},
    "falcon@k4": {"tau": 2.35, "alpha": 0.708, "speedup": 2.86},
    "ctc_drafter": {"tau": 3.56, "speedup": 2.78},
    "ctc_drafter:alignments": {"tau": 3.56, "speedup": 2.78},
    "ctc_drafter:none": {"tau": 3.02, "speedup": 2.25},
    "ctc_drafter:alignments@medusa": {"tau": 2.38, "speedup": 1.71},
    "ctc_drafter:none@medusa": {"tau": 2.58, "speedup": 2.13},
}
SETUPS = {
    "glide": "GLIDE: Vicuna-7B, MT-Bench, one H800, fp16, batch 1 (tables 3 and 4)",
    "cape": "CAPE: Vicuna-7B, MT-Bench, one H800, fp16 (table 3, section 6)",
    "specdecpp": "SpecDec++: Llama-2-chat-7B for 70B, Alpaca (abstract); 1.90 with the best fixed "
    "K",
    "falcon": "Falcon: Vicuna-7B, MT-Bench, H800 (tables 4, 5); its tau leaves out the bonus, like "
    "`accepted`",
    "ctc_drafter": "CTC-drafter: Vicuna-7B, MT-Bench (table 2)",
}


def _paper_tables(arms: dict) -> list[str]:
    """Ours beside the papers' figures, with the share of a round's time by part; columns without
    any are left out."""
    rows = []
    for name, a in arms.items():
        if theirs := PAPERS.get(name):
            spent = {
                part: a["timers_ms"].get(part, 0.0) for part in ("verify", "draft", "transform")
            }
            total = (a["draft_ms"] or 0.0) + a["verify_ms"] + a["other_ms"]
            share = {part: f"{100 * ms / total:.0f}%" for part, ms in spent.items() if ms}
            rows.append(
                [
                    name,
                    *(shown(a[key]) for key in ("tau", "accepted_per_round", "alpha", "speedup")),
                    shown(a["draft_ms"], 1),
                    *map(share.get, spent),
                    *(shown(theirs.get(key)) for key in ("tau", "alpha", "speedup")),
                    shown(theirs.get("draft_ms"), 1),
                ]
            )
    heads = [
        "arm",
        "tau",
        "accepted",
        "alpha",
        "speedup",
        "draft ms",
        "verify",
        "draft",
        "transform",
    ]
    heads += [f"paper's {figure}" for figure in ("tau", "alpha", "speedup", "draft ms")]
    kept = [i for i in range(len(heads)) if any(row[i] is not None for row in rows)]
    setups = dict.fromkeys(
        SETUPS[name.partition("@")[0].partition(":")[0]] for name in arms if name in PAPERS
    )
    return (
        [
            f"Beside the papers' figures, which are greedy. {'. '.join(setups)}.",
            markdown([heads[i] for i in kept], [[row[i] for i in kept] for row in rows]),
        ]
        if rows
        else []
    )


def tables(result: dict) -> str:
    """All tables of a result, as printed after a run and by `bench.py --table`."""
    parts = [
        f"**{result['target']}**, {result['dtype']}, {result['device']}, commit {result['commit']}"
    ]
    if result.get("arms"):
        parts[0] += (
            f"; {result['prompts']} prompts, up to {result['max_new_tokens']} tokens a turn, "
            "temperature "
            f"{result['temperature']:g}" + ("; interrupted" if result.get("interrupted") else "")
        )
        parts += _arm_tables(result["arms"]) + _paper_tables(result["arms"])
    if batch := result.get("batch"):
        parts[0] += (
            f"; {batch['batches']} batches of {batch['size']} prompts, up to "
            f"{result['max_new_tokens']} "
            f"tokens a turn, temperature {result['temperature']:g}"
        )
        rows = [
            [
                f"{name} ({a['loop']})" if "loop" in a else name,
                shown(a["tokens_per_s"], 1),
                shown(a["speedup"]),
                "-".join(map(shown, a["speedup_ci"])),
                shown(a["tau"]),
                {True: "yes", None: None}.get(a["identical_to_greedy"], f"{a['diverged']} differ"),
            ]
            for name, a in batch["arms"].items()
        ]
        parts.append(markdown(["arm", "tokens/s", "speedup", "95%", "tau", "= greedy"], rows))
    if curve := result.get("cost_curve"):
        parts.append(
            f"Milliseconds of a target forward by tokens, at {curve['context']} tokens of context"
        )
        counts, lengths = curve["by_tokens"], curve["by_context"]
        parts.append(
            markdown(["tokens", *counts], [["ms", *(shown(ms, 1) for ms in counts.values())]])
        )
        parts.append("and by tokens of context")
        parts.append(
            markdown(
                ["ms", *lengths],
                [
                    [f"{n} tokens", *(shown(ms[n], 1) for ms in lengths.values())]
                    for n in next(iter(lengths.values()), {})
                ],
            )
        )
    if sweep := result.get("sweep"):
        parts += _sweep_tables(sweep)
    for name, fitted in (result.get("fitted") or {}).items():
        parts.append(
            f"Fitted to this machine, {name}: "
            + "; ".join(
                f"{key} {json.dumps(fitted[key])}"
                for key in ("sizes", "paper", "bounds", "tree")
                if key in fitted
            )
        )
    return "\n\n".join(parts)


def _sweep_tables(sweep: dict) -> list[str]:
    rows = [
        [rule, setting, *map(shown, point[:2]), shown(point[2], 1)]
        for rule, settings in sweep["points"].items()
        for setting, point in settings.items()
    ]
    fitted = (
        "mean times; too few draft lengths to fit"
        if sweep["r2"] is None
        else f"R^2 {sweep['r2']:.2f}"
    )
    parts = [
        f"Stop rules, replayed; modelled tokens/s from T = {sweep['t_draft_ms']:.1f} ms N_draft + "
        f"{sweep['t_target_ms']:.1f} ms N_target ({fitted})",
        markdown(["rule", "setting", "N_t/N", "N_d/N", "tokens/s"], rows),
    ]
    if sweep["calibration"]:
        keys = ("w_rej", "head_depth", "ece", "ece_reweighted")
        rows = [
            [name, *(shown(errors.get(key), 2 if "ece" in key else 0) for key in keys)]
            for name, errors in sweep["calibration"].items()
        ]
        parts += [
            "Calibration of the heads",
            markdown(["head", "w_rej", "D", "ECE", "ECE, log w_rej added"], rows),
        ]
        name, errors = next(iter(sweep["calibration"].items()))
        for kind, title in (("bins", ""), ("bins_reweighted", ", log w_rej added")):
            if rows := list(zip(*errors.get(kind, []))):
                parts.append(
                    markdown(
                        [f"{name}{title}: predicted", *map(shown, rows[0])],
                        [["accepted", *map(shown, rows[1])], ["tokens", *map(str, rows[2])]],
                    )
                )
    rows = list(zip(*sweep["acceptance_by_confidence"]))
    return (
        [
            *parts,
            "Acceptance by the drafter's confidence",
            markdown(
                ["confidence", *map(shown, rows[0])],
                [["accepted", *map(shown, rows[1])], ["tokens", *map(str, rows[2])]],
            ),
        ]
        if rows
        else parts
    )


def _arm_tables(arms: dict) -> list[str]:
    rows, parts = [], []
    for name, a in arms.items():
        same = {True: "yes", None: None}.get(a["identical_to_greedy"], f"{a['diverged']} differ")
        counts = (
            "tau",
            "accepted_per_round",
            "alpha",
            "n_target_per_token",
            "n_discarded_per_token",
        )
        rows.append(
            [
                f"{name} ({a['loop']})" if "loop" in a else name,
                shown(a["tokens_per_s"], 1),
                shown(a["speedup"]),
                "-".join(map(shown, a["speedup_ci"])),
                *(shown(a[key]) for key in counts),
                *(shown(a[key], 1) for key in ("draft_ms", "verify_ms", "other_ms")),
                shown(a["overhead"]),
                same,
            ]
        )
    heads = ["arm", "tokens/s", "speedup", "95%", "tau", "accepted", "alpha", "N_t/N", "N_d/N"]
    parts.append(
        markdown([*heads, "draft ms", "verify ms", "other ms", "overhead", "= greedy"], rows)
    )
    for name, a in arms.items():
        if gone := a["first_divergence"]:
            where = f"prompt {gone['question_id']} at new token {gone['position'] + 1}"
            parts.append(
                f"{name} leaves greedy decoding in {a['diverged']} answers, first in {where}, "
                "where the "
                f"target's top-2 margin is {gone['top2_margin']:.2g}"
            )
    positions = {
        name: a["acceptance_by_position"] for name, a in arms.items() if a["acceptance_by_position"]
    }
    if positions:
        levels = range(min(12, max(map(len, positions.values()))))
        rows = [
            [name, *(shown(rates[i]) if i < len(rates) else None for i in levels)]
            for name, rates in positions.items()
        ]
        parts += [
            "Acceptance by draft position",
            markdown(["arm", *(str(i + 1) for i in levels)], rows),
        ]
    categories = arms["baseline"]["by_category"]
    if len(categories) > 1 and len(arms) > 1:
        rows = [
            [name, *(f"{c['speedup']:.2f} ({c['tau']:.2f})" for c in a["by_category"].values())]
            for name, a in arms.items()
            if name != "baseline"
        ]
        parts += ["Speedup (tau) by category", markdown(["arm", *categories], rows)]
    return parts


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


def highlight(tokenizer, answer) -> str:
    """The text of a bench.Answer with the accepted draft tokens on green and the target's own
    tokens plain."""
    drafted = [kind for count in answer.accepted for kind in [True] * count + [False]][
        : len(answer.tokens)
    ]
    borders = [
        0,
        *(i for i in range(1, len(drafted)) if drafted[i] != drafted[i - 1]),
        len(drafted),
    ]
    text = ""
    for start, end in zip(borders, borders[1:]):
        before, after = (
            tokenizer.decode(answer.tokens[:n], skip_special_tokens=True) for n in (start, end)
        )
        text += (
            f"\x1b[30;42m{after[len(before) :]}\x1b[0m" if drafted[start] else after[len(before) :]
        )
    return text


# ----------------------------------------------------------------------------------------- pictures


def plot(results: list[dict], folder: Path) -> list[Path]:
    """Draw speedups, acceptance, a round's time, the cost curve and stop rules into `folder`;
    returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    arms = {
        f"{name} [{number}]" if len(results) > 1 else name: a
        for number, result in enumerate(results, 1)
        for name, a in (result.get("arms") or {}).items()
    }
    names, drawn = list(arms)[::-1], []  # bars are stacked from below

    def picture(name: str, rows: int, title: str, x: str, y: str, draw) -> None:
        figure, axes = plt.subplots(figsize=(7, 1.6 + 0.35 * rows), layout="constrained")
        draw(axes)
        axes.set(title=title, xlabel=x, ylabel=y)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
        drawn.append(folder / name)

    def speedups(axes):
        values = [arms[name]["speedup"] for name in names]
        errors = [
            [max(0, v - arms[name]["speedup_ci"][0]) for v, name in zip(values, names)],
            [max(0, arms[name]["speedup_ci"][1] - v) for v, name in zip(values, names)],
        ]
        axes.bar_label(
            axes.barh(names, values, xerr=errors, capsize=3),
            fmt="%.2f",
            label_type="center",
            color="white",
        )
        axes.axvline(1, color="black", linewidth=0.8)

    def times(axes):
        left = [0.0] * len(names)
        for part in ("draft", "verify", "other"):
            widths = [arms[name][f"{part}_ms"] or 0.0 for name in names]
            axes.barh(names, widths, left=left, label=part)
            left = [a + b for a, b in zip(left, widths)]

    def acceptance(axes):
        for name, a in arms.items():
            if rates := a["acceptance_by_position"]:
                axes.plot(range(1, len(rates) + 1), rates, marker="o", label=name)
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)

    if arms:
        picture(
            "speedup.png",
            len(arms),
            "Speedup over plain decoding",
            "ratio of tokens/s, 95% range",
            "",
            speedups,
        )
        picture(
            "time.png", len(arms), "Where a round's time goes", "milliseconds a round", "", times
        )
        picture(
            "acceptance.png",
            8,
            "Acceptance by draft position",
            "draft position",
            "share of rounds",
            acceptance,
        )
    for curve in [result["cost_curve"] for result in results if result.get("cost_curve")][:1]:

        def cost(axes, curve=curve):
            axes.plot(
                [int(n) for n in curve["by_tokens"]], list(curve["by_tokens"].values()), marker="o"
            )
            axes.set_ylim(bottom=0)

        title = f"Target forward at {curve['context']} tokens of context"
        picture("cost.png", 8, title, "tokens fed", "milliseconds", cost)
    for sweep in [result["sweep"] for result in results if result.get("sweep")][:1]:

        def pareto(axes, sweep=sweep):
            axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
            for rule, settings in sweep["points"].items():
                line = sorted((point[1], point[0]) for point in settings.values())
                axes.plot(
                    *zip(*line),
                    marker="*" if rule == "oracle" else "o",
                    markersize=4 + 8 * (rule == "oracle"),
                    label=rule,
                )

        def confidence(axes, rows=sweep["acceptance_by_confidence"]):
            values, shares, counts = zip(*rows) if rows else ((), (), ())
            axes.bar_label(
                axes.bar(values, shares, width=0.08), [f"{n}" for n in counts], fontsize=7
            )
            axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)

        picture(
            "stopping.png",
            10,
            "Stop rules",
            "draft tokens discarded per token",
            "target forwards per token",
            pareto,
        )
        picture(
            "confidence.png",
            8,
            "Acceptance by the drafter's confidence",
            "largest probability of q_draft",
            "share accepted (counts above)",
            confidence,
        )
    return drawn
