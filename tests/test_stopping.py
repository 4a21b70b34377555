"""stopping.py: replayed rates are those of decoding; times, calibration and figures by hand."""

import copy
import dataclasses
import math
import types

import pytest
import torch
from tiny import decoding_of, make_llama, slow, teach

import cape
import common
import glide
import specdecpp
from support import stopping
from support.stopping import Round

PROMPT = torch.tensor([[9, 8, 7]])
TURN = {"input_ids": PROMPT, "max_new_tokens": 30}


@pytest.fixture(scope="module")
def drafter(llama):
    """Two layers and a head, each trained a little."""
    torch.manual_seed(5)
    config = specdecpp.Config(layers=[0, -1], draft_vocab=0, head_depth=2)
    first = specdecpp.build(config, llama, torch.arange(48)).double()
    teach(specdecpp, first, llama, 40, 5e-3)
    second = specdecpp.Drafter(dataclasses.replace(first.config, stage="head")).double()
    second.load_state_dict(first.state_dict())
    teach(specdecpp, second, llama, 20, 5e-3)
    return second


@pytest.fixture(scope="module")
def recorded(llama, drafter):
    return stopping.record(specdecpp, drafter, {"mine": drafter}, llama, TURN)


def tokens(count, **more):
    """A Round of `count` tokens."""
    return Round([1] * count, [0.5] * count, [1.0] * count, **more)


# ------------------------------------------------------------------------------- the recording


@pytest.mark.parametrize("name", ["K=2", slow("K=14"), "mine=0.1", "mine=0.7"])
@pytest.mark.parametrize("place", [None, 17])
def test_replayed_rates_are_those_of_decoding(llama, drafter, name, place):
    """Up to a limit of tokens, or to an end-of-sequence token."""
    turn = dict(TURN)
    if place is not None:
        answer = llama.generate(PROMPT, max_new_tokens=30, do_sample=False)
        turn["eos_token_id"] = int(answer[0, 3 + place])
    kind, value = name.split("=")
    rule = {"threshold": float(value)}
    if kind == "K":
        rule = {"stop": "fixed", "gamma": int(value)}
    ids = turn.pop("input_ids")
    decoding = decoding_of(llama, ids, do_sample=False, **turn)
    with torch.no_grad():
        config = dataclasses.replace(drafter.config, **rule)
        for draft in specdecpp.drafts(decoding, drafter, config):
            decoding.verify(draft)
    stats = decoding.stats
    discarded = stats.drafted - sum(stats.accepted)
    turn["input_ids"] = ids
    rounds = stopping.record(specdecpp, drafter, {"mine": drafter}, llama, turn)
    found = stopping.points([rounds])[kind][value]
    rates = (stats.target_forwards / stats.emitted, discarded / stats.emitted)
    assert found == pytest.approx(rates)
    assert len(rounds) == stats.emitted


def test_what_is_recorded_at_a_place(llama, drafter, recorded):
    ids = llama.generate(**TURN, do_sample=False)
    assert len(recorded) == 30
    for place in (0, 7, 20, 28, 29):
        each = recorded[place]
        prefix = ids[:, : 3 + place]
        mask = torch.ones_like(prefix)
        given = decoding_of(llama, prefix, attention_mask=mask, do_sample=False, max_new_tokens=90)
        with torch.no_grad():
            steps = specdecpp.propose(drafter, given, specdecpp.Memory(drafter, llama))
            drafted = [next(steps) for _ in range(min(20, 29 - place))]
            states = [hidden for _, _, hidden in drafted[1:]]
            said = [float(drafter.head(hidden).sigmoid()) for hidden in states]
        assert each.tokens == [int(token) for token, _, _ in drafted]
        assert each.confidence == pytest.approx([float(q.max()) for _, q, _ in drafted], rel=1e-5)
        entropy = [float(torch.special.entr(q).sum()) for _, q, _ in drafted]
        assert each.entropy == pytest.approx(entropy, rel=1e-5)
        assert each.chances["mine"] == pytest.approx(said, rel=1e-4)
        right = [token == int(ids[0, 3 + place + i]) for i, token in enumerate(each.tokens)]
        assert each.agreed == (right.index(False) if False in right else len(right))


def test_glide_and_cape_are_recorded_too(llama):
    torch.manual_seed(6)
    config = glide.Config(intermediate_size=48, draft_vocab=30)
    drafter = glide.build(config, llama, torch.arange(48)).double().eval()
    for module, kwargs in (
        (glide, {"drafter": drafter, "config": drafter.config}),
        (cape, {"base": glide, "base_drafter": drafter, "config": cape.Config()}),
    ):
        result = stopping.sweep(module, kwargs, {}, llama, [TURN], [(4, 2, 1.0, 0.5)])
        assert set(result["points"]) == {"K", "confidence", "entropy", "oracle"}
        assert result["points"]["K"]["4"][1] > 0


# ----------------------------------------------------------------------------------- the rules


def test_replay_by_hand():
    """Five tokens; the first draft of the first round is right, and all others are wrong."""
    rounds = [tokens(m, agreed=n) for m, n in zip((4, 3, 2, 1, 0), (1, 0, 0, 0, 0))]
    assert stopping.replay(rounds, [3] * 5) == (4, 2 + 2 + 1)
    assert stopping.replay(rounds, [1] * 5) == (4, 0 + 1 + 1)


def test_rates_are_of_the_tokens_of_all_answers():
    """Not the mean of answers: five tokens as above, and one token at one forward."""
    long = [tokens(m, agreed=n) for m, n in zip((4, 3, 2, 1, 0), (1, 0, 0, 0, 0))]
    found = stopping.points([long, [tokens(0)]])
    assert found["K"]["3"] == pytest.approx((5 / 6, 5 / 6))
    assert found["oracle"][""] == pytest.approx((5 / 6, 0))  # disagreements at 1, 2, 3, not at 4


def test_lengths_by_hand():
    """A head judges a token once the next one is drafted: 1 - 0.95 = 0.05, 1 - 0.475 = 0.525."""
    each = Round([1] * 4, [0.8, 0.6, 0.2, 0.9], [0.2, 0.8, 1.7, 2.5], {"mine": [0.95, 0.5, 0.9]})
    found = stopping.lengths(each)
    many = stopping.first([])
    assert many > 1000 and stopping.first([False, True, True]) == 2
    expected = {
        ("K", "3"): 3,
        ("confidence", "0.1"): many,
        ("confidence", "0.5"): 3,
        ("confidence", "0.7"): 2,
        ("entropy", "0.5"): 2,
        ("entropy", "1.5"): 3,
        ("entropy", "3.0"): many,
        ("mine", "0.1"): 3,
        ("mine", "0.5"): 3,
        ("mine", "0.7"): many + 1,
    }
    assert {rule: found[rule] for rule in expected} == expected


def test_no_rule_verifies_less_than_the_oracle(recorded):
    points = stopping.points([recorded, recorded])
    least = min(rate for settings in points.values() for rate, _ in settings.values())
    assert points["oracle"][""] == (least, 0.0)


# ----------------------------------------------------------------------------------- the times


def test_forward_times_by_hand():
    """10 ms and 100 ms, told apart by the counts (Eq. 2.1) where they differ enough."""
    answers = [(k * n, n, 0.01 * k * n + 0.1 * n, 0.0) for k, n in ((4, 3), (4, 5), (2, 4), (2, 6))]
    assert stopping.forward_times(answers) == pytest.approx((0.01, 0.1, 1.0))
    noisy = [(d, t, s * f, 0.0) for (d, t, s, _), f in zip(answers, (1.3, 0.8, 1.1, 0.9))]
    assert stopping.fit_times(*list(zip(*noisy))[:3])[2] < 0.95
    alike = [(5 * n, n, 0.2 * n, 0.05 * n) for n in (3, 7, 8, 12)]  # K = 5 in every answer
    assert stopping.forward_times(alike) == (pytest.approx(0.01), pytest.approx(0.15), None)
    assert stopping.forward_times([(10, 4, 1.0, 0.3)])[2] is None
    assert stopping.forward_times([(0, 4, 1.0, 0.0)]) == (0, 0.25, None)


def test_a_fit_with_a_negative_time_is_not_taken():
    answers = [(1, 4, 8.0, 1.0), (8, 4, 1.0, 1.0), (2, 5, 9.0, 1.0)]
    assert min(stopping.fit_times(*list(zip(*answers))[:3])[:2]) < 0
    assert stopping.forward_times(answers) == (3 / 11, 15 / 13, None)


# ----------------------------------------------------------------------- how well a head predicts


def test_calibration_by_hand():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(20000, generator=generator)
    labels = (torch.rand(20000, generator=generator) < truth).float()
    rows, error = stopping.calibration(truth, labels)
    assert len(rows) == 10 and sum(count for *_, count in rows) == 20000 and error < 0.02
    biased = truth / (truth + 6 * (1 - truth))  # what w_rej = 6 makes of it
    assert stopping.calibration(biased, labels)[1] > 0.2
    torch.testing.assert_close(stopping.unbiased(torch.logit(biased), 6.0), truth)
    rows, error = stopping.calibration(torch.tensor([0.25, 0.95, 1.0]), torch.tensor([0.0, 1, 0]))
    assert rows == [[0.25, 0.0, 1], [pytest.approx(0.975), 0.5, 2]]
    assert error == pytest.approx((0.25 + 2 * 0.475) / 3)


def test_auc_by_hand():
    """Pairs (accepted, refused): 0.9 over 0.8 and 0.1, 0.8 over 0.1, 0.8 with 0.8 is a half."""
    predicted = torch.tensor([0.9, 0.8, 0.8, 0.1])
    assert stopping.auc(predicted, torch.tensor([1.0, 1.0, 0.0, 0.0])) == 3.5 / 4
    assert stopping.auc(-predicted, torch.tensor([1.0, 1.0, 0.0, 0.0])) == 0.5 / 4
    assert math.isnan(stopping.auc(predicted, torch.ones(4)))


def test_auc_of_soft_labels():
    """0.7 accepted is 7 accepted and 3 refused of ten tokens with that prediction."""
    predicted, labels = [0.2, 0.5, 0.5, 0.6, 0.9], [0.1, 0.7, 0.2, 0.4, 1.0]
    tens = [(p, i < round(10 * label)) for p, label in zip(predicted, labels) for i in range(10)]
    scores, accepted = (torch.tensor(column).float() for column in zip(*tens))
    expected = stopping.auc(scores, accepted)
    got = stopping.auc(torch.tensor(predicted), torch.tensor(labels))
    assert got == pytest.approx(expected) and 0.5 < got < 1


def test_head_quality_by_hand():
    """w_rej = 3: sigmoids of 0.75, 0.25 and 0.75 mean probabilities of 0.9, 0.5 and 0.9."""
    logits = torch.tensor([3.0, 1 / 3, 3.0]).log()
    found = stopping.head_quality(logits, torch.tensor([1.0, 0.0, 0.5]), 3.0)
    mixed = -0.5 * math.log(0.9) - 0.5 * math.log(0.1)
    bce = (-math.log(0.9) - math.log(0.5) + mixed) / 3
    assert found["bce"] == pytest.approx(bce, rel=1e-5)
    assert found["kl"] == pytest.approx(bce - math.log(2) / 3, rel=1e-5)  # of the label 0.5
    assert found["ece"] == pytest.approx((2 * (0.9 - 0.75) + 0.5) / 3, rel=1e-5)
    # accepted 1 and 0.5 at 0.9, refused 0.5 at 0.9 and 1 at 0.5: 1.5 * (1 + 0.25) of 1.5 * 1.5
    assert found["auc"] == pytest.approx(1.25 / 1.5)


def test_only_tokens_after_accepted_ones_are_judged():
    """What comes after a refusal would be discarded whatever it is."""
    rounds = [Round([1] * 3, [0.9, 0.8, 0.7], [], agreed=1), Round([1] * 2, [0.4, 0.3], [], {}, 2)]
    values, accepted = stopping.judged([rounds], lambda each: each.confidence)
    assert values.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.3])
    assert accepted.tolist() == [1, 0, 1, 1]


# ----------------------------------------------------------------------------------- the sweep


def test_the_sweep_of_a_run(llama, drafter, recorded):
    answers = [(10, 5, 0.7, 0.2), (40, 7, 1.5, 0.8), (25, 12, 1.7, 0.5)]  # 20 ms and 100 ms
    kwargs = {"drafter": drafter, "config": drafter.config}
    result = stopping.sweep(specdecpp, kwargs, {"mine": drafter}, llama, [TURN], answers)
    times = (result["t_draft_ms"], result["t_target_ms"], result["r2"])
    assert times == pytest.approx((20, 100, 1))
    assert set(result["points"]) == {"K", "confidence", "entropy", "mine", "oracle"}
    verified, discarded, speed = result["points"]["mine"]["0.7"]
    assert speed == pytest.approx(specdecpp.throughput(verified, discarded, 0.02, 0.1))
    judge = result["calibration"]["mine"]
    assert (judge["w_rej"], judge["head_depth"]) == (6.0, 2)
    said, accepted = stopping.judged([recorded], lambda each: each.chances["mine"])
    true = said / (said + (1 - said) / 6)  # s = P / (P + 6 (1 - P)), solved for P
    for name, chances in (("", said), ("_reweighted", true)):
        bins, error = stopping.calibration(chances, accepted)
        assert judge["ece" + name] == pytest.approx(error, abs=1e-5)
        assert [count for *_, count in judge["bins" + name]] == [count for *_, count in bins]
    sure = [q for each in recorded for q in each.confidence[: each.agreed + 1]]
    bins = result["acceptance_by_confidence"]
    assert sum(count for *_, count in bins) == len(sure)
    share = sum(each.agreed for each in recorded)
    assert sum(share * count for _, share, count in bins) == pytest.approx(share, rel=1e-5)


def test_an_interrupted_sweep_keeps_what_is_recorded(llama, drafter, monkeypatch):
    def stopped(turns, after):
        yield from turns[:after]
        raise KeyboardInterrupt

    for done in (1, 0):
        monkeypatch.setattr(stopping, "tqdm", lambda turns, done=done, **_: stopped(turns, done))
        turns, kwargs = [TURN] * 3, {"drafter": drafter}
        result = stopping.sweep(specdecpp, kwargs, {}, llama, turns, [(4, 2, 1.0, 0.5)])
        assert bool(result) == bool(done)


def test_heads_that_do_not_fit_the_draft_model_are_refused(llama, drafter, monkeypatch):
    another_head = copy.deepcopy(drafter)
    torch.nn.init.ones_(another_head.head.out.weight)
    kwargs = {"drafter": drafter}
    heads = {"a": drafter, "b": another_head}
    assert stopping.chain_of(specdecpp, kwargs, heads) == (specdecpp, drafter)

    moved = copy.deepcopy(drafter)
    torch.nn.init.ones_(moved.body.norm.weight)
    untrained = copy.deepcopy(drafter)
    untrained.config = dataclasses.replace(drafter.config, stage="draft")
    for name, head in {"moved": moved, "untrained": untrained}.items():
        with pytest.raises(common.Mistake, match=f"{name} is no acceptance head trained on"):
            stopping.chain_of(specdecpp, kwargs, {name: head})

    model = make_llama(layers=1, seed=4)
    monkeypatch.setattr(common, "load_target", lambda name, **_: (model, None))
    specdecpp.load_draft_model.cache_clear()
    config = specdecpp.Config(draft_model="small", stage="head")
    on_model = specdecpp.build(config, llama, torch.arange(48)).double()
    by_model = {"drafter": on_model, "draft_model": model}  # what is named is what drafts
    assert stopping.chain_of(specdecpp, by_model, {"a": on_model}) == (specdecpp, model)
    assert stopping.chain_of(specdecpp, {"drafter": on_model}, {"a": on_model})[1] is on_model
    with pytest.raises(common.Mistake, match="a is no acceptance head"):
        stopping.chain_of(specdecpp, by_model, {"a": drafter})

    with pytest.raises(common.Mistake, match="falcon drafts no chains"):
        stopping.chain_of(types.SimpleNamespace(__name__="falcon"), kwargs, {})
