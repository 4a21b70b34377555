"""stopping.py: replayed rates are those of decoding; times, calibration, head quality by hand."""

import copy
import dataclasses
import math
import types

import pytest
import torch
from test_specdecpp import decode, fit, held_out, make_drafter
from tiny import make_llama, slow

import common
import specdecpp
from support import stopping


@pytest.fixture(scope="module")
def draft_model():
    made = make_drafter(make_llama(), stage="draft")
    fit(made, make_llama(), 40, 5e-3)
    return made


@pytest.fixture(scope="module", params=["hidden", "confidence"])
def drafter(request, draft_model):
    """A draft model with its head, trained a little; the head sees e_t, or log q(Y_t) too."""
    config = dataclasses.replace(draft_model.config, stage="head", head_sees=request.param)
    torch.manual_seed(0)
    second = specdecpp.Drafter(config).double()
    second.body.load_state_dict(draft_model.body.state_dict())
    fit(second, make_llama(), 20, 5e-3)
    return second


@pytest.fixture(scope="module")
def recorded(llama, drafter):
    prompt = torch.tensor([[9, 8, 7]])
    answer = llama.generate(prompt, max_new_tokens=30, do_sample=False)[0, 3:].tolist()
    return stopping.record(specdecpp, drafter, llama, prompt, answer)


@pytest.mark.parametrize(
    "name",
    ["K=2", slow("K=14"), slow("head=0.1"), "head=0.7", "confidence=0.7", "entropy=0.5"],
)
def test_replayed_rates_are_those_of_decoding(llama, drafter, recorded, name):
    kind, value = name.split("=")
    rules = {
        "K": {"stop": "fixed", "gamma": int(float(value))},
        "head": {"threshold": float(value)},
        "confidence": {"stop": "confidence", "confidence": float(value)},
        "entropy": {"stop": "entropy", "entropy": float(value)},
    }
    options = rules[kind] | {"max_new_tokens": 30}
    _, stats = decode(llama, torch.tensor([[9, 8, 7]]), drafter=drafter, **options)
    discarded = stats.drafted - sum(stats.accepted)
    found = stopping.points([recorded], {"head": drafter})
    assert found[kind][value] == pytest.approx((stats.target_forwards / 30, discarded / 30))


def test_no_rule_verifies_less_than_the_oracle(recorded):
    points = stopping.points([recorded, recorded], {})
    least = min(rate for settings in points.values() for rate, _ in settings.values())
    assert points["oracle"][""] == (least, 0.0)
    agrees = [each.agreed > 0 for each in recorded[:-1]] + [True]
    assert least * 30 == pytest.approx(specdecpp.oracle(agrees))


def test_rates_of_several_answers_by_hand():
    """Of all tokens together, not the mean of answers: five tokens, and one at one forward."""
    agreed, room = (1, 0, 0, 0, 0), (4, 3, 2, 1, 0)
    long = [stopping.Round(None, [0.5] * m, [1.0] * m, n, 0) for m, n in zip(room, agreed)]
    short = [stopping.Round(None, [], [], 0, 0)]
    found = stopping.points([long, short], {})
    assert found["K"]["3"] == pytest.approx((5 / 6, 5 / 6))  # see test_replay_by_hand
    assert found["oracle"][""] == pytest.approx((5 / 6, 0))  # disagreements at 1, 2, 3, not at 4


def test_replay_by_hand():
    agreed, room = (1, 0, 0, 0, 0), (4, 3, 2, 1, 0)
    rounds = [stopping.Round(None, [0.5] * m, [], n, 0) for m, n in zip(room, agreed)]
    assert stopping.replay(rounds, [3] * 5) == (4, 2 + 2 + 1)
    assert stopping.replay(rounds, [1] * 5) == (4, 0 + 1 + 1)
    assert stopping.first([False, True, True]) == 2 and stopping.first([False, False]) > 20


def test_a_head_stops_one_token_later_than_it_knows_by_hand():
    """It says 0.95, 0.5 of the first two tokens; the second is judged when the third is drafted."""
    head = types.SimpleNamespace(accept_logit=lambda hidden, of_q: torch.logit(hidden[:, 0]))
    hidden = torch.tensor([[0.95], [0.5], [0.9]])
    rounds = [stopping.Round(hidden, [0.5] * 4, [0.1] * 4, 0, 1)]
    rounds += [stopping.Round(torch.zeros(0, 1), [], [], 0, 0)] * 4
    found = stopping.points([rounds], {"mine": head})["mine"]
    drafted = {h: round(discarded * 5) for h, (_, discarded) in found.items()}
    assert drafted == {
        "0.1": 3,
        "0.3": 3,
        "0.5": 3,
        "0.7": 4,
        "0.9": 4,
    }  # 1 - 0.95 * 0.5 is known then


def test_the_recording_by_looking_at_drafts(llama, drafter, recorded):
    prompt = torch.tensor([[9, 8, 7]])
    ids = llama.generate(prompt, max_new_tokens=30, do_sample=False)
    for place in (0, 7, 20, 28, 29):
        each, own = recorded[place], specdecpp.new_memory(drafter, llama)
        steps = specdecpp.propose(drafter, llama, ids[:, : 3 + place], None, own)
        drafted = [next(steps) for _ in range(min(20, 29 - place))]
        right = [int(step[0]) == int(ids[0, 3 + place + i]) for i, step in enumerate(drafted)]
        sure = [float(q_draft.max()) for _, q_draft, _ in drafted]
        assert each.confidence == pytest.approx(sure, rel=1e-5)
        for state, (_, _, hidden) in zip(each.hidden, drafted[1:]):
            torch.testing.assert_close(state, hidden, atol=1e-5, rtol=1e-5)
        assert len(each.hidden) == max(0, len(drafted) - 1)
        assert each.agreed == (right.index(False) if False in right else len(right))
        rank = 0
        if False in right:
            q_draft = drafted[each.agreed][1]
            rank = int((q_draft > q_draft[ids[0, 3 + place + each.agreed]]).sum())
        assert each.rank == rank


def test_what_is_judged_by_hand():
    """A token counts where all before it were accepted: what comes after a refusal never would."""
    rounds = [
        stopping.Round(None, [0.9, 0.8, 0.7], [], 1, 3),
        stopping.Round(None, [0.4, 0.3], [], 2, 0),
    ]
    values, accepted = stopping.judged([rounds], [[each.confidence for each in rounds]])
    assert values.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.3])
    assert accepted.tolist() == [1, 0, 1, 1]


def test_the_sweep_of_a_run(llama, drafter, recorded):
    prompt = torch.tensor([[9, 8, 7]])
    answer = llama.generate(prompt, max_new_tokens=30, do_sample=False)[0, 3:].tolist()
    answers = [(10, 5, 0.7, 0.2), (40, 7, 1.5, 0.8), (25, 12, 1.7, 0.5)]  # 20 ms and 100 ms
    turns = [{"input_ids": prompt, "answer": answer}]
    result = stopping.sweep(specdecpp, drafter, {"mine": drafter}, llama, turns, answers)
    times = (result["t_draft_ms"], result["t_target_ms"], result["r2"])
    assert times == pytest.approx((20, 100, 1))
    assert set(result["points"]) == {"K", "confidence", "entropy", "mine", "oracle"}
    verified, discarded, speed = result["points"]["mine"]["0.7"]
    assert speed == pytest.approx(stopping.throughput(verified, discarded, 0.02, 0.1))
    judge = result["calibration"]["mine"]
    own = (drafter.config.w_rej, drafter.config.head_depth)
    assert (judge["w_rej"], judge["head_depth"]) == own
    said, accepted = stopping.judged([recorded], [stopping.accept_probs(drafter, recorded)])
    true = said / (said + (1 - said) / 6)  # s = P / (P + 6 (1 - P)), solved for P
    for name, chances in (("", said), ("_reweighted", true)):
        bins, error = stopping.calibration(chances, accepted)
        assert judge["ece" + name] == pytest.approx(error, abs=1e-5)
        assert [count for *_, count in judge["bins" + name]] == [count for *_, count in bins]
    bins = result["acceptance_by_confidence"]  # of every token but those after a refused one
    sure = [q for each in recorded for q in each.confidence[: each.agreed + 1]]
    assert sum(count for *_, count in bins) == len(sure)
    assert sum(value * count for value, _, count in bins) == pytest.approx(sum(sure), rel=1e-5)
    accepted = sum(each.agreed for each in recorded)
    assert sum(share * count for _, share, count in bins) == pytest.approx(accepted, rel=1e-5)


def test_an_interrupted_sweep_keeps_what_is_recorded(llama, drafter, monkeypatch):
    turns = [{"input_ids": torch.tensor([[9, 8, 7]]), "answer": [1, 2, 3]}] * 3
    for done in (1, 0):
        monkeypatch.setattr(stopping, "tqdm", lambda turns, done=done, **_: stopped(turns, done))
        result = stopping.sweep(specdecpp, drafter, {}, llama, turns, [(4, 2, 1.0, 0.5)])
        assert bool(result) == bool(done)


def stopped(items, after):
    yield from items[:after]
    raise KeyboardInterrupt


def test_times_by_hand_that_no_regression_can_tell_apart():
    alike = [(5 * n, n, 0.2 * n, 0.05 * n) for n in (3, 7, 8, 12)]  # K = 5 in every answer
    assert stopping.forward_times(alike) == (pytest.approx(0.01), pytest.approx(0.15), None)
    assert stopping.forward_times([(10, 4, 1.0, 0.3)])[2] is None
    assert stopping.forward_times([(0, 4, 1.0, 0.0)]) == (0, 0.25, None)
    answers = [(k * n, n, 0.01 * k * n + 0.1 * n, 0.0) for k, n in ((4, 3), (4, 5), (2, 4), (2, 6))]
    assert stopping.forward_times(answers) == pytest.approx((0.01, 0.1, 1.0))


def timed_arm(offered, drafters="mine", module="specdecpp", **options):
    """An arm of bench.py with one answer: a draft pass takes 10 ms, a forward 100 ms."""
    rounds, passes = len(offered), sum(offered[1:])  # the first draft is timed with the prefill
    answer = types.SimpleNamespace(
        offered=offered,
        rounds=rounds,
        timers={"draft": 0.01 * passes},
        decode_seconds=0.01 * passes + 0.1 * rounds,
    )
    made = {"drafters": drafters, "module": module, "answers": [answer], "kwargs": options}
    return types.SimpleNamespace(**made, facts={})


def test_t_draft_by_hand_without_the_first_untimed_draft():
    """Were it counted, three answers that begin with long drafts would have faster passes."""
    arms = [timed_arm([20, 2, 2]), timed_arm([20, 5]), timed_arm([20, 1, 1, 1])]
    found = stopping.forward_times(stopping.measured(arms))
    assert found == (pytest.approx(0.01), pytest.approx(0.1), pytest.approx(1.0))


def test_arms_that_draft_alike_by_hand():
    mine = timed_arm([4, 3, 2])
    others = [timed_arm([9, 9], drafters="b"), timed_arm([9, 9], module="cape")]
    others.append(timed_arm([10, 10], copies=10))  # copies make drafts longer, at no cost
    others.append(timed_arm([10, 10]))
    others[-1].facts = {"copies": 10}  # of the drafter's config
    assert stopping.measured([mine, *others]) == stopping.measured([mine])
    assert stopping.measured([mine, timed_arm([4, 1])])[1] == pytest.approx((1, 2, 0.21, 0.01))


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
    model = make_llama(seed=4)
    by_model = arm_of(other)
    by_model.kwargs["draft_model"] = model  # what --draft-model names is what drafted
    assert stopping.chain_and_heads(by_model, llama, [])[1] is model
    with pytest.raises(ValueError, match="drafts chains"):
        stopping.chain_and_heads(arm_of(None, None, name="prompt-lookup"), llama, [])


def test_fit_times_and_throughput_by_hand():
    draft, target = [10, 40, 25, 33], [5, 7, 12, 4]
    seconds = [0.02 * d + 0.1 * t for d, t in zip(draft, target)]
    assert stopping.fit_times(draft, target, seconds) == pytest.approx((0.02, 0.1, 1.0))
    noisy = [s * f for s, f in zip(seconds, (1.3, 0.8, 1.1, 0.9))]
    assert stopping.fit_times(draft, target, noisy)[2] < 0.95
    # 100 tokens, 30 target forwards, 50 discarded: N_draft = 120
    assert stopping.throughput(0.3, 0.5, 0.02, 0.1) == pytest.approx(100 / (120 * 0.02 + 30 * 0.1))


def test_calibration_by_hand():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(20000, generator=generator)
    labels = (torch.rand(20000, generator=generator) < truth).float()
    rows, error = stopping.calibration(truth, labels)
    assert len(rows) == 10 and sum(count for _, _, count in rows) == 20000 and error < 0.02
    weighted = truth / (truth + 6 * (1 - truth))
    assert stopping.calibration(weighted, labels)[1] > 0.2
    undone = stopping.unbiased(torch.logit(weighted), 6.0)
    assert stopping.calibration(undone, labels)[1] < 0.02
    assert stopping.calibration(torch.tensor([0.25, 0.85]), torch.tensor([0.0, 1.0])) == (
        [(0.25, 0.0, 1), (pytest.approx(0.85), 1.0, 1)],
        pytest.approx(0.2),
    )


def test_calibration_by_hand_puts_one_into_the_last_bin():
    """Ten bins are ten, and those of 0.95 and of 1.0 are the same."""
    rows, error = stopping.calibration(torch.tensor([0.95, 1.0]), torch.tensor([1.0, 0.0]))
    assert rows == [(pytest.approx(0.975), 0.5, 2)] and error == pytest.approx(0.475)
    every = torch.linspace(0, 1, 101)
    assert len(stopping.calibration(every, every)[0]) == 10


# ----------------------------------------------------------------- how good a head is, head_quality


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
    """Two batches, w_rej = 3: sigmoids of 0.75 and 0.25 mean chances of 0.9 and 0.5."""
    batches = [
        (torch.tensor([3.0, 1 / 3]).log(), torch.tensor([1.0, 0.0])),
        (torch.tensor([3.0]).log(), torch.tensor([0.5])),
    ]
    head = types.SimpleNamespace(
        distils=False,
        config=types.SimpleNamespace(w_rej=3.0),
        accept_logit=lambda hidden, of_q: hidden,
    )
    module = types.SimpleNamespace(
        labelled=lambda drafter, target, batch, base: (batch[0], None, batch[1])
    )
    found = stopping.head_quality(module, head, None, batches, base="any")
    mixed = -0.5 * math.log(0.9) - 0.5 * math.log(0.1)
    bce = (-math.log(0.9) - math.log(0.5) + mixed) / 3
    assert found["bce"] == pytest.approx(bce, rel=1e-5)
    assert found["kl"] == pytest.approx(bce - math.log(2) / 3, rel=1e-5)  # of the label 0.5
    assert found["ece"] == pytest.approx((2 * (0.9 - 0.75) + 0.5) / 3, rel=1e-5)
    # accepted 1 and 0.5 at 0.9, refused 0.5 at 0.9 and 1 at 0.5: 1.5 * (1 + 0.25) of 1.5 * 1.5
    assert found["auc"] == pytest.approx(1.25 / 1.5)


def test_head_quality_of_a_trained_head(llama, drafter):
    found = stopping.head_quality(specdecpp, drafter, llama, [held_out(llama)])
    assert found["auc"] > 0.6 and found["kl"] == pytest.approx(found["bce"])  # labels are 0 or 1
    assert 0 <= found["ece"] < 0.5
    draft = make_drafter(llama, stage="draft")
    assert stopping.head_quality(specdecpp, draft, llama, [held_out(llama)]) == {}
    assert stopping.head_quality(specdecpp, drafter, llama, []) == {}


def test_a_fit_with_a_negative_time_is_not_taken():
    answers = [(1, 4, 8.0, 1.0), (8, 4, 1.0, 1.0), (2, 5, 9.0, 1.0)]
    n_draft, n_target, seconds, _ = zip(*answers)
    assert min(stopping.fit_times(n_draft, n_target, seconds)[:2]) < 0
    assert stopping.forward_times(answers) == (3 / 11, 15 / 13, None)
