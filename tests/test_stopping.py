"""stopping.py: the replayed rates are those of decoding; times, throughput and calibration by hand."""

import pytest
import specdecpp
import torch
from conftest import make_llama
from test_specdecpp import decode, fit, make_drafter

import stopping


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
    return stopping.record(specdecpp, drafter, drafter, llama, prompt, answer)


@pytest.mark.parametrize("name", ["K=2", "K=6", "K=14", "h=0.1", "h=0.3", "h=0.5", "h=0.7", "h=0.9"])
def test_replayed_rates_are_those_of_decoding(llama, drafter, recorded, name):
    kind, value = name.split("=")
    rule = {"stop": "fixed", "gamma": int(value)} if kind == "K" else {"threshold": float(value)}
    _, stats = decode(llama, torch.tensor([[9, 8, 7]]), drafter=drafter, max_new_tokens=50, **rule)
    discarded = stats.drafted - sum(stats.accepted)
    assert stopping.sweep([recorded])[name] == pytest.approx((stats.target_forwards / 50, discarded / 50))


def test_no_rule_verifies_less_than_the_oracle(recorded):
    points = stopping.sweep([recorded, recorded])
    assert points["oracle"] == (min(rate for rate, _ in points.values()), 0.0)
    assert points["oracle"][0] * 50 == specdecpp.oracle([each.agreed > 0 for each in recorded[:-1]] + [True])


def test_replay_by_hand():
    rounds = [stopping.Round([0.9, 0.2, 0.9], 1), stopping.Round([], 0), *[stopping.Round([], 0)] * 3]
    assert stopping.replay(rounds, lambda probs: len(probs) == 2) == (4, 2 + 2 + 1)
    assert stopping.replay(rounds, lambda probs: True) == (4, 0 + 1 + 1)


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
    assert stopping.calibration((torch.logit(weighted) + torch.log(torch.tensor(6.0))).sigmoid(), labels)[1] < 0.02
    assert stopping.calibration(torch.tensor([0.25, 0.85]), torch.tensor([0.0, 1.0])) == (
        [(0.25, 0.0, 1), (pytest.approx(0.85), 1.0, 1)], pytest.approx(0.2))
