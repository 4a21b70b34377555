"""ctc_drafter.py: lossless decoding whatever the slots say; the loss and the transform against sums
over alignments."""

import collections
import itertools
import math

import pytest
import torch
from conftest import chi_square_p_value, enumerate_joint
from transformers import GPT2Config, GPT2LMHeadModel

import common
import ctc_drafter
import train
from support import packed

TRANSFORMS = ("prefixes", "alignments", "none")


def make_drafter(target, **options):
    settings = (
        dict(
            target=common.target_shape(target),
            intermediate_size=48,
            draft_vocab=0,
            anchors=6,
            slots=8,
            window=4,
        )
        | options
    )
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return ctc_drafter.build(ctc_drafter.Config(**settings), target, counts).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    return target.generate(
        ids, custom_generate=ctc_drafter.generate, drafter=drafter, **options
    ), options["stats"]


def make_batch(target, lengths=(9, 14, 7), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, [], None)
    return train.make_batch(
        range(len(lengths)), sequences, features, torch.arange(len(lengths)) + 7, 0.0, "cpu"
    )


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter of each kind that has seen a little of what the target says."""
    ids = llama.generate(torch.arange(1, 9)[:, None], max_new_tokens=60, do_sample=False)
    sequences = [(row, torch.arange(len(row)) > 0) for row in ids]
    features, drafters = train.Features(llama, sequences, [], None), {}
    for kind in ("ctc", "medusa"):
        drafter = drafters[kind] = make_drafter(llama, kind=kind, anchors=16).train()
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
        for step in range(80):
            batch = train.make_batch(
                range(8), sequences, features, torch.arange(8) + 8 * step, step / 80, "cpu"
            )
            (ctc_drafter.loss(drafter, llama, batch) / batch.loss_mask.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        drafter.eval()
    return drafters


@pytest.fixture
def slots_say(monkeypatch):
    """Call with a function from committed ids (1, T) to what the slots hold (a list, None being
    blank)."""

    def install(script, noise=0.0):
        def propose(drafter, target, input_ids, hidden, own):
            vocab = target.config.vocab_size
            frames = [vocab if symbol is None else symbol for symbol in script(input_ids)]
            q_slots = torch.full((len(frames), vocab + 1), noise / vocab)
            q_slots[torch.arange(len(frames)), frames] = 1 - noise
            return q_slots

        monkeypatch.setattr(ctc_drafter, "propose", propose)

    return install


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("length", [1, 2, 13])
def test_greedy_output_is_the_targets(llama, trained, length):
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=24, do_sample=False)
    random = [
        make_drafter(llama, slots=slots, window=window, draft_vocab=vocab, kind=kind)
        for slots, window, vocab, kind in ((1, 1, 0, "ctc"), (5, 2, 9, "ctc"), (3, 3, 0, "medusa"))
    ]
    for drafter in (*trained.values(), *random):
        for transform in TRANSFORMS:
            for nodes in (1, 20):
                output, stats = decode(
                    llama, drafter, ids, transform=transform, nodes=nodes, max_new_tokens=24
                )
                assert torch.equal(output, truth)
                assert stats.emitted == 24 and sum(stats.accepted) + stats.target_forwards == 24


def test_trained_drafters_are_accepted_sometimes_and_refused_sometimes(llama, trained):
    for drafter in trained.values():
        _, stats = decode(llama, drafter, torch.tensor([[3]]), max_new_tokens=100)
        assert 0 < sum(stats.accepted) < stats.drafted and len(set(stats.accepted)) > 2


def test_a_repeat_merged_in_the_middle_of_a_candidate_keeps_positions_and_cache_right(
    llama, slots_say
):
    """The case that breaks a tree whose nodes are masked out after it was built: what follows
    shifts by one."""
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=41, do_sample=False)[0].tolist()

    def script(committed):
        a, b, c, d = (truth + [0] * 4)[committed.shape[1] :][:4]
        return [a, a, None, b, b, b, c, None] if b != c else [a, None, b, b, None, c, d, None]

    slots_say(script, noise=0.05)
    for transform in ("prefixes", "alignments"):
        output, stats = decode(llama, drafter, ids, transform=transform, nodes=20)
        assert output[0].tolist() == truth[:43] and stats.emitted / stats.target_forwards >= 3
    output, stats = decode(llama, drafter, ids, transform="none", nodes=20)
    assert output[0].tolist() == truth[:43] and stats.emitted / stats.target_forwards < 3


def test_genuine_repeats_can_be_drafted(slots_say):
    from conftest import make_llama

    target = make_llama(vocab=7, seed=3)
    drafter, ids = make_drafter(target), torch.tensor([[1, 2]])
    only = {"suppress_tokens": [0, 1, 2, 3, 5, 6]}  # so the answer is 4 4 4 4 ...
    slots_say(lambda committed: [4, None, 4, None, 4])
    for transform in ("prefixes", "alignments"):
        output, stats = decode(target, drafter, ids, max_new_tokens=13, transform=transform, **only)
        assert output[0, 2:].tolist() == [4] * 13 and stats.accepted == [3, 3, 3, 0]
    slots_say(lambda committed: [4, 4, 4, 4, 4])
    assert decode(target, drafter, ids, max_new_tokens=13, **only)[1].accepted == [1] * 6 + [0]


def test_stopping_inside_a_draft(llama, slots_say):
    drafter, ids = make_drafter(llama), torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=45, do_sample=False)
    slots_say(
        lambda committed: [
            x for t in (truth[0].tolist() + [0] * 4)[committed.shape[1] :][:4] for x in (t, None)
        ]
    )
    for place in range(3, 12):
        eos = int(truth[0, place])
        expected = llama.generate(ids, max_new_tokens=37, do_sample=False, eos_token_id=eos)
        assert torch.equal(
            decode(llama, drafter, ids, eos_token_id=eos, max_new_tokens=37)[0], expected
        )
        shorter, stats = decode(llama, drafter, ids, eos_token_id=None, max_new_tokens=place)
        assert torch.equal(shorter, truth[:, : 3 + place]) and stats.emitted == place


def test_logits_processors_see_each_prefix(llama, trained):
    for options in (
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 4, 5]},
    ):
        ids = torch.tensor([[9, 8, 7, 9, 8]])
        expected = llama.generate(ids, max_new_tokens=30, do_sample=False, **options)
        assert torch.equal(
            decode(llama, trained["ctc"], ids, max_new_tokens=30, **options)[0], expected
        )


def test_sampling_follows_the_target(small_llama):
    target, drafter = small_llama, make_drafter(small_llama, slots=4, window=2)
    torch.manual_seed(11)
    ids, counts = torch.tensor([[1, 4, 2]]), collections.Counter()
    for turn in range(750):
        output, _ = decode(
            target,
            drafter,
            ids,
            max_new_tokens=3,
            do_sample=True,
            top_k=0,
            transform=TRANSFORMS[turn % 3],
        )
        counts[tuple(output[0, 3:].tolist())] += 1
    assert chi_square_p_value(counts, enumerate_joint(target, ids, 3)) > 1e-3


def test_the_chi_square_sees_a_lossy_rule(small_llama, monkeypatch):
    """Negative control: descending whenever the target's second choice is drafted is not sampling
    from the target."""
    drafter, ids = make_drafter(small_llama, slots=4, window=2), torch.tensor([[1, 4, 2]])
    counts = collections.Counter()

    def lossy(scores, candidates, tokens, *_):
        best = scores.topk(2).indices.tolist()
        taken = next((n for n in candidates if tokens[n] in best), None)
        return taken, tokens[taken] if taken is not None else int(
            torch.multinomial(scores.softmax(-1), 1)
        )

    monkeypatch.setattr(common, "_choose", lossy)
    torch.manual_seed(11)
    for _ in range(300):
        output, _ = decode(small_llama, drafter, ids, max_new_tokens=3, do_sample=True, top_k=0)
        counts[tuple(output[0, 3:].tolist())] += 1
    assert chi_square_p_value(counts, enumerate_joint(small_llama, ids, 3)) < 1e-6


# --------------------------------------------------------------------------------- masks, alignment


def test_the_mask_against_a_loop():
    anchors, length, slots = torch.tensor([[0, 2, 5], [4, 4, 1]]), 6, 3
    mask = ctc_drafter.slot_mask(anchors, length, slots)
    assert mask.shape == (2, 1, 9, 15)
    for b, query, key in itertools.product(range(2), range(9), range(15)):
        if key < length:
            expected = key <= int(anchors[b, query // slots])
        else:
            expected = (key - length) // slots == query // slots
        assert bool(mask[b, 0, query, key]) == expected


@pytest.mark.parametrize("kind", ["ctc", "medusa"])
def test_drafting_is_what_was_trained(llama, kind):
    """The slots after a newest token are the same in one training pass as in decoding round by
    round."""
    drafter, batch = make_drafter(llama, kind=kind), make_batch(llama, lengths=(12,), prompt=1)
    anchors = torch.arange(11)[None]
    q_slots = ctc_drafter.training_logits(drafter, llama, batch, anchors).softmax(-1)[
        0
    ]  # (A, S, V + 1)
    own, fed = ctc_drafter.new_memory(drafter, llama), 0
    for end in (3, 4, 8, 12):  # tokens committed; the features of all but the newest are there
        q_round = ctc_drafter.propose(
            drafter, llama, batch.input_ids[:, :end], batch.hidden[:, fed : end - 1], own
        )
        fed = end - 1
        torch.testing.assert_close(q_round.double(), q_slots[end - 2], atol=1e-6, rtol=1e-5)


def test_nothing_after_the_newest_token_is_seen(llama):
    drafter, batch = make_drafter(llama), make_batch(llama, lengths=(12,), prompt=1)
    anchors = torch.tensor([[5]])
    before = ctc_drafter.training_logits(drafter, llama, batch, anchors)
    batch.input_ids[:, 7:], batch.hidden[:, 6:] = 0, 0.0
    assert torch.equal(before, ctc_drafter.training_logits(drafter, llama, batch, anchors))
    batch.input_ids[:, 6] = 0  # the newest token itself
    assert not torch.allclose(before, ctc_drafter.training_logits(drafter, llama, batch, anchors))


@pytest.mark.parametrize("prompt", [1, 3])
def test_windows_hold_what_the_target_says_after_the_newest_token(llama, prompt):
    drafter, batch = (
        make_drafter(llama, anchors=20, window=4),
        make_batch(llama, lengths=(9, 14, 7), prompt=prompt),
    )
    anchors, labels, counts = ctc_drafter.windows(drafter, llama, batch)
    best = common.target_logits(llama, batch.hidden).argmax(-1)  # best[t] follows x_t
    for row, length in enumerate((9, 14, 7)):
        used = {int(a): n for n, a in enumerate(anchors[row]) if counts[row, n]}
        assert sorted(used) == list(
            range(max(prompt, 2) - 2, length - 2)
        )  # first labels 2 or 3 .. length - 1
        for anchor, n in used.items():
            count = int(counts[row, n])
            assert count == min(4, length - (anchor + 2))
            assert (
                labels[row, n, :count].tolist()
                == best[row, anchor + 1 : anchor + 1 + count].tolist()
            )


# ---------------------------------------------------------------------------------- loss, transform


def by_collapsing(q_slots):
    """{sequence: probability} by summing over every alignment."""
    blank, exact = q_slots.shape[1] - 1, collections.defaultdict(float)
    for alignment in itertools.product(range(blank + 1), repeat=len(q_slots)):
        probability = math.prod(
            float(q_slots[slot, symbol]) for slot, symbol in enumerate(alignment)
        )
        exact[ctc_drafter.collapse(alignment, blank)] += probability
    return exact


def some_slots(slots=4, symbols=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(slots, symbols + 1, generator=generator, dtype=torch.double).softmax(-1)


def test_collapse():
    for alignment, sequence in (
        ((1, 1, 9, 2, 9, 2, 2), (1, 2, 2)),
        ((9, 9), ()),
        ((), ()),
        ((3, 3, 3), (3,)),
        ((9, 1, 9, 9, 1), (1, 1)),
        ((1, 2, 1), (1, 2, 1)),
    ):
        assert ctc_drafter.collapse(alignment, 9) == sequence


def test_the_loss_sums_over_alignments(llama, monkeypatch):
    drafter, batch = make_drafter(llama, slots=4, window=3), make_batch(llama)
    labels = torch.tensor([[0, 1, 2], [0, 0, 1], [2, 2, 2], [1, 0, 0], [1, 1, 1]])[None]
    counts = torch.tensor([[3, 3, 2, 1, 3]])
    q_slots = torch.stack([some_slots(seed=seed) for seed in range(5)])
    monkeypatch.setattr(
        ctc_drafter, "windows", lambda *_: (torch.zeros(1, 5).long(), labels, counts)
    )
    monkeypatch.setattr(ctc_drafter, "training_logits", lambda *_: q_slots.log()[None])
    expected = 0.0
    for row in range(5):
        exact = by_collapsing(q_slots[row])[tuple(labels[0, row, : counts[0, row]].tolist())]
        expected -= (
            math.log(exact) if exact else 0.0
        )  # (1, 1, 1) does not fit into four slots: it needs five
    got = float(ctc_drafter.loss(drafter, llama, batch)) / int(batch.loss_mask.sum()) * 5
    assert by_collapsing(q_slots[4])[(1, 1, 1)] == 0 and got == pytest.approx(expected, rel=1e-5)


def test_a_window_that_does_not_fit_gives_no_gradient_and_no_nan(llama, monkeypatch):
    drafter, batch = make_drafter(llama, slots=2, window=3), make_batch(llama)
    anchors, _, _ = ctc_drafter.windows(drafter, llama, batch)
    ones = torch.ones(*anchors.shape, 3, dtype=torch.long)
    monkeypatch.setattr(ctc_drafter, "windows", lambda *_: (anchors, ones, ones.sum(-1)))
    loss = ctc_drafter.loss(drafter.train(), llama, batch)
    loss.backward()
    assert not loss and all(not w.grad.any() for w in drafter.parameters() if w.grad is not None)


def test_medusa_loss_by_hand(llama, monkeypatch):
    drafter, batch = make_drafter(llama, kind="medusa", window=2), make_batch(llama)
    logits = torch.randn(1, 2, 2, 5, dtype=torch.double)
    logits[..., -1] = -torch.inf
    labels, counts = torch.tensor([[[1, 2], [3, 0]]]), torch.tensor([[2, 1]])
    monkeypatch.setattr(
        ctc_drafter, "windows", lambda *_: (torch.zeros(1, 2).long(), labels, counts)
    )
    monkeypatch.setattr(ctc_drafter, "training_logits", lambda *_: logits)
    log_q = logits[0].float().log_softmax(-1)
    expected = -(log_q[0, 0, 1] + 0.8 * log_q[0, 1, 2] + log_q[1, 0, 3]) / 2 * batch.loss_mask.sum()
    torch.testing.assert_close(ctc_drafter.loss(drafter, llama, batch).float(), expected)


@pytest.mark.parametrize("kind", ["ctc", "medusa"])
def test_training_lowers_the_loss(llama, kind):
    drafter, batch = make_drafter(llama, kind=kind).train(), make_batch(llama)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for _ in range(12):
        loss = ctc_drafter.loss(drafter, llama, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        assert all(w.grad is not None and w.grad.isfinite().all() for w in drafter.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("seed", range(4))
def test_prefix_search_sums_all_alignments(seed):
    q_slots = some_slots(seed=seed)
    exact, starts = by_collapsing(q_slots), collections.defaultdict(float)
    for sequence, probability in exact.items():
        for end in range(1, len(sequence) + 1):
            starts[sequence[:end]] += probability
    found = ctc_drafter.prefix_search(q_slots, symbols=3, candidates=1000)
    assert found.keys() == {prefix for prefix, probability in starts.items() if probability > 0}
    assert all(found[prefix] == pytest.approx(starts[prefix]) for prefix in found)
    pruned = ctc_drafter.prefix_search(q_slots, symbols=2, candidates=3)
    assert 0 < len(pruned) < len(found) and all(
        pruned[prefix] <= starts[prefix] + 1e-12 for prefix in pruned
    )


def test_alignments_are_the_most_probable_combinations():
    q_slots = some_slots(slots=3, symbols=4, seed=2)
    every = sorted(
        itertools.product(range(5), repeat=3),
        reverse=True,
        key=lambda symbols: math.prod(float(q_slots[slot, s]) for slot, s in enumerate(symbols)),
    )
    for merge in (True, False):
        expected = collections.defaultdict(float)
        for raw in every[:7]:
            sequence = (
                ctc_drafter.collapse(raw, 4)
                if merge
                else tuple(itertools.takewhile(lambda s: s != 4, raw))
            )
            for end in range(1, len(sequence) + 1):
                expected[sequence[:end]] += math.prod(
                    float(q_slots[slot, s]) for slot, s in enumerate(raw)
                )
        found = ctc_drafter.alignments(q_slots.float(), symbols=4, candidates=7, merge=merge)
        assert found.keys() == expected.keys()
        assert all(found[prefix] == pytest.approx(expected[prefix], rel=1e-4) for prefix in found)


def test_the_tree_is_a_trie_of_the_most_valuable_prefixes():
    worth = {(3,): 0.6, (3, 5): 0.4, (3, 5, 5): 0.1, (4,): 0.3, (4, 5): 0.25, (6,): 0.05}
    draft = ctc_drafter.token_tree(worth, torch.arange(10) * 10, nodes=4, depth=9)
    assert draft.tokens.tolist() == [30, 50, 40, 50] and draft.parents.tolist() == [-1, 0, -1, 2]
    assert draft.probs is None
    shallow = ctc_drafter.token_tree(worth, torch.arange(10), nodes=9, depth=1)
    assert shallow.tokens.tolist() == [3, 4, 6] and shallow.parents.tolist() == [-1, -1, -1]
    assert len(ctc_drafter.token_tree(worth, torch.arange(10), nodes=9, depth=0).tokens) == 0
    rounded = {(3,): 0.5, (3, 5): 0.5000001}  # sums of the same terms in another order
    assert ctc_drafter.token_tree(rounded, torch.arange(10), nodes=9, depth=9).tokens.tolist() == [
        3
    ]


def test_alpha_is_the_acceptance_rate_of_the_first_draft_token(small_llama):
    drafter, batch = (
        make_drafter(small_llama, slots=3, window=2),
        make_batch(small_llama, lengths=(8,), prompt=3),
    )
    anchors, _, counts = ctc_drafter.windows(drafter, small_llama, batch)
    q_slots = ctc_drafter.training_logits(drafter, small_llama, batch, anchors).softmax(-1)
    expected, number = 0.0, 0
    for n, anchor in enumerate(anchors[0].tolist()):
        if counts[0, n]:
            first = collections.defaultdict(float)
            for sequence, probability in by_collapsing(q_slots[0, n]).items():
                first[sequence[:1]] += probability
            p_target = small_llama(batch.input_ids[:, : anchor + 2]).logits[0, -1].softmax(-1)
            expected += sum(
                min(float(p_target[int(drafter.draft_ids[token])]), first[token,])
                for token in range(7)
            )
            number += 1
    total, count = ctc_drafter.alpha(drafter, small_llama, batch)
    assert count == number == 5 and float(total) == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------- others


def test_saved_and_loaded(llama, trained, tmp_path):
    for kind, drafter in trained.items():
        drafter.save_pretrained(tmp_path / kind)
        again = common.load_drafter(ctc_drafter.Drafter, tmp_path / kind, llama)
        assert again.config == drafter.config
        theirs = drafter.state_dict()
        for name, weight in again.state_dict().items():  # float32 on the way
            torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)


def test_low_precision_packed_and_models_without_rotary(trained, llama):
    import copy

    ids = torch.tensor([[9, 8, 7]])
    for target in (packed.pack(copy.deepcopy(llama).float()), copy.deepcopy(llama).bfloat16()):
        drafter = copy.deepcopy(trained["ctc"]).to(target.dtype)
        assert decode(target, drafter, ids)[0].shape == (1, 43)
    torch.manual_seed(0)
    gpt2 = (
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=40,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                bos_token_id=None,
                eos_token_id=None,
                initializer_range=0.3,
            )
        )
        .double()
        .eval()
    )
    drafter = make_drafter(gpt2)
    ctc_drafter.loss(drafter, gpt2, make_batch(gpt2)).backward()
    for room in (30, 61):  # up to the last position of the model
        truth = gpt2.generate(ids, max_new_tokens=room, do_sample=False)
        assert torch.equal(decode(gpt2, drafter, ids, max_new_tokens=room)[0], truth)


@pytest.mark.parametrize("options", [{"transform": "merge"}, {"symbols": 0}, {"candidates": 0}])
def test_bad_options_are_refused(llama, options):
    with pytest.raises(ValueError, match="transform is prefixes"):
        decode(llama, make_drafter(llama), torch.tensor([[1]]), **options)


def test_bad_configs_are_refused(llama):
    with pytest.raises(ValueError, match="ctc or medusa"):
        make_drafter(llama, kind="eagle")
    with pytest.raises(ValueError, match="at least 1"):
        make_drafter(llama, slots=0)
