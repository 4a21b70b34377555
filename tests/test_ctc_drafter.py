"""ctc_drafter.py: lossless decoding whatever the slots say; loss and transform by brute force."""

import collections
import itertools
import math

import pytest
import torch
from tiny import chi_square_p_value, enumerate_joint, make_llama, slow, teach
from transformers import GPT2Config, GPT2LMHeadModel

import common
import ctc_drafter
import train
from support import packed

TRANSFORMS = ("prefixes", "alignments", "none")
KINDS = ("ctc", "transformer", "medusa")


def make_drafter(target, **options):
    settings = {"intermediate_size": 48, "draft_vocab": 0, "anchors": 6, "slots": 8, "window": 4}
    config = ctc_drafter.Config(target=common.target_shape(target), **settings | options)
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return ctc_drafter.build(config, target, counts).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    output = target.generate(ids, custom_generate=ctc_drafter.generate, drafter=drafter, **options)
    return output, options["stats"]


def make_batch(target, lengths=(9, 14, 7), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, [], None)
    seeds = torch.arange(len(lengths)) + 7
    return train.make_batch(range(len(lengths)), sequences, features, seeds, 0.0, "cpu")


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter of each kind that has seen a little of what the target says."""
    drafters = {kind: make_drafter(llama, kind=kind, anchors=16) for kind in ("ctc", "medusa")}
    for drafter in drafters.values():
        teach(ctc_drafter, drafter, llama, 80, 1e-2)
    return drafters


@pytest.fixture
def slots_say(monkeypatch):
    """Call with a function from committed ids (1, T) to what the slots hold, None for a blank."""

    def install(script, noise=0.0):
        def propose(drafter, target, input_ids, features, memory):
            vocab = target.config.vocab_size
            frames = [vocab if symbol is None else symbol for symbol in script(input_ids)]
            q_slots = torch.full((len(frames), vocab + 1), noise / vocab)
            q_slots[torch.arange(len(frames)), frames] = 1 - noise
            return q_slots

        monkeypatch.setattr(ctc_drafter, "propose", propose)

    return install


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("length", [1, slow(2), slow(13)])
def test_greedy_output_is_the_targets(llama, trained, length):
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=16, do_sample=False)
    random = [
        make_drafter(llama, slots=1, window=1),
        make_drafter(llama, slots=5, window=2, draft_vocab=9),
        make_drafter(llama, kind="medusa", window=3),
        make_drafter(llama, kind="transformer", window=3),
    ]
    extras = ({}, {"copies": 6}, {"least_worth": 0.02}, {"copies": 6, "least_worth": 0.3})
    turn = 0
    for drafter in (*trained.values(), *random):
        for transform in TRANSFORMS:
            turn += 1
            nodes = 1 if turn % 5 == 0 else 20
            options = {"transform": transform, "nodes": nodes} | extras[turn % len(extras)]
            output, stats = decode(llama, drafter, ids, max_new_tokens=16, **options)
            assert torch.equal(output, truth), options
            assert stats.emitted == 16 and sum(stats.accepted) + stats.target_forwards == 16
            copied = sum(offered for offered, _ in stats.copies)
            assert stats.drafted - copied <= nodes * stats.target_forwards


def test_copies_and_worthless_prefixes(llama, trained):
    """A prompt that repeats itself is copied from; what is worth too little is not drafted."""
    drafter, start = trained["ctc"], torch.tensor([[9, 8, 7]])
    text = llama.generate(start, max_new_tokens=30, do_sample=False, suppress_tokens=[0])
    ids = torch.cat([text, start], dim=1)
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    drafted = {}
    for least in (0.0, 0.1, 2.0):
        for copies in (0, 6):
            options = {"least_worth": least, "copies": copies, "max_new_tokens": 30}
            output, stats = decode(llama, drafter, ids, **options)
            assert torch.equal(output, truth)
            drafted[least, copies] = stats.drafted
            assert (sum(offered for offered, _ in stats.copies) > 0) == (copies > 0)
    assert drafted[0.0, 0] > drafted[0.1, 0] > drafted[2.0, 0] == 0
    assert drafted[2.0, 6] > 0, "copies need no prefix"


def test_trained_drafters_are_accepted_sometimes_and_refused_sometimes(llama, trained):
    for drafter in trained.values():
        _, stats = decode(llama, drafter, torch.tensor([[3]]), max_new_tokens=100)
        assert 0 < sum(stats.accepted) < stats.drafted and len(set(stats.accepted)) > 2


def test_a_repeat_merged_in_the_middle_keeps_positions_and_cache_right(llama, slots_say):
    """Breaks a tree whose nodes are masked out after it was built: what follows shifts by one."""
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
    from tiny import make_llama

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

    def script(committed):
        a, b, c, d = (truth[0].tolist() + [0] * 4)[committed.shape[1] :][:4]
        return [a, None, b, None, c, None, d, None]

    slots_say(script)
    for place in range(3, 12):
        eos = int(truth[0, place])
        expected = llama.generate(ids, max_new_tokens=37, do_sample=False, eos_token_id=eos)
        output, _ = decode(llama, drafter, ids, eos_token_id=eos, max_new_tokens=37)
        assert torch.equal(output, expected)
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
        output, _ = decode(llama, trained["ctc"], ids, max_new_tokens=30, **options)
        assert torch.equal(output, expected)


def sampled(target, drafter, ids, times):
    """How often each answer of three tokens comes, over all transforms, copies and worths."""
    options = [{"transform": transform} for transform in TRANSFORMS]
    options += [{"copies": 6}, {"copies": 6, "least_worth": 0.15}, {"least_worth": 0.15}]
    torch.manual_seed(12)
    counts, copied, drafted = collections.Counter(), 0, 0
    settings = {"max_new_tokens": 3, "do_sample": True, "top_k": 0}
    for turn in range(times):
        output, stats = decode(target, drafter, ids, **settings, **options[turn % len(options)])
        counts[tuple(output[0, ids.shape[1] :].tolist())] += 1
        copied += sum(offered for offered, _ in stats.copies)
        drafted += stats.drafted
    assert drafted > copied > 0  # else the test says nothing
    return counts


def test_sampling_follows_the_target(small_llama):
    drafter, ids = make_drafter(small_llama, slots=4, window=2), torch.tensor([[1, 4, 2, 1, 4]])
    counts = sampled(small_llama, drafter, ids, 360)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, ids, 3)) > 1e-3


@pytest.mark.slow
def test_the_chi_square_sees_a_lossy_rule(small_llama, monkeypatch):
    """Negative control: to take any drafted token among the target's best two is not sampling."""
    drafter, ids = make_drafter(small_llama, slots=4, window=2), torch.tensor([[1, 4, 2, 1, 4]])

    def lossy(scores, siblings, draft):
        best = scores.topk(2).indices.tolist()
        drafted = [token for token in draft.tokens.tolist() if token in best]
        return drafted[0] if drafted else int(torch.multinomial(scores.softmax(-1), 1))

    monkeypatch.setattr(common, "_draw", lossy)
    counts = sampled(small_llama, drafter, ids, 300)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, ids, 3)) < 1e-6


# --------------------------------------------------------------------------------- masks, alignment


def test_the_mask_against_a_loop():
    anchors, length, slots = torch.tensor([[0, 2, 5], [4, 4, 1]]), 6, 3
    got = ctc_drafter.slot_mask(anchors, length, slots)
    expected = torch.zeros(2, 1, 9, 15, dtype=torch.bool)
    for b, query, key in itertools.product(range(2), range(9), range(15)):
        if key < length:
            expected[b, 0, query, key] = key <= int(anchors[b, query // slots])
        else:
            expected[b, 0, query, key] = (key - length) // slots == query // slots
    assert got is not None and torch.equal(got, expected), (
        f"slot_mask(anchors={anchors.tolist()}, length={length}, slots={slots})\n"
        f"expected\n{drawn(expected)}\ngot\n{drawn(got)}"
    )


def drawn(mask):
    """The masks (B, 1, Q, K) as in the docstring, x where a slot sees."""
    if mask is None:
        return "None"
    lines = []
    for sequence in mask[:, 0].tolist():
        lines += ["".join("x" if sees else "." for sees in row) for row in sequence] + [""]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_is_what_was_trained(llama, kind):
    """The slots after a newest token are the same in one training pass as round by round."""
    drafter, batch = make_drafter(llama, kind=kind), make_batch(llama, lengths=(12,), prompt=1)
    anchors = torch.arange(11)[None]
    logits = ctc_drafter.training_logits(drafter, llama, batch, anchors)
    q_slots = logits.softmax(-1)[0]  # (A, S, V + 1)
    memory, fed = ctc_drafter.new_memory(drafter, llama), 0
    for end in (3, 4, 8, 12):  # tokens committed; the features of all but the newest are there
        ids, features = batch.input_ids[:, :end], batch.hidden[:, fed : end - 1]
        q_round = ctc_drafter.propose(drafter, llama, ids, features, memory)
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
    drafter = make_drafter(llama, anchors=20, window=4)
    batch = make_batch(llama, lengths=(9, 14, 7), prompt=prompt)
    anchors, labels, counts = ctc_drafter.windows(drafter, llama, batch)
    best = common.target_logits(llama, batch.hidden).argmax(-1)  # best[t] follows x_t
    for row, length in enumerate((9, 14, 7)):
        used = {int(a): n for n, a in enumerate(anchors[row]) if counts[row, n]}
        assert sorted(used) == list(range(max(prompt, 2) - 2, length - 2))  # labels from a + 2 on
        for anchor, n in used.items():
            count = int(counts[row, n])
            assert count == min(4, length - (anchor + 2))
            expected = best[row, anchor + 1 : anchor + 1 + count]
            assert labels[row, n, :count].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_which_no_anchor_teaches_gives_zeros(llama, kind):
    """The only token to learn stands at place 1, which no row goes before."""
    drafter = make_drafter(llama, kind=kind, first_token=0.5).train()
    batch = make_batch(llama, lengths=(5, 2), prompt=1)
    batch.loss_mask[:, 2:] = False
    assert batch.loss_mask.any()
    value = ctc_drafter.loss(drafter, llama, batch)
    value.backward()
    assert value.dtype == torch.float32 and float(value.detach()) == 0
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None and not weight.grad.any(), name


@pytest.mark.parametrize("draft_vocab", [0, 30])
def test_cut_labels_end_where_the_data_differs(llama, draft_vocab):
    """The label there is kept: it was asked after data that agreed so far."""
    options = {"anchors": 20, "window": 4, "draft_vocab": draft_vocab}
    lengths = (9, 14, 7)
    batch = make_batch(llama, lengths)
    best = common.target_logits(llama, batch.hidden).argmax(-1)
    for row, place in itertools.product(range(3), (4, 5, 8, 9, 10)):  # make the data agree there
        if place < lengths[row]:
            batch.input_ids[row, place] = best[row, place - 1]
    whole = ctc_drafter.windows(make_drafter(llama, **options), llama, batch)
    drafter = make_drafter(llama, cut_labels=True, **options)
    anchors, labels, counts = ctc_drafter.windows(drafter, llama, batch)
    assert torch.equal(anchors, whole[0]) and torch.equal(labels, whole[1])
    seen = set()
    for row, n in itertools.product(range(3), range(anchors.shape[1])):
        expected = int(whole[2][row, n])
        for place in range(expected - 1, -1, -1):
            data = int(batch.input_ids[row, anchors[row, n] + 2 + place])
            if data != int(drafter.draft_ids[labels[row, n, place]]):
                expected = place + 1
        assert int(counts[row, n]) == expected
        seen.add(expected)
    assert seen == {0, 1, 2, 3, 4} if not draft_vocab else {0, 1, 2} <= seen


def test_first_labels_are_drawn_anew_by_each_seed(llama):
    """Equal seeds give equal anchors; other seeds other ones; in the long run all come up."""
    drafter, batch = make_drafter(llama, anchors=3), make_batch(llama, lengths=(30, 30), prompt=1)
    draws = []
    for step in range(40):
        batch.seed = torch.tensor([step, step + 1000])
        anchors, _, counts = ctc_drafter.windows(drafter, llama, batch)
        assert torch.equal(anchors, ctc_drafter.windows(drafter, llama, batch)[0])
        assert counts.all() and all(len(set(row)) == 3 for row in anchors.tolist())
        draws += [tuple(row) for row in anchors.tolist()]
    assert len(set(draws)) > 70, "the same anchors in every step"
    assert {place for draw in draws for place in draw} == set(range(28))


# ---------------------------------------------------------------------------------- loss, transform


def by_collapsing(q_slots):
    """{sequence: probability} by summing over every alignment."""
    blank, exact = q_slots.shape[1] - 1, collections.defaultdict(float)
    for alignment in itertools.product(range(blank + 1), repeat=len(q_slots)):
        chosen = [float(q_slots[slot, symbol]) for slot, symbol in enumerate(alignment)]
        exact[ctc_drafter.collapse(alignment, blank)] += math.prod(chosen)
    return exact


def beginnings(q_slots):
    """{prefix: probability that the sequence begins with it}, over every alignment."""
    starts = collections.defaultdict(float)
    for sequence, probability in by_collapsing(q_slots).items():
        for end in range(1, len(sequence) + 1):
            starts[sequence[:end]] += probability
    return {prefix: probability for prefix, probability in starts.items() if probability > 0}


def some_slots(slots=4, symbols=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(slots, symbols + 1, generator=generator, dtype=torch.double)
    return scores.softmax(-1).detach()


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
    counts = torch.tensor([[3, 3, 2, 1, 3]])  # two windows are cut short
    q_slots = torch.stack([some_slots(seed=seed) for seed in range(5)])
    anchors = torch.zeros(1, 5).long()
    monkeypatch.setattr(ctc_drafter, "windows", lambda *_: (anchors, labels, counts))
    monkeypatch.setattr(ctc_drafter, "training_logits", lambda *_: q_slots.log()[None])
    expected = 0.0
    for row, count in enumerate(counts[0].tolist()):
        exactly, begins = by_collapsing(q_slots[row]), beginnings(q_slots[row])
        window = tuple(labels[0, row, :count].tolist())
        if window in begins:  # (1, 1, 1) does not fit into four slots: it needs five
            expected -= math.log(exactly[window] if count == 3 else begins[window])
    got = float(ctc_drafter.loss(drafter, llama, batch)) / int(batch.loss_mask.sum()) * 5
    assert by_collapsing(q_slots[4])[(1, 1, 1)] == 0 and got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_ctc_loss_of_cut_windows_sums_all_alignments_that_begin_so(slots):
    """Every window of up to three labels, also those that need more slots than there are."""
    q_slots = some_slots(slots=slots, symbols=2, seed=slots)
    exact = beginnings(q_slots)
    windows = [w for n in (1, 2, 3) for w in itertools.product(range(2), repeat=n)]
    labels = torch.tensor([(*window, 0, 1, 0)[:4] for window in windows])  # the rest is not read
    counts = torch.tensor([len(window) for window in windows])
    logits = q_slots.float().log().expand(len(windows), -1, -1).clone().requires_grad_()
    got = ctc_drafter.ctc_loss(logits.log_softmax(-1), labels, counts)
    expected = [-math.log(exact.get(window, 1.0)) for window in windows]
    torch.testing.assert_close(got.detach(), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    got.sum().backward()
    fits = torch.tensor([window in exact for window in windows])
    assert logits.grad.isfinite().all() and not logits.grad[~fits].any()
    assert slots < 5 or fits.all()


def test_ctc_loss_of_cut_windows_has_the_gradients_of_a_brute_force_sum():
    logits = some_slots(slots=4, symbols=2, seed=3).log().requires_grad_()
    log_q, window = logits.log_softmax(-1), (1, 1)
    terms = []
    for alignment in itertools.product(range(3), repeat=4):
        if ctc_drafter.collapse(alignment, 2)[:2] == window:
            terms.append(log_q[range(4), alignment].sum())
    (expected,) = torch.autograd.grad(-torch.stack(terms).logsumexp(0), logits, retain_graph=True)
    labels, counts = torch.tensor([[*window, 0]]), torch.tensor([2])
    (got,) = torch.autograd.grad(ctc_drafter.ctc_loss(log_q[None], labels, counts).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_ctc_loss_of_what_is_almost_impossible_is_finite():
    """Below the smallest float32, and beside alignments that are impossible."""
    logits = torch.zeros(2, 6, 5)
    logits[..., 0] = 80.0
    logits.requires_grad_()
    log_q, counts = logits.log_softmax(-1), torch.tensor([3, 2])
    got = ctc_drafter.ctc_loss(log_q, torch.tensor([[1, 1, 1, 0], [2, 3, 0, 0]]), counts)
    got.sum().backward()
    assert got.tolist() == pytest.approx([400, 160])  # slots but the last ones must not say 0
    assert logits.grad.isfinite().all() and logits.grad.any()


def test_whole_windows_have_the_loss_and_the_gradients_of_torch():
    """The paper's loss, which also says where the sequence ends; repeats, too many of them also."""
    labels = torch.tensor([*itertools.product(range(3), repeat=3)])  # (27, 3)
    counts, frames = torch.full((27,), 3), torch.full((27,), 4)
    logits = torch.randn(27, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    log_q = logits.log_softmax(-1)
    options = {"blank": 3, "reduction": "none", "zero_infinity": True}
    by_slot = log_q.transpose(0, 1)
    expected = torch.nn.functional.ctc_loss(by_slot, labels, frames, counts, **options)
    got = ctc_drafter.ctc_loss(log_q, labels, counts)
    torch.testing.assert_close(got, expected)
    assert int((got == 0).sum()) == 3  # 0 0 0, 1 1 1 and 2 2 2 take five slots
    (theirs,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad(got.sum(), logits)
    torch.testing.assert_close(ours, theirs)


def test_only_windows_that_were_cut_are_scored_as_beginnings():
    q_slots = some_slots(seed=1)
    exactly, begins = by_collapsing(q_slots), beginnings(q_slots)
    log_q, labels = q_slots.log().expand(2, -1, -1), torch.tensor([[2, 1], [2, 1]])
    got = ctc_drafter.ctc_loss(log_q, labels, torch.tensor([2, 1])).exp()
    assert got.tolist() == pytest.approx([1 / exactly[2, 1], 1 / begins[2,]])


def test_a_window_that_does_not_fit_gives_no_gradient_and_no_nan(llama, monkeypatch):
    drafter, batch = make_drafter(llama, slots=2, window=3), make_batch(llama)
    anchors, _, _ = ctc_drafter.windows(drafter, llama, batch)
    ones = torch.ones(*anchors.shape, 3, dtype=torch.long)
    monkeypatch.setattr(ctc_drafter, "windows", lambda *_: (anchors, ones, ones.sum(-1)))
    loss = ctc_drafter.loss(drafter.train(), llama, batch)
    loss.backward()
    assert not loss and all(not w.grad.any() for w in drafter.parameters() if w.grad is not None)


@pytest.mark.parametrize("kind", ["transformer", "medusa"])
def test_cross_entropy_by_hand(llama, monkeypatch, kind):
    """Slot j is for token j, and weighs 0.8^j."""
    drafter, batch = make_drafter(llama, kind=kind, window=2), make_batch(llama)
    logits = torch.randn(1, 2, 2, 5, dtype=torch.double)
    logits[..., -1] = -torch.inf
    anchors = torch.zeros(1, 2).long()
    labels, counts = torch.tensor([[[1, 2], [3, 0]]]), torch.tensor([[2, 1]])
    monkeypatch.setattr(ctc_drafter, "windows", lambda *_: (anchors, labels, counts))
    monkeypatch.setattr(ctc_drafter, "training_logits", lambda *_: logits)
    log_q = logits[0].float().log_softmax(-1)
    expected = -(log_q[0, 0, 1] + 0.8 * log_q[0, 1, 2] + log_q[1, 0, 3]) / 2 * batch.loss_mask.sum()
    torch.testing.assert_close(ctc_drafter.loss(drafter, llama, batch).float(), expected)


@pytest.mark.parametrize("kind", ["transformer", "medusa"])
def test_other_kinds_have_by_definition_a_slot_for_each_token(llama, kind):
    drafter, batch = make_drafter(llama, kind=kind, window=3), make_batch(llama)
    anchors, _, _ = ctc_drafter.windows(drafter, llama, batch)
    logits = ctc_drafter.training_logits(drafter, llama, batch, anchors)
    assert logits.shape[2] == 3 and (logits[..., -1] == -torch.inf).all()
    assert logits[..., :-1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_first_token_adds_a_cross_entropy_by_hand(small_llama, kind):
    """Of the first token's distribution, over all alignments, to the target's."""
    drafter = make_drafter(small_llama, kind=kind, slots=3, window=2)
    batch = make_batch(small_llama, lengths=(8, 6), prompt=3)
    anchors, _, counts = ctc_drafter.windows(drafter, small_llama, batch)
    logits = ctc_drafter.training_logits(drafter, small_llama, batch, anchors)
    q_slots, entropy = logits.softmax(-1).detach(), 0.0
    for row, n in counts.nonzero().tolist():
        starts = beginnings(q_slots[row, n])
        ids = batch.input_ids[row, : anchors[row, n] + 2]
        p_target = small_llama(ids[None]).logits[0, -1].softmax(-1)
        for token, p in enumerate(p_target[drafter.draft_ids].tolist()):
            entropy -= p * math.log(starts[token,])
    mean = entropy / int((counts > 0).sum())
    plain = ctc_drafter.loss(drafter, small_llama, batch)
    drafter.config.first_token = 0.7
    more = ctc_drafter.loss(drafter, small_llama, batch)
    expected = 0.7 * mean * int(batch.loss_mask.sum())
    assert float((more - plain).detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(llama, kind):
    drafter, batch = make_drafter(llama, kind=kind, first_token=0.5).train(), make_batch(llama)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for _ in range(12):
        loss = ctc_drafter.loss(drafter, llama, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        assert all(w.grad is not None and w.grad.isfinite().all() for w in drafter.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]


def test_first_target_is_of_the_whole_vocabulary(llama):
    """What cannot be drafted keeps its share: the rows sum to less than 1."""
    drafter, batch = make_drafter(llama, draft_vocab=9), make_batch(llama)
    anchors = torch.tensor([[0, 3]] * len(batch.input_ids))
    got = ctc_drafter.first_target(drafter, llama, batch, anchors)  # (B, 2, 9)
    whole = llama(batch.input_ids).logits.softmax(-1)  # (B, T, V)
    expected = whole[:, [1, 4]][..., drafter.draft_ids]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_prefix_search_sums_all_alignments(seed):
    q_slots = some_slots(seed=seed)
    exact = beginnings(q_slots)
    found = ctc_drafter.prefix_search(q_slots, symbols=3, candidates=1000)
    wrong = {
        prefix: (round(exact.get(prefix, 0.0), 4), round(found.get(prefix, 0.0), 4))
        for prefix in sorted(exact.keys() | found.keys())
        if found.get(prefix) != pytest.approx(exact.get(prefix))
    }
    lines = [f"{prefix}: expected {a}, got {b}" for prefix, (a, b) in wrong.items()]
    assert not wrong, f"prefix_search of the slots, blank last\n{q_slots}\n" + "\n".join(lines[:5])
    pruned = ctc_drafter.prefix_search(q_slots, symbols=2, candidates=3)
    assert 0 < len(pruned) < len(exact)
    assert all(pruned[prefix] <= exact[prefix] + 1e-12 for prefix in pruned)


def test_prefix_search_on_the_two_slots_of_its_docstring():
    q_slots = torch.tensor([[0.6, 0.0, 0.4], [0.2, 0.5, 0.3]], dtype=torch.double)  # a, b, blank
    found = ctc_drafter.prefix_search(q_slots, symbols=2, candidates=9)
    assert found == pytest.approx({(0,): 0.68, (1,): 0.20, (0, 1): 0.30})


def test_alignments_are_the_most_probable_combinations():
    q_slots = some_slots(slots=3, symbols=4, seed=2)
    value = {}
    for raw in itertools.product(range(5), repeat=3):
        value[raw] = math.prod(float(q_slots[slot, symbol]) for slot, symbol in enumerate(raw))
    for merge in (True, False):
        expected = collections.defaultdict(float)
        for raw in sorted(value, key=value.get, reverse=True)[:7]:
            sequence = tuple(itertools.takewhile(lambda symbol: symbol != 4, raw))
            if merge:
                sequence = ctc_drafter.collapse(raw, 4)
            for end in range(1, len(sequence) + 1):
                expected[sequence[:end]] += value[raw]
        found = ctc_drafter.alignments(q_slots.float(), symbols=4, candidates=7, merge=merge)
        assert found == pytest.approx(expected, rel=1e-4)


def test_symbols_and_candidates_are_those_of_the_config(llama, monkeypatch):
    asked, search = [], ctc_drafter.prefix_search

    def noted(q_slots, symbols, candidates):
        asked.append((symbols, candidates))
        return search(q_slots, symbols, candidates)

    monkeypatch.setattr(ctc_drafter, "prefix_search", noted)
    drafter = make_drafter(llama, symbols=3, candidates=5)
    decode(llama, drafter, torch.tensor([[9, 8, 7]]), max_new_tokens=4)
    decode(llama, drafter, torch.tensor([[9, 8, 7]]), max_new_tokens=4, symbols=2)
    assert set(asked) == {(3, 5), (2, 5)}


def test_the_tree_is_a_trie_of_the_most_valuable_prefixes():
    worth = {(3,): 0.6, (3, 5): 0.4, (3, 5, 5): 0.1, (4,): 0.3, (4, 5): 0.25, (6,): 0.05}
    draft = ctc_drafter.token_tree(worth, torch.arange(10) * 10, nodes=4, depth=9)
    assert draft.tokens.tolist() == [30, 50, 40, 50] and draft.parents.tolist() == [-1, 0, -1, 2]
    assert draft.probs is None
    shallow = ctc_drafter.token_tree(worth, torch.arange(10), nodes=9, depth=1)
    assert shallow.tokens.tolist() == [3, 4, 6] and shallow.parents.tolist() == [-1, -1, -1]
    assert len(ctc_drafter.token_tree(worth, torch.arange(10), nodes=9, depth=0).tokens) == 0
    rounded = {(3,): 0.5, (3, 5): 0.5000001}  # sums of the same terms in another order
    assert ctc_drafter.token_tree(rounded, torch.arange(10), 9, 9).tokens.tolist() == [3]
    for least, tokens in ((0.0, [3, 5, 4, 5, 5, 6]), (0.25, [3, 5, 4, 5]), (0.3, [3, 5, 4])):
        draft = ctc_drafter.token_tree(worth, torch.arange(10), 9, 9, least)
        assert draft.tokens.tolist() == tokens
    nothing = ctc_drafter.token_tree(worth, torch.arange(10), 9, 9, 0.7)
    assert nothing.tokens.dtype == nothing.parents.dtype == torch.long
    assert nothing.tokens.shape == nothing.parents.shape == (0,)


def test_alpha_is_the_acceptance_rate_of_the_first_draft_token(small_llama):
    drafter = make_drafter(small_llama, slots=3, window=2)
    batch = make_batch(small_llama, lengths=(8,), prompt=3)
    anchors, _, counts = ctc_drafter.windows(drafter, small_llama, batch)
    logits = ctc_drafter.training_logits(drafter, small_llama, batch, anchors)
    q_slots, expected = logits.softmax(-1).detach(), 0.0
    for n in counts[0].nonzero()[:, 0].tolist():
        starts, ids = beginnings(q_slots[0, n]), batch.input_ids[:, : anchors[0, n] + 2]
        p_target = small_llama(ids).logits[0, -1].softmax(-1)
        for token, p in enumerate(p_target[drafter.draft_ids].tolist()):
            expected += min(p, starts[token,])
    total, count = ctc_drafter.alpha(drafter, small_llama, batch)
    assert count == int((counts > 0).sum()) == 5
    assert float(total.detach()) == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------- others


def test_a_round_can_be_recorded(llama, trained):
    """What the slots said and what the prefixes are worth, for each round that drafted."""
    stats = common.Stats(trace=[])
    decode(llama, trained["ctc"], torch.tensor([[9, 8, 7]]), stats=stats)
    assert len(stats.trace) == stats.target_forwards > 1
    drafted = [record for record in stats.trace if "worth" in record]
    assert len(drafted) >= len(stats.trace) - 1  # there is nothing to draft for a last token
    for record in drafted:
        assert record["q_slots"].shape == (8, 49)
        worth, ids = record["worth"], record["draft_ids"]
        for node, parent in enumerate(record["draft"].parents.tolist()):
            if parent == -1:
                token = record["draft"].tokens[node]
                assert worth[int((ids == token).nonzero()),] > 0
    _, stats = decode(llama, trained["ctc"], torch.tensor([[9, 8, 7]]))
    assert stats.trace is None and not stats.noted
    stats = common.Stats(trace=[])
    decode(llama, trained["ctc"], torch.tensor([[9, 8, 7]]), stats=stats, max_new_tokens=1)
    assert "worth" not in stats.trace[0]


def test_saved_and_loaded(llama, trained, tmp_path):
    for kind, drafter in trained.items():
        drafter.save_pretrained(tmp_path / kind)
        again = common.load_drafter(ctc_drafter.Drafter, tmp_path / kind, llama)
        assert again.config == drafter.config
        theirs = drafter.state_dict()
        for name, weight in again.state_dict().items():  # float32 on the way
            torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)


def test_the_layer_and_the_final_norm_start_as_the_targets():
    target = make_llama()
    for place, norm in enumerate(p for p in target.parameters() if p.dim() == 1):
        norm.fill_(0.5 + place)  # a random target's are all 1, as a new drafter's are
    drafter = make_drafter(target)
    for name, theirs in target.model.layers[-1].named_parameters():
        torch.testing.assert_close(drafter.get_parameter(name), theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)


def test_low_precision_packed_and_models_without_rotary(trained, llama):
    import copy

    ids = torch.tensor([[9, 8, 7]])
    for target in (packed.pack(copy.deepcopy(llama).float()), copy.deepcopy(llama).bfloat16()):
        drafter = copy.deepcopy(trained["ctc"]).to(target.dtype)
        assert decode(target, drafter, ids)[0].shape == (1, 43)
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**shape, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    gpt2 = GPT2LMHeadModel(config).double().eval()
    drafter = make_drafter(gpt2)
    ctc_drafter.loss(drafter, gpt2, make_batch(gpt2)).backward()
    for room in (30, 61):  # up to the last position of the model
        truth = gpt2.generate(ids, max_new_tokens=room, do_sample=False)
        assert torch.equal(decode(gpt2, drafter, ids, max_new_tokens=room)[0], truth)


@pytest.mark.parametrize("options", [{"transform": "merge"}, {"symbols": 0}, {"candidates": 0}])
def test_bad_options_are_refused(llama, options):
    with pytest.raises(ValueError, match="prefixes, alignments or none"):
        decode(llama, make_drafter(llama), torch.tensor([[1]]), **options)


def test_bad_configs_are_refused(llama):
    with pytest.raises(ValueError, match="ctc, transformer or medusa"):
        make_drafter(llama, kind="eagle")
    with pytest.raises(ValueError, match="slots 0: must be at least 1"):
        make_drafter(llama, slots=0)
