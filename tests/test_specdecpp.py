"""specdecpp.py: lossless under every stop rule, labels, losses, heads, and the theory."""

import collections
import copy
import dataclasses
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny import chi_square_p_value, enumerate_joint, make_llama, slow, teach

import cape
import common
import glide
import specdecpp
import train
from support import cli, packed

RULES = [
    {},
    {"threshold": 0.2},
    {"stop": "fixed", "gamma": 4},
    {"stop": "confidence"},
    {"stop": "entropy"},
    {"copies": 6, "stop": "fixed", "gamma": 2},
]


def make_drafter(target, **options):
    settings = dict(
        target=common.target_shape(target),
        layers=[0, -1],
        draft_vocab=0,
        stage="head",
        head_depth=2,
    )
    torch.manual_seed(5)
    config = specdecpp.Config(**settings | options)
    return specdecpp.build(config, target, torch.arange(target.config.vocab_size)).double().eval()


def make_glide(target):
    config = glide.Config(target=common.target_shape(target), intermediate_size=48, draft_vocab=30)
    torch.manual_seed(6)
    return glide.build(config, target, torch.arange(target.config.vocab_size)).double().eval()


def decode(target, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    return target.generate(ids, custom_generate=specdecpp.generate, **options), options["stats"]


def make_batch(target, lengths=(9, 12, 7), prompt=3, layers=()):
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, list(layers), None)
    indices, seeds = list(range(len(lengths))), torch.arange(len(lengths)) + 7
    return train.make_batch(indices, sequences, features, seeds, 0.0, "cpu")


def fit(drafter, target, steps, lr, **more):
    """Train on what the target says; returns the loss a token at each step."""
    return teach(specdecpp, drafter, target, steps, lr, rows=8, length=61, **more)


def unchanged(module, before):
    return all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


@pytest.fixture(scope="module")
def both_stages(llama):
    """(drafter, losses of the draft, losses of the head), trained a little in both stages."""
    first = make_drafter(llama, stage="draft")
    frozen = copy.deepcopy(first.head.state_dict())
    draft_losses = fit(first, llama, 60, 5e-3)
    assert unchanged(first.head, frozen)
    second = specdecpp.Drafter(dataclasses.replace(first.config, stage="head")).double()
    second.load_state_dict(first.state_dict(), strict=False)  # as train.py --init does
    frozen = copy.deepcopy(second.body.state_dict())
    head_losses = fit(second, llama, 60, 5e-3)
    assert unchanged(second.body, frozen)
    return second, draft_losses, head_losses


@pytest.fixture(scope="module")
def trained(both_stages):
    return both_stages[0]


def constant_head(drafter, logit):
    """The drafter with a head that always predicts the same."""
    changed = copy.deepcopy(drafter)
    torch.nn.init.zeros_(changed.head.out.weight)
    torch.nn.init.constant_(changed.head.out.bias, logit)
    return changed


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("length", [1, 13])
def test_greedy_output_is_the_targets(llama, trained, rule, length):
    ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (trained, make_drafter(llama, layers=[1], draft_vocab=9)):
        output, stats = decode(llama, ids, drafter=drafter, max_new_tokens=24, **rule)
        assert torch.equal(output, truth)
        assert stats.emitted == 24 and sum(stats.accepted) + stats.target_forwards == 24


@pytest.mark.parametrize("drafts", ["own", "one at a time", "a causal LM"])
def test_copies_from_the_context_change_nothing_but_the_speed(llama, trained, drafts):
    """The prompt holds what the target may answer, so that there is much to copy."""
    answer = llama.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=30, do_sample=False)
    ids = torch.cat([answer, answer[:, :12]], dim=1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    truth = llama.generate(ids, do_sample=False, **options)
    rules = {
        "own": {},
        "one at a time": {"stop": "fixed", "gamma": 1},
        "a causal LM": {"stop": "fixed", "draft_model": make_llama(layers=1, seed=4)},
    }
    output, stats = decode(llama, ids, drafter=trained, copies=8, **options, **rules[drafts])
    assert torch.equal(output, truth)
    assert stats.emitted == 20 and sum(stats.accepted) + stats.target_forwards == 20
    assert sum(offered for offered, _ in stats.copies) > 0


def test_no_copies_unless_asked_for(llama, trained):
    _, stats = decode(llama, torch.tensor([[5, 6, 7, 5, 6, 7]]), drafter=trained)
    assert set(stats.copies) == {(0, 0)} and specdecpp.Config().copies == 0


def test_rounds_are_of_different_lengths_and_some_are_accepted(llama, trained):
    _, stats = decode(llama, torch.tensor([[3]]), drafter=trained, max_new_tokens=100)
    assert len(set(stats.offered)) > 3 and 0 < sum(stats.accepted) < stats.drafted


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_stopping_inside_a_draft(llama, rule):
    """All layers copied: every draft is right, so that the end always falls inside one."""
    drafter = constant_head(make_drafter(llama, layers=[0, 1, 2]), 8.0)
    ids = torch.tensor([[9, 8, 7]])
    truth, stats = decode(llama, ids, drafter=drafter, max_new_tokens=20, **rule)
    assert torch.equal(truth, llama.generate(ids, max_new_tokens=20, do_sample=False))
    if "copies" not in rule:
        assert stats.accepted == stats.offered
    for place in (3, 6, 9):
        eos = int(truth[0, place])
        options = {"max_new_tokens": 17, "eos_token_id": eos}
        expected = llama.generate(ids, do_sample=False, **options)
        assert torch.equal(decode(llama, ids, drafter=drafter, **options, **rule)[0], expected)
        output, _ = decode(llama, ids, drafter=drafter, max_new_tokens=place, **rule)
        assert torch.equal(output, truth[:, : 3 + place])


@pytest.mark.parametrize("rule", [{}, {"stop": "fixed", "gamma": 9}], ids=str)
@pytest.mark.parametrize("several", [False, True])
def test_nothing_is_drafted_after_an_end_of_sequence(llama, rule, several):
    """All layers copied: the end is drafted, and a pass of the draft model after it is lost."""
    drafter = constant_head(make_drafter(llama, layers=[0, 1, 2]), 8.0)
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=20, do_sample=False)
    eos = int(truth[0, 9])
    stats = common.Stats(trace=[])
    passes = []
    drafter.register_forward_hook(lambda *_: passes.append(1))
    options = {"eos_token_id": [47, eos] if several else eos, "max_new_tokens": 30, "stats": stats}
    output, _ = decode(llama, ids, drafter=drafter, **options, **rule)
    length = truth[0, 3:].tolist().index(eos) + 1
    assert torch.equal(output, truth[:, : 3 + length])
    assert len(passes) == stats.drafted == sum(stats.accepted) == length
    drafted = [record["draft"].tokens.tolist() for record in stats.trace]
    assert not any(eos in tokens[:-1] for tokens in drafted) and drafted[-1][-1] == eos
    assert stats.trace[-1]["stopped"] == "end of sequence"


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_logits_processors_see_each_prefix(llama, trained, options):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False, **options)
    assert torch.equal(decode(llama, ids, drafter=trained, **options)[0], truth)
    assert torch.equal(decode(llama, ids, drafter=trained, copies=6, **options)[0], truth)


REPEATS = torch.tensor([[1, 2, 3, 2, 1, 2, 3]])  # 2 followed the last three tokens before


@pytest.fixture(scope="module")
def tiny():
    """Five tokens: joint distributions can be enumerated, and 120 answers show a mistake."""
    return make_llama(vocab=5, layers=1, seed=3)


def unlike(target, noise=0.3):
    """A draft model of one layer that is the target's, disturbed."""
    drafter = make_drafter(target, layers=[0])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.body.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return drafter


def sampled(target, prompt, rounds=120, **options):
    """Counts of the three tokens that follow `prompt` at temperature 1."""
    counts = collections.Counter()
    most = prompt.shape[1] + 3
    config = transformers.GenerationConfig(max_length=most, do_sample=True)
    criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(most)])
    torch.manual_seed(0)
    for _ in range(rounds):
        output = specdecpp.generate(target, prompt, None, criteria, config, **options)
        counts[tuple(output[0, prompt.shape[1] :].tolist())] += 1
    return counts


@pytest.mark.parametrize(
    "rule",
    [{"threshold": 0.55}, slow({"stop": "confidence", "confidence": 0.5}), {"copies": 6}],
    ids=str,
)
def test_sampled_output_follows_the_target(tiny, rule):
    """What a rule sees of the draft, and what is copied, must not show in what comes out."""
    stats = common.Stats()
    counts = sampled(tiny, REPEATS, drafter=unlike(tiny), stats=stats, **rule)
    assert chi_square_p_value(counts, enumerate_joint(tiny, REPEATS, 3)) > 0.001
    assert 0 < sum(stats.accepted) < stats.drafted
    assert max(copied for copied, _ in stats.copies) == (2 if "copies" in rule else 0)


def withhold_unlikely_drafts(monkeypatch):
    """Not to submit a token because of what it is: the mistake that stop rules invite."""

    def picky(steps, drafter, config, most, chances):
        for step in itertools.islice(steps, most):
            if step[0] != step[1].argmax():
                return
            yield step

    monkeypatch.setattr(specdecpp, "until_stop", picky)


def accept_every_draft(monkeypatch):
    monkeypatch.setattr(common.torch, "rand", lambda *_, **__: torch.zeros(()))


def accept_every_copy(monkeypatch):
    """A copy is no sample: it must not be tried as if it had been drawn with some probability."""
    merge = common.Lookup.merge

    def claims(self, draft, input_ids, room):
        nothing = common.Draft(draft.tokens[:0], draft.parents[:0], torch.zeros(0, 5))
        copies = merge(self, nothing, input_ids, room)
        copies.probs = torch.zeros(copies.copied, 5).scatter(1, copies.tokens[:, None], 1e-6)
        return copies

    monkeypatch.setattr(common.Lookup, "merge", claims)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, noise, copies",
    [(withhold_unlikely_drafts, 0.0, 0), (accept_every_draft, 0.3, 0), (accept_every_copy, 0.3, 6)],
)
def test_negative_control(tiny, monkeypatch, mistake, noise, copies):
    """As many answers as above are enough to notice each mistake."""
    mistake(monkeypatch)
    drafter = unlike(tiny, noise)
    counts = sampled(tiny, REPEATS, drafter=drafter, threshold=0.9, copies=copies)
    assert chi_square_p_value(counts, enumerate_joint(tiny, REPEATS, 3)) < 1e-5


def test_drafting_with_a_cache_equals_drafting_from_scratch(llama, trained, monkeypatch):
    drafts, real = [], common.verify

    def verify(target, input_ids, draft, *rest):
        drafts.append((input_ids, draft.tokens))
        return real(target, input_ids, draft, *rest)

    monkeypatch.setattr(common, "verify", verify)
    decode(llama, torch.tensor([[9, 8, 7, 6]]), drafter=trained, stop="fixed")
    for ids, tokens in drafts[1:]:
        steps = specdecpp.propose(trained, llama, ids, None, specdecpp.new_memory(trained, llama))
        assert [int(next(steps)[0]) for _ in tokens] == tokens.tolist()


def test_tokens_come_as_often_as_their_q_says(llama):
    drafter, ids, draws = make_drafter(llama, draft_vocab=7), torch.tensor([[9, 8, 7]]), 400
    counts = collections.Counter()
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(draws):
            memory = specdecpp.new_memory(drafter, llama)
            token, q_draft, _ = next(
                specdecpp.propose(drafter, llama, ids, None, memory, do_sample=True)
            )
            counts[(int(token),)] += 1
    expected = {(token,): float(q_draft[token]) for token in drafter.draft_ids.tolist()}
    assert max(expected.values()) > 0.3  # a flat one would be its own square root
    assert chi_square_p_value(counts, expected) > 1e-3


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("caller", [specdecpp, cape], ids=["alone", "cape"])
def test_processors_that_forbid_all_draft_tokens_end_the_draft(
    llama, caller, do_sample, normalised
):
    """A drafter of nine tokens, all of them forbidden: nothing is drafted, and nothing breaks."""
    drafter, ids = make_drafter(llama, draft_vocab=9), torch.tensor([[9, 8, 7]])
    forbidden, stats = drafter.draft_ids.tolist(), common.Stats()
    options = {"drafter": drafter}
    if caller is cape:
        options = {"base": specdecpp, "base_drafter": drafter}
    options |= {"suppress_tokens": forbidden, "renormalize_logits": normalised}
    options |= {"do_sample": do_sample, "stats": stats, "max_new_tokens": 20}
    output = llama.generate(ids, custom_generate=caller.generate, **options)
    assert output.shape == (1, 23) and stats.drafted == 0
    assert not set(output[0, 3:].tolist()) & set(forbidden)


# --------------------------------------------------------------------------------------- stop rules


class Head:
    """Stands for a drafter whose head says chances[i] of token i; notes what it was shown."""

    def __init__(self, chances):
        self.chances, self.asked = chances, []

    def accept_logit(self, hidden, of_q):
        self.asked.append((int(hidden[0, 0]), float(of_q)))
        return torch.logit(torch.tensor([self.chances[int(hidden[0, 0])]]))  # (1,)


def run_rule(rule, head=None, dists=None, most=20, noted=None):
    """How many tokens a round of `most` submits; None without a round. Token i is i."""
    flat = torch.full((30,), 1 / 30)
    steps = []
    for i in range(30):
        before = torch.tensor([float(i - 1)])  # e_(i-1), the hidden state of the token before
        steps.append((torch.tensor([i]), flat if dists is None else dists[i], before))
    noted = [] if noted is None else noted
    drafted = specdecpp.until_stop(iter(steps), head, specdecpp.Config(**rule), most, noted)
    return None if drafted is None else len(list(drafted))


@pytest.mark.parametrize(
    "h, expected", [(0.05, 2), (0.101, 3), (0.2, 3), (0.3, 4), (0.6, 4), (0.65, 5)]
)
def test_algorithm_2_by_hand(h, expected):
    """1 - 0.9 = 0.1, 1 - 0.72 = 0.28, 1 - 0.36 = 0.64: each known once the next is drafted."""
    chances = [0.9, 0.8, 0.5, 0.9, 0.9]
    got = run_rule({"threshold": h}, Head(chances), most=5)
    assert got == expected, (
        f"h = {h} and a head that says {chances}: expected {expected} tokens, got {got}"
    )


def test_the_size_of_a_round():
    assert run_rule({"threshold": 0.99}, Head([0.0] * 30)) == 2
    for most in (20, 7, 1, 0):
        assert run_rule({}, Head([1.0] * 30), most=most) == most


def test_the_chance_that_all_are_accepted_is_noted():
    noted = []
    assert run_rule({"threshold": 0.6}, Head([0.9, 0.8, 0.5]), noted=noted) == 4
    assert noted == pytest.approx([0.9, 0.72, 0.36])


def test_what_the_head_is_shown_by_hand():
    """Token i comes with the hidden state of token i - 1; q must be that of token i - 1, too."""
    dists = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)).softmax(-1)
    head = Head([1.0] * 30)
    run_rule({}, head, dists=dists, most=5)
    assert head.asked == [(i, pytest.approx(float(dists[i, i]))) for i in range(4)]


@pytest.mark.parametrize("w_rej", [1.0, 6.0])
def test_h_on_the_scale_of_the_true_chance_by_hand(w_rej):
    """A head trained with w_rej says P / (P + w_rej (1 - P)) where the true chance is P."""
    true = [0.9, 0.9, 0.9, 0.9, 0.9]
    biased = [p / (p + w_rej * (1 - p)) for p in true]
    for h in (0.05, 0.15, 0.25, 0.3):
        expected = run_rule({"threshold": h}, Head(true), most=5)
        rule = {"threshold": h, "true_probability": True, "w_rej": w_rej}
        assert run_rule(rule, Head(biased), most=5) == expected
    assert 1 - 0.72 / (0.72 + 6 * 0.28) == pytest.approx(0.7)  # h = 0.7 is a true 0.28


def test_the_rivals_by_hand():
    sure = torch.tensor([0.97, 0.01, 0.01, 0.01])  # entropy 0.17
    unsure = torch.full((4,), 0.25)  # entropy 1.39
    dists = [sure, sure, unsure, *[sure] * 27]
    expected = {
        ("fixed", 0.0): 6,  # never before its most
        ("confidence", 0.4): 3,
        ("confidence", 0.2): 6,
        ("entropy", 1.0): 3,
        ("entropy", 1.5): 6,
    }
    for (stop, value), length in expected.items():
        rule = {"stop": stop} if stop == "fixed" else {"stop": stop, stop: value}
        head = Head([0.0] * 30)
        wide = [F.pad(dist, (0, 26)) for dist in dists]
        assert run_rule(rule, head, dists=wide, most=6) == length, rule
        assert not head.asked


def test_the_largest_size_of_a_round(llama, trained):
    sure, ids = constant_head(trained, 9.0), torch.tensor([[9, 8, 7]])
    for rule, most in (({"max_draft": 7}, 7), ({"stop": "fixed", "gamma": 3, "max_draft": 2}, 3)):
        _, stats = decode(llama, ids, drafter=sure, **rule)
        assert stats.offered[0] == max(stats.offered) == most


def test_what_a_round_notes(llama, trained):
    """For the page that replays decoding: the chance after each token, and why it stopped."""
    stats = common.Stats(trace=[])
    decode(llama, torch.tensor([[9, 8, 7]]), drafter=trained, stats=stats, max_draft=6)
    seen = set()
    for record in stats.trace:
        drafted, chances = len(record["draft"].tokens), record["chances"]
        assert len(chances) == max(0, drafted - 1) and chances == sorted(chances, reverse=True)
        if record["stopped"] == "head":
            assert 1 - chances[-1] > 0.7 and all(1 - chance <= 0.7 for chance in chances[:-1])
        seen.add(record["stopped"])
    assert seen == {"head", "limit"}
    stats = common.Stats(trace=[])
    decode(llama, torch.tensor([[9, 8, 7]]), drafter=trained, stats=stats, stop="fixed", gamma=3)
    for record in stats.trace:  # the last rounds have room for fewer
        assert record["stopped"] == ("fixed" if len(record["draft"].tokens) == 3 else "limit")
    assert {record["stopped"] for record in stats.trace} == {"fixed", "limit"}


def test_the_head_decides(llama, trained):
    ids = torch.tensor([[9, 8, 7]])
    for logit, length in ((9.0, 20), (-9.0, 2)):
        _, stats = decode(llama, ids, drafter=constant_head(trained, logit))
        assert max(stats.offered) == length and stats.offered[0] == length


# -------------------------------------------------------------------------------- labels and losses


def processed(logits, temperature, top_p):
    """Temperature and top-p by their definition: the fewest likeliest tokens that hold top_p."""
    probs, kept = (logits / temperature).softmax(-1), torch.zeros(len(logits))
    for token in probs.argsort(descending=True).tolist():
        if kept.sum() < top_p:
            kept[token] = probs[token]
    return kept / kept.sum()


def brute_force_labels(drafter, target, batch):
    """(tokens read, [(row, place, q, label)]) from forwards of single prefixes, same randomness."""
    config, mixed, labels = drafter.config, batch.input_ids.clone(), []
    full, vocabulary = drafter.causal_lm(target), drafter.draft_ids
    for row, length in enumerate((batch.loss_mask.cumsum(1).argmax(1) + 1).tolist()):
        generator = torch.Generator().manual_seed(int(batch.seed[row]))
        noise = torch.rand(batch.input_ids.shape[1], 2, generator=generator)
        for place in range(1, length):
            if not batch.loss_mask[row, place] or noise[place, 1] < config.keep:
                continue
            prefix = batch.input_ids[row : row + 1, :place]
            q_logits = full(prefix).logits[0, -1, vocabulary].float()
            p_logits = target(prefix).logits[0, -1].float()
            if config.temperature == 0:
                index, q = int(q_logits.argmax()), q_logits.softmax(-1)
                token = int(vocabulary[index])
                label = float(token == int(p_logits.argmax()))
            else:
                q = processed(q_logits, config.temperature, config.top_p)
                p = processed(p_logits, config.temperature, config.top_p)
                index = int((q.cumsum(-1) > noise[place - 1, 0]).nonzero()[0])
                token = int(vocabulary[index])
                label = min(1.0, float(p[token] / q[index]))
            if place < batch.input_ids.shape[1] - 1:
                mixed[row, place] = token
                labels.append((row, place, float(q[index]), label))
    return mixed, labels


@pytest.mark.parametrize(
    "temperature, top_p, keep", [(0.0, 1.0, 0.0), (1.0, 1.0, 0.5), (0.7, 1.0, 0.0), (0.6, 0.7, 0.0)]
)
def test_labels_against_brute_force(llama, temperature, top_p, keep):
    """Draft, label and hidden state of each position, from forwards of one prefix at a time."""
    options = {"temperature": temperature, "top_p": top_p, "keep": keep, "draft_vocab": 40}
    drafter, batch = make_drafter(llama, **options), make_batch(llama)
    mixed, expected = brute_force_labels(drafter, llama, batch)
    states = drafter.causal_lm(llama).base_model(mixed)[0]
    wanted = {
        "hidden states": [states[row, place].tolist() for row, place, _, _ in expected],
        "q of the drafts": [q for _, _, q, _ in expected],
        "labels": [label for *_, label in expected],
    }
    got = specdecpp.labelled(drafter, llama, batch)
    for index, (name, values) in enumerate(wanted.items()):
        result = None if got is None else got[index].tolist()
        right = got is not None and torch.allclose(
            torch.tensor(result), torch.tensor(values), atol=1e-5
        )
        assert right, (
            f"{options}, tokens {batch.input_ids.tolist()}: expected {name} {values}, got {result}"
        )
    if keep == 0:
        assert len(expected) == 18 and len(set(wanted["labels"])) > 1


def test_the_targets_labels_have_top_p(llama):
    """A draft model that is the target is never refused: top-p is applied to both or to none."""
    batch = make_batch(llama, lengths=(30, 30))
    for top_p in (1.0, 0.3):
        options = {"temperature": 1.0, "top_p": top_p, "keep": 0.0, "layers": [0, 1, 2]}
        _, _, labels = specdecpp.labelled(make_drafter(llama, **options), llama, batch)
        assert labels.min() > 1 - 1e-4


def test_labels_are_drawn_anew_every_step_and_only_then(llama):
    drafter, batch = make_drafter(llama, temperature=1.0), make_batch(llama)
    one, same = (specdecpp.labelled(drafter, llama, batch)[2] for _ in range(2))
    other = specdecpp.labelled(drafter, llama, dataclasses.replace(batch, seed=batch.seed + 100))[2]
    assert torch.equal(one, same) and one.tolist() != other.tolist()


def test_the_mean_label_is_the_acceptance_rate(llama):
    """E min(1, p(Y)/q(Y)) = sum_x min(p, q), which alpha computes exactly."""
    drafter = make_drafter(llama, temperature=1.0, keep=0.0)
    batch = make_batch(llama, lengths=(60, 60))
    batch.loss_mask[:, -1] = False  # the last column has no label
    total, count = specdecpp.alpha(drafter, llama, batch)
    means = []
    for i in range(30):
        again = dataclasses.replace(batch, seed=batch.seed + 10 * i)
        means.append(float(specdecpp.labelled(drafter, llama, again)[2].mean()))
    assert sum(means) / len(means) == pytest.approx(float(total) / count, abs=0.02)


def test_top_p_leaves_out_the_tail():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    cut = specdecpp.distribution(probs.log(), 1.0, 0.8)
    torch.testing.assert_close(cut, torch.tensor([[0.625, 0.375, 0, 0]]))
    torch.testing.assert_close(specdecpp.distribution(probs.log(), 1.0, 1.0), probs)
    assert specdecpp.distribution(probs.log(), 0.0, 1.0).tolist() == [[1, 0, 0, 0]]


def test_weighted_bce_by_hand(llama, monkeypatch):
    drafter, batch = make_drafter(llama, w_rej=3.0), make_batch(llama)
    labels = torch.tensor([1.0, 0.0, 0.25])
    predicted = torch.tensor([0.9, 0.6, 0.5])
    monkeypatch.setattr(specdecpp, "labelled", lambda *_: (None, None, labels))
    monkeypatch.setattr(drafter, "accept_logit", lambda *_: torch.logit(predicted))
    terms = [-torch.tensor(x).log() for x in (0.9, 0.4, 0.5, 0.5)]
    weights = [1.0, 3.0, 0.25, 2.25]  # w_acc P, w_rej (1 - P)
    expected = sum(w * t for w, t in zip(weights, terms)) / sum(weights) * batch.loss_mask.sum()
    assert float(specdecpp.loss(drafter, llama, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_distillation_by_hand(llama):
    drafter, batch = make_drafter(llama, stage="draft", draft_vocab=30), make_batch(llama)
    model, expected = drafter.causal_lm(llama), 0.0
    for row, length in enumerate((9, 12, 7)):
        for place in range(3, length):
            ids = batch.input_ids[row : row + 1, :place]
            p_target = llama(ids).logits[0, -1, drafter.draft_ids].softmax(-1)
            q_draft = model(ids).logits[0, -1, drafter.draft_ids].softmax(-1)
            expected -= (p_target * q_draft.log()).sum().item()
    assert specdecpp.loss(drafter, llama, batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 300])
def test_labels_do_not_depend_on_how_they_are_cut_into_parts(llama, batch_size):
    """256 positions at a time: more than that give what each conversation gives by itself."""
    drafter = make_drafter(llama, temperature=1.0)
    batch = make_batch(llama, lengths=(batch_size // 2 + 20,) * 2)
    _, _, together = specdecpp.labelled(drafter, llama, batch)
    alone = []
    for row in (slice(0, 1), slice(1, 2)):
        parts = {name: getattr(batch, name)[row] for name in ("input_ids", "loss_mask")}
        parts |= {"hidden": batch.hidden[row], "seed": batch.seed[row]}
        alone.append(specdecpp.labelled(drafter, llama, dataclasses.replace(batch, **parts))[2])
    torch.testing.assert_close(together, torch.cat(alone))


def test_each_stage_trains_its_own_part_by_hand(llama):
    for stage, part in (("draft", "body"), ("head", "head")):
        drafter = make_drafter(llama, stage=stage)
        trained = [name for name, weight in drafter.named_parameters() if weight.requires_grad]
        assert {name.partition(".")[0] for name in trained} == {part}


def test_both_losses_go_down(both_stages):
    _, draft, head = both_stages
    assert sum(draft[-5:]) < 0.8 * sum(draft[:5]) and sum(head[-5:]) < 0.9 * sum(head[:5])


def held_out(llama):
    """Four answers of 39 tokens, as one batch."""
    ids = llama.generate(torch.arange(1, 5)[:, None], max_new_tokens=39, do_sample=False)
    return dataclasses.replace(
        make_batch(llama, lengths=(40,) * 4),
        input_ids=ids,
        loss_mask=(torch.arange(40) > 0).expand(4, -1),
        seed=torch.arange(4),
        hidden=common.target_features(llama, ids)[0],
    )


def test_a_trained_head_tells_accepted_from_refused(llama, trained):
    hidden, of_q, labels = specdecpp.labelled(trained, llama, held_out(llama))
    predicted = trained.accept_logit(hidden, of_q).sigmoid()
    assert predicted[labels == 1].mean() > predicted[labels == 0].mean() + 0.2


# ------------------------------------------------------------------- what the head sees (head_sees)


def test_a_head_that_sees_log_q_by_hand(llama, trained):
    """A direction times log q(Y_t) is added to e_t; nothing else is new."""
    drafter = make_drafter(llama, head_sees="confidence", head_depth=0)
    hidden, of_q = torch.randn(3, 32).double(), torch.tensor([1.0, 0.5, 0.01]).double()
    direction = torch.randn(32).double()
    with torch.no_grad():
        drafter.head.log_q.copy_(direction)
    seen = hidden + of_q.log()[:, None] * direction
    expected = seen @ drafter.head.out.weight[0] + drafter.head.out.bias
    torch.testing.assert_close(drafter.accept_logit(hidden, of_q), expected)
    assert drafter.accept_logit(hidden, 0 * of_q).isfinite().all()
    blind = trained.accept_logit(hidden, of_q)
    assert torch.equal(blind, trained.accept_logit(hidden, 0 * of_q))  # the paper's sees e_t only


def test_a_head_that_sees_log_q_begins_as_one_that_does_not(llama, trained):
    """So --stage head --head-sees confidence --init takes any checkpoint."""
    drafter = make_drafter(llama, head_sees="confidence")
    missing = drafter.load_state_dict(trained.state_dict(), strict=False).missing_keys
    hidden, of_q = torch.randn(3, 32).double(), torch.rand(3).double()
    assert missing == ["head.log_q"]
    same = trained.accept_logit(hidden, of_q)
    assert torch.equal(drafter.accept_logit(hidden, of_q), same)


def test_log_q_helps_where_the_hidden_state_cannot_tell(llama):
    """Labels that depend on q(Y_t) alone: only the head that sees it learns them."""
    drafters = {name: make_drafter(llama, head_sees=name) for name in ("hidden", "confidence")}
    generator, errors = torch.Generator().manual_seed(0), {}
    for name, drafter in drafters.items():
        optimizer = torch.optim.Adam(drafter.head.parameters(), lr=2e-2)
        for _ in range(100):
            hidden = torch.randn(256, 32, generator=generator)
            of_q = torch.rand(256, generator=generator)
            logit = drafter.accept_logit(hidden, of_q)
            error = F.binary_cross_entropy_with_logits(logit, (of_q > 0.5).to(logit.dtype))
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
        errors[name] = float(error.detach())
    assert errors["confidence"] < 0.3 < 0.6 < errors["hidden"]


@pytest.mark.parametrize(
    "rule", [slow({}), {"copies": 6}, slow({"true_probability": True})], ids=str
)
def test_decoding_with_a_head_that_sees_log_q(llama, rule):
    drafter, ids = make_drafter(llama, head_sees="confidence"), torch.tensor([[9, 8, 7]])
    losses = fit(drafter, llama, 12, 5e-3)
    output, stats = decode(llama, ids, drafter=drafter, max_new_tokens=24, **rule)
    assert torch.equal(output, llama.generate(ids, max_new_tokens=24, do_sample=False))
    assert losses[-1] < losses[0] and stats.drafted


def test_labels_and_decoding_show_the_head_the_same(llama):
    """On a text of its own drafts: e_t and q(Y_t) of `labelled` are those that until_stop hands
    over."""
    drafter = make_drafter(llama, head_sees="confidence", keep=0.0, layers=[0, 1, 2])
    ids = llama.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=9, do_sample=False)
    mask = (torch.arange(12) > 2)[None]
    hidden = common.target_features(llama, ids)[0]
    batch = common.Batch(ids, mask, hidden, {}, torch.tensor([1]), 0.0)
    states, of_q, labels = specdecpp.labelled(drafter, llama, batch)
    seen, real = [], drafter.accept_logit
    drafter.accept_logit = lambda *shown: seen.append(shown) or real(*shown)
    decode(llama, ids[:, :3], drafter=drafter, max_new_tokens=10, threshold=1.0)
    assert len(seen) == len(states) == 8 and labels.min() == 1
    for (state, q), expected_state, expected_q in zip(seen, states, of_q):
        torch.testing.assert_close(state[0], expected_state, atol=1e-5, rtol=1e-5)
        assert float(q) == pytest.approx(float(expected_q), rel=1e-4)


def test_a_checkpoint_without_the_new_fields_loads_unchanged(llama, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("head_sees", "true_probability", "copies"):
        del config[name]
    path.write_text(json.dumps(config))
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, llama)
    assert loaded.config == trained.config and loaded.config.head_sees == "hidden"


def test_alpha_of_the_target_itself_is_one(llama):
    drafter, batch = make_drafter(llama, layers=[0, 1, 2]), make_batch(llama)
    total, count = specdecpp.alpha(drafter, llama, batch)
    assert count == int(batch.loss_mask.sum()) and float(total) == pytest.approx(count, rel=1e-5)


# ------------------------------------------------------------- other drafters than one's own layers


def test_a_head_on_glide(llama):
    """Trained, then decoding."""
    base = {"base": glide, "base_drafter": make_glide(llama)}
    drafter = make_drafter(llama, base="glide", stage="draft")
    assert drafter.body is None and not drafter.distils
    batch = make_batch(llama, layers=base["base_drafter"].kv_layers)
    theirs = glide.alpha(base["base_drafter"], llama, batch)[0]
    assert specdecpp.alpha(drafter, llama, batch, **base)[0] == theirs
    losses = fit(drafter, llama, 20, 5e-3, layers=base["base_drafter"].kv_layers, **base)
    assert sum(losses[-5:]) < sum(losses[:5])
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    for copies in (0, 6):
        output, stats = decode(
            llama, ids, drafter=drafter, max_new_tokens=30, copies=copies, **base
        )
        assert torch.equal(output, truth) and stats.drafted
    with pytest.raises(ValueError, match="nothing to draft with"):
        decode(llama, ids, drafter=drafter)


def test_labels_on_glide_read_the_mixed_tokens_and_the_targets_true_cache(llama):
    base, batch = make_glide(llama), make_batch(llama, layers=[2])
    drafter = make_drafter(llama, base="glide", keep=0.3)
    hidden, _, labels = specdecpp.labelled(drafter, llama, batch, glide, base)
    seen = []
    hook = base.register_forward_pre_hook(lambda _module, args: seen.append(args))
    specdecpp.labelled(drafter, llama, batch, glide, base)
    hook.remove()
    assert len(seen) == 2 and len(hidden) == len(labels) == int(seen[1][4].sum())
    plain, mixed = (args[0] for args in seen)
    assert torch.equal(plain[~seen[1][4]], mixed[~seen[1][4]]) and not torch.equal(plain, mixed)
    for one, other in zip(seen[0][2], seen[1][2]):
        assert torch.equal(one[0], other[0])


@pytest.mark.slow
def test_any_causal_lm_drafts(llama, trained, monkeypatch):
    small, ids = make_llama(layers=1, seed=4), torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for model in (small, llama):
        for rule in ({"stop": "fixed"}, {"stop": "confidence"}):
            output, stats = decode(llama, ids, draft_model=model, **rule)
            assert torch.equal(output, truth)
    assert stats.accepted == stats.offered  # the target itself drafted last
    with pytest.raises(ValueError, match="no acceptance head"):
        decode(llama, ids, drafter=trained, draft_model=small)
    with pytest.raises(ValueError, match="20 tokens and the target 48"):
        decode(llama, ids, draft_model=make_llama(vocab=20), stop="fixed")

    monkeypatch.setattr(common, "load_target", lambda name, **_: (small, None))
    drafter = make_drafter(llama, draft_model="small", stage="draft")
    losses = fit(drafter, llama, 20, 5e-3)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert not any("embed" in name or "body" in name for name in drafter.state_dict())
    for given in ({}, {"draft_model": small}):
        assert torch.equal(decode(llama, ids, drafter=drafter, **given)[0], truth)
    wide = make_llama(layers=1, hidden_size=64)
    with pytest.raises(ValueError, match="no acceptance head"):  # one of hidden states of 32
        decode(llama, ids, drafter=drafter, draft_model=wide)
    with pytest.raises(ValueError, match="acceptance head only"):
        drafter.causal_lm(llama)


def test_labels_of_a_causal_lm_that_is_the_target_are_all_one(llama, monkeypatch):
    monkeypatch.setattr(common, "load_target", lambda name, **_: (llama, None))
    specdecpp.load_draft_model.cache_clear()
    drafter = make_drafter(llama, draft_model="itself", temperature=1.0)
    assert specdecpp.labelled(drafter, llama, make_batch(llama))[2].min() > 1 - 1e-4


@pytest.mark.parametrize("as_causal_lm", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_cape_expands_it(llama, trained, as_causal_lm, do_sample):
    ids, stats = torch.tensor([[9, 8, 7]]), common.Stats()
    drafter = trained.causal_lm(llama) if as_causal_lm else trained
    options = {"custom_generate": cape.generate, "base": specdecpp, "base_drafter": drafter}
    torch.manual_seed(0)
    output = llama.generate(ids, max_new_tokens=24, do_sample=do_sample, stats=stats, **options)
    assert output.shape[1] == 27 and stats.drafted > sum(stats.offered)
    if not do_sample:
        assert torch.equal(output, llama.generate(ids, max_new_tokens=24, do_sample=False))


def families():
    tiny = dict(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    yield transformers.Qwen3Config(**tiny)
    yield transformers.Gemma2Config(**tiny, sliding_window=100)
    yield transformers.Gemma3TextConfig(**tiny, sliding_window=100)
    yield transformers.GPT2Config(
        vocab_size=48,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    opt = {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}
    yield transformers.OPTConfig(**tiny, **opt)


@pytest.mark.parametrize("config", families(), ids=lambda config: config.model_type)
def test_other_families(config, tmp_path):
    """With every layer copied the draft model is the target; with some it still fits together."""
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    target.requires_grad_(False)
    ids = torch.randint(1, 48, (1, 5))
    truth = target.generate(ids, max_new_tokens=20, do_sample=False)
    whole, half = make_drafter(target, layers=[0, 1, 2, 3]), make_drafter(target, layers=[1, -1])
    torch.testing.assert_close(whole.causal_lm(target)(truth).logits, target(truth).logits)
    _, stats = decode(target, ids, drafter=whole, stop="fixed", max_new_tokens=20)
    assert stats.accepted == stats.offered
    half.save_pretrained(tmp_path)
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, target)
    assert torch.equal(decode(target, ids, drafter=loaded, max_new_tokens=20)[0], truth)


def test_copied_layers_keep_their_kind_of_attention():
    config = list(families())[1]  # Gemma 2: sliding, full, sliding, full
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    drafter = make_drafter(target, layers=[1, -1])
    assert drafter.config.model["layer_types"] == ["full_attention"] * 2


# ------------------------------------------------------------------------------------- architecture


def test_the_head_is_residual():
    head = specdecpp.AcceptanceHead(8, 3).double()
    x = torch.randn(5, 8).double()
    expected = x
    for block in head.blocks:
        inner = expected @ block.weight.T + block.bias
        expected = expected + inner * inner.sigmoid()
    torch.testing.assert_close(head(x), (expected @ head.out.weight.T + head.out.bias)[:, 0])
    assert len({id(block.weight) for block in head.blocks}) == 3
    assert len(list(specdecpp.AcceptanceHead(8, 0).parameters())) == 2  # D = 0 is a linear layer


def test_the_causal_lm_is_the_draft_model(llama, trained):
    ids, model = torch.randint(0, 48, (1, 9)), trained.causal_lm(llama)
    lm_head = common.draft_head(llama, trained.draft_ids)
    logits, _ = trained(llama.get_input_embeddings()(ids), slice(None), lm_head)
    torch.testing.assert_close(model(ids).logits[..., trained.draft_ids].float(), logits)
    assert model.lm_head is llama.lm_head and model.model.embed_tokens is llama.model.embed_tokens
    assert not any("embed" in name or "lm_head" in name for name in trained.state_dict())
    assert not any(parameter.is_meta for parameter in model.parameters())
    truth = llama.generate(ids, max_new_tokens=20, do_sample=False)
    assisted = llama.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=model)
    assert torch.equal(assisted, truth)


def test_layers_start_as_the_targets(llama):
    drafter = make_drafter(llama, layers=[2, -3])
    assert drafter.config.layers == [2, 0]
    for layer, number in zip(drafter.body.layers, (2, 0)):
        for name, weight in layer.named_parameters():
            assert torch.equal(weight, dict(llama.model.layers[number].named_parameters())[name])
    assert torch.equal(drafter.body.norm.weight, llama.model.norm.weight)
    for layers in ([3], [-4], []):
        with pytest.raises(ValueError, match="name some of the target's"):
            make_drafter(llama, layers=layers)


def test_draft_vocabulary_is_the_most_frequent_tokens(llama):
    counts = torch.zeros(48)
    counts[[40, 3, 17]] = torch.tensor([5.0, 9.0, 7.0])
    config = specdecpp.Config(target=common.target_shape(llama), layers=[0], draft_vocab=3)
    assert specdecpp.build(config, llama, counts).draft_ids.tolist() == [3, 17, 40]


def test_saved_and_loaded_drafts_are_the_same(llama, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, llama)
    assert loaded.config == trained.config
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_drafting_in_half_precision_runs(rule):
    target = make_llama().bfloat16()
    drafter = make_drafter(target).bfloat16()
    assert decode(target, torch.tensor([[4, 5, 6]]), drafter=drafter, **rule)[0].shape == (1, 43)


def test_packed_weights_change_nothing():
    target = make_llama().float()
    drafter, ids = make_drafter(target).float(), torch.tensor([[4, 5, 6]])
    truth, before = decode(target, ids, drafter=drafter)
    packed.pack(target)
    output, after = decode(target, ids, drafter=packed.pack(drafter))
    assert torch.equal(output, truth) and after.offered == before.offered


def test_mistakes_get_one_clear_line(llama):
    ids = torch.tensor([[4, 5, 6]])
    with pytest.raises(ValueError, match="no acceptance head"):
        decode(llama, ids, drafter=make_drafter(llama, stage="draft"))
    with pytest.raises(ValueError, match="unknown stop 'never'"):
        decode(llama, ids, drafter=make_drafter(llama), stop="never")
    with pytest.raises(ValueError, match="nothing to draft with"):
        decode(llama, ids, stop="fixed")
    with pytest.raises(ValueError, match="unknown stage"):
        make_drafter(llama, stage="both")
    with pytest.raises(ValueError, match="unknown head_sees"):
        make_drafter(llama, head_sees="all")


def test_every_variant_is_accepted(llama, trained):
    ids, length = torch.tensor([[9, 8, 7]]), {"max_new_tokens": 8}
    truth = llama.generate(ids, do_sample=False, **length)
    options = {option.name for option in cli.decode_fields(specdecpp)}
    for rule in specdecpp.VARIANTS.values():
        assert set(rule) <= options
        assert torch.equal(decode(llama, ids, drafter=trained, **length, **rule)[0], truth)


def test_variants_are_what_their_names_say():
    """The paper's grids: K tokens a round, or h as the most chance of a refusal."""
    for name, rule in specdecpp.VARIANTS.items():
        if name.startswith("K"):
            assert rule == {"stop": "fixed", "gamma": int(name[1:])}
        elif name.startswith("h"):
            assert rule == {"stop": "head", "threshold": float(name[1:])}


# ------------------------------------------------------------------------------------------- theory


def policies(agrees, place=0):
    """(N_target, N_discarded) of every way to choose the length of every round."""
    if place >= len(agrees):
        return {(0, 0)}
    outcomes = set()
    for length in range(len(agrees) - place):  # the bonus token is never drafted
        run = next((i for i in range(length) if not agrees[place + i]), length)
        outcomes |= {(1 + n, length - run + lost) for n, lost in policies(agrees, place + run + 1)}
    return outcomes


def test_the_oracle_against_all_stopping_policies():
    for agrees in itertools.product((False, True), repeat=7):
        outcomes = policies(agrees)
        best = min(n for n, _ in outcomes)
        got = specdecpp.oracle(list(agrees))
        assert got == best, f"agrees {list(agrees)}: expected {best} target forwards, got {got}"
        assert best == min(n for n, lost in outcomes if lost == 0)  # and nothing is discarded
        refused = [i for i, agree in enumerate(agrees) if not agree]
        assert best == len(refused) + 1 - (6 in refused)  # |S| + 1, but for the last token


def test_the_oracle_is_what_decoding_with_hindsight_does(llama, trained, monkeypatch):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    model = trained.causal_lm(llama)
    agrees = (model(truth).logits[0, 2:-1].argmax(-1) == truth[0, 3:]).tolist()

    def hindsight(steps, drafter, config, most, chances):
        for _ in range(most):
            token, q_draft, hidden = next(steps)
            place = len(committed[-1][0]) + len(taken)
            if int(token) != int(truth[0, place]):
                return
            taken.append(token)
            yield token, q_draft, hidden

    committed, taken, real = [ids], [], specdecpp.propose

    def propose(drafter, target, input_ids, *rest):
        committed.append(input_ids)
        taken.clear()
        return real(drafter, target, input_ids, *rest)

    monkeypatch.setattr(specdecpp, "until_stop", hindsight)
    monkeypatch.setattr(specdecpp, "propose", propose)
    output, stats = decode(llama, ids, drafter=trained)
    assert torch.equal(output, truth) and stats.accepted == stats.offered
    assert stats.target_forwards == specdecpp.oracle(agrees) < 40


def test_stop_threshold_by_hand():
    """At the threshold the certain waste R c1 equals what may be saved, (1 - R)(c2 + Delta)."""
    for c1, c2, delta in ((1.0, 4.0, 0.0), (0.0234, 0.112 - 0.0234, 0.05), (1.0, 0.0, 0.0)):
        chance = specdecpp.stop_threshold(c1, c2, delta)
        assert chance * c1 == pytest.approx((1 - chance) * (c2 + delta))
    assert specdecpp.stop_threshold(1, 4, 1) > specdecpp.stop_threshold(1, 4) == 0.8


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_no_best_fixed_length_drafts_beyond_the_threshold(rate, cost):
    """With independent acceptances the best K of all stops before Theorem 3.1 makes it stop."""

    def cost_per_token(k):
        accepted = sum(rate**i for i in range(1, k + 1))
        return ((k - accepted) * cost + 1 - cost) / (accepted + 1)  # Eq. 2.3 less the constant

    best = min(range(1, 100), key=cost_per_token)
    assert 1 - rate ** (best - 1) < specdecpp.stop_threshold(cost, 1 - cost)
