"""specdecpp.py: stop rules, labels, losses, what drafts, and the theory."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chat import refused
from tiny import (
    Table,
    check,
    family,
    make_batch,
    make_llama,
    opened,
    random_batch,
    teach,
    untrained,
)

import common
import specdecpp
from support.interop import export

PROMPT = torch.tensor([[9, 8, 7]])


make_drafter = partial(untrained, specdecpp, seed=5, head_depth=2)


def decode(target, ids, drafter, max_new_tokens=40, eos=None, **changes):
    """(greedy output, Stats, drafts) with the changed fields of Config."""
    options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos}
    decoding = opened(target, input_ids=ids, **options)
    stats = common.Stats()
    made = []
    for draft in specdecpp.drafts(decoding, drafter, **changes):
        stats(decoding, draft, decoding.verify(draft))
        made.append(draft)
    return decoding.ids, stats, made


def constant_head(drafter, logit):
    """The drafter with a head that always predicts the same."""
    changed = copy.deepcopy(drafter)
    torch.nn.init.zeros_(changed.head.out.weight)
    torch.nn.init.constant_(changed.head.out.bias, logit)
    return changed


# ----------------------------------------------------------------------------- drafting


@pytest.mark.parametrize("rule", [{}, {"stop": "fixed", "gamma": 9}], ids=str)
def test_nothing_is_drafted_after_an_end_of_sequence(llama, rule):
    """With all layers copied the end is drafted, and a pass after it would be lost."""
    drafter = constant_head(make_drafter(llama, layers=[0, 1, 2]), 8.0)
    eos = int(llama.generate(PROMPT, max_new_tokens=7, do_sample=False)[0, -1])
    passes = []
    drafter.norm.register_forward_hook(lambda *_: passes.append(1))
    _, stats, drafts = decode(llama, PROMPT, drafter, 30, [47, eos], **rule)
    assert len(passes) == stats.drafted == sum(stats.accepted)
    assert drafts[-1].tokens[-1] == eos


def picky(steps, head, threshold):
    """A rule that submits a token, or not, because of what it is."""
    return itertools.takewhile(lambda step: step[0] == step[1].argmax(), steps)


@pytest.mark.parametrize("rule", [specdecpp.until_stop, picky])
def test_a_rule_that_withholds_tokens_is_noticed_in_the_sampled_output(
    rule, monkeypatch
):
    """What the head sees must not show in the output; the second rule is a control."""
    monkeypatch.setattr(specdecpp, "until_stop", rule)
    table = Table()
    drafter = make_drafter(table.target, layers=[0])
    states = torch.randn(5, 32)  # of a draft model that is a table as well
    weight = 0.2 * torch.randn(32, 5)
    drafter.lm = SimpleNamespace(
        hidden=lambda ids, cache: states[ids],
        logits=lambda hidden: hidden @ weight,
        vocab_ids=torch.arange(5),
        num_layers=1,
        context=None,
    )
    drafter.head.float()
    drafts = partial(specdecpp.drafts, drafter=drafter, threshold=0.55)
    p_value = table.p_value(drafts, draws=1000, length=3)
    assert p_value < 1e-6 if rule is picky else p_value > 1e-3


# --------------------------------------------------------------------------- stop rules


def run_rule(h, chances, most=5):
    """(number of submitted tokens, each p^); token i comes with e_(i-1) = (i - 1,)."""

    def head(hidden):
        return torch.logit(torch.tensor(chances[int(hidden[0])]))

    q_draft = torch.full((30,), 1 / 30)
    steps = [
        (torch.tensor([i]), q_draft, torch.tensor([float(i - 1)])) for i in range(most)
    ]
    left = iter(steps)
    submitted = list(specdecpp.until_stop(left, head, h))
    drawn, count = most - len(list(left)), len(submitted)
    assert drawn == count, f"{drawn} tokens were drafted and {count} submitted"
    for (token, q_draft, _), step in zip(submitted, steps):
        assert token is step[0] and q_draft is step[1], "it yielded another token"
    return count, [chance for *_, chance in submitted]


@pytest.mark.parametrize(
    "h, expected",
    [(0.0, 2), (0.05, 2), (0.101, 3), (0.2, 3), (0.3, 4), (0.6, 4), (0.65, 5)],
)
def test_algorithm_2_by_hand(h, expected):
    """1 - p^ is 0.1, 0.28 and 0.64, each known once the next token is drafted."""
    said = [0.9, 0.8, 0.5, 0.9, 0.9]
    got, noted = run_rule(h, said)
    given = f"h = {h} and a head that says {said}"
    check(f"{given}: how many tokens", expected, got)
    chances = [1.0, 0.9, 0.72, 0.36, 0.324][:expected]
    check(f"{given}: p^", pytest.approx(chances), noted)


def test_a_round_holds_two_tokens_to_max_draft(llama):
    drafter = make_drafter(llama)
    for most in (20, 7, 1, 0):
        assert run_rule(0.7, [1.0] * 30, most)[0] == most
    for logit, length in ((9.0, 7), (-9.0, 2)):
        judged = constant_head(drafter, logit)
        _, stats, made = decode(llama, PROMPT, judged, max_draft=7)
        assert stats.offered[0] == max(stats.offered) == length
        for draft in made:  # each round notes its own p^, but not for the newest token
            assert len(draft.notes["chances"]) == max(0, len(draft.tokens) - 1)
    _, stats, _ = decode(llama, PROMPT, drafter, stop="fixed", gamma=3, max_draft=2)
    assert max(stats.offered) == 3


def test_the_head_reads_the_same_in_training_and_in_decoding(llama, monkeypatch):
    """On a text of its own drafts, `labelled` gives the head what `until_stop` does."""
    monkeypatch.setattr(specdecpp, "KEEP", 0.0)
    drafter = make_drafter(llama, layers=[0, 1, 2])
    ids = llama.generate(PROMPT, max_new_tokens=9, do_sample=False)
    batch = make_batch(llama, [(ids[0], torch.arange(12) > 2)])
    states, labels = specdecpp.labelled(drafter, llama, batch)
    seen = []
    drafter.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    decode(llama, PROMPT, drafter, max_new_tokens=10, threshold=1.0)
    assert (
        len(seen) == 8 and labels.min() == 1
    )  # of nine drafts, the newest is not judged
    torch.testing.assert_close(torch.stack(seen), states[:8], atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------- labels and losses


def brute_force_labels(drafter, target, batch, for_y, for_z):
    """(Z, [(row, place, label)]) from forwards of single prefixes.

    for_y (M, 1) and for_z (B, T): the random numbers.
    """
    config = drafter.config
    model = export.causal_lm(drafter, target)
    mixed = batch.input_ids.clone()
    labels = []
    for (row, place), number in zip(batch.loss_mask.nonzero().tolist(), for_y):
        if for_z[row, place] < specdecpp.KEEP:
            continue
        prefix = batch.input_ids[row : row + 1, :place]
        q_logits = model(prefix).logits[0, -1, drafter.vocab_ids].float()
        p_logits = target(prefix).logits[0, -1].float()
        if config.temperature == 0:
            token = int(drafter.vocab_ids[q_logits.argmax()])
            label = float(token == int(p_logits.argmax()))
        else:
            q_draft = (q_logits / config.temperature).softmax(-1)
            p_target = (p_logits / config.temperature).softmax(-1)
            index = int((q_draft.cumsum(-1) > number).nonzero()[0])
            token = int(drafter.vocab_ids[index])
            label = min(1.0, float(p_target[token] / q_draft[index]))
        mixed[row, place] = token
        labels.append((row, place, label))
    return mixed, labels


@pytest.mark.parametrize("temperature, keep", [(0.0, 0.0), (1.0, 0.5), (0.7, 0.0)])
def test_labels_against_brute_force(llama, temperature, keep, monkeypatch):
    """Label and hidden state of each judged token, one prefix at a time."""
    monkeypatch.setattr(specdecpp, "KEEP", keep)
    options = {"temperature": temperature, "draft_vocab": 40}
    drafter, batch = make_drafter(llama, **options), random_batch(llama)
    options["r"] = keep
    torch.manual_seed(1)
    for_y = torch.rand(19 if temperature else 0, 1, dtype=torch.double)
    for_y = for_y if temperature else [None] * 19
    for_z = torch.rand(batch.input_ids.shape)
    mixed, expected = brute_force_labels(drafter, llama, batch, for_y, for_z)
    assert len(expected) < 19 if keep else len(expected) == 19
    labels = [label for *_, label in expected]
    assert len(set(labels)) > 1
    states = export.causal_lm(drafter, llama).base_model(mixed)[0]
    states = torch.stack([states[row, place] for row, place, _ in expected])
    torch.manual_seed(1)
    got_states, got_labels = specdecpp.labelled(drafter, llama, batch)
    check("the number of labels", len(labels), len(got_labels))
    for (row, place, label), ours in zip(expected, got_labels.tolist()):
        tokens = batch.input_ids[row].tolist()
        given = f"{options}, tokens {tokens}, the draft at place {place}"
        check(given, pytest.approx(label, abs=1e-5), ours)
    said = "the head read other tokens than Z: are they of the target's vocabulary?"
    assert torch.allclose(got_states, states, atol=1e-5, rtol=1e-5), said


def test_the_mixture_by_hand():
    """Row 0 keeps its last token, as 0.1 < 0.5; 0.5 itself does not keep one."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]).bool()
    batch = common.Batch(ids, mask, None, {}, 0.0)
    uniform = torch.tensor([[0.0, 0.0, 0.9, 0.1], [0.9, 0.6, 0.5, 0.9]])
    mixed, judged = specdecpp.mix(batch, torch.tensor([11, 12, 13, 14]), uniform, 0.5)
    given = "X 1 2 3 4 and 5 6 7 0, Y 11 12 13 14, keep 0.5, uniform 0 0 .9 .1 and "
    given += ".9 .6 .5 .9"
    check(f"{given}: mixed", [[1, 2, 11, 4], [5, 13, 14, 0]], mixed.tolist())
    wanted = [[False, False, True, False], [False, True, True, False]]
    check(f"{given}: judged", wanted, judged.tolist())


def test_the_mean_label_is_the_acceptance_rate(llama, monkeypatch):
    """E min(1, p(Y) / q(Y)) = sum_x min(p, q), which `acceptance` computes exactly."""
    monkeypatch.setattr(specdecpp, "KEEP", 0.0)
    drafter = make_drafter(llama, temperature=1.0)
    batch = random_batch(llama, lengths=(60, 60))
    total, count = specdecpp.acceptance(drafter, llama, batch)
    torch.manual_seed(0)
    means = []
    for _ in range(30):
        means.append(float(specdecpp.labelled(drafter, llama, batch)[1].mean()))
    assert sum(means) / len(means) == pytest.approx(float(total) / count, abs=0.02)


@torch.no_grad()
def test_weighted_bce_by_hand(llama, monkeypatch):
    drafter, batch = make_drafter(llama, w_rej=3.0), random_batch(llama)
    said = torch.logit(torch.tensor([0.9, 0.6, 0.5]))
    labels = torch.tensor([1.0, 0.0, 0.25])
    monkeypatch.setattr(specdecpp, "labelled", lambda *_: (said, labels))
    monkeypatch.setattr(drafter.head, "forward", lambda hidden: hidden)
    terms = -torch.tensor([0.9, 0.4, 0.5, 0.5]).log()
    weights = torch.tensor([1.0, 3.0, 0.25, 2.25])  # w_acc P, w_rej (1 - P)
    total, weight = specdecpp.loss(drafter, llama, batch)
    assert float(total) == pytest.approx(float((weights * terms).sum()), rel=1e-5)
    assert float(weight) == pytest.approx(6.5)


@torch.no_grad()
def test_distillation_by_hand(llama):
    drafter = make_drafter(llama, stage="draft", draft_vocab=30)
    batch = random_batch(llama)
    model = export.causal_lm(drafter, llama)
    expected = 0.0
    for row, place in batch.loss_mask.nonzero().tolist():
        ids = batch.input_ids[row : row + 1, :place]
        p_target = llama(ids).logits[0, -1, drafter.vocab_ids].softmax(-1)
        q_draft = model(ids).logits[0, -1, drafter.vocab_ids].softmax(-1)
        expected -= float((p_target * q_draft.log()).sum())
    total, weight = specdecpp.loss(drafter, llama, batch)
    assert float(total) == pytest.approx(expected, rel=1e-5) and weight == 19


def test_each_stage_trains_its_own_part(llama):
    for stage, parts in (("draft", {"layers", "norm"}), ("head", {"head"})):
        drafter = make_drafter(llama, stage=stage)
        specdecpp.loss(drafter, llama, random_batch(llama))[0].backward()
        weights = drafter.named_parameters()
        learns = [name for name, x in weights if x.grad is not None and x.grad.any()]
        assert {name.partition(".")[0] for name in learns} == parts


# -------------------------------------------------------------------------- what drafts


def test_the_chosen_layers_of_the_target_are_copied():
    """With all layers copied the draft model is the target."""
    target = make_llama(layers=4, rms_norm_eps=1e-5)
    for place, norm in enumerate(p for p in target.parameters() if p.dim() == 1):
        norm.fill_(0.5 + place / 8)  # a random target's are all 1, as a new drafter's
    ids = torch.arange(1, 9)[None]
    model = specdecpp.model_of(make_drafter(target, layers=[0, 1, 2, 3]), target)
    logits = target(ids).logits.float()
    torch.testing.assert_close(model.logits(model.hidden(ids)), logits)
    drafter = make_drafter(target, layers=[1, -1, 0, 3, 2])  # -1 is 3
    assert drafter.config.layers == [1, 3, 0, 2]
    for place, copied in zip(drafter.config.layers, drafter.layers):
        weights = target.model.layers[place].state_dict()
        assert copied.state_dict().keys() == weights.keys()
        for name, weight in copied.state_dict().items():
            torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=1e-6)


def test_build_leaves_the_callers_config_as_it_was(llama):
    config = specdecpp.Config(layers=[0], draft_vocab=0)
    before = copy.deepcopy(config)
    drafter = specdecpp.build(config, llama, torch.arange(48))
    assert config == before and drafter.config.layers and drafter.config.target


# ----------------------------------------------------------------- a causal LM drafts


@pytest.fixture
def small(monkeypatch):
    """A causal LM that load_target finds under any name, and `small.loads` counts."""
    model = make_llama(layers=1, seed=4)
    model.config.name_or_path = "there/small"
    model.loads = 0

    def load(name, **_):
        model.loads += 1
        return model, None

    monkeypatch.setattr(common, "load_target", load)
    return model


def test_a_head_on_a_causal_lm_is_trained_and_decodes(llama, small, tmp_path):
    drafter = make_drafter(llama, draft_model="small")
    losses = teach(specdecpp, drafter, llama, 20, 5e-3)
    assert sum(losses[-5:]) < sum(losses[:5])
    truth = llama.generate(PROMPT, max_new_tokens=40, do_sample=False)
    output, stats, made = decode(llama, PROMPT, drafter)
    assert torch.equal(output, truth) and small.loads == 1
    assert made[0].notes["chances"], "the head judged nothing"
    with refused("only a head"):
        export.causal_lm(drafter, llama)
    # The LM is neither saved nor copied. A loaded drafter gets it by its name, once, or
    # from memory.
    assert all(name.startswith(("head.", "vocab_ids")) for name in drafter.state_dict())
    assert copy.deepcopy(drafter).lm.lm is small
    drafter.save_pretrained(tmp_path)
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, llama)
    for _ in range(2):
        assert torch.equal(decode(llama, PROMPT, loaded)[0], truth)
    assert small.loads == 2
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, llama)
    loaded.lm = specdecpp.CausalLM(small, llama)
    again = decode(llama, PROMPT, loaded)
    assert small.loads == 2
    assert again[1].offered == stats.offered and torch.equal(again[0], truth)


def test_a_causal_lm_drafts_without_a_head(llama):
    """The target itself is right about every token; a round has gamma and the bonus."""
    truth = llama.generate(PROMPT, max_new_tokens=40, do_sample=False)
    output, stats, _ = decode(llama, PROMPT, specdecpp.wrap(llama, llama), gamma=4)
    assert torch.equal(output, truth)
    assert stats.offered == stats.accepted == [4] * 8
    other = specdecpp.wrap(make_llama(layers=1, seed=4), llama)
    output, stats, _ = decode(llama, PROMPT, other)
    assert torch.equal(output, truth)
    assert sum(stats.accepted) < sum(stats.offered) and max(stats.offered) == 5
    # A drafter with a head as well is saved without layers of its own.
    named = specdecpp.wrap(make_llama(layers=1), llama, specdecpp.Config(stage="head"))
    assert named.config.draft_model and not hasattr(named, "layers")


EMBEDS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}
LMS = [
    ("Gemma2", {"final_logit_softcapping": 2.0}, torch.float64),
    ("Granite", {"logits_scaling": 4.0}, torch.float64),
    ("GPT2", {}, torch.bfloat16),
    ("Gemma4", EMBEDS, torch.float64),
    ("copied layers", {}, torch.float64),
]


@torch.no_grad()
@pytest.mark.parametrize("name, options, dtype", LMS)
def test_q_is_the_draft_models_own(name, options, dtype):
    """In every round, after rejections, when the cache holds tokens that were not
    committed, and after whole drafts, when two tokens are fed: what a forward of the
    whole LM says.
    """
    target = make_llama(vocab=40).to(dtype)
    if name == "copied layers":
        drafter = make_drafter(target)
        lm = export.causal_lm(drafter, target)
    else:
        lm = family(name, seed=2, **options).to(dtype)
        drafter = specdecpp.wrap(lm, target)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}
    decoding = common.start(target, input_ids=PROMPT, **options)
    rejected = set()
    for draft in specdecpp.drafts(decoding, drafter, stop="fixed", gamma=3):
        length = decoding.ids.shape[1]
        rejected.add(len(draft.tokens) - len(decoding.verify(draft)))
        if draft.probs is not None:
            before = decoding.ids[:, :length]
            ids = torch.cat([before, draft.tokens[None]], dim=1)
            q_draft = lm(ids).logits[0, length - 1 : -1].float().softmax(-1)
            close = 0.05 if dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(draft.probs, q_draft, atol=close)
    assert {0, 3} <= rejected


def test_mistakes_get_one_clear_line(llama):
    draft = make_drafter(llama, stage="draft")
    short = make_llama()
    short.config.max_position_embeddings = 16
    wrap = partial(specdecpp.wrap, target=llama)
    decode(llama, PROMPT, wrap(short), max_new_tokens=15)  # it reads 16 of 18 tokens
    # It is held to what common.check_target asks of a target.
    misread = family("Llama4", vocab_size=48, num_local_experts=4)
    mistakes = {
        "reads 16 tokens at most: set": lambda: decode(
            llama, PROMPT, wrap(short), max_new_tokens=16
        ),
        # A text of 12 in a window of 6, and the first five tokens of a draft.
        "reads 16 tokens at most: .*window": lambda: decode(
            llama, PROMPT, wrap(short), window=6, gamma=6
        ),
        "20 tokens, not 48: choose another": lambda: wrap(make_llama(vocab=20)),
        "a draft model Llama4ForCausalLM: .*attention": lambda: wrap(misread),
        "no acceptance head has been trained": lambda: decode(llama, PROMPT, draft),
        "use stop=fixed": lambda: decode(llama, PROMPT, wrap(short), stop="head"),
        "the drafter is a": lambda: decode(llama, PROMPT, llama),
    }
    for message, call in mistakes.items():
        with refused(message):
            call()


# ------------------------------------------------------------------------------- theory


def policies(agrees, place=0):
    """(N_target, N_discarded) of every way to choose the length of every round."""
    if place >= len(agrees):
        return {(0, 0)}
    outcomes = set()
    for length in range(len(agrees) - place):  # the bonus token is never drafted
        run = next((i for i in range(length) if not agrees[place + i]), length)
        outcomes |= {
            (1 + n, length - run + lost)
            for n, lost in policies(agrees, place + run + 1)
        }
    return outcomes


def test_the_oracle_against_all_stopping_policies():
    for agrees in itertools.product((False, True), repeat=7):
        outcomes = policies(agrees)
        best = min(n for n, _ in outcomes)
        got = specdecpp.oracle(list(agrees))
        assert got == best, (
            f"agrees {list(agrees)}: expected {best} target forwards, got {got}"
        )
        assert best == min(
            n for n, lost in outcomes if lost == 0
        )  # and nothing is discarded
        rejected = [i for i, agree in enumerate(agrees) if not agree]
        assert best == len(rejected) + 1 - (
            6 in rejected
        )  # |S| + 1, but for the last token


def test_throughput_and_stop_threshold_by_hand():
    # 100 tokens, 30 target forwards, 50 discarded: N_draft = 120.
    expected = 100 / (120 * 0.02 + 30 * 0.1)
    assert specdecpp.throughput(0.3, 0.5, 0.02, 0.1) == pytest.approx(expected)
    # At the threshold the wasted R c1 equals what may be saved, (1 - R)(c2 + Delta).
    rejection = specdecpp.stop_threshold(0.02, 0.09, 0.05)
    assert rejection * 0.02 == pytest.approx((1 - rejection) * (0.09 + 0.05))
    # The paper's times.
    assert specdecpp.stop_threshold(0.0234, 0.112 - 0.0234) == pytest.approx(
        0.79, abs=0.002
    )
