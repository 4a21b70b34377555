"""falcon.py: what a draft holds, its passes, masks, CSGD, the loss, trees."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from chat import refused
from tiny import (
    Table,
    check,
    drawn,
    make_llama,
    paths,
    random_batch,
    untrained,
)

import common
import falcon

make_drafter = partial(untrained, falcon, seed=5)


def random_ids(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 48, (1, length), generator=generator)


# ----------------------------------------------------------------------------- decoding


def from_scratch(drafter, target, ids, branch):
    """Logits (k, Vd) after committed and drafted tokens, attended block by block."""
    k = drafter.config.k
    total = ids.shape[1] - 1
    hidden = common.target_features(target, ids)[0][:, :-1]
    tokens = torch.cat([ids, ids.new_tensor([branch])], dim=1)[:, 1:]
    for end in range(total, total + len(branch) + 1, k):
        fused, _ = drafter.fuse(target, hidden, tokens[:, :end])
        mask = falcon.relaxed_mask(end, k, torch.tensor([-total % k]))
        h_draft = drafter.attend(target, fused, torch.arange(end)[None], mask)[:, -k:]
        hidden = torch.cat([hidden, h_draft], dim=1)
    return common.draft_head(target, drafter.vocab_ids)(h_draft[0])


def scores_of(path, drafter, target, ids, tokens):
    """Logits (Vd,) that a node is drafted from, by its own branch; tokens: {path:
    token} of all nodes.
    """
    k = drafter.config.k
    start = (len(path) - 1) // k * k
    branch = [tokens[path[:end]] for end in range(1, start + 1)]
    return from_scratch(drafter, target, ids, branch)[len(path) - start - 1]


@pytest.mark.parametrize("k, fusion", [(1, "lstm"), (2, "lstm"), (3, "linear")])
@torch.no_grad()
def test_a_tree_holds_what_each_branch_alone_would_give(llama, k, fusion):
    """Every node of a tree of three passes, by attending only to its own branch."""
    drafter = make_drafter(llama, k=k, fusion=fusion, num_layers=2, draft_vocab=20)
    tree = []
    for path in ([1, 0, 2] * 3, [0] * 9, [1, 0, 2, 0, 1, 0, 0, 2, 1], [0, 2, 1] * 3):
        tree += [path[:end] for end in range(1, 3 * k + 1)]
    tree = dataclasses.replace(drafter.config, tree=tree).tree
    for length in range(k + 1, 2 * k + 1):
        ids = random_ids(length, seed=length)
        decoding = common.start(llama, input_ids=ids, max_new_tokens=20)
        draft = next(falcon.drafts(decoding, drafter, tree=tree))
        tokens = dict(zip(map(tuple, tree), draft.tokens.tolist()))
        assert len(draft.tokens) == len(tree) and draft.probs is None
        assert draft.notes["k"] == k
        for node, path in enumerate(tokens):
            parent = tree.index(list(path[:-1])) if len(path) > 1 else -1
            assert draft.parents[node] == parent
            slot = scores_of(path, drafter, llama, decoding.ids, tokens).softmax(-1)
            choice = slot.argsort(descending=True)[path[-1]]
            assert tokens[path] == int(drafter.vocab_ids[choice]), path
            expected = pytest.approx(float(slot[choice]), rel=1e-4)
            assert draft.notes["q"][node] == expected


@pytest.mark.parametrize("k, passes", [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_a_pass_drafts_k_levels(llama, monkeypatch, k, passes):
    """Table 5: a tree of four levels."""
    fed = []
    attend = falcon.Drafter.attend

    def counted(self, target, x, *given):
        fed.append(x.shape[1])
        return attend(self, target, x, *given)

    monkeypatch.setattr(falcon.Drafter, "attend", counted)
    drafter = make_drafter(llama, k=k, tree=falcon.layered_tree([3, 4, 1, 1]))
    options = {"input_ids": random_ids(6, seed=0), "max_new_tokens": 20}
    draft = next(falcon.drafts(common.start(llama, **options), drafter))
    assert len(draft.tokens) == 9 and len(fed) == passes


@pytest.mark.parametrize("k", [2, 3])
@torch.no_grad()
def test_a_prompt_is_read_as_if_attended_at_once(k):
    """`first_pass` lets 256 blocks attend at a time; the first may be incomplete."""
    target = make_llama(max_position_embeddings=2048)
    drafter = make_drafter(target, k=k)
    for total in (256 * k, 256 * k + 1, 512 * k + k // 2):
        ids = random_ids(total + 1, seed=total)
        decoding = common.start(target, input_ids=ids, max_new_tokens=1)
        memory = falcon.Memory(drafter, target)
        newest = falcon.first_pass(drafter, decoding, memory)
        expected = from_scratch(drafter, target, ids, [])
        torch.testing.assert_close(memory.head(newest.h_draft[0]), expected)
        assert newest.mask.shape == (1, total) and newest.mask.all()


@torch.no_grad()
def test_nothing_is_drafted_below_an_end_of_the_answer_or_beyond_its_room(llama):
    """Greedily: the rest of the tree is what it is without that end or limit."""
    drafter = make_drafter(llama, k=2)
    tree = falcon.layered_tree([3, 4, 4, 3, 2])

    def drafted(**given):
        given = {"input_ids": random_ids(9, seed=1), "max_new_tokens": 20} | given
        draft = next(falcon.drafts(common.start(llama, **given), drafter, tree=tree))
        return dict(zip(paths(draft), draft.notes.get("q", [])))

    whole = drafted()
    end = next(iter(whole))[0]  # the likeliest token
    left = {text: q for text, q in whole.items() if end not in text[:-1]}
    assert 3 <= len(left) < len(whole)
    assert drafted(eos_token_id=end) == pytest.approx(left)
    for room in range(7):
        left = {text: q for text, q in whole.items() if len(text) <= room}
        assert drafted(max_new_tokens=room + 1) == pytest.approx(left)


def test_only_the_tree_may_change(llama):
    decoding = common.start(llama, input_ids=random_ids(5, seed=2), max_new_tokens=8)
    drafter = make_drafter(llama)
    with refused("cannot change k: it can change tree$"):
        next(falcon.drafts(decoding, drafter, k=3))
    assert len(next(falcon.drafts(decoding, drafter, tree=[])).tokens) == 0


# ----------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_no_node_holds_a_token_that_cannot_be_drawn(llama, k):
    """Where fewer tokens are left than siblings, a node and all below it are missing.

    So are those below an end of the text. Siblings never hold one token twice. If the
    target may write only a token that the drafter does not know, the draft is empty.
    """
    drafter = make_drafter(llama, k=k, draft_vocab=4)
    wide = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [3, 0], [3, 0, 0], [0, 1, 0]]
    known = drafter.vocab_ids.tolist()
    given = {"do_sample": True, "max_new_tokens": 9, "eos_token_id": known[3]}
    pair = {"prefix_allowed_tokens_fn": lambda *_: [5, *known[1:3]], "top_k": 0}
    one = {"prefix_allowed_tokens_fn": lambda *_: known[:1], "top_k": 0}
    others = torch.arange(48) != 0  # which is not known
    forbid = [lambda _, scores: scores.masked_fill(others, -torch.inf)]
    none = {"logits_processor": forbid, "top_k": 0}
    cases = [(pair, 2), (one, 1), ({"top_k": 1}, 4), ({"top_p": 0.5}, 4), (none, 0)]
    for options, most in cases:
        for seed in range(8):
            torch.manual_seed(seed)
            ids = random_ids(7, seed)
            decoding = common.start(llama, input_ids=ids, **given, **options)
            draft = next(falcon.drafts(decoding, drafter, tree=wide))
            probs = () if draft.probs is None else draft.probs
            assert len(probs) == len(draft.tokens) == len(draft.parents)
            assert len(draft.children()) == len(draft.tokens), "a token twice"
            assert draft.parents.count(-1) == most
            for node, token in enumerate(draft.tokens.tolist()):
                assert draft.probs[node, token] > 0
                parent = draft.parents[node]
                assert parent < 0 or int(draft.tokens[parent]) != known[3]
            decoding.verify(draft)


def p_value(monkeypatch, k=2, sure=1.0, draws=800, **options):
    """Of answers of three tokens, drafted by passes that read from a table.

    sure: what the slots' logits are multiplied by; 0 makes all tokens alike.
    """
    table = Table(**options)
    drafter = make_drafter(table.target, k=k)
    generator = torch.Generator().manual_seed(3)
    slots = sure * torch.randn(5, k, 5, generator=generator)  # after each token

    def after(tokens):
        return SimpleNamespace(h_draft=slots[tokens])

    def first_pass(drafter, decoding, memory):
        return after(decoding.ids[0, -1:])

    def later_pass(drafter, decoding, memory, previous, continued, tokens):
        return after([fed[-1] for fed in tokens])

    monkeypatch.setattr(falcon, "first_pass", first_pass)
    monkeypatch.setattr(falcon, "later_pass", later_pass)
    memory = SimpleNamespace(head=lambda h_draft: h_draft)
    monkeypatch.setattr(falcon, "Memory", lambda *_: memory)
    tree = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    drafts = partial(falcon.drafts, drafter=drafter, tree=tree)
    return table.p_value(drafts, draws, length=3)


FILTERED = {"top_k": 3, "draws": 400}


@pytest.mark.parametrize("k, options", [(1, {"sure": 0}), (2, {}), (2, FILTERED)])
def test_sampled_trees_follow_the_target(monkeypatch, k, options):
    assert p_value(monkeypatch, k, **options) > 1e-3


# -------------------------------------------------------------------------------- masks


def test_relaxed_mask_drawing_and_definition():
    """The drawing of the docstring; then, for every k and phase, no later block."""
    expected = ["x....", "xxx..", "xxx..", "xxxxx", "xxxxx"]
    got = drawn(falcon.relaxed_mask(5, 2, torch.tensor([1])))
    check("relaxed_mask(length=5, k=2, phase=[1])", expected, got)
    for k in (1, 2, 3, 4):
        for phase in range(k):
            block = [(slot + phase) // k for slot in range(13)]
            expected = [
                "".join("x" if b <= own else "." for b in block) for own in block
            ]
            got = drawn(falcon.relaxed_mask(13, k, torch.tensor([phase])))
            check(f"relaxed_mask(length=13, k={k}, phase=[{phase}])", expected, got)
    both = falcon.relaxed_mask(3, 2, torch.tensor([0, 1]))  # a phase for each sequence
    call = "relaxed_mask(length=3, k=2, phase=[0, 1])"
    check(call, ["xx.", "xx.", "xxx", "x..", "xxx", "xxx"], drawn(both))
    check(f"{call}.shape", [(2, 1, 3, 3)], [tuple(both.shape)])


def test_the_branch_masks_of_the_docstring():
    committed = torch.ones(1, 3, dtype=torch.bool)
    second = falcon.branch_mask(committed, torch.tensor([0, 0, 0]), 2)
    check("branch_mask, pass 2", ["xxxxx....", "xxx..xx..", "xxx....xx"], drawn(second))
    third = falcon.branch_mask(second, torch.tensor([0, 2]), 2)
    check("branch_mask, pass 3", ["xxxxx....xx..", "xxx....xx..xx"], drawn(third))


# -------------------------------------------------------------------- CSGD and the loss


def glance(wrong, learns, rate, k, phase, seed=0):
    wrong, learns = (torch.tensor([[c == "x" for c in row]]) for row in (wrong, learns))
    torch.manual_seed(seed)
    return drawn(falcon.glance(wrong, learns, rate, k, torch.tensor([phase])))[0]


def test_glancing_worked_by_hand():
    """Cases (which are wrong, which learn, rate, k, phase): which are revealed."""
    cases = [
        # With k = 2 a run is one slot. N = 4 is the first slot of every block.
        ("xxxxxxxx", "xxxxxxxx", 0.5, 2, 0, "x.x.x.x."),
        # The first block and the last one are incomplete.
        ("xxxxxxxx", "xxxxxxxx", 0.5, 2, 1, ".x.x.x.."),
        ("xxxxxxxx", "xxxxxxxx", 0.0, 2, 0, "........"),  # the end of training
        ("........", "xxxxxxxx", 0.5, 2, 0, "........"),  # nothing was wrong
        # N = 3, but slot 2 is of the prompt.
        ("...xxxxx", "...xxxxx", 0.6, 2, 0, "....x.x."),
    ]
    for *inputs, expected in cases:
        call = "glance(wrong={}, learns={}, rate={}, k={}, phase=[{}])".format(*inputs)
        check(call, [expected], [glance(*inputs)])
    # k = 3: all outcomes of (which are wrong, which learn, rate, phase).
    outcomes = [
        # Two blocks: for N = 3 runs of two and one, or of one and one; then N = 2.
        ("xxxxxx", "xxxxxx", 0.5, 0, {"xx.x..", "x..xx.", "x..x.."}),
        ("xxxxxx", "xxxxxx", 0.34, 0, {"x..x..", "xx....", "...xx."}),
        # A block whose first slot does not learn is left out.
        (".xxxxx", ".xxxxx", 0.5, 0, {"...x..", "...xx."}),
        # The docstring's case is the first of these.
        (
            "xxxxxx.....",
            "xxxxxxxx...",
            0.5,
            1,
            {"..x..xx....", "..xx.x.....", "..x..x....."},
        ),
    ]
    for wrong, learns, rate, phase, expected in outcomes:
        got = {glance(wrong, learns, rate, 3, phase, seed) for seed in range(60)}
        call = f"glance(wrong={wrong}, learns={learns}, rate={rate}, k=3, "
        call += f"phase=[{phase}])"
        check(f"{call}: all outcomes of 60 calls", sorted(expected), sorted(got))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_glancing_against_the_definition(k):
    generator = torch.Generator().manual_seed(k)
    for _ in range(30):
        start = torch.randint(12, (3, 1), generator=generator)  # of the answer
        learns = torch.arange(41) >= start
        wrong = learns & (torch.rand(3, 41, generator=generator) < 0.5)
        phase = torch.randint(k, (3,), generator=generator)
        revealed = falcon.glance(wrong, learns, 0.4, k, phase)
        assert not (revealed & ~learns).any(), "a slot that does not learn was revealed"
        for row in range(3):
            count, exact = int(revealed[row].sum()), 0.4 * int(wrong[row].sum())
            assert abs(count - exact) <= 0.5, (
                f"expected N = {exact} rounded, got {count} revealed"
            )
            first = -int(phase[row]) % k
            assert not revealed[row, :first].any(), (
                "a slot of an incomplete first block"
            )
            for start in range(first, 41, k):
                run = revealed[row, start : start + k].tolist()
                if any(run):
                    length = sum(run)
                    assert run[:length] == [True] * length, "a run starts a block"
                    assert length < k, "the last slot of a block was revealed"
                    whole = learns[row, start : start + k]
                    assert len(whole) == k and whole.all(), "a slot does not learn"
    same = torch.ones(9, 41, dtype=torch.bool)
    several = drawn(falcon.glance(same, same, 0.1, k, torch.zeros(9, dtype=torch.long)))
    assert len(set(several)) > 1, "all sequences have the same slots revealed"


def test_noise_is_uniform_and_differs_everywhere():
    noise = falcon.noisy(torch.full((2, 90, 32), 5.0, dtype=torch.float64), 0.1) - 5
    assert -0.1 <= noise.min() < -0.099 and 0.099 < noise.max() <= 0.1
    assert abs(float(noise.mean())) < 0.003 and len(noise.unique()) == noise.numel()


@pytest.mark.parametrize("k, csgd", [(2, False), (2, True), (3, True)])
@torch.no_grad()
def test_loss_against_a_hand_worked_case(llama, k, csgd):
    """Every slot by itself: a forward over the blocks up to its own, three losses. The
    acceptance is the overlap of both distributions, when nothing is revealed.
    """
    batch = random_batch(llama)
    batch.progress = 0.25
    drafter = make_drafter(
        llama, k=k, csgd=csgd, noise=0.0, distill_weight=0.3, draft_vocab=30
    )
    head = common.draft_head(llama, drafter.vocab_ids)
    torch.manual_seed(9)  # so that `loss` begins with the same random numbers below
    phases = torch.randint(k, (3,))

    def forward(row, slot, revealed):
        phase = int(phases[row])
        hidden, tokens = batch.hidden[row : row + 1], batch.input_ids[row : row + 1]
        end = (slot + phase) // k * k + k - phase  # of the slot's block
        states, inputs = hidden[:, :end].clone(), tokens[:, 1 : end + 1].clone()
        for other in range(end):
            if (row, other) in revealed:
                states[0, other] = hidden[0, other + k]
                inputs[0, other] = tokens[0, other + k + 1]
        blocks = torch.tensor([(i + phase) // k for i in range(end)])
        mask = (blocks[:, None] >= blocks)[None, None]
        fused, _ = drafter.fuse(llama, states, inputs)
        h_draft = drafter.attend(llama, fused, torch.arange(end)[None], mask)[0, slot]
        return head(h_draft), h_draft

    slots = []
    for row, length in enumerate((9, 12, 7)):
        slots += [(row, slot) for slot in range(length - k - 1) if slot + k + 1 >= 3]
    overlap = 0.0
    truth = llama(batch.input_ids).logits.softmax(-1)
    for row, slot in slots:
        q_draft = forward(row, slot, set())[0].softmax(-1)
        p_target = truth[row, slot + k, drafter.vocab_ids]
        overlap += float(torch.minimum(p_target, q_draft).sum())
    revealed = set()
    if csgd:
        learns = torch.zeros(3, 11, dtype=torch.bool)
        wrong = learns.clone()
        for row, slot in slots:
            learns[row, slot] = True
            answer = head(batch.hidden[row, slot + k]).argmax()
            wrong[row, slot] = forward(row, slot, revealed)[0].argmax() != answer
        chosen = falcon.glance(wrong, learns, 0.4 * 0.75, k, phases)
        revealed = set(map(tuple, chosen.nonzero().tolist()))
        assert len(revealed) >= 3
    expected = 0.0
    for row, slot in slots:
        if (row, slot) not in revealed:
            logits, h_draft = forward(row, slot, revealed)
            answer = batch.hidden[row, slot + k]
            gap = (h_draft - answer).abs()
            smooth_l1 = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
            p_target, log_q = head(answer).softmax(-1), logits.log_softmax(-1)
            kl = (p_target * (p_target.log() - log_q)).sum()
            expected += float(
                smooth_l1 + 0.3 * (0.9 * kl - 0.1 * log_q[p_target.argmax()])
            )
    torch.manual_seed(9)
    total, weight = falcon.loss(drafter, llama, batch)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert int(weight) == len(slots) - len(revealed)
    torch.manual_seed(9)
    total, count = falcon.acceptance(drafter, llama, batch)
    assert count == len(slots) and float(total) == pytest.approx(overlap, rel=1e-5)


def test_a_sequence_shorter_than_a_block_gives_no_loss(llama):
    total, weight = falcon.loss(
        make_drafter(llama, k=4), llama, random_batch(llama, (4, 5))
    )
    total.backward()
    assert float(total.detach()) == 0 == int(weight)


@pytest.mark.parametrize("options", [{}, {"fusion": "linear", "csgd": False}, {"k": 3}])
def test_every_weight_learns(options):
    """Also under autocast, where weights cast in CSGD's first pass have no gradient."""
    target = make_llama().float()
    batch = random_batch(target)
    for enabled in (False, True):
        drafter = make_drafter(target, **options).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            total, _ = falcon.loss(drafter, target, batch)
        total.backward()
        for name, weight in drafter.named_parameters():
            assert weight.grad.isfinite().all() and weight.grad.any(), name


# ------------------------------------------------------------------- trees and settings


def test_trees_have_their_counts_at_each_depth():
    paper = falcon.Config(**falcon.VARIANTS["paper"]).tree
    assert paper == sorted(falcon.paper_tree(), key=len), "no path twice"
    depths = [len(path) for path in paper]
    counts = [depths.count(depth) for depth in range(1, 9)]
    assert counts == [20, 19, 19, 15, 16, 10, 10, 9]
    assert falcon.layered_tree([2, 3]) == [[0], [1], [0, 0], [0, 1], [1, 0]]
    five = [
        [0, 0],
        [0, 1],
        [1, 0],
        [0, 2],
        [2, 0],
    ]  # 1 * 3 is less than the 2 * 2 of [1, 1]
    assert falcon.layered_tree([3, 5])[3:] == five
    tree = falcon.Config(tree=[[0, 1], [1], [0], [1, 0], [0]]).tree
    assert tree == [[0], [1], [0, 1], [1, 0]], "parents come first, and no path twice"
