"""support/rivals: Medusa's heads, and beam search as a draft."""

import dataclasses
import math

import pytest
import torch
from tiny import make_glide, paths, random_batch

import common
import glide
from support.rivals import beam, medusa

PROMPT = torch.tensor([[9, 8, 7]])


def make_medusa(target, **options):
    settings = dict(draft_vocab=0, anchors=16, window=3)
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return medusa.build(medusa.Config(**settings | options), target, counts).double().eval()


@torch.no_grad()
def head_probs(target, drafter, ids):
    """q_heads (U, Vd) after the tokens ids (T,), the last of them the newest."""
    decoding = common.open_decoding(target, ids[None], max_new_tokens=5)
    return medusa.propose(drafter, decoding, common.draft_head(target, drafter.vocab_ids))


def test_medusas_head_j_learns_token_j_and_weighs_less(llama):
    """Also that training and drafting agree: the loss is computed from what is drafted."""
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
    assert int(count) == 4 + 2 and float(total.detach()) == pytest.approx(expected, rel=1e-4)
    total, count = medusa.acceptance(drafter, llama, batch)
    assert count == 6 and float(total.detach()) == pytest.approx(overlap, rel=1e-4)


def test_medusa_drafts_products_and_merges_no_repeats(llama, monkeypatch):
    """Heads that agree on a token draft it again; the blank, which they lack, is not drafted."""
    q_heads = torch.full((3, 48), 0.1 / 47)
    q_heads[:, 4] = 0.9
    monkeypatch.setattr(medusa, "propose", lambda *_: q_heads)
    drafter = make_medusa(llama)
    decoding = common.open_decoding(llama, PROMPT, max_new_tokens=9)
    config = dataclasses.replace(drafter.config, nodes=3, symbols=1)
    draft = next(medusa.drafts(decoding, drafter, config))
    assert paths(draft) == [(4,), (4, 4), (4, 4, 4)]
    assert draft.q.tolist() == pytest.approx([0.9**3] * 3)  # of one combination


def beams_by_hand(target, drafter, depth, width):
    """{proposal: probability} of beam search (5.1), each scored by a drafter without memory."""
    decoding = common.open_decoding(target, PROMPT, max_new_tokens=9)
    beams = {(): 1.0}
    for _ in range(depth):
        grown = {}
        for path, probability in beams.items():
            # The target has cached the prompt only.
            decoding.ids = torch.cat([PROMPT, torch.tensor([path], dtype=torch.long)], dim=1)
            steps = glide.propose(drafter, decoding, glide.Memory(drafter, target))
            _, q_draft, _ = next(steps)
            for token, q in enumerate(q_draft.tolist()):
                grown[(*path, token)] = probability * q
        best = sorted(grown, key=grown.get, reverse=True)[:width]
        beams = {path: grown[path] for path in best}
    return beams


@pytest.mark.parametrize("depth, width", [(0, 4), (1, 4), (3, 1), (3, 4), (2, 25)])
@torch.no_grad()
def test_the_tree_is_that_of_the_best_proposals(llama, depth, width):
    drafter = make_glide(llama, draft_vocab=20)
    options = {"do_sample": True, "suppress_tokens": list(range(28, 38))}
    decoding = common.open_decoding(llama, PROMPT, max_new_tokens=9, **options)
    memory = glide.Memory(drafter, llama)
    draft = beam.propose(glide, drafter, decoding, memory, depth, width)
    beams = beams_by_hand(llama, drafter, depth, width)
    expected = {path[:end] for path in beams for end in range(1, depth + 1)}
    q_of = dict(zip(paths(draft), draft.q.tolist()))
    assert len(q_of) == len(draft.tokens) and set(q_of) == expected
    for path, probability in beams.items():  # q along a proposal multiplies to its score
        product = math.prod(q_of[path[:end]] for end in range(1, depth + 1))
        assert product == pytest.approx(probability, rel=1e-4)
    # Only a copy of the decoding ranks greedily and without processors.
    assert torch.equal(decoding.ids, PROMPT) and decoding.do_sample and decoding.logits_processor
