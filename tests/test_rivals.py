"""support/rivals: Medusa's heads, beam search as a draft, copies from the context."""

import math
import random
from functools import partial

import pytest
import torch
from chat import refused
from tiny import make_glide, opened, paths, random_batch, random_tree, untrained

import common
import glide
from support.rivals import beam, lookup, medusa

PROMPT = torch.tensor([[9, 8, 7]])


# ------------------------------------------------------------------------------- Medusa


make_medusa = partial(untrained, medusa, seed=5, anchors=16, labels=3)


@torch.no_grad()
def head_probs(target, drafter, ids):
    """Probabilities (U, Vd) after the tokens ids (T,), the last of them the newest."""
    decoding = opened(target, input_ids=ids[None])
    head = common.draft_head(target, drafter.vocab_ids)
    return medusa.run_heads(drafter, decoding, head).exp()


def test_medusas_head_j_learns_token_j_and_weighs_less(llama):
    """And training and drafting agree: the loss is computed from what is drafted."""
    drafter = make_medusa(llama, draft_vocab=30)
    batch = random_batch(llama, lengths=(9, 7))
    expected = 0.0
    overlap = 0.0
    for ids, length in zip(batch.input_ids, (9, 7)):
        scores = llama(ids[None]).logits[0]  # (T, V)
        for newest in range(2, length - 3):  # the three labels stand at newest + 1, ...
            q_heads = head_probs(llama, drafter, ids[: newest + 1])
            label = scores[:, drafter.vocab_ids].argmax(-1)[newest : newest + 3]
            for head in range(3):
                expected -= 0.8**head * math.log(q_heads[head, label[head]])
            p_target = scores[newest].softmax(-1)[drafter.vocab_ids]
            overlap += float(torch.minimum(p_target.float(), q_heads[0]).sum())
    total, count = medusa.loss(drafter, llama, batch)
    assert int(count) == 4 + 2
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)
    total, count = medusa.acceptance(drafter, llama, batch)
    assert count == 6 and float(total.detach()) == pytest.approx(overlap, rel=1e-4)


def test_medusa_drafts_products_and_merges_no_repeats(llama, monkeypatch):
    """Heads that agree on a token draft it twice; the blank, which they lack, never."""
    q_heads = torch.full((3, 48), 0.1 / 47)
    q_heads[:, 4] = 0.9
    monkeypatch.setattr(medusa, "run_heads", lambda *_: q_heads.log())
    drafter = make_medusa(llama)
    draft = next(medusa.drafts(opened(llama), drafter, nodes=3, symbols=1))
    assert paths(draft) == [(4,), (4, 4), (4, 4, 4)]
    assert draft.notes["q"] == pytest.approx([0.9, 0.9**2, 0.9**3])
    draft = next(medusa.drafts(opened(llama, eos_token_id=4), drafter, nodes=3))
    assert (4,) in paths(draft) and all(4 not in path[:-1] for path in paths(draft))


@torch.no_grad()
def test_medusa_draws_the_first_token_from_its_first_head(llama):
    """The distribution of sampled answers is tested in test_ctc_drafter.py."""
    drafter = make_medusa(llama)
    draft = next(medusa.drafts(opened(llama, do_sample=True, top_k=0), drafter))
    q_heads = head_probs(llama, drafter, PROMPT[0])
    torch.testing.assert_close(draft.probs[0, drafter.vocab_ids], q_heads[0])
    assert draft.probs.shape == (1, 48) and draft.parents[0] == -1


# --------------------------------------------------------------------------------- beam


def beams_by_hand(target, drafter, depth, width):
    """{proposal: probability} of beam search (5.1); the drafter remembers nothing."""
    decoding = opened(target)
    beams = {(): 1.0}
    for _ in range(depth):
        grown = {}
        for path, probability in beams.items():
            # The target has cached the prompt only.
            after = torch.tensor([path], dtype=torch.long)
            decoding.ids = torch.cat([PROMPT, after], dim=1)
            cache = common.DraftCache(drafter.config.num_layers)
            head = common.draft_head(target, drafter.vocab_ids)
            steps = glide.propose(drafter, decoding, cache, head)
            _, q_draft = next(steps)
            for token, q in enumerate(q_draft.tolist()):
                grown[(*path, token)] = probability * q
        best = sorted(grown, key=grown.get, reverse=True)[:width]
        beams = {path: grown[path] for path in best}
    return beams


@pytest.mark.parametrize("depth, width", [(0, 4), (1, 4), (3, 1), (3, 4), (2, 25)])
@torch.no_grad()
def test_the_tree_is_that_of_the_best_proposals(llama, depth, width):
    drafter = make_glide(llama, draft_vocab=20)
    # It ranks greedily and without processors, whatever is asked of the answer.
    decoding = opened(llama, do_sample=True, suppress_tokens=list(range(28, 38)))
    cache = common.DraftCache(1)
    head = common.draft_head(llama, drafter.vocab_ids)
    draft = beam.propose(drafter, decoding, cache, head, depth, width)
    beams = beams_by_hand(llama, drafter, depth, width)
    expected = {path[:end] for path in beams for end in range(1, depth + 1)}
    q_of = dict(zip(paths(draft), draft.notes["q"]))
    assert len(q_of) == len(draft.tokens) and set(q_of) == expected
    for (
        path,
        probability,
    ) in beams.items():  # q along a proposal multiplies to its score
        product = math.prod(q_of[path[:end]] for end in range(1, depth + 1))
        assert product == pytest.approx(probability, rel=1e-4)


DRAFTERS = [{}, {"cross_attention": False}, {"num_layers": 2}]


@pytest.mark.parametrize("options", DRAFTERS, ids=str)
def test_a_level_is_one_pass_and_leaves_nothing_in_the_drafters_cache(llama, options):
    """In every round, the tree is that of a drafter which has just read the text."""
    drafter = make_glide(llama, **options)
    passes = []

    def count(_module, inputs):
        passes.append(inputs[1].shape[1])

    drafter.register_forward_pre_hook(count)
    options = {"max_new_tokens": 20, "do_sample": False}
    decoding = opened(llama, input_ids=PROMPT[:, :1], **options)
    for draft in beam.drafts(decoding, drafter, gamma=3, width=4):
        depth = min(3, decoding.max_depth)
        assert len(passes) == depth
        assert passes[1:] == [4] * (depth - 1)  # tokens of each
        fresh = next(beam.drafts(decoding, drafter, gamma=3, width=4))
        assert paths(draft) == paths(fresh)
        assert draft.notes["q"] == pytest.approx(fresh.notes["q"], rel=1e-5)
        decoding.verify(draft)
        passes.clear()


def test_the_beam_drafts_nothing_after_an_end(llama):
    drafter = make_glide(llama)
    whole = next(beam.drafts(opened(llama), drafter))
    end = paths(whole)[0][0]  # the best proposal goes on after it
    cut = next(beam.drafts(opened(llama, eos_token_id=end), drafter))
    assert set(paths(cut)) == {path for path in paths(whole) if end not in path[:-1]}
    assert len(cut.tokens) < len(whole.tokens)


# ------------------------------------------------------------------------------- copies


def found_by_search(text, most):
    """What Lookup finds, by its definition: search the whole text from its end."""
    for n, length in ((4, most), (3, most // 2), (2, most // 3)):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copy = text[end:]
                while len(copy) < length:
                    copy.append(copy[end - len(text)])
                return copy[:length]
    return []


def random_text(chance):
    return [chance.randint(0, 3) for _ in range(chance.randint(1, 30))]


def test_copies_are_found_as_by_a_search():
    """The text grows by a few tokens from call to call, as while decoding."""
    chance = random.Random(0)
    for _ in range(200):
        text = random_text(chance)
        most = chance.randint(0, 9)
        finder = lookup.Lookup(most)
        for end in range(1, len(text) + 1, chance.randint(1, 5)):
            expected = found_by_search(text[:end], most) if most else []
            assert finder.find(torch.tensor([text[:end]])) == expected, (
                text[:end],
                most,
            )


def test_a_merged_tree_holds_the_drafts_paths_and_the_copys():
    """The draft's nodes stay first and unchanged, and no path is there twice."""
    chance = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        text = random_text(chance)
        nodes = chance.randint(0, 8)
        room = chance.randint(0, 6)
        draft = random_tree(generator, nodes, 9)
        draft.probs = torch.rand(nodes, 9)
        draft.notes["q"] = [0.5] * nodes
        merged = lookup.Lookup(6).merge(draft, torch.tensor([text]), room)
        copy = found_by_search(text, 6)[:room]
        before, after = paths(draft), paths(merged)
        assert after[:nodes] == before
        assert len(set(after)) == len(after) == len(merged.notes["q"])
        assert set(after) == set(before) | {
            tuple(copy[:n]) for n in range(1, len(copy) + 1)
        }
        assert merged.notes.get("copied", 0) == len(after) - nodes
        assert merged.notes["q"][:nodes] == [0.5] * nodes
        assert all(map(math.isnan, merged.notes["q"][nodes:]))
        assert merged.probs is draft.probs, "a copy was not sampled"


@pytest.mark.parametrize("options, last", [({"eos_token_id": [6, 9]}, 6), ({}, 5)])
def test_a_copy_ends_with_the_answer(llama, options, last):
    """At an end-of-sequence token, or where one place is left for the bonus token."""
    text = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]])
    length = 2 if last == 5 else 9
    decoding = opened(llama, input_ids=text, max_new_tokens=length, **options)
    draft = next(lookup.drafts(decoding))
    assert draft.tokens.tolist()[-1] == last


def test_a_draft_that_holds_the_copy_stays_as_it_is(llama):
    """And without a draft, the copy is all that is drafted."""
    decoding = opened(llama, input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 3, 4]]))
    alone = next(lookup.drafts(decoding, most=2))
    assert paths(alone) == [(5,), (5, 6)] and alone.notes == {"copied": 2}
    draft = common.Draft(torch.tensor([5, 6, 1]), [-1, 0, 1])
    assert next(lookup.with_copies(iter([draft]), decoding, most=2)) is draft


def test_a_wrong_setting_is_refused(llama):
    decoding = opened(llama)
    with refused("most -1: take an int of at least 0"):
        next(lookup.with_copies(iter([]), decoding, most=-1))
    with refused("decoding cannot change base"):
        next(beam.drafts(decoding, make_glide(llama), base="glide"))
