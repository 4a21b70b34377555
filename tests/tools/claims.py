"""What the papers say beside what was measured here; tables.py writes results/claims.md from it.

A verdict is computed, not typed. Where two arms answered the same prompts of one run, their ratio
has a 95% interval (`report.paired`, bootstrap over prompts), and the claim that it is above 1 is

    confirmed     if the whole interval is
    the opposite  if the whole interval is below 1
    not shown     otherwise

A figure without an interval stands as it is. An interval tells how much other prompts would change
a ratio; that another training run would change it, too, only a second seed can show.
"""

import json
from pathlib import Path

import glide
from support import report

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"
MAIN = "cpu_stages"  # the main table: 16 prompts, 128 tokens
VARIANTS = "cpu_variants"  # the shipped drafters in many ways: 10 prompts, 48 tokens
GLIDES = "cpu_rivals_glide"  # drafters trained alike; one thread, the other core was busy
FALCONS = "cpu_rivals_falcon"
CTCS = "cpu_rivals_ctc"  # the same
BATCHES = ("cpu_batch2", "cpu_batch4", "cpu_batch8")
MEDUSA = "cpu_medusa"  # shipped drafters beside Medusa's: 10 prompts, 48 tokens
MEDUSAS = "ctc_drafter:none@medusa"
SAMPLED = "cpu_t1"  # temperature 1: 10 prompts, 48 tokens
MORE = "cpu_rivals_more"  # an LSTM, four layers, a beam of eight: the prompts of FALCONS
UNITS = {"speed": "tokens/s", "tau": "tau", "alpha": "alpha"}


def result(file: str) -> dict:
    return json.loads((RESULTS / f"{file}.json").read_text())


def figure(file: str, arm: str, name: str):
    return result(file)["arms"][arm][name]


def verdict(low: float, high: float) -> str:
    """Of the claim that a ratio is above 1, by its interval as it is printed."""
    low, high = round(low, 2), round(high, 2)
    if low > 1:
        return "confirmed"
    return "the opposite" if high < 1 else "not shown"


def interval(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def ratio(file: str, arm: str, other: str, rate: str) -> tuple[str, str, str]:
    """One arm's tokens/s, tau or alpha against another's, prompt by prompt."""
    arms = result(file)["arms"]
    found = report.paired(arms[arm]["by_prompt"], arms[other]["by_prompt"], rate)
    said = f"{arm} / {other}: {interval(*found)} in {UNITS[rate]}"
    if rate != "speed":  # a speed of its own belongs to the machine and the hour
        said += f", {arms[arm][rate]:.2f} and {arms[other][rate]:.2f}"
    return said, verdict(*found[1:]), file


def across(file: str, arm: str, other_file: str, other: str) -> tuple[str, str, str]:
    """Tau, which no machine changes, of arms that answered the same prompts in two runs."""
    pair = (result(file)["arms"][arm], result(other_file)["arms"][other])
    ours, theirs = (each["by_prompt"] for each in pair)
    assert ours["tokens"] == theirs["tokens"], "answers to other prompts"
    found = report.paired(ours, theirs, "tau")
    said = f"{arm} / {other} of {other_file}: {interval(*found)} in tau"
    return f"{said}, {pair[0]['tau']:.2f} and {pair[1]['tau']:.2f}", verdict(*found[1:]), file


def plain(file: str, arm: str) -> tuple[str, str, str]:
    """An arm's speed against plain decoding."""
    bounds = figure(file, arm, "speedup_ci")
    return f"{arm}: {interval(figure(file, arm, 'speedup'), *bounds)}", verdict(*bounds), file


def predicted(file: str, arm: str) -> tuple[str, str, str]:
    """GLIDE's E(Spd.) from alpha, gamma and c of a run at temperature 1, beside the measured."""
    found = result(file)["arms"][arm]
    gamma = found["settings"]["gamma"]
    cost = found["draft_ms"] / gamma / figure(file, "baseline", "verify_ms")
    said = f"{glide.expected_speedup(found['alpha'], gamma, cost):.2f} predicted"
    return only(file, f"{arm}: {said}, {found['speedup']:.2f} measured")


def batched(files: tuple, arm: str) -> tuple[str, str, str]:
    """The same in batches, which are too few for an interval."""
    batches = [result(file)["batch"] for file in files]
    sizes = ", ".join(str(batch["size"]) for batch in batches)
    each = ", ".join(f"{batch['arms'][arm]['speedup']:.2f}" for batch in batches)
    return only(files[0], f"{arm} in batches of {sizes}: {each}")


def only(file: str, said: str) -> tuple[str, str, str]:
    """Figures without an interval."""
    return said, "no interval", file


def milliseconds(file: str, part: str, *arms: str) -> tuple[str, str, str]:
    """What arms draft, or verify, a round."""
    each = [f"{arm} {figure(file, arm, f'{part}_ms'):.1f}" for arm in arms]
    words = {"draft": "drafting", "verify": "verification"}[part]
    return only(file, ", ".join(each) + f" ms of {words}")


def figures(file: str, name: str, *arms: str) -> tuple[str, str, str]:
    """The same figure of several arms."""
    each = ", ".join(f"{arm} {figure(file, arm, name):.2f}" for arm in arms)
    return only(file, f"{each} ({name})")


def drafted(file: str, arm: str) -> float:
    """Draft tokens a round."""
    found = result(file)["arms"][arm]
    return found["accepted_per_round"] + found["n_discarded_per_token"] * found["tau"]


def nodes(file: str, *arms: str) -> tuple[str, str, str]:
    each = ", ".join(f"{arm} {drafted(file, arm):.1f}" for arm in arms)
    return only(file, f"{each} draft tokens a round")


def token_times(file: str, *arms: str) -> tuple[str, str, str]:
    """What a draft token takes."""
    each = [f"{arm} {figure(file, arm, 'draft_ms') / drafted(file, arm):.1f}" for arm in arms]
    return only(file, ", ".join(each) + " ms a draft token")


def time_shares(file: str, arm: str) -> tuple[str, str, str]:
    """Where the time of a round goes."""
    times = figure(file, arm, "timers_ms")
    total = sum(figure(file, arm, f"{part}_ms") for part in ("draft", "verify", "other"))
    each = [f"{part} {100 * times[part] / total:.1f}%" for part in ("verify", "draft", "transform")]
    return only(file, f"{arm}: " + ", ".join(each))


def by_category(file: str, arm: str, *categories: str) -> tuple[str, str, str]:
    """Tau of some categories, the how-manieth they are, and tau of all."""
    each = {name: found["tau"] for name, found in figure(file, arm, "by_category").items()}
    order = sorted(each, key=each.get, reverse=True)
    said = ", ".join(
        f"{name} {each[name]:.2f} (number {order.index(name) + 1} of {len(order)})"
        for name in categories
    )
    return only(file, f"{arm}: {said}, all {figure(file, arm, 'tau'):.2f} (tau)")


def sweep(file: str) -> dict:
    """{rule: [(discards, target forwards, modelled tokens/s) of every setting]}, replayed."""
    points = result(file)["sweep"]["points"]
    return {
        rule: sorted((discards, forwards, speed) for forwards, discards, speed in each.values())
        for rule, each in points.items()
    }


def frontier(file: str) -> tuple[str, str, str]:
    """How many of the head's points lie below the line of fixed lengths (figure 4)."""
    rules = sweep(file)
    below = 0
    for discards, forwards, _ in rules["head"]:
        for left, right in zip(rules["K"], rules["K"][1:]):
            if left[0] <= discards < right[0]:
                share = (discards - left[0]) / (right[0] - left[0])
                below += forwards < left[1] + share * (right[1] - left[1])
    return only(file, f"{below} of {len(rules['head'])} thresholds lie below the fixed lengths")


def modelled(file: str, rule: str, other: str) -> tuple[str, str, str]:
    """The best setting of a stop rule against the best of another, by Eq. 2.3."""
    best = {name: max(each[2] for each in sweep(file)[name]) for name in (rule, other)}
    return only(file, f"{rule} / {other}: {best[rule] / best[other]:.2f} in modelled tokens/s")


def at_costs(file: str, rule: str, other: str, costs: list[float]) -> tuple[str, str, str]:
    """The same by Eq. 2.3 on machines where t_draft / t_target is another."""
    each = []
    for cost in costs:
        best = {
            name: max(
                1 / (cost * (1 - forwards + discards) + forwards)  # of a token, in target forwards
                for discards, forwards, _ in sweep(file)[name]
            )
            for name in (rule, other)
        }
        each.append(f"{best[rule] / best[other]:.2f} at {cost}")
    return only(file, f"{rule} / {other}: " + ", ".join(each))


def heads(file: str) -> tuple[str, str, str]:
    """The best settings of heads that were trained otherwise, by Eq. 2.3."""
    rules = sweep(file)
    best = {rule: max(speed for _, _, speed in each) for rule, each in rules.items()}
    of_heads = [best[rule] for rule in best if rule == "head" or rule[0] == "w"]
    said = f"{len(of_heads)} heads {min(of_heads):.2f} to {max(of_heads):.2f}"
    said += f", K {best['K']:.2f}, confidence {best['confidence']:.2f}"
    return only(file, f"{said} modelled tokens/s")


def fitted(file: str) -> tuple[str, str, str]:
    """Eq. 2.1 on a run's answers."""
    found = result(file)["sweep"]
    times = f"{found['t_draft_ms']:.1f} ms and {found['t_target_ms']:.1f} ms"
    fit = "not fitted" if found["r2"] is None else f"R^2 {found['r2']:.2f}"
    return only(file, f"{times}, {fit}")


def confidence(file: str) -> tuple[str, str, str]:
    """How often the least and the most confident draft tokens are accepted (figure 1b)."""
    rows = result(file)["sweep"]["acceptance_by_confidence"]
    least, most = ([f"{each:.2f}" for each in row[:2]] for row in (rows[0], rows[-1]))
    said = f"{least[1]} at a confidence of {least[0]}, {most[1]} at {most[0]}"
    return only(file, said)


def ends(*runs: str) -> tuple[str, str, str]:
    """Alpha on answers to built-in prompts after training runs."""
    each = [f"{run} {result(f'curves/{run}')[-1]['eval_alpha']:.3f}" for run in runs]
    return only(f"curves/{runs[0]}", ", ".join(each) + " (alpha on answers to built-in prompts)")


def claims() -> dict[str, list[tuple]]:
    """{paper: rows of (what it says, its figures, what was found: text, verdict, run)}."""
    return {
        "glide": [
            (
                "Reading the target's keys and values, those of its top layer, raises alpha "
                "(figure 4)",
                "5.4 to 23.5 points",
                ratio(GLIDES, "glide@layer29", "glide@vanilla", "alpha"),
            ),
            (
                "(ours) so do those of a layer with induction heads",
                "",
                ratio(GLIDES, "glide@layer18", "glide@vanilla", "alpha"),
            ),
            (
                "(ours) and more of the draft is accepted",
                "",
                ratio(GLIDES, "glide@layer18", "glide@vanilla", "tau"),
            ),
            (
                "(ours) and decoding is faster",
                "",
                ratio(GLIDES, "glide@layer18", "glide@vanilla", "speed"),
            ),
            (
                "The higher the layer that is read, the better (figure 7, Mistral-7B)",
                "rising",
                ratio(GLIDES, "glide@layer29", "glide@layer18", "alpha"),
            ),
            (
                "the same, with layers 0, 9, 18 and 29",
                "rising",
                ends("rival_glide0", "rival_glide9", "rival_glide18", "rival_glide29"),
            ),
            (
                "A low layer is better than none (figure 7)",
                "",
                ends("rival_glide0", "rival_vanilla"),
            ),
            (
                "Distillation helps (table 2: on what the target wrote, as all do here; here on "
                "its distribution, too)",
                "0.2 to 0.7 points",
                ends("rival_glide18", "rival_hard"),
            ),
            (
                "Faster than plain decoding (table 4, Vicuna-7B)",
                "1.96",
                plain(MAIN, "glide"),
            ),
            ("at temperature 1 (the table does not say)", "1.96", plain(SAMPLED, "glide")),
            (
                "Alpha, gamma and c tell the speedup (5.1, tables 1, 5)",
                "",
                predicted(SAMPLED, "glide"),
            ),
            (
                "in small batches, too (table 4; there copies of one prompt)",
                "1.92 to 2.08",
                batched(BATCHES, "glide"),
            ),
            (
                "A better draft than a separate model's (table 1; ours has two of the target's "
                "layers)",
                "alpha 0.19 to 0.58, 0.56 to 0.67",
                ratio(VARIANTS, "glide", "specdecpp:K2", "alpha"),
            ),
            ("(ours) in tau", "", ratio(VARIANTS, "glide", "specdecpp:K2", "tau")),
            (
                "and faster (table 5)",
                "0.95 to 1.53, 1.69 to 2.11",
                ratio(VARIANTS, "glide", "specdecpp:K2", "speed"),
            ),
            ("Faster than Medusa (5.3)", "", ratio(MEDUSA, "glide", MEDUSAS, "speed")),
            (
                "(ours) Five draft tokens, as there, are faster than two",
                "",
                ratio(VARIANTS, "cape:none", "glide", "speed"),
            ),
        ],
        "cape": [
            (
                "More confident tokens are accepted more often (figure 1b)",
                "rising",
                confidence(GLIDES),
            ),
            (
                "Confidence-aware expansion makes GLIDE faster (figure 6, sections 1, 5.3)",
                "up to 2.17 without, 2.50 to 2.61 with it",
                ratio(VARIANTS, "cape", "cape:none", "speed"),
            ),
            (
                "(ours) more is accepted; it cannot be less, as the chain is in the tree",
                "",
                ratio(VARIANTS, "cape", "cape:none", "tau"),
            ),
            (
                "(ours) so it is at temperature 1",
                "",
                ratio(SAMPLED, "cape", "cape:none", "tau"),
            ),
            (
                "(ours) it is faster with lengths and sizes for this machine",
                "",
                ratio(MAIN, "cape:cpu", "glide", "speed"),
            ),
            (
                "Sizes by confidence are better than four everywhere (5.4)",
                "70.6, 68.4 tokens/s",
                ratio(VARIANTS, "cape", "cape:fixed", "speed"),
            ),
            ("(ours) in tau", "", ratio(VARIANTS, "cape", "cape:fixed", "tau")),
            (
                "(in the paper both draft as many)",
                "",
                nodes(VARIANTS, "cape", "cape:fixed", "cape:beam4"),
            ),
            (
                "Faster than a beam of four (figure 6)",
                "",
                ratio(VARIANTS, "cape", "cape:beam4", "speed"),
            ),
            (
                "(ours) than one of eight, which drafts more nearly as many tokens",
                "",
                ratio(MORE, "cape", "cape:beam8", "speed"),
            ),
            ("(ours) in tau", "", ratio(MORE, "cape", "cape:beam8", "tau")),
            ("(those of this run)", "", nodes(MORE, "cape", "cape:fixed", "cape:beam8")),
            (
                "GLIDE alone can be faster than with a beam (5.3)",
                "",
                ratio(VARIANTS, "cape:none", "cape:beam4", "speed"),
            ),
            (
                "Drafting takes hardly longer; with a beam of four it does (5.4, table 3)",
                "5.3, 5.5, 10.9 ms",
                milliseconds(VARIANTS, "draft", "cape:none", "cape", "cape:beam4"),
            ),
            (
                "Verifying takes as long as the beam (5.4)",
                "",
                milliseconds(VARIANTS, "verify", "cape:none", "cape", "cape:beam4"),
            ),
            ("Faster than Medusa (5.3)", "", ratio(MEDUSA, "cape:cpu", MEDUSAS, "speed")),
        ],
        "specdecpp": [
            (
                "The head is faster than the best fixed length (table 1, modelled by Eq. 2.3)",
                "1.07 to 1.11",
                modelled(VARIANTS, "head", "K"),
            ),
            (
                "so it is whatever a draft token costs, in target forwards (4.3; there 0.21)",
                "",
                at_costs(VARIANTS, "head", "K", [0.01, 0.02, 0.05, 0.1, 0.2]),
            ),
            (
                "(ours) against two fixed tokens (three, the model's best, were not timed)",
                "",
                ratio(VARIANTS, "specdecpp", "specdecpp:K2", "speed"),
            ),
            (
                "the same with a draft model of four layers",
                "1.07 to 1.11",
                modelled(MORE, "head", "K"),
            ),
            (
                "(ours) as modelled, the four's head is faster than the best untrained threshold",
                "",
                modelled(MORE, "head", "confidence"),
            ),
            (
                "(ours) timed, with those four, against two fixed tokens",
                "",
                ratio(MORE, "specdecpp@four", "specdecpp:K2@four", "speed"),
            ),
            (
                "(ours) By two fixed tokens four layers, trained on, have a higher tau than two",
                "",
                ratio(MORE, "specdecpp:K2@four", "specdecpp:K2", "tau"),
            ),
            (
                "(ours) and are faster",
                "",
                ratio(MORE, "specdecpp:K2@four", "specdecpp:K2", "speed"),
            ),
            (
                "timed at temperature 1, as there, with a head trained for it, against K2",
                "1.07 to 1.11",
                ratio(SAMPLED, "specdecpp@head-t1", "specdecpp:K2", "speed"),
            ),
            (
                "(ours) There that head is better than one trained for greedy drafts",
                "",
                ratio(SAMPLED, "specdecpp@head-t1", "specdecpp", "tau"),
            ),
            (
                "w_rej from 1 to 12 and D from 0 to 4 are worth a choice (4.1; here of the first "
                "stage)",
                "",
                heads("cpu_specdecpp_heads"),
            ),
            (
                "A better frontier than fixed lengths: fewer target forwards at the same discards "
                "(figure 4)",
                "strictly",
                frontier(VARIANTS),
            ),
            (
                "An oracle would gain much over the best fixed length (2.1)",
                "1.54",
                modelled(VARIANTS, "oracle", "K"),
            ),
            ("with four layers", "1.54", modelled(MORE, "oracle", "K")),
            (
                "Time is t_draft N_draft + t_target N_target (Eq. 2.1; 4.2)",
                "R^2 at least 0.98",
                fitted(VARIANTS),
            ),
            ("with four layers, in another run", "R^2 at least 0.98", fitted(MORE)),
            (
                "The head takes no time to speak of (4.2)",
                "",
                token_times(VARIANTS, "specdecpp", "specdecpp:K2"),
            ),
            (
                "(ours) The head is faster than an untrained threshold of 0.4",
                "",
                ratio(VARIANTS, "specdecpp", "specdecpp:confidence", "speed"),
            ),
            (
                "(ours) and than transformers' own loop with the same draft model",
                "",
                ratio(VARIANTS, "specdecpp", "assisted:confidence", "speed"),
            ),
            (
                "Faster than plain decoding (4.3, h = 0.7)",
                "2.03 to 2.26",
                plain(MAIN, "specdecpp"),
            ),
            (
                "at temperature 1, as there",
                "2.03 to 2.26",
                plain(SAMPLED, "specdecpp@head-t1"),
            ),
        ],
        "falcon": [
            (
                "CSGD raises tau, with the tree (table 4)",
                "2.78 to 3.34",
                ratio(FALCONS, "falcon@k2", "falcon@no-csgd", "tau"),
            ),
            (
                "the same, trained from another seed",
                "2.78 to 3.34",
                ratio(FALCONS, "falcon@k2-seed1", "falcon@no-csgd-seed1", "tau"),
            ),
            (
                "and with a chain",
                "1.64 to 2.13",
                ratio(FALCONS, "falcon:chain@k2", "falcon:chain@no-csgd", "tau"),
            ),
            (
                "The tree raises tau (table 4)",
                "2.13 to 3.34",
                ratio(VARIANTS, "falcon", "falcon:chain", "tau"),
            ),
            (
                "and without CSGD",
                "1.64 to 2.78",
                ratio(FALCONS, "falcon@no-csgd", "falcon:chain@no-csgd", "tau"),
            ),
            (
                "and makes it faster (here a tree of six nodes)",
                "2.27 to 3.10",
                ratio(VARIANTS, "falcon", "falcon:chain", "speed"),
            ),
            (
                "(ours) with 13 nodes",
                "",
                ratio(FALCONS, "falcon@k2", "falcon:chain@k2", "speed"),
            ),
            (
                "(ours) The shipped drafter (a second layer, 2.4M token-steps more, six nodes for "
                "five) has a higher tau than that before it",
                "",
                ratio(VARIANTS, "falcon", "falcon@one-layer", "tau"),
            ),
            (
                "(ours) and is faster",
                "",
                ratio(VARIANTS, "falcon", "falcon@one-layer", "speed"),
            ),
            (
                "k = 2 is better than 3, which has half the passes (table 5)",
                "tau 3.34, 2.52",
                ratio(FALCONS, "falcon@k2-tall", "falcon@k3-tall", "tau"),
            ),
            (
                "and faster",
                "3.10, 2.96",
                ratio(FALCONS, "falcon@k2-tall", "falcon@k3-tall", "speed"),
            ),
            (
                "k = 3 is better than 4, which has as many",
                "tau 2.52, 2.35",
                ratio(FALCONS, "falcon@k3-tall", "falcon@k4-tall", "tau"),
            ),
            (
                "and faster",
                "2.96, 2.86",
                ratio(FALCONS, "falcon@k3-tall", "falcon@k4-tall", "speed"),
            ),
            (
                "(ours) with one small tree for all k = 2 is better than 3",
                "",
                ratio(FALCONS, "falcon@k2", "falcon@k3", "tau"),
            ),
            (
                "(ours) and faster than 4, which needs one pass for it instead of two",
                "",
                ratio(FALCONS, "falcon@k2", "falcon@k4", "speed"),
            ),
            (
                "(ours) The paper's LSTM (3.2) has a higher tau than a linear layer",
                "",
                across(MORE, "falcon@lstm", FALCONS, "falcon@k2"),
            ),
            (
                "(ours) than the linear layer from another seed",
                "",
                across(MORE, "falcon@lstm", FALCONS, "falcon@k2-seed1"),
            ),
            ("(ours) and learns faster", "", ends("rival_flstm", "rival_fk2")),
            (
                "A higher tau than Medusa's (table 3)",
                "3.34, 1.51",
                ratio(MEDUSA, "falcon", MEDUSAS, "tau"),
            ),
            (
                "and faster (table 1)",
                "3.10, 2.06",
                ratio(MEDUSA, "falcon", MEDUSAS, "speed"),
            ),
            (
                "than prompt lookup",
                "3.10, 1.61",
                ratio(VARIANTS, "falcon", "prompt-lookup", "speed"),
            ),
            (
                "than a separate draft model",
                "3.10, 1.82",
                ratio(VARIANTS, "falcon", "specdecpp:K2", "speed"),
            ),
            ("and than plain decoding", "2.91 to 3.51", plain(MAIN, "falcon")),
            (
                "(ours) Five nodes, which --refit takes, are faster than the shipped six",
                "",
                ratio("cpu_copies", "falcon@five", "falcon", "speed"),
            ),
        ],
        "ctc_drafter": [
            (
                "Collapsing before verifying raises tau (table 2)",
                "3.02 to 3.56",
                ratio(CTCS, "ctc_drafter:alignments@ctc", "ctc_drafter:none@ctc", "tau"),
            ),
            (
                "with the shipped drafter",
                "",
                ratio(VARIANTS, "ctc_drafter:alignments", "ctc_drafter:none", "tau"),
            ),
            (
                "and it is faster",
                "2.25 to 2.78",
                ratio(VARIANTS, "ctc_drafter:alignments", "ctc_drafter:none", "speed"),
            ),
            (
                "A transformer layer with CTC is better than Medusa's heads (table 2)",
                "tau 2.58 to 3.02",
                ratio(CTCS, "ctc_drafter:none@ctc", "ctc_drafter:none@medusa", "tau"),
            ),
            (
                "with the transform",
                "tau 2.58 to 3.56",
                ratio(CTCS, "ctc_drafter:alignments@ctc", "ctc_drafter:none@medusa", "tau"),
            ),
            (
                "and faster",
                "2.13 to 2.78",
                ratio(CTCS, "ctc_drafter:alignments@ctc", "ctc_drafter:none@medusa", "speed"),
            ),
            (
                "(ours) by CTC, not by the layer alone",
                "",
                ratio(CTCS, "ctc_drafter:alignments@ctc", "ctc_drafter:none@transformer", "tau"),
            ),
            (
                "(ours) All alignments of a prefix tell more than the best",
                "",
                ratio(CTCS, "ctc_drafter@ctc", "ctc_drafter:alignments@ctc", "tau"),
            ),
            (
                "(ours) with the shipped drafter",
                "",
                ratio(VARIANTS, "ctc_drafter", "ctc_drafter:alignments", "tau"),
            ),
            (
                "(ours) and it is faster",
                "",
                ratio(MEDUSA, "ctc_drafter", "ctc_drafter:alignments", "speed"),
            ),
            (
                "(ours) and so CTC is better than the layer alone",
                "",
                ratio(CTCS, "ctc_drafter@ctc", "ctc_drafter:none@transformer", "tau"),
            ),
            (
                "(ours) and than Medusa's heads",
                "",
                ratio(CTCS, "ctc_drafter@ctc", "ctc_drafter:none@medusa", "tau"),
            ),
            (
                "(ours) with the transform, too",
                "",
                ratio(CTCS, "ctc_drafter@ctc", "ctc_drafter:alignments@medusa", "tau"),
            ),
            (
                "The transform does Medusa's heads harm (table 2)",
                "tau 2.58 to 2.38",
                ratio(CTCS, "ctc_drafter:none@medusa", "ctc_drafter:alignments@medusa", "tau"),
            ),
            (
                "and makes them slower",
                "2.13 to 1.71",
                ratio(CTCS, "ctc_drafter:none@medusa", "ctc_drafter:alignments@medusa", "speed"),
            ),
            (
                "The target keeps most of the time (figure 3: drafting, transform)",
                "14.9%, 5.4%",
                time_shares(VARIANTS, "ctc_drafter:alignments"),
            ),
            (
                "Best at code, slightly worse at role play (figure 2)",
                "",
                by_category(MAIN, "ctc_drafter", "coding", "roleplay"),
            ),
            (
                "Faster than Medusa (table 1; the shipped drafters)",
                "2.78, 2.13",
                ratio(MEDUSA, "ctc_drafter:alignments", MEDUSAS, "speed"),
            ),
            (
                "(ours) with our ranking",
                "",
                ratio(MEDUSA, "ctc_drafter", MEDUSAS, "speed"),
            ),
            ("and than plain decoding", "2.16 to 2.78", plain(MAIN, "ctc_drafter")),
        ],
    }


def table(paper: str) -> str:
    """The claims of a paper, as Markdown."""
    rows = []
    for said, papers, (here, seen, file) in claims()[paper]:
        rows.append([said or "the same", papers or None, here, seen, f"[run]({file}.json)"])
    return report.markdown(["what the paper says", "its figures", "here", "verdict", "from"], rows)
