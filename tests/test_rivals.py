"""support/rivals: the drafters that the methods are compared with."""

import dataclasses
import math

import pytest
import torch
from tiny import decoding_of, make_batch, teach

import common
from support.rivals import medusa

# ----------------------------------------------------------------------------------------- Medusa


def make_medusa(target, **options):
    settings = dict(draft_vocab=0, anchors=16, window=3)
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return medusa.build(medusa.Config(**settings | options), target, counts).double().eval()


def some_batch(target, lengths=(9, 7), prompt=3):
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    return make_batch(target, sequences)


@torch.no_grad()
def head_probs(target, drafter, ids):
    """q_heads (U, Vd) after the tokens ids (T,), the last of them the newest."""
    decoding = decoding_of(target, ids[None], max_new_tokens=5, do_sample=False)
    return medusa.propose(drafter, decoding, medusa.Memory(drafter, target))


def test_medusas_head_j_learns_token_j_and_weighs_less(llama):
    """Also that training and drafting agree: the loss is computed from what is drafted."""
    drafter = make_medusa(llama, draft_vocab=30)
    batch = some_batch(llama)
    expected = 0.0
    overlap = 0.0
    for ids, length in zip(batch.input_ids, (9, 7)):
        scores = llama(ids[None]).logits[0]  # (T, V)
        for newest in range(2, length - 3):  # the three labels stand at newest + 1, ...
            q_heads = head_probs(llama, drafter, ids[: newest + 1])
            label = scores[:, drafter.draft_ids].argmax(-1)[newest : newest + 3]
            for head in range(3):
                expected -= 0.8**head * math.log(q_heads[head, label[head]])
            p_target = scores[newest].softmax(-1)[drafter.draft_ids]
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
    decoding = decoding_of(llama, torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=False)
    config = dataclasses.replace(drafter.config, nodes=3, symbols=1)
    draft = next(medusa.drafts(decoding, drafter, config))
    assert draft.tokens.tolist() == [4, 4, 4] and draft.parents.tolist() == [-1, 0, 1]
    assert draft.q.tolist() == pytest.approx([0.9**3] * 3)  # of one combination


@pytest.mark.parametrize("length", [1, 5])
def test_medusa_is_lossless_and_accepted_sometimes(llama, length):
    drafter = make_medusa(llama)
    losses = teach(medusa, drafter, llama, 40, 1e-2)
    assert losses[-1] < 0.7 * losses[0], losses[::10]
    ids = torch.arange(1, length + 1)[None]
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    for some in (drafter, make_medusa(llama, window=1, draft_vocab=9)):
        stats = common.Stats()
        options = dict(max_new_tokens=30, do_sample=False, drafter=some, stats=stats)
        output = llama.generate(ids, custom_generate=medusa.generate, **options)
        assert torch.equal(output, truth) and stats.emitted == 30
        if some is drafter:
            assert 0 < sum(stats.accepted) < stats.drafted


def test_medusa_without_a_whole_window_gives_zeros(llama):
    drafter = make_medusa(llama)
    total, count = medusa.loss(drafter, llama, some_batch(llama, lengths=(5, 2)))
    total.backward()
    assert float(total.detach()) == 0 and int(count) == 0
    assert all(weight.grad is not None for weight in drafter.parameters())


def test_a_bad_config_of_medusa_is_refused():
    with pytest.raises(common.Mistake, match="window 0: take at least 1"):
        medusa.Config(window=0)
