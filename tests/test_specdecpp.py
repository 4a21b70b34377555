"""specdecpp.py: lossless decoding under every stop rule, the label pipeline, the two losses, the
theory."""

import collections
import copy
import dataclasses
import itertools

import pytest
import torch
import transformers
from conftest import chi_square_p_value, enumerate_joint, make_llama

import bench
import cape
import common
import glide
import specdecpp
import train
from support import packed

RULES = [
    {},
    {"threshold": 0.2},
    {"stop": "fixed", "gamma": 4},
    {"stop": "confidence"},
    {"stop": "entropy"},
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
    return train.make_batch(
        list(range(len(lengths))), sequences, features, torch.arange(len(lengths)) + 7, 0.0, "cpu"
    )


def fit(drafter, target, steps, lr, **base):
    """Train on what the target says; returns the loss a token at each step."""
    drafter.train()
    ids = target.generate(torch.arange(1, 9)[:, None], max_new_tokens=60, do_sample=False)
    sequences = [(row, torch.arange(len(row)) > 0) for row in ids]
    features = train.Features(target, sequences, [], None)
    weights, losses = [p for p in drafter.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(weights, lr=lr)
    for step in range(steps):
        batch = train.make_batch(
            list(range(8)), sequences, features, torch.arange(8) + 8 * step, 0.0, "cpu"
        )
        total = specdecpp.loss(drafter, target, batch, **base) / batch.loss_mask.sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    drafter.eval()
    return losses


@pytest.fixture(scope="module")
def both_stages(llama):
    """(drafter, losses of the draft, losses of the head), trained a little in both stages."""
    first = make_drafter(llama, stage="draft")
    frozen = copy.deepcopy(first.head.state_dict())
    draft_losses = fit(first, llama, 60, 5e-3)
    assert all(
        torch.equal(weight, frozen[name]) for name, weight in first.head.state_dict().items()
    )
    second = specdecpp.Drafter(dataclasses.replace(first.config, stage="head")).double()
    second.load_state_dict(first.state_dict(), strict=False)  # as train.py --init does
    frozen = copy.deepcopy(second.body.state_dict())
    head_losses = fit(second, llama, 60, 5e-3)
    assert all(
        torch.equal(weight, frozen[name]) for name, weight in second.body.state_dict().items()
    )
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
@pytest.mark.parametrize("length", [1, 2, 13])
def test_greedy_output_is_the_targets(llama, trained, rule, length):
    ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for drafter in (trained, make_drafter(llama, layers=[1]), make_drafter(llama, draft_vocab=9)):
        output, stats = decode(llama, ids, drafter=drafter, **rule)
        assert torch.equal(output, truth)
        assert stats.emitted == 40 and sum(stats.accepted) + stats.target_forwards == 40


def test_rounds_are_of_different_lengths_and_some_are_accepted(llama, trained):
    _, stats = decode(llama, torch.tensor([[3]]), drafter=trained, max_new_tokens=100)
    assert len(set(stats.offered)) > 3 and 0 < sum(stats.accepted) < stats.drafted


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_stopping_inside_a_draft(llama, rule):
    """All layers copied: every draft is right, so that the end always falls inside one."""
    drafter, ids = (
        constant_head(make_drafter(llama, layers=[0, 1, 2]), 8.0),
        torch.tensor([[9, 8, 7]]),
    )
    truth, stats = decode(llama, ids, drafter=drafter, **rule)
    assert torch.equal(truth, llama.generate(ids, max_new_tokens=40, do_sample=False))
    assert stats.accepted == stats.offered
    for place in range(3, 12):
        eos = int(truth[0, place])
        expected = llama.generate(ids, max_new_tokens=37, do_sample=False, eos_token_id=eos)
        output, _ = decode(llama, ids, drafter=drafter, max_new_tokens=37, eos_token_id=eos, **rule)
        assert torch.equal(output, expected)
        assert torch.equal(
            decode(llama, ids, drafter=drafter, max_new_tokens=place, **rule)[0],
            truth[:, : 3 + place],
        )


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}], ids=str
)
def test_logits_processors_see_each_prefix(llama, trained, options):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False, **options)
    assert torch.equal(decode(llama, ids, drafter=trained, **options)[0], truth)


def sampled(target, prompt, rounds=500, **options):
    counts = collections.Counter()
    torch.manual_seed(0)
    for _ in range(rounds):
        output, _ = decode(target, prompt, do_sample=True, top_k=0, max_new_tokens=3, **options)
        counts[tuple(output[0, prompt.shape[1] :].tolist())] += 1
    return counts


@pytest.mark.parametrize(
    "rule", [{"threshold": 0.55}, {"stop": "confidence", "confidence": 0.5}], ids=str
)
def test_sampled_output_follows_the_target(small_llama, rule):
    """A rule that looks at what was drafted must not show in what comes out."""
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    counts = sampled(small_llama, prompt, drafter=drafter, **rule)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) > 0.001


def test_negative_control_withholding_a_draft_is_noticed(small_llama, monkeypatch):
    """Not submitting a token because of what it is would be the mistake that stop rules invite."""
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])

    def picky(steps, drafter, config, room):
        for step in itertools.islice(steps, room):
            if step[0] == step[1].argmax():
                return
            yield step

    monkeypatch.setattr(specdecpp, "until_stop", picky)
    counts = sampled(small_llama, prompt, drafter=drafter)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) < 1e-5


def test_negative_control_accepting_every_draft_is_noticed(small_llama, monkeypatch):
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    monkeypatch.setattr(
        common.torch, "rand", lambda *_, **__: torch.zeros(())
    )  # the acceptance test always passes
    counts = sampled(small_llama, prompt, drafter=drafter, threshold=0.9)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) < 1e-6


def test_drafting_with_a_cache_equals_drafting_from_scratch(llama, trained, monkeypatch):
    drafts, real = [], common.verify
    monkeypatch.setattr(
        common, "verify", lambda *a, **k: drafts.append((a[1], a[2].tokens)) or real(*a, **k)
    )
    decode(llama, torch.tensor([[9, 8, 7, 6]]), drafter=trained, stop="fixed")
    for ids, tokens in drafts[1:]:
        steps = specdecpp.propose(trained, llama, ids, None, specdecpp.new_memory(trained, llama))
        assert [int(next(steps)[0]) for _ in tokens] == tokens.tolist()


# --------------------------------------------------------------------------------------- stop rules


def run_rule(probs, rule, room=100, logits=None):
    """Length of the round when the head predicts probs[i] for token i + 1."""
    hidden = [torch.zeros(1), *torch.tensor([probs]).T]  # e_(i-1) comes with token i
    flat = torch.full((4,), 0.25)
    steps = [
        (torch.tensor([0]), flat if logits is None else logits[i], hidden[i])
        for i in range(len(probs))
    ]
    head = lambda e: torch.logit(e)[0, 0]
    return len(list(specdecpp.until_stop(iter(steps), head, specdecpp.Config(**rule), room)))


def test_algorithm_2_by_hand():
    """1 - 0.9 = 0.1, 1 - 0.72 = 0.28, 1 - 0.36 = 0.64: each is known only once the next token is
    drafted."""
    probs = [0.9, 0.8, 0.5, 0.9, 0.9]
    assert [run_rule(probs, {"threshold": h}) for h in (0.05, 0.1 + 1e-6, 0.2, 0.3, 0.6, 0.65)] == [
        2,
        3,
        3,
        4,
        4,
        5,
    ]
    assert run_rule([0.0] * 5, {"threshold": 0.99}) == 2  # never fewer than two
    assert (
        run_rule([1.0] * 30, {}) == 20 and run_rule([1.0] * 30, {"max_draft": 7}) == 7
    )  # never more than 20
    assert run_rule([1.0] * 30, {}, room=3) == 3 and run_rule([1.0] * 30, {}, room=0) == 0


def test_the_rivals_by_hand():
    sure, unsure = (
        torch.tensor([0.97, 0.01, 0.01, 0.01]),
        torch.full((4,), 0.25),
    )  # entropies 0.17 and 1.39
    dists = [sure, sure, unsure, sure]
    assert run_rule([0.0] * 4, {"stop": "fixed", "gamma": 3}, logits=dists) == 3
    assert run_rule([0.0] * 4, {"stop": "confidence"}, logits=dists) == 3
    assert run_rule([0.0] * 4, {"stop": "confidence", "confidence": 0.2}, logits=dists) == 4
    assert run_rule([0.0] * 4, {"stop": "entropy", "entropy": 1.0}, logits=dists) == 3
    assert run_rule([0.0] * 4, {"stop": "entropy"}, logits=dists) == 4


def test_the_head_decides(llama, trained):
    ids = torch.tensor([[9, 8, 7]])
    for logit, length in ((9.0, 20), (-9.0, 2)):
        _, stats = decode(llama, ids, drafter=constant_head(trained, logit))
        assert max(stats.offered) == length and stats.offered[0] == length


# -------------------------------------------------------------------------------- labels and losses


def brute_force_labels(drafter, target, batch):
    """(tokens read, [(row, place, label)]) from forwards of single prefixes with the same random
    numbers."""
    config, mixed, labels = drafter.config, batch.input_ids.clone(), []
    full, vocabulary = drafter.causal_lm(target), drafter.draft_ids
    for row, length in enumerate(batch.lengths.tolist()):
        noise = torch.rand(
            batch.input_ids.shape[1],
            2,
            generator=torch.Generator().manual_seed(int(batch.seed[row])),
        )
        for place in range(1, length):
            if not batch.loss_mask[row, place] or noise[place, 1] < config.keep:
                continue
            prefix = batch.input_ids[row : row + 1, :place]
            q, p = (
                full(prefix).logits[0, -1, vocabulary].float(),
                target(prefix).logits[0, -1].float(),
            )
            if config.temperature == 0:
                token = int(vocabulary[q.argmax()])
                label = float(token == int(p.argmax()))
            else:
                q, p = (q / config.temperature).softmax(-1), (p / config.temperature).softmax(-1)
                index = int((q.cumsum(-1) > noise[place - 1, 0]).nonzero()[0])
                token = int(vocabulary[index])
                label = min(1.0, float(p[token] / q[index]))
            if place < batch.input_ids.shape[1] - 1:
                mixed[row, place] = token
                labels.append((row, place, label))
    return mixed, labels


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_labels_against_brute_force(llama, temperature, keep):
    drafter, batch = (
        make_drafter(llama, temperature=temperature, keep=keep, draft_vocab=40),
        make_batch(llama),
    )
    hidden, accepted = specdecpp.labelled(drafter, llama, batch)
    mixed, expected = brute_force_labels(drafter, llama, batch)
    assert accepted.tolist() == pytest.approx([label for _, _, label in expected], abs=1e-5)
    states = drafter.causal_lm(llama).base_model(mixed)[0]
    for got, (row, place, _) in zip(hidden, expected):
        torch.testing.assert_close(got, states[row, place], atol=1e-5, rtol=1e-5)
    assert len(expected) == (17 + 1 if keep == 0.0 else len(expected)) and 0 < len(expected) <= 18
    assert len(set(accepted.tolist())) > 1


def test_labels_are_drawn_anew_every_step_and_only_then(llama):
    drafter, batch = make_drafter(llama, temperature=1.0), make_batch(llama)
    one, same = (specdecpp.labelled(drafter, llama, batch)[1] for _ in range(2))
    other = specdecpp.labelled(drafter, llama, dataclasses.replace(batch, seed=batch.seed + 100))[1]
    assert torch.equal(one, same) and one.tolist() != other.tolist()


def test_the_mean_label_is_the_acceptance_rate(llama):
    """E min(1, p(Y)/q(Y)) = sum_x min(p, q), which alpha computes exactly."""
    drafter, batch = (
        make_drafter(llama, temperature=1.0, keep=0.0),
        make_batch(llama, lengths=(30, 30)),
    )
    batch.loss_mask[:, -1] = False  # the last column has no label
    total, count = specdecpp.alpha(drafter, llama, batch)
    means = [
        float(
            specdecpp.labelled(
                drafter, llama, dataclasses.replace(batch, seed=batch.seed + 10 * i)
            )[1].mean()
        )
        for i in range(60)
    ]
    assert sum(means) / 60 == pytest.approx(float(total) / count, abs=0.02)


def test_top_p_leaves_out_the_tail():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    torch.testing.assert_close(
        specdecpp.distribution(probs.log(), 1.0, 0.8), torch.tensor([[0.625, 0.375, 0, 0]])
    )
    torch.testing.assert_close(specdecpp.distribution(probs.log(), 1.0, 1.0), probs)
    assert specdecpp.distribution(probs.log(), 0.0, 1.0).tolist() == [[1, 0, 0, 0]]


def test_weighted_bce_by_hand(llama, monkeypatch):
    drafter, batch = make_drafter(llama, w_rej=3.0), make_batch(llama)
    hidden, labels, predicted = (
        torch.randn(3, 32).double(),
        torch.tensor([1.0, 0.0, 0.25]),
        (0.9, 0.6, 0.5),
    )
    monkeypatch.setattr(specdecpp, "labelled", lambda *_: (hidden, labels))
    monkeypatch.setattr(drafter, "forward", lambda _: torch.logit(torch.tensor(predicted)))
    terms = [-torch.tensor(x).log() for x in (0.9, 0.4, 0.5, 0.5)]
    weights = [1.0, 3.0, 0.25, 2.25]  # w_acc P, w_rej (1 - P)
    expected = (
        sum(w * t for w, t in zip(weights, terms)) / sum(weights) * int(batch.loss_mask.sum())
    )
    assert float(specdecpp.loss(drafter, llama, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_distillation_by_hand(llama):
    drafter, batch, expected = (
        make_drafter(llama, stage="draft", draft_vocab=30),
        make_batch(llama),
        0.0,
    )
    model = drafter.causal_lm(llama)
    for row, length in enumerate(batch.lengths.tolist()):
        for place in range(3, length):
            ids = batch.input_ids[row : row + 1, :place]
            teacher = llama(ids).logits[0, -1, drafter.draft_ids].softmax(-1)
            expected -= float(
                (teacher * model(ids).logits[0, -1, drafter.draft_ids].log_softmax(-1))
                .sum()
                .detach()
            )
    assert specdecpp.loss(drafter, llama, batch).item() == pytest.approx(expected, rel=1e-5)


def test_both_losses_go_down(both_stages):
    _, draft, head = both_stages
    assert sum(draft[-5:]) < 0.8 * sum(draft[:5]) and sum(head[-5:]) < 0.9 * sum(head[:5])


def test_a_trained_head_tells_accepted_from_refused(llama, trained):
    batch = make_batch(llama, lengths=(40, 40))
    ids = llama.generate(torch.arange(1, 5)[:, None], max_new_tokens=39, do_sample=False)
    batch = dataclasses.replace(
        batch,
        input_ids=ids,
        loss_mask=(torch.arange(40) > 0).expand(4, -1),
        seed=torch.arange(4),
        hidden=common.target_features(llama, ids)[0],
    )
    hidden, accepted = specdecpp.labelled(trained, llama, batch)
    predicted = trained(hidden).sigmoid()
    assert predicted[accepted == 1].mean() > predicted[accepted == 0].mean() + 0.2


def test_alpha_of_the_target_itself_is_one(llama):
    drafter, batch = make_drafter(llama, layers=[0, 1, 2]), make_batch(llama)
    total, count = specdecpp.alpha(drafter, llama, batch)
    assert count == int(batch.loss_mask.sum()) and float(total) == pytest.approx(count, rel=1e-5)


# ------------------------------------------------------------- other drafters than one's own layers


def test_a_head_on_glide(llama):
    """Trained with and without the target's K/V at hand, then decoding."""
    base = {"base": glide, "base_drafter": make_glide(llama)}
    drafter = make_drafter(llama, base="glide", stage="draft")
    assert drafter.body is None and not drafter.distils
    with_kv, without = (
        make_batch(llama, layers=layers) for layers in (base["base_drafter"].kv_layers, ())
    )
    one, other = (specdecpp.loss(drafter, llama, batch, **base) for batch in (with_kv, without))
    assert torch.equal(one, other)
    assert (
        specdecpp.alpha(drafter, llama, without, **base)[0]
        == glide.alpha(base["base_drafter"], llama, with_kv)[0]
    )
    losses = fit(drafter, llama, 30, 5e-3, **base)
    assert sum(losses[-5:]) < sum(losses[:5])
    ids = torch.tensor([[9, 8, 7]])
    output, stats = decode(llama, ids, drafter=drafter, **base)
    assert (
        torch.equal(output, llama.generate(ids, max_new_tokens=40, do_sample=False))
        and stats.drafted
    )
    with pytest.raises(ValueError, match="nothing to draft with"):
        decode(llama, ids, drafter=drafter)


def test_labels_on_glide_read_the_mixed_tokens_and_the_targets_true_cache(llama):
    base, batch = make_glide(llama), make_batch(llama, layers=[2])
    drafter = make_drafter(llama, base="glide", keep=0.3)
    hidden, accepted = specdecpp.labelled(drafter, llama, batch, glide, base)
    seen = []
    hook = base.register_forward_pre_hook(lambda _module, args: seen.append(args))
    specdecpp.labelled(drafter, llama, batch, glide, base)
    hook.remove()
    assert len(seen) == 2 and len(hidden) == len(accepted) == int(seen[1][4].sum())
    plain, mixed = (args[0] for args in seen)
    assert torch.equal(plain[~seen[1][4]], mixed[~seen[1][4]]) and not torch.equal(plain, mixed)
    for one, other in zip(seen[0][2], seen[1][2]):
        assert torch.equal(one[0], other[0])


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
    losses = fit(drafter, llama, 30, 5e-3)
    assert sum(losses[-5:]) < sum(losses[:5]) and not [
        n for n in drafter.state_dict() if "embed" in n or "body" in n
    ]
    for given in ({}, {"draft_model": small}):
        assert torch.equal(decode(llama, ids, drafter=drafter, **given)[0], truth)
    with pytest.raises(ValueError, match="acceptance head only"):
        drafter.causal_lm(llama)


def test_labels_of_a_causal_lm_that_is_the_target_are_all_one(llama, monkeypatch):
    monkeypatch.setattr(common, "load_target", lambda name, **_: (llama, None))
    specdecpp.load_draft_model.cache_clear()
    drafter = make_drafter(llama, draft_model="itself", temperature=1.0)
    assert specdecpp.labelled(drafter, llama, make_batch(llama))[1].min() > 1 - 1e-4


@pytest.mark.parametrize("as_causal_lm", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_cape_expands_it(llama, trained, as_causal_lm, do_sample):
    ids, stats = torch.tensor([[9, 8, 7]]), common.Stats()
    base = {
        "base": specdecpp,
        "base_drafter": trained.causal_lm(llama) if as_causal_lm else trained,
    }
    torch.manual_seed(0)
    base |= {"custom_generate": cape.generate, "stats": stats}
    output = llama.generate(ids, max_new_tokens=40, do_sample=do_sample, **base)
    assert output.shape[1] == 43 and stats.drafted > sum(stats.offered)
    if not do_sample:
        assert torch.equal(output, llama.generate(ids, max_new_tokens=40, do_sample=False))


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


@pytest.mark.parametrize("config", families(), ids=lambda config: config.model_type)
def test_other_families(config, tmp_path):
    """With every layer copied the draft model is the target; with some of them everything still
    fits together."""
    torch.manual_seed(0)
    target = (
        transformers.AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    )
    ids = torch.randint(1, 48, (1, 5))
    truth = target.generate(ids, max_new_tokens=20, do_sample=False)
    whole, half = make_drafter(target, layers=[0, 1, 2, 3]), make_drafter(target, layers=[1, -1])
    torch.testing.assert_close(whole.causal_lm(target)(truth).logits, target(truth).logits)
    _, stats = decode(target, ids, drafter=whole, stop="fixed", max_new_tokens=20)
    assert stats.accepted == stats.offered
    half.save_pretrained(tmp_path)
    loaded = common.load_drafter(specdecpp.Drafter, tmp_path, target)
    assert torch.equal(decode(target, ids, drafter=loaded, max_new_tokens=20)[0], truth)


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
    logits, hidden = trained(llama.get_input_embeddings()(ids), lm_head, (slice(None), slice(None)))
    torch.testing.assert_close(model(ids).logits[..., trained.draft_ids], logits)
    assert model.lm_head is llama.lm_head and model.model.embed_tokens is llama.model.embed_tokens
    assert not any("embed" in name or "lm_head" in name for name in trained.state_dict())
    assert not any(parameter.is_meta for parameter in model.parameters())
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(
        llama.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=model), truth
    )


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
    assert (
        loaded.config == trained.config
        and loaded.state_dict().keys() == trained.state_dict().keys()
    )
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


def test_every_variant_is_accepted(llama, trained):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=20, do_sample=False)
    options = {option.name for option in bench.decode_fields(specdecpp)}
    for rule in specdecpp.VARIANTS.values():
        assert set(rule) <= options
        assert torch.equal(decode(llama, ids, drafter=trained, max_new_tokens=20, **rule)[0], truth)


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
        outcomes, best = policies(agrees), specdecpp.oracle(list(agrees))
        assert min(n for n, _ in outcomes) == best == min(n for n, lost in outcomes if lost == 0)
        refused = [i for i, agree in enumerate(agrees) if not agree]
        assert best == len(refused) + 1 - (6 in refused)  # |S| + 1, but for the last token


def test_the_oracle_is_what_decoding_with_hindsight_does(llama, trained, monkeypatch):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    model = trained.causal_lm(llama)
    agrees = (model(truth).logits[0, 2:-1].argmax(-1) == truth[0, 3:]).tolist()

    def hindsight(steps, drafter, config, room):
        for _ in range(room):
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


def test_stop_threshold():
    """At the threshold the certain waste R c1 equals what may be saved, (1 - R)(c2 + Delta)."""
    for c1, c2, delta in ((1.0, 4.0, 0.0), (0.0234, 0.112 - 0.0234, 0.05), (1.0, 0.0, 0.0)):
        chance = specdecpp.stop_threshold(c1, c2, delta)
        assert chance * c1 == pytest.approx((1 - chance) * (c2 + delta))
    assert specdecpp.stop_threshold(1, 4, 1) > specdecpp.stop_threshold(1, 4) == 0.8


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_no_best_fixed_length_drafts_beyond_the_threshold(rate, cost):
    """With independent acceptances the best K, found by trying all, stops before Theorem 3.1 makes
    it stop."""

    def cost_per_token(k):
        accepted = sum(rate**i for i in range(1, k + 1))
        return ((k - accepted) * cost + 1 - cost) / (accepted + 1)  # Eq. 2.3 less the constant

    best = min(range(1, 100), key=cost_per_token)
    assert 1 - rate ** (best - 1) < specdecpp.stop_threshold(cost, 1 - cost)
