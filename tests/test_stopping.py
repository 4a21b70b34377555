"""stopping.py: replayed rates are those of decoding; times and figures of a head by hand."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tiny import make_glide, slow, teach

import common
import glide
import specdecpp
from support import stopping
from support.stopping import Round

PROMPT = torch.tensor([[9, 8, 7]])
TURN = {"input_ids": PROMPT, "max_new_tokens": 30, "do_sample": False}


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


def make_arm(target, drafter, name="specdecpp", module=specdecpp):
    """What the sweep reads of an Arm."""
    return SimpleNamespace(name=name, target=target, module=module, drafter=drafter)


def record(target, drafter, turn=TURN, **fields):
    """The rounds of a turn, as the sweep records them."""
    arm = make_arm(target, drafter, **fields)
    return stopping.record(stopping.longest_chains(arm), target, turn)


# ------------------------------------------------------------------------------- the recording


@pytest.mark.parametrize("name", ["K=2", slow("K=14"), "head=0.1", "head=0.7"])
@pytest.mark.parametrize("place", [None, 17])
def test_replayed_rates_are_those_of_decoding(llama, drafter, name, place):
    """Up to a limit of tokens, or to an end-of-sequence token."""
    turn = dict(TURN)
    if place is not None:
        turn["eos_token_id"] = int(llama.generate(**TURN)[0, 3 + place])
    kind, value = name.split("=")
    rule = {"threshold": float(value)}
    if kind == "K":
        rule = {"stop": "fixed", "gamma": int(value)}
    stats = common.Stats()
    llama.generate(
        **turn, custom_generate=common.speculate(specdecpp.drafts, drafter, each=stats, **rule)
    )
    discarded = stats.drafted - sum(stats.accepted)
    rates = (stats.target_forwards / stats.emitted, discarded / stats.emitted)
    rounds = record(llama, drafter, turn)
    assert stopping.points([rounds])[kind][value] == pytest.approx(rates)
    assert len(rounds) == stats.emitted


def test_a_round_by_hand():
    steps = [
        (torch.tensor([1]), torch.tensor([0.5, 0.5])),
        (torch.tensor([0]), torch.tensor([0.8, 0.2])),
    ]
    each = stopping.round_of(common.chain(steps, PROMPT, chances=[0.9]))
    assert each.tokens == [1, 0]
    assert each.confidence == pytest.approx([0.5, 0.8])
    assert each.entropy == pytest.approx([0.6931, 0.5004], abs=1e-4)
    assert each.chances == [0.9]
    assert stopping.round_of(common.chain([], PROMPT)) == Round()


def test_every_place_is_recorded_to_the_full_length(llama, drafter):
    """Whatever the drafter's own rule, with a head and without one; fewer only near the end."""
    impatient = dataclasses.replace(drafter.config, threshold=0.0, max_draft=3, gamma=2)
    unjudged = dataclasses.replace(impatient, stage="draft")
    lengths = [min(stopping.LONGEST, 29 - place) for place in range(30)]
    for config, judged in ((impatient, True), (unjudged, False)):
        other = specdecpp.Drafter(config).double()
        other.load_state_dict(drafter.state_dict())
        rounds = record(llama, other)
        assert [len(each.tokens) for each in rounds] == lengths
        chances = [max(0, length - 1) if judged else 0 for length in lengths]
        assert [len(each.chances) for each in rounds] == chances
    rounds = record(llama, make_glide(llama, gamma=2), name="glide", module=glide)
    assert [len(each.tokens) for each in rounds] == lengths


# ----------------------------------------------------------------------------------- the rules


def test_replay_by_hand():
    """Five tokens; the first draft of the first round is right, and all others are wrong.

    Rates are of the tokens of all answers: another one has one token at one forward.
    """
    rounds = [Round([1] * m, agreed=n) for m, n in zip((4, 3, 2, 1, 0), (1, 0, 0, 0, 0))]
    fixed, _ = stopping.RULES["K"]
    assert stopping.replay(rounds, fixed, 3) == (4, 2 + 2 + 1)
    assert stopping.replay(rounds, fixed, 1) == (4, 0 + 1 + 1)
    found = stopping.points([rounds, [Round()]])
    assert found["K"]["3"] == pytest.approx((5 / 6, 5 / 6))
    assert found["oracle"][""] == pytest.approx((5 / 6, 0))  # disagreements at 1, 2, 3, not at 4


@pytest.mark.parametrize(
    "rule, setting, length",
    [
        ("K", 3, 3),
        ("confidence", 0.1, 5),  # never: more than all tokens
        ("confidence", 0.5, 3),
        ("confidence", 0.7, 2),
        ("entropy", 1.5, 3),
        ("head", 0.1, 3),
        ("head", 0.7, 5),
    ],
)
def test_lengths_by_hand(rule, setting, length):
    """A head judges a token once the next one is drafted: 1 - 0.95 = 0.05, 1 - 0.475 = 0.525."""
    each = Round([1] * 4, [0.8, 0.6, 0.2, 0.9], [0.2, 0.8, 1.7, 2.5], [0.95, 0.475, 0.4275])
    assert stopping.RULES[rule][0](each, setting) == length


# ----------------------------------------------------------------------------------- the sweep


def timed(n_draft, n_target, draft, verify):
    """An answer with its times. Its first draft, of 9 tokens, counts as prefill."""
    seconds = {"prefill": 7.0, "draft": draft, "verify": verify}
    return SimpleNamespace(target_forwards=n_target, offered=[9, n_draft], seconds=seconds)


def test_forward_times_by_hand():
    """10 ms and 100 ms explain all answers, or only a part of what they take."""
    counts = ((12, 3), (20, 5), (8, 4))
    exact = [timed(d, t, 0.01 * d, 0.1 * t) for d, t in counts]
    assert stopping.forward_times(exact) == pytest.approx((0.01, 0.1, 1.0))
    slower = [timed(10, 4, 0.1, 0.3), timed(10, 4, 0.1, 0.5)]  # alike, but not in their times
    assert stopping.forward_times(slower) == pytest.approx((0.01, 0.1, 0.0))
    assert stopping.forward_times(exact[:1])[2] is None  # nothing to explain
    assert stopping.forward_times([timed(0, 4, 0.0, 1.0)])[:2] == (0, 0.25)


def test_the_sweep_of_a_run(llama, drafter):
    arm = make_arm(llama, drafter)
    result = stopping.sweep(arm, [TURN], [timed(10, 5, 0.2, 0.5)])
    assert (result["t_draft_ms"], result["t_target_ms"]) == pytest.approx((20, 100))
    for rule, settings in stopping.points([record(llama, drafter)]).items():
        for setting, rates in settings.items():
            *found, speed = result["points"][rule][setting]
            assert found == pytest.approx(rates)
            assert speed == pytest.approx(specdecpp.throughput(*rates, 0.02, 0.1))


def test_the_sweep_of_chains_without_a_head(llama):
    arm = make_arm(llama, make_glide(llama), "glide:gamma=3", glide)
    result = stopping.sweep(arm, [TURN], [timed(10, 5, 0.2, 0.5)])
    assert list(result["points"]) == ["K", "confidence", "entropy", "oracle"]


@pytest.mark.parametrize("name", ["cape", "falcon", "specdecpp+cape", "glide:gamma=3+copies"])
def test_arms_of_other_trees_than_chains_are_refused(name):
    with pytest.raises(common.UserError, match="no plain chains: take glide or specdecpp"):
        stopping.longest_chains(make_arm(None, None, name))
    stopping.longest_chains(make_arm(None, None, "specdecpp:threshold=0.5@a+b"))
