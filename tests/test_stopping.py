"""stopping.py: the replayed rates are those of decoding; times, throughput and calibration by
hand."""

import copy
import types

import pytest
import torch
from conftest import make_llama
from test_specdecpp import decode, fit, make_drafter

import common
import specdecpp
from support import stopping


@pytest.fixture(scope="module")
def drafter():
    target = make_llama()
    made = make_drafter(target, stage="draft")
    fit(made, target, 60, 5e-3)
    second = specdecpp.Drafter(specdecpp.dataclasses.replace(made.config, stage="head")).double()
    second.load_state_dict(made.state_dict(), strict=False)
    fit(second, target, 40, 5e-3)
    return second


@pytest.fixture(scope="module")
def recorded(llama, drafter):
    prompt = torch.tensor([[9, 8, 7]])
    answer = llama.generate(prompt, max_new_tokens=50, do_sample=False)[0, 3:].tolist()
    return stopping.record(specdecpp, drafter, llama, prompt, answer)


@pytest.mark.parametrize(
    "name",
    [
        "K=2",
        "K=6",
        "K=14",
        "head=0.1",
        "head=0.5",
        "head=0.7",
        "head=0.9",
        "confidence=0.3",
        "confidence=0.7",
        "entropy=0.5",
        "entropy=2.0",
    ],
)
def test_replayed_rates_are_those_of_decoding(llama, drafter, recorded, name):
    kind, value = name.split("=")
    rule = {
        "K": {"stop": "fixed", "gamma": int(float(value))},
        "head": {"threshold": float(value)},
    }.get(kind, {"stop": kind, kind: float(value)})
    _, stats = decode(llama, torch.tensor([[9, 8, 7]]), drafter=drafter, max_new_tokens=50, **rule)
    discarded = stats.drafted - sum(stats.accepted)
    found = stopping.points([recorded], {"head": drafter})
    assert found[kind][value] == pytest.approx((stats.target_forwards / 50, discarded / 50))


def test_no_rule_verifies_less_than_the_oracle(recorded):
    points = stopping.points([recorded, recorded], {})
    oracle = points["oracle"][""]
    assert oracle == (
        min(rate for settings in points.values() for rate, _ in settings.values()),
        0.0,
    )
    assert oracle[0] * 50 == specdecpp.oracle([each.agreed > 0 for each in recorded[:-1]] + [True])


def test_replay_by_hand():
    agreed, room = (1, 0, 0, 0, 0), (4, 3, 2, 1, 0)
    rounds = [stopping.Round(None, [0.5] * m, [], n, 0) for m, n in zip(room, agreed)]
    assert stopping.replay(rounds, [3] * 5) == (4, 2 + 2 + 1)
    assert stopping.replay(rounds, [1] * 5) == (4, 0 + 1 + 1)
    assert stopping.first([False, True, True]) == 2 and stopping.first([False, False]) > 20


def test_the_recording_by_looking_at_drafts(llama, drafter, recorded):
    prompt = torch.tensor([[9, 8, 7]])
    ids = llama.generate(prompt, max_new_tokens=50, do_sample=False)
    for place in (0, 7, 30, 48, 49):
        each, own = recorded[place], specdecpp.new_memory(drafter, llama)
        steps = specdecpp.propose(drafter, llama, ids[:, : 3 + place], None, own)
        drafted = [next(steps) for _ in range(min(20, 49 - place))]
        assert each.confidence == pytest.approx(
            [float(q_draft.max()) for _, q_draft, _ in drafted], rel=1e-5
        )
        wrong = [i for i, step in enumerate(drafted) if int(step[0]) != int(ids[0, 3 + place + i])]
        assert each.agreed == (wrong[0] if wrong else len(drafted))
        truth = drafted[wrong[0]][1][ids[0, 3 + place + wrong[0]]] if wrong else None
        assert each.rank == (int((drafted[wrong[0]][1] > truth).sum()) if wrong else 0)


def test_what_is_judged():
    rounds = [
        stopping.Round(None, [0.9, 0.8, 0.7], [], 1, 3),
        stopping.Round(None, [0.4, 0.3], [], 2, 0),
    ]
    values, accepted = stopping.judged([rounds], [[each.confidence for each in rounds]])
    assert values.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.3]) and accepted.tolist() == [
        1,
        0,
        1,
        1,
    ]


def test_the_sweep_of_a_run(llama, drafter):
    prompt = torch.tensor([[9, 8, 7]])
    answer = llama.generate(prompt, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    answers = [(10, 5, 0.7, 0.2), (40, 7, 1.5, 0.8), (25, 12, 1.7, 0.5)]  # 20 ms and 100 ms
    turns = [{"input_ids": prompt, "answer": answer}] * 2
    result = stopping.sweep(specdecpp, drafter, {"mine": drafter}, llama, turns, answers)
    assert (result["t_draft_ms"], result["t_target_ms"], result["r2"]) == pytest.approx(
        (20, 100, 1)
    )
    assert set(result["points"]) == {"K", "confidence", "entropy", "mine", "oracle"}
    verified, discarded, speed = result["points"]["mine"]["0.7"]
    assert speed == pytest.approx(stopping.throughput(verified, discarded, 0.02, 0.1))
    judge = result["calibration"]["mine"]
    tokens = sum(count for *_, count in result["acceptance_by_confidence"])
    seen = [sum(count for *_, count in judge[bins]) for bins in ("bins", "bins_reweighted")]
    assert 0 < seen[0] == seen[1] <= tokens and judge["ece"] != judge["ece_reweighted"]
    assert (judge["w_rej"], judge["head_depth"]) == (
        drafter.config.w_rej,
        drafter.config.head_depth,
    )


def test_an_interrupted_sweep_keeps_what_is_recorded(llama, drafter, monkeypatch):
    turns = [{"input_ids": torch.tensor([[9, 8, 7]]), "answer": [1, 2, 3]}] * 3
    for done in (1, 0):
        monkeypatch.setattr(stopping, "tqdm", lambda turns, done=done, **_: stopped(turns, done))
        result = stopping.sweep(specdecpp, drafter, {}, llama, turns, [(4, 2, 1.0, 0.5)])
        assert bool(result) == bool(done)


def stopped(items, after):
    yield from items[:after]
    raise KeyboardInterrupt


def test_times_that_no_regression_can_tell_apart():
    times = stopping.forward_times(
        [(5 * n, n, 0.2 * n, 0.05 * n) for n in (3, 7, 8, 12)]
    )  # K = 5 in every answer
    assert times == (pytest.approx(0.01), pytest.approx(0.15), None)
    assert stopping.forward_times([(10, 4, 1.0, 0.3)])[2] is None
    assert stopping.forward_times([(0, 4, 1.0, 0.0)]) == (0, 0.25, None)
    answers = [(k * n, n, 0.01 * k * n + 0.1 * n, 0.0) for k, n in ((4, 3), (4, 5), (2, 4), (2, 6))]
    assert stopping.forward_times(answers) == pytest.approx((0.01, 0.1, 1.0))


def arm_of(drafter, module=specdecpp, name="arm"):
    return types.SimpleNamespace(name=name, kwargs={"drafter": drafter}, base={}, module=module)


def test_heads_that_do_not_fit_the_draft_model(llama, drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "K")  # the name of a rule
    drafter = common.load_drafter(
        specdecpp.Drafter, tmp_path / "K", llama
    )  # in float32's precision, as files are
    chains, source, heads = stopping.chain_and_heads(arm_of(drafter), llama, [str(tmp_path / "K")])
    assert (
        chains is specdecpp and source is drafter and list(heads) == ["head", str(tmp_path / "K")]
    )
    with torch.no_grad():
        next(drafter.head.parameters()).add_(1)  # another head, the same draft model
    stopping.chain_and_heads(arm_of(drafter), llama, [str(tmp_path / "K")])
    other = make_drafter(llama, stage="draft")
    assert stopping.chain_and_heads(arm_of(other), llama, [])[2] == {}  # its head is untrained
    other.save_pretrained(tmp_path / "untrained")
    moved = copy.deepcopy(drafter)
    with torch.no_grad():
        next(moved.body.parameters()).add_(1)
    moved.save_pretrained(tmp_path / "moved")
    for name in ("untrained", "moved"):
        with pytest.raises(
            ValueError, match=f"{name}: no acceptance head trained on the draft model of arm"
        ):
            stopping.chain_and_heads(arm_of(drafter), llama, [str(tmp_path / name)])
    with pytest.raises(ValueError, match="drafts chains"):
        stopping.chain_and_heads(arm_of(None, None, name="prompt-lookup"), llama, [])


def test_fit_times_and_throughput():
    draft, target = [10, 40, 25, 33], [5, 7, 12, 4]
    seconds = [0.02 * d + 0.1 * t for d, t in zip(draft, target)]
    assert stopping.fit_times(draft, target, seconds) == pytest.approx((0.02, 0.1, 1.0))
    noisy = [s * f for s, f in zip(seconds, (1.3, 0.8, 1.1, 0.9))]
    assert stopping.fit_times(draft, target, noisy)[2] < 0.95
    # 100 tokens, 30 target forwards, 50 discarded: N_draft = 120
    assert stopping.throughput(0.3, 0.5, 0.02, 0.1) == pytest.approx(100 / (120 * 0.02 + 30 * 0.1))


def test_calibration():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(20000, generator=generator)
    labels = (torch.rand(20000, generator=generator) < truth).float()
    rows, error = stopping.calibration(truth, labels)
    assert len(rows) == 10 and sum(count for _, _, count in rows) == 20000 and error < 0.02
    weighted = truth / (truth + 6 * (1 - truth))
    assert stopping.calibration(weighted, labels)[1] > 0.2
    assert (
        stopping.calibration(
            (torch.logit(weighted) + torch.log(torch.tensor(6.0))).sigmoid(), labels
        )[1]
        < 0.02
    )
    assert stopping.calibration(torch.tensor([0.25, 0.85]), torch.tensor([0.0, 1.0])) == (
        [(0.25, 0.0, 1), (pytest.approx(0.85), 1.0, 1)],
        pytest.approx(0.2),
    )
