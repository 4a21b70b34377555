"""stopping.py: replayed rates are those of decoding; times and figures of a head by hand."""

import dataclasses

import pytest
import torch
from tiny import slow, teach

import cape
import common
import specdecpp
from support import stopping
from support.arms import Arm
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
    decoding = common.open_decoding(llama, **turn)
    with torch.no_grad():
        config = dataclasses.replace(drafter.config, **rule)
        for draft in specdecpp.drafts(decoding, drafter, config):
            decoding.verify(draft)
    stats = decoding.stats
    discarded = stats.drafted - sum(stats.accepted)
    rates = (stats.target_forwards / stats.emitted, discarded / stats.emitted)
    rounds = stopping.record(specdecpp, drafter, drafter.head, llama, turn)
    assert stopping.points([rounds])[kind][value] == pytest.approx(rates)
    assert len(rounds) == stats.emitted


def test_a_round_by_hand():
    """The head judges a token by the state that comes with the next one."""
    steps = [
        (torch.tensor([1]), torch.tensor([0.5, 0.5]), torch.tensor([0.1])),
        (torch.tensor([0]), torch.tensor([0.8, 0.2]), torch.tensor([0.9])),
    ]
    each = stopping.round_of(steps, head=torch.logit)
    assert each.tokens == [1, 0]
    assert each.confidence == pytest.approx([0.5, 0.8])
    assert each.entropy == pytest.approx([0.6931, 0.5004], abs=1e-4)
    assert each.chances == pytest.approx([0.9])


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
    """The Stats of an answer. Its first draft, of 9 tokens, counts as prefill."""
    seconds = {"prefill": 7.0, "draft": draft, "verify": verify}
    return common.Stats(target_forwards=n_target, offered=[9, n_draft], seconds=seconds)


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
    arm = Arm("x", llama, specdecpp, {"drafter": drafter})
    result = stopping.sweep(arm, llama, [TURN], [timed(10, 5, 0.2, 0.5)])
    assert (result["t_draft_ms"], result["t_target_ms"]) == pytest.approx((20, 100))
    rounds = stopping.record(specdecpp, drafter, drafter.head, llama, TURN)
    for rule, settings in stopping.points([rounds]).items():
        for setting, rates in settings.items():
            *found, speed = result["points"][rule][setting]
            assert found == pytest.approx(rates)
            assert speed == pytest.approx(specdecpp.throughput(*rates, 0.02, 0.1))


def test_what_drafts_in_an_arm_and_the_head_that_was_trained_on_it(llama, drafter):
    ours = {"drafter": drafter}
    assert stopping.chain_of(Arm("x", llama, specdecpp, ours)) == (specdecpp, drafter, drafter.head)
    for arm in (Arm("x", llama, cape), Arm("x", llama, specdecpp, ours, copies=16)):
        with pytest.raises(common.UserError, match="no plain chains: take glide or specdecpp"):
            stopping.chain_of(arm)
