"""fitting.py but for CAPE's and Falcon's own parts: costs between counts, and copies."""

import types

import pytest
import torch
from tiny import make_llama

import cape
import ctc_drafter
import falcon
from support import fitting, report, stopping


def test_the_cost_between_measured_counts():
    times = fitting.milliseconds({"1": 10.0, "2": 20.0, "4": 50.0}, 6)
    assert times == [10, 10, 20, 35, 50, 50, 50]
    assert fitting.milliseconds({"10": 2.0, "2": 1.0}, 4)[4] == 1.25  # counts are no words


def turn(prompt, answer):
    return {"input_ids": torch.tensor([prompt]), "answer": answer}


def test_acceptance_of_copies_by_match_and_position():
    """Worked by hand: the prompt 1 2 3 4 5 is repeated by the answer, up to a last token."""
    found = fitting.copy_acceptance([turn([1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 7])], most=3)
    # before 1 and before 2 nothing that was there; before 3, after 1 2: 3 4 5 against 3 4 7;
    # before 4, after 1 2 3: 4 5 9 against 4 7; before 7, after 1 2 3 4: 5 against 7
    assert found[2] == {"share": 1 / 5, "acceptance": [1.0, 1.0, 0.0]}
    assert found[3] == {"share": 1 / 5, "acceptance": [1.0, 0.0]}
    assert found[4] == {"share": 1 / 5, "acceptance": [0.0]}


def test_what_follows_a_wrong_copy_is_not_right():
    """After 1 2 the copy 3 4 meets 9 4: its second token agrees and is lost all the same."""
    found = fitting.copy_acceptance([turn([1, 2, 3, 4], [1, 2, 9, 4])])
    assert found[2] == {"share": 1 / 4, "acceptance": [0.0, 0.0]}


def test_a_text_without_repetition_copies_nothing():
    found = fitting.copy_acceptance([turn([1, 2, 3], [4, 5, 6])])
    assert all(each == {"share": 0.0, "acceptance": []} for each in found.values())
    fitted = fitting.lengths_of_copies([turn([1, 2, 3], [4, 5, 6])], {"by_tokens": {"1": 5.0}})
    assert {each["copy"] for each in fitted["by_match"].values()} == {0}
    assert "Copies from the context" in "".join(report._fitted_tables("copies", fitted))


def test_a_periodic_answer_is_copied_whole():
    found = fitting.copy_acceptance([turn([1, 2], [1, 2] * 10)], most=4)
    assert found[4]["acceptance"] == [1.0] * 4
    assert found[4]["share"] == 16 / 20  # the first place of each length of match is another's


def test_how_many_tokens_to_copy():
    """As many as raise tokens a second; 0.5 more tokens are worth half a forward."""
    rates = [0.9, 0.5, 0.4]
    assert fitting.copy_length(rates, [10.0] * 5) == 3  # a forward costs the same: all
    assert fitting.copy_length(rates, [10.0, 10, 20, 30, 40]) == 0
    assert fitting.copy_length(rates, [10.0, 10, 11, 16, 30]) == 1  # 1.9 / 11 > 2.4 / 16
    assert fitting.copy_length(rates, [10.0, 10, 11, 13.5, 30]) == 2  # 2.4 / 13.5 > 1.9 / 11
    assert fitting.copy_length([], [10.0, 10.0]) == 0


def test_a_methods_drafting_time_leaves_out_the_first_round():
    class Target:
        device = torch.device("cpu")

        def generate(self, ids, stats, **options):
            stats.seconds["draft"] = 0.03 * ids.shape[1]
            stats.target_forwards = 4

    turns = [turn([1] * n, []) for n in (1, 2, 30)]
    assert abs(fitting.draft_ms(Target(), turns) - 20.0) < 1e-9


def test_the_refit_of_falcon_by_hand(monkeypatch):
    """A pass is timed with k levels, and acceptance is counted over all answers."""
    timed = []
    hits_and_trials = {3: (1.0, 1.0), 4: (2.0, 3.0)}  # by the length of prompt and answer

    def draft_ms(target, turns, tree, **options):
        timed.append(max(map(len, tree)))
        return 5.0 * len(timed)

    def tree_acceptance(module, drafter, target, ids, start, tree):
        return torch.tensor(hits_and_trials[ids.shape[1]])[:, None, None].expand(2, 6, 3)

    monkeypatch.setattr(fitting, "draft_ms", draft_ms)
    monkeypatch.setattr(fitting, "tree_acceptance", tree_acceptance)
    drafter = types.SimpleNamespace(config=Falcon)
    arm = types.SimpleNamespace(module=falcon, kwargs={"drafter": drafter})
    costs = {"by_tokens": {"1": 10.0, "64": 20.0}}
    turns = [turn([1, 2], [3]), turn([1, 2], [3, 4])]
    found = fitting.tree_of_falcon(arm, None, turns, costs)
    assert timed == [2, 4, 6] and found["draft_ms_by_passes"] == [5.0, 10.0, 15.0]
    assert found["acceptance"] == [[0.75] * 3] * 6
    assert len(found["tree"]) > 6  # most nodes are right, and cost little


class Falcon:
    """What the refit asks of its Config."""

    k = 2


def test_the_refit_of_cape_by_hand(monkeypatch):
    """Confidences up to 0.5 and above; the target's token was first or second, in two answers."""
    rounds = {
        3: [stopping.Round(None, [0.4], [], 1, 0), stopping.Round(None, [0.9], [], 0, 1)],
        4: [stopping.Round(None, [0.8], [], 1, 0), stopping.Round(None, [0.7], [], 1, 0)],
    }
    rounds[4].append(stopping.Round(None, [], [], 0, 0))  # no room for a draft

    def record(base, drafter, target, ids, answer, longest):
        assert longest == 1
        return rounds[ids.shape[1]]

    monkeypatch.setattr(stopping, "record", record)
    monkeypatch.setattr(fitting, "draft_ms", lambda *_, **__: 5.0)
    base = {"base": None, "base_drafter": None}
    arm = types.SimpleNamespace(module=cape, base=base, kwargs={"bounds": [0.5]})
    costs = {"by_tokens": {"1": 10.0, "64": 20.0}}
    found = fitting.sizes_of_cape(arm, None, [turn([1] * n, [3]) for n in (3, 4)], costs)
    assert found["frequency"] == [0.25, 0.75]
    low, high = found["acceptance_by_rank"]
    assert low[:3] == [1, 0, 0] and high[:3] == pytest.approx([2 / 3, 1 / 3, 0])
    assert found["sizes"] == [0, 1]  # a second choice where it was ever right


def test_the_least_worth_of_a_node_by_hand():
    """Five tokens in 100 ms, four nodes a round, 2 ms for a node more: as long as 0.1 tokens."""
    answers = [
        types.SimpleNamespace(tokens=[1, 2], decode_seconds=0.06, drafted=7, rounds=2),
        types.SimpleNamespace(tokens=[1, 2, 3], decode_seconds=0.04, drafted=5, rounds=1),
    ]
    costs = {"by_tokens": {"1": 10.0, "5": 18.0, "64": 1000.0}}
    assert fitting.least_worth(answers, costs) == pytest.approx(0.1)
    cheaper = {"by_tokens": {"1": 10.0, "5": 9.0, "64": 9.0}}  # noise: no node costs less than 0
    assert fitting.least_worth(answers, cheaper) == 0


@pytest.mark.parametrize(
    "module, names",
    [
        (ctc_drafter, ["worth_of_nodes"]),
        (falcon, ["tree_of_falcon", "worth_of_nodes"]),
        (cape, ["sizes_of_cape", "worth_of_nodes"]),
    ],
)
def test_what_each_method_leaves_open_is_fitted(monkeypatch, module, names):
    for name in ("sizes_of_cape", "tree_of_falcon", "worth_of_nodes"):
        monkeypatch.setattr(fitting, name, lambda *_, name=name: {name: 1})
    monkeypatch.setattr(fitting, "lengths_of_copies", lambda *_: {})
    found = fitting.fitter(types.SimpleNamespace(module=module, name="it"))(None, [], {})
    assert found == {"it": dict.fromkeys(names, 1), "copies": {}}


def speed_of(sizes, acceptance, verify_ms, draft_ms, gamma, most):
    """Expected tokens a millisecond of CAPE with two ranges of confidence, equally common."""
    nodes = gamma + gamma * sum(sizes) / 2
    if nodes > most:
        return 0.0
    low = int(nodes)
    share = nodes - low
    verification = (1 - share) * verify_ms[1 + low] + share * verify_ms[1 + min(low + 1, most)]
    first = float(acceptance[:, 0].mean())
    hit = sum(float(row[: 1 + n].sum()) for row, n in zip(acceptance, sizes)) / 2
    return (1 + hit * sum(first**step for step in range(gamma))) / (draft_ms + verification)


def test_refit_stops_where_one_extra_more_does_not_pay():
    """Of random drafters and machines: no size one larger gives more tokens a millisecond."""
    generator = torch.Generator().manual_seed(0)
    gamma, most, draft_ms, frequency = 3, 12, 5.0, torch.tensor([0.5, 0.5])
    for _ in range(60):
        drawn = torch.rand(2, 4, generator=generator) / torch.tensor([2.0, 4.0, 6.0, 8.0])
        acceptance = drawn.sort(descending=True)[0]
        verify_ms = (40 + 3 * torch.rand(most + 2, generator=generator).cumsum(0)).tolist()
        machine = (acceptance, verify_ms, draft_ms, gamma, most)
        found = fitting.refit_sizes(acceptance, frequency, verify_ms, draft_ms, gamma, most)
        best = speed_of(found, *machine)
        for place in range(2):
            larger = [n + (i == place) for i, n in enumerate(found)]
            if larger[place] < 4:
                assert speed_of(larger, *machine) <= best * (1 + 1e-6)
            fewer = [n - (i == place) for i, n in enumerate(found)]
            if fewer[place] >= 0:
                assert speed_of(fewer, *machine) < best * (1 + 0.05)
        assert best >= speed_of([0, 0], *machine)


def test_induction_is_attention_to_what_followed_before():
    """Five tokens twice; a head that looks where it should, one that looks one place too early."""
    right, early = torch.zeros(2, 10, 10).unbind()
    for query in range(5, 10):
        right[query, query - 4] = 0.75
        early[query, query - 5] = 1.0
    uniform = torch.full((10, 10), 0.1)
    target = make_llama(vocab=30, layers=2)
    asked = []

    def forward(ids, output_attentions):
        asked.append((ids, output_attentions, target.config._attn_implementation))
        return types.SimpleNamespace(
            attentions=[torch.stack([early, right])[None], torch.stack([uniform, early])[None]]
        )

    target.forward = forward
    assert fitting.induction(target, length=5) == pytest.approx([0.75, 0.1])
    [(ids, wanted, implementation)] = asked
    assert torch.equal(ids[:, :5], ids[:, 5:]) and len(ids[0].unique()) > 2
    assert wanted and implementation == "eager"
    assert target.config._attn_implementation == "sdpa"


def test_induction_of_a_real_target():
    target = make_llama(layers=3)
    before = target(torch.arange(1, 9)[None]).logits
    shares = fitting.induction(target, length=20)
    assert len(shares) == 3 and all(0 < share < 1 for share in shares)
    assert torch.equal(target(torch.arange(1, 9)[None]).logits, before)


def test_shares_of_ranks_leave_out_what_is_beyond_the_table():
    """Below 0.5: the truth was the drafter's 0th, 2nd, 3rd and 7th choice; above: its 0th."""
    confidences = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.9])
    ranks = torch.tensor([0, 2, 3, 7, 0])
    table = fitting.rank_acceptance(confidences, ranks, [0.5], most=3)
    assert table.tolist() == [[0.25, 0, 0.25], [1, 0, 0]]
