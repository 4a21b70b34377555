"""Random trees, logits, settings and acceptance patterns: what must hold for all of them
(hypothesis, fixed seeds)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_common import ancestors, assert_cache_is_fresh, family, start
from test_families import make_drafter
from test_house import METHODS
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import common

VOCAB = 13
SETTINGS = dict(
    max_examples=40, deadline=None, derandomize=True
)  # the same examples on every machine
TARGETS = {
    name: family(name, vocab_size=VOCAB).requires_grad_(False)
    for name in ("Llama", "Gemma3", "GPT2")
}


@st.composite
def trees(draw, vocab=VOCAB, most=9):
    """Any tree: chains, stars, forests under the root, and siblings that hold the same token."""
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    return [draw(st.integers(0, vocab - 1)) for _ in parents], parents


@st.composite
def processors(draw):
    """What `generate` makes of random sampling options, in the library's order."""
    made = []
    if penalty := draw(st.sampled_from([None, 0.5, 1.3, 5.0])):
        made.append(RepetitionPenaltyLogitsProcessor(penalty))
    if temperature := draw(st.sampled_from([None, 0.05, 0.7, 3.0])):
        made.append(TemperatureLogitsWarper(temperature))
    if top_k := draw(st.sampled_from([None, 1, 3, 50])):
        made.append(TopKLogitsWarper(top_k))
    if (top_p := draw(st.sampled_from([None, 0.0, 0.3, 0.95]))) is not None:
        made.append(TopPLogitsWarper(top_p))
    if min_p := draw(st.sampled_from([None, 0.3])):
        made.append(MinPLogitsWarper(min_p))
    return LogitsProcessorList(made)


def as_draft(tree, probs=None):
    tokens, parents = tree
    return common.Draft(
        torch.tensor(tokens, dtype=torch.long), torch.tensor(parents, dtype=torch.long), probs
    )


def plain_step(target, ids, processor):
    """The next token of plain greedy decoding over the whole sequence."""
    scores = target(ids).logits[:, -1].float()
    return int((processor(ids, scores) if processor else scores).argmax())


# ------------------------------------------------------------------------------ masks and positions


@settings(**SETTINGS)
@given(
    trees(),
    st.integers(0, 6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_mask_is_ancestors_or_self_and_gives_the_depths(tree, prefix, dtype):
    draft = as_draft(tree)
    mask = common.ancestor_mask(draft.parents, prefix, dtype)
    assert mask.dtype == dtype and set(mask.unique().tolist()) <= {0.0, torch.finfo(dtype).min}
    see, count = mask[0, 0] == 0, len(tree[0])
    assert see[:, : prefix + 1].all() and not see[0, prefix + 1 :].any()
    for node in range(count):
        line = list(ancestors(tree[1], node))
        assert see[node + 1, prefix + 1 :].nonzero()[:, 0].tolist() == sorted(line)
        assert int(see[node + 1, prefix:].sum()) - 1 == len(
            line
        )  # its depth, from which verify takes its position


@settings(**SETTINGS)
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 5), st.lists(st.booleans(), max_size=6)),
        max_size=8,
    )
)
def test_growing_layer_holds_what_a_list_would(steps):
    layer, truth, counter = common.GrowingLayer(), [], 0
    for count, cut, picks in steps:
        rows = torch.arange(counter, counter + count, dtype=torch.float32)
        counter += count
        layer.update(rows.view(1, 1, -1, 1), -rows.view(1, 1, -1, 1))
        truth += rows.tolist()
        if cut := min(cut, len(truth)):
            layer.crop(-cut)
            truth = truth[:-cut]
        start = max(0, len(truth) - len(picks))
        kept = [start + place for place, keep in enumerate(picks[: len(truth) - start]) if keep]
        layer.keep(start, torch.tensor(kept, dtype=torch.long))
        truth = truth[:start] + [truth[place] for place in kept]
        assert layer.keys.flatten().tolist() == truth and layer.values.flatten().tolist() == [
            -x for x in truth
        ]
        assert layer.get_seq_length() == len(truth)


@settings(**SETTINGS)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=5),
            st.integers(0, 5),
            st.lists(st.integers(0, 3), min_size=1, max_size=3),
        ),
        max_size=8,
    )
)
def test_draft_cache_holds_the_committed_tokens_it_was_fed(rounds):
    """Whatever was drafted, accepted and refused: a row's token is the committed one, and nothing
    is fed twice."""
    cache, ids = common.DraftCache(1), torch.tensor([[1, 2]])

    def consume(tokens):
        positions = cache.feed(tokens)
        cache.layers[0].update(*[tokens.view(1, 1, -1, 1).float()] * 2)
        assert positions.tolist() == [
            list(range(cache.fed.shape[1] - tokens.shape[1], cache.fed.shape[1]))
        ]

    for drafted, accepted, more in rounds:
        rest = cache.rewind(ids)
        held = cache.get_seq_length() if cache.fed is not None else 0
        assert torch.equal(ids[:, held:], rest) and rest.shape[1] >= 1
        if held:
            assert (
                cache.layers[0].keys.flatten().tolist()
                == ids[0, :held].tolist()
                == cache.fed[0].tolist()
            )
        consume(rest)
        for token in drafted:
            consume(torch.tensor([[token]]))
        ids = torch.cat([ids, torch.tensor([drafted[:accepted] + more])], dim=1)


# ------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("name", TARGETS)
@settings(**SETTINGS | {"max_examples": 12})
@given(
    st.lists(trees(), min_size=1, max_size=4),
    st.one_of(st.none(), processors()),
    st.integers(0, 2**31),
    st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_greedy_rounds_are_plain_decoding_and_leave_a_fresh_cache(
    name, drafts, processor, seed, helpful
):
    """Random trees, some of whose nodes are replaced by what the target will say, for several
    rounds."""
    target = TARGETS[name]
    ids = torch.randint(0, VOCAB, (1, 4), generator=torch.Generator().manual_seed(seed))
    cache, helpful = start(target, ids), iter(helpful)
    for tokens, parents in drafts:
        truth = {-1: ids}  # what each node follows
        for node, parent in enumerate(parents):
            if next(helpful):
                tokens[node] = plain_step(target, truth[parent], processor)
            truth[node] = torch.cat([truth[parent], torch.tensor([[tokens[node]]])], dim=1)
        verified = common.verify(target, ids, as_draft((tokens, parents)), cache, processor)
        expected = ids
        for token in verified.tokens[0].tolist():
            assert token == plain_step(target, expected, processor)
            expected = torch.cat([expected, torch.tensor([[token]])], dim=1)
        last = verified.path[-1] if verified.path else -1
        children = [tokens[n] for n, parent in enumerate(parents) if parent == last]
        assert verified.tokens[0, -1] not in torch.tensor(
            children or [-1]
        )  # it stopped because it had to
        assert all(parents[b] == a for a, b in zip([-1, *verified.path], verified.path))
        ids = expected
        assert cache.get_seq_length() == ids.shape[1] - 1 and verified.hidden.isfinite().all()
        assert_cache_is_fresh(target, ids, cache)
        whole, _ = common.target_features(target, ids[:, :-1])
        torch.testing.assert_close(
            verified.hidden, whole[:, -verified.hidden.shape[1] :], atol=1e-5, rtol=1e-5
        )


@settings(**SETTINGS | {"max_examples": 20})
@given(st.lists(trees(), min_size=1, max_size=4), processors(), st.integers(0, 2**31), st.data())
def test_sampled_rounds_emit_possible_tokens_and_leave_a_fresh_cache(drafts, processor, seed, data):
    """Any distributions may be claimed for the first nodes: flat, certain, even impossible."""
    target, generator = TARGETS["Llama"], torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, 4), generator=generator)
    cache = start(target, ids)
    for tree in drafts:
        rows = []
        for token in tree[0][: data.draw(st.integers(0, len(tree[0])))]:
            kind = data.draw(st.sampled_from(["flat", "certain", "random", "sparse"]))
            scores = torch.randn(VOCAB, generator=generator) * 3
            if kind == "sparse":
                scores[torch.rand(VOCAB, generator=generator) < 0.7] = float("-inf")
                scores[token] = 0.0
            row = {
                "flat": torch.ones(VOCAB) / VOCAB,
                "certain": torch.eye(VOCAB)[token],
            }.get(kind, scores.softmax(-1))
            rows.append(row)
        draft = as_draft(tree, torch.stack(rows) if rows else None)
        torch.manual_seed(seed)
        verified = common.verify(target, ids, draft, cache, processor, do_sample=True)
        for token in verified.tokens[0]:
            probs = processor(ids, target(ids).logits[:, -1].float()).softmax(-1)[0]
            assert (
                not probs.isnan().any() and probs[token] > 0
            )  # never a token that plain sampling could not draw
            ids = torch.cat([ids, token.view(1, 1)], dim=1)
        assert [tree[0][n] for n in verified.path] == verified.tokens[0, :-1].tolist()
        assert_cache_is_fresh(target, ids, cache)


LOGITS = st.lists(
    st.sampled_from([float("-inf"), -50.0, -1.0, 0.0, 0.0, 1.0, 1.0, 80.0]), min_size=5, max_size=5
).filter(lambda row: max(row) > float("-inf"))


def star(tokens, probs):
    """A tree of siblings under the root."""
    tokens = torch.tensor(tokens, dtype=torch.long)
    return common.Draft(tokens, torch.full_like(tokens, -1), probs)


@settings(**SETTINGS | {"max_examples": 150})
@given(LOGITS, st.lists(st.tuples(st.integers(0, 4), LOGITS), max_size=4), st.integers(0, 2**31))
def test_a_draw_never_yields_a_token_of_probability_0(row, siblings, seed):
    """Whatever distribution a sibling claims to come from, even one that excludes its token."""
    tokens = [token for token, _ in siblings]
    probs = torch.tensor([other for _, other in siblings]).softmax(-1).reshape(-1, 5)
    draft = star(tokens, probs)
    torch.manual_seed(seed)
    for honest in (False, True):
        for place, token in enumerate(tokens):
            if honest and not probs[place, token]:
                probs[place] = torch.eye(5)[token]
        choice = common._draw(torch.tensor(row), list(range(len(tokens))), draft)
        assert row[choice] > float("-inf")


@settings(**SETTINGS | {"max_examples": 6})
@given(LOGITS, st.lists(LOGITS, min_size=1, max_size=3), st.integers(0, 2**20))
def test_draws_follow_the_target_whatever_was_drafted(row, drafts, seed):
    """Siblings honestly drawn one after the other from any distributions."""
    p_target, q_draft = torch.tensor(row).softmax(-1), torch.tensor(drafts).softmax(-1)
    draws, counts = 1000, torch.zeros(5)
    torch.manual_seed(seed)
    for _ in range(draws):
        tokens = torch.multinomial(q_draft, 1)[:, 0].tolist()
        siblings = list(range(len(tokens)))
        counts[common._draw(p_target.log(), siblings, star(tokens, q_draft))] += 1
    spread = (draws * p_target * (1 - p_target)).sqrt() + 1e-3
    assert ((counts - draws * p_target).abs() <= 5 * spread + 1).all()


# ------------------------------------------------------------------------------------ whole methods


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Those of `generate` for each method, made when first asked for: one that fails is alone."""

    class Arguments(dict):
        def __missing__(self, name):
            folder = tmp_path_factory.mktemp(name)
            self[name] = make_drafter(name, TARGETS["Llama"], folder)
            return self[name]

    return Arguments()


@pytest.mark.parametrize("method", METHODS)
@settings(**SETTINGS | {"max_examples": 8})
@given(
    st.integers(1, 9),
    st.integers(1, 16),
    st.sampled_from([None, 0.7, 1.5]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.0, 0.4, 3.0]),
    st.integers(0, 2**31),
)
def test_every_round_of_every_method(arguments, method, length, new, penalty, ngram, noise, seed):
    """Rounds of real drafters, blurred at random: invariants at each call of verify, and the
    library's own output."""
    target, verify = TARGETS["Llama"], common.verify
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (1, length), generator=generator)
    options = dict(
        max_new_tokens=new,
        do_sample=False,
        repetition_penalty=penalty,
        no_repeat_ngram_size=ngram,
        attention_mask=torch.ones_like(ids),
    )

    def checked(target, input_ids, draft, cache, *more, **named):
        assert (draft.parents < torch.arange(len(draft.parents))).all() and len(
            draft.tokens
        ) == len(draft.parents)
        assert ((draft.tokens >= 0) & (draft.tokens < VOCAB)).all()
        if draft.probs is not None:
            assert draft.probs.isfinite().all() and (draft.probs >= 0).all()
        verified = verify(target, input_ids, draft, cache, *more, **named)
        assert_cache_is_fresh(target, torch.cat([input_ids, verified.tokens], dim=1), cache)
        return verified

    def blur(module, _args, out):
        logits, *others = out if isinstance(out, tuple) else (out,)
        logits = logits + noise * torch.randn(logits.shape, generator=generator).to(logits)
        return (logits, *others) if others else logits

    drafter = arguments[method].get("drafter", arguments[method].get("base_drafter"))
    hooks = [] if drafter is None else [drafter.register_forward_hook(blur)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "verify", checked)
        output = target.generate(ids, **options, **arguments[method])
    for hook in hooks:
        hook.remove()
    assert torch.equal(output, target.generate(ids, **options))
