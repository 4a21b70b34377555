"""falcon.py: what a draft holds, its passes, masks, CSGD, the loss, trees."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from tiny import drawn, family, make_llama, random_batch, sampled_p_value
from transformers import LogitsProcessorList

import common
import falcon
from support.rivals import eagle


def make_drafter(target, **options):
    settings = {"intermediate_size": 48, "draft_vocab": 0} | options
    config = falcon.Config(target=common.target_shape(target), **settings)
    torch.manual_seed(5)
    counts = torch.arange(target.config.vocab_size)
    return falcon.build(config, target, counts).double().eval()


def random_ids(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 48, (1, length), generator=generator)


def compare(call, expected, got):
    lines = [f"input     {call}", *(f"expected  {row}" for row in expected)]
    lines += [f"got       {row}" for row in got]
    assert got == expected, "\n" + "\n".join(lines)


# ----------------------------------------------------------------------------- decoding


def from_scratch(drafter, target, ids, branch):
    """Logits (k, Vd) after committed and drafted tokens, attended block by block."""
    k = drafter.config.k
    total = ids.shape[1] - 1
    hidden = common.target_features(target, ids)[0][:, :-1]
    tokens = torch.cat([ids, torch.tensor([list(branch)], dtype=torch.long)], dim=1)[
        :, 1:
    ]
    for end in range(total, total + len(branch) + 1, k):
        fused, _ = drafter.fuse(target, hidden, tokens[:, :end])
        mask = falcon.relaxed_mask(end, k, torch.tensor([-total % k]))
        h_draft = drafter.attend(target, fused, torch.arange(end)[None], mask)[:, -k:]
        hidden = torch.cat([hidden, h_draft], dim=1)
    return common.draft_head(target, drafter.vocab_ids)(h_draft[0])


@pytest.mark.parametrize("fusion", ["lstm", "linear"])
@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_a_tree_holds_what_each_branch_alone_would_give(llama, k, fusion):
    """Every node of a tree of three passes, by attending only to its own branch."""
    drafter = make_drafter(llama, k=k, fusion=fusion, num_layers=2, draft_vocab=20)
    tree = []
    for path in ([1, 0, 2] * 3, [0] * 9, [1, 0, 2, 0, 1, 0, 0, 2, 1], [0, 2, 1] * 3):
        tree += [path[:end] for end in range(1, 3 * k + 1)]
    paths = [
        tuple(path) for path in dataclasses.replace(drafter.config, tree=tree).tree
    ]
    for length in range(k + 1, k + 5):
        ids = random_ids(length, seed=length)
        decoding = common.start(llama, input_ids=ids, max_new_tokens=20)
        draft = next(falcon.drafts(decoding, drafter, tree=tree))
        tokens = dict(zip(paths, draft.tokens.tolist()))
        assert len(draft.tokens) == len(paths) and draft.probs is None
        assert draft.notes["k"] == k
        for node, path in enumerate(paths):
            parent = paths.index(path[:-1]) if len(path) > 1 else -1
            assert draft.parents[node] == parent
            start = (len(path) - 1) // k * k
            branch = [tokens[path[:end]] for end in range(1, start + 1)]
            slots = from_scratch(drafter, llama, decoding.ids, branch)  # (k, Vd)
            slot = slots[len(path) - start - 1].softmax(-1)
            choice = slot.argsort(descending=True)[path[-1]]
            assert tokens[path] == int(drafter.vocab_ids[choice]), path
            assert draft.notes["q"][node] == pytest.approx(
                float(slot[choice]), rel=1e-4
            )


@pytest.mark.parametrize("fusion", ["lstm", "linear"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@torch.no_grad()
def test_rounds_of_any_length_leave_what_an_uncached_forward_computes(llama, k, fusion):
    """The newest k slots are a block; a slot sees what it saw when it last attended."""
    drafter = make_drafter(llama, k=k, fusion=fusion, num_layers=2)
    ids = random_ids(40, seed=k)
    hidden = common.target_features(llama, ids)[0]
    chain = {(0,) * depth: [0] for depth in range(2 * k)}
    for steps in (
        [k + 1, 1, 1, 1, 1, 1],
        [6, 2, 3, 1, 4, 2, 5, 1],
        [k, k, 1, k, 2],
        [0, 1, 1, 1, 1],
    ):
        memory = falcon.Memory(drafter, llama)
        total = 0
        reach = {}  # the last slot that each slot sees
        for step in steps:
            before = total
            total += step
            decoding = SimpleNamespace(target=llama, max_depth=2 * k, do_sample=False)
            decoding.ids, decoding.eos_ids = ids[:, : total + 1], set()
            decoding.hidden = hidden[:, :total]
            draft = falcon.propose(drafter, decoding, memory, chain)
            if total < k:
                assert len(draft.tokens) == 0
                continue
            for slot in range(max(0, before - (k - 1)), total):
                later_blocks = (total - 1 - slot) // k
                reach[slot] = total - 1 - later_blocks * k  # the end of its block
            ends = torch.tensor([reach[slot] for slot in range(total)])
            mask = (ends[:, None] >= torch.arange(total))[None, None]
            plain = common.GrowingCache(2)
            fused, _ = drafter.fuse(llama, hidden[:, :total], ids[:, 1 : total + 1])
            h_draft = drafter.attend(
                llama, fused, torch.arange(total)[None], mask, plain
            )
            choices = memory.head(h_draft[0, -k:]).argmax(-1)
            assert choices.tolist() == draft.tokens[:k].tolist()
            for mine, theirs in zip(memory.cache.layers, plain.layers):
                torch.testing.assert_close(mine.keys[:, :, :total], theirs.keys)
                torch.testing.assert_close(mine.values[:, :, :total], theirs.values)


@pytest.mark.parametrize("k", [1, 2, 3])
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


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_a_tree_is_cut_where_the_room_ends(llama, k, monkeypatch):
    """By levels; the rest is drafted as in the whole tree, and in no more passes."""
    drafter = make_drafter(llama, k=k)
    ids = random_ids(9, seed=1)
    tree = falcon.layered_tree([3, 4, 4, 2, 2, 1])
    config = dataclasses.replace(drafter.config, tree=tree)
    depths = [len(path) for path in config.tree]
    calls = []
    attend = falcon.Drafter.attend
    monkeypatch.setattr(
        falcon.Drafter, "attend", lambda *x: calls.append(1) or attend(*x)
    )

    def drafted(room):
        calls.clear()
        decoding = common.start(llama, input_ids=ids, max_new_tokens=room + 1)
        assert decoding.max_depth == room
        return next(falcon.drafts(decoding, drafter, tree=tree))

    whole = drafted(20)
    assert len(whole.tokens) == len(tree) and whole.depths() == depths
    for room in range(8):
        draft = drafted(room)
        count = sum(depth <= room for depth in depths)
        assert draft.tokens.tolist() == whole.tokens[:count].tolist()
        assert draft.parents == whole.parents[:count]
        assert draft.notes.get("q", []) == whole.notes["q"][:count]
        assert len(calls) == -(-min(room, 6) // k)


@pytest.mark.parametrize("options", [{}, {"k": 3}, {"fusion": "linear"}, {"k": 1}])
@torch.no_grad()
def test_rounds_draft_what_a_new_generator_would(llama, options):
    """With one layer a cached row depends only on its slot, and not on any block.

    After every third round comes one with a draft of somebody else's.
    """
    drafter = make_drafter(llama, num_layers=1, **options)
    ids = random_ids(5, seed=2)
    given = {"max_new_tokens": 40, "do_sample": False}
    decoding = common.start(llama, input_ids=ids, **given)
    accepted = 0
    for number, draft in enumerate(falcon.drafts(decoding, drafter)):
        again = common.start(
            llama, input_ids=decoding.ids, max_new_tokens=decoding.max_depth + 1
        )
        anew = next(falcon.drafts(again, drafter))
        assert draft.tokens.tolist() == anew.tokens.tolist()
        accepted += len(decoding.verify(draft))
        if number % 3 == 2 and not decoding.done:
            decoding.verify(common.chain([], decoding.ids))
    assert torch.equal(decoding.ids, llama.generate(ids, **given))
    assert accepted > 0, "no row of a draft was ever dropped after it was accepted"


@torch.no_grad()
def test_nothing_is_drafted_below_an_end_of_the_answer(llama):
    """Greedily: the rest of the tree is what it is without that end."""
    drafter = make_drafter(llama, k=2)
    tree = falcon.layered_tree([3, 4, 4, 3, 2])

    def drafted(**given):
        given |= {"input_ids": random_ids(9, seed=1), "max_new_tokens": 20}
        draft = next(falcon.drafts(common.start(llama, **given), drafter, tree=tree))
        return dict(zip(texts(draft), draft.notes["q"]))

    whole = drafted()
    end = next(iter(whole))[0]  # the likeliest token
    left = {text: q for text, q in whole.items() if end not in text[:-1]}
    assert 3 <= len(left) < len(whole)
    cut = drafted(eos_token_id=end)
    assert cut.keys() == left.keys()
    assert list(cut.values()) == pytest.approx(list(left.values()))


def test_only_the_tree_may_change(llama):
    decoding = common.start(llama, input_ids=random_ids(5, seed=2), max_new_tokens=8)
    drafter = make_drafter(llama)
    can = "cannot change k: it can change tree$"
    with pytest.raises(common.UserError, match=can):
        next(falcon.drafts(decoding, drafter, k=3))
    with pytest.raises(common.UserError, match=r"add its parent \[1\]"):
        next(falcon.drafts(decoding, drafter, tree=[[0], [1, 0]]))
    assert len(next(falcon.drafts(decoding, drafter, tree=[])).tokens) == 0


# ----------------------------------------------------------------------------- sampling


TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]


def names(draft):
    """The rank path of each node of a draft, whose siblings are in order."""
    parents = draft.parents
    return paths(parents, [parents[:n].count(x) for n, x in enumerate(parents)])


def texts(draft):
    """The tokens down to each node of a draft."""
    return paths(draft.parents, draft.tokens.tolist())


def paths(parents, marks):
    """The marks of the nodes down to each node."""
    downward = []
    for parent, mark in zip(parents, marks):
        downward.append((*(downward[parent] if parent >= 0 else ()), mark))
    return downward


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_nodes_are_drawn_from_what_their_siblings_leave(llama, k):
    """Every q_draft, from a forward over only the node's own branch."""
    drafter = make_drafter(llama, k=k, draft_vocab=20)
    given = {"do_sample": True, "temperature": 0.7, "top_k": 12, "max_new_tokens": 9}
    unlikely = 0
    for seed in range(5):
        torch.manual_seed(seed)
        decoding = common.start(llama, input_ids=random_ids(7, seed), **given)
        draft = next(falcon.drafts(decoding, drafter, tree=TREE))
        assert names(draft) == [tuple(path) for path in TREE]
        assert len(draft.probs) == len(TREE), "every node is drawn"
        tokens = dict(zip(names(draft), draft.tokens.tolist()))
        for node, path in enumerate(tokens):
            start = (len(path) - 1) // k * k
            branch = [tokens[path[:end]] for end in range(1, start + 1)]
            slots = from_scratch(drafter, llama, decoding.ids, branch)  # (k, Vd)
            scores = slots[len(path) - start - 1]
            whole = torch.full((48,), -torch.inf, dtype=scores.dtype)
            whole[drafter.vocab_ids] = scores
            whole[[tokens[(*path[:-1], rank)] for rank in range(path[-1])]] = -torch.inf
            whole[whole < whole.topk(12).values[-1]] = -torch.inf
            expected = (whole / 0.7).softmax(-1).float()
            torch.testing.assert_close(draft.probs[node], expected)
            assert expected[tokens[path]] > 0
            unlikely += tokens[path] != int(expected.argmax())
    assert unlikely > 0


@pytest.mark.parametrize("k", [1, 2, 3])
@torch.no_grad()
def test_no_node_holds_a_token_that_cannot_be_drawn(llama, k):
    """Where fewer tokens are left than siblings, a node and all below it are missing.

    So are those below an end of the text. Siblings never hold one token twice.
    """
    drafter = make_drafter(llama, k=k, draft_vocab=4)
    wide = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [3, 0], [3, 0, 0], [0, 1, 0]]
    known = drafter.vocab_ids.tolist()
    given = {"do_sample": True, "max_new_tokens": 9, "eos_token_id": known[3]}
    pair = {"prefix_allowed_tokens_fn": lambda *_: [5, *known[1:3]], "top_k": 0}
    one = {"prefix_allowed_tokens_fn": lambda *_: known[:1], "top_k": 0}
    for options, most in ((pair, 2), (one, 1), ({"top_k": 1}, 4), ({"top_p": 0.5}, 4)):
        for seed in range(8):
            torch.manual_seed(seed)
            ids = random_ids(7, seed)
            decoding = common.start(llama, input_ids=ids, **given, **options)
            draft = next(falcon.drafts(decoding, drafter, tree=wide))
            assert len(draft.probs) == len(draft.tokens) == len(draft.parents)
            assert len(draft.children()) == len(draft.tokens), "a token twice"
            assert draft.parents.count(-1) == most
            for node, token in enumerate(draft.tokens.tolist()):
                assert draft.probs[node, token] > 0
                parent = draft.parents[node]
                assert parent < 0 or int(draft.tokens[parent]) != known[3]
            decoding.verify(draft)


@torch.no_grad()
def test_without_a_token_to_draw_the_draft_is_empty(llama):
    """The target may write only a token that the drafter does not know."""
    drafter = make_drafter(llama, draft_vocab=20)
    unknown = min(set(range(48)) - set(drafter.vocab_ids.tolist()))
    others = torch.arange(48) != unknown
    forbid = LogitsProcessorList(
        [lambda _, scores: scores.masked_fill(others, -torch.inf)]
    )
    given = {"do_sample": True, "max_new_tokens": 6, "logits_processor": forbid}
    decoding = common.start(llama, input_ids=random_ids(7, 0), **given)
    for draft in falcon.drafts(decoding, drafter):
        assert len(draft.tokens) == 0
        decoding.verify(draft)
    assert decoding.ids[0, 7:].tolist() == [unknown] * 6


def small_target(sure, k=2):
    """A target of four tokens, so that its answers can be enumerated.

    sure: what the drafter's logits are multiplied by; 0 makes all tokens alike.
    """
    target = family("Llama", vocab_size=4, num_hidden_layers=2)
    drafter = make_drafter(target, num_layers=1, k=k)
    drafter.norm.weight.data *= sure
    ids = torch.randint(1, 4, (1, 6), generator=torch.Generator().manual_seed(4))
    return target, drafter, ids


def p_value(sure, k=2, top_k=0):
    """Of the first three tokens of answers, drafted in three passes or in two."""
    target, drafter, ids = small_target(sure, k)
    decoder = common.speculate(falcon.drafts, drafter, tree=TREE)
    given = {"custom_generate": decoder, "top_k": top_k}
    return sampled_p_value(target, ids, 3, draws=300, max_new_tokens=4, **given)


@pytest.mark.parametrize("k, sure, top_k", [(1, 0.0, 0), (2, 4.0, 0), (2, 4.0, 2)])
def test_sampled_trees_follow_the_target(k, sure, top_k):
    assert p_value(sure, k, top_k) > 1e-3


def test_negative_control_nodes_that_share_a_random_number(monkeypatch):
    """A node then depends on what an earlier one drew, but its q_draft does not."""
    pick = common.pick
    uniform = None

    def shared(decoding, logits, vocab_ids, drafted):
        nonlocal uniform
        if not drafted and logits.isfinite().all():  # the first node of a draft
            uniform = torch.rand(1, dtype=torch.float64)
        _, q_draft = pick(decoding, logits, vocab_ids, drafted)
        return common.sample(q_draft, uniform), q_draft

    monkeypatch.setattr(common, "pick", shared)
    assert p_value(0.0) < 1e-5


def test_negative_control_siblings_that_forget_what_they_leave_out(monkeypatch):
    """Each is judged by the distribution of the first one."""
    sample_siblings = falcon.sample_siblings

    def forgetful(*inputs):
        first = None
        for token, q_draft in sample_siblings(*inputs):
            first = q_draft if first is None else first
            yield token, first

    monkeypatch.setattr(falcon, "sample_siblings", forgetful)
    assert p_value(4.0) < 3e-4


def test_processors_are_asked_only_about_texts_that_the_target_may_write():
    """Not after an end, nor after a forbidden token, nor beyond the last one."""
    target, drafter, ids = small_target(1.0)

    def allowed(_, text):
        said = text[6:].tolist()
        assert 2 not in said, "the answer has ended"
        assert 3 not in said[1:], "a forbidden token"
        assert len(said) < 12, "beyond the last token"
        return [0, 1, 2] if said else [3]

    decoder = common.speculate(falcon.drafts, drafter, tree=TREE)
    given = {"do_sample": True, "top_k": 0, "max_new_tokens": 12, "eos_token_id": 2}
    for seed in range(8):
        torch.manual_seed(seed)
        given |= {"prefix_allowed_tokens_fn": allowed, "custom_generate": decoder}
        said = target.generate(ids, **given)[0, 6:].tolist()
        assert said[0] == 3 and 3 not in said[1:]


def test_a_drafter_saved_with_settings_of_the_past_is_read(llama, tmp_path):
    """config.json once had `norms`, `bias` and `layer`, with these values."""
    drafter = make_drafter(llama)
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    old = {"norms": True, "bias": True, "layer": {}}
    path.write_text(json.dumps(settings | old))
    again = common.load_drafter(falcon.Drafter, tmp_path, llama)
    assert again.config == drafter.config
    # With other values the weights were others. Here they are EAGLE's.
    other = eagle.Config(drafter.config.target, draft_vocab=0)
    eagle.Drafter(other).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="no falcon drafter.*feature_norm"):
        common.load_drafter(falcon.Drafter, tmp_path, llama)


# -------------------------------------------------------------------------------- masks


def test_relaxed_mask_drawing_and_definition():
    """The drawing of the docstring; then, for every k and phase, no later block."""
    expected = ["x....", "xxx..", "xxx..", "xxxxx", "xxxxx"]
    got = drawn(falcon.relaxed_mask(5, 2, torch.tensor([1])))
    compare("relaxed_mask(length=5, k=2, phase=[1])", expected, got)
    for k in (1, 2, 3, 4):
        for phase in range(k):
            block = [(slot + phase) // k for slot in range(13)]
            expected = [
                "".join("x" if b <= own else "." for b in block) for own in block
            ]
            got = drawn(falcon.relaxed_mask(13, k, torch.tensor([phase])))
            compare(f"relaxed_mask(length=13, k={k}, phase=[{phase}])", expected, got)
    both = falcon.relaxed_mask(3, 2, torch.tensor([0, 1]))  # a phase for each sequence
    call = "relaxed_mask(length=3, k=2, phase=[0, 1])"
    compare(call, ["xx.", "xx.", "xxx", "x..", "xxx", "xxx"], drawn(both))
    compare(f"{call}.shape", [(2, 1, 3, 3)], [tuple(both.shape)])


def test_the_branch_masks_of_the_docstring():
    committed = torch.ones(1, 3, dtype=torch.bool)
    second = falcon.branch_mask(committed, torch.tensor([0, 0, 0]), 2)
    compare(
        "branch_mask, pass 2", ["xxxxx....", "xxx..xx..", "xxx....xx"], drawn(second)
    )
    third = falcon.branch_mask(second, torch.tensor([0, 2]), 2)
    compare("branch_mask, pass 3", ["xxxxx....xx..", "xxx....xx..xx"], drawn(third))


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
        compare(call, [expected], [glance(*inputs)])
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
        compare(f"{call}: all outcomes of 60 calls", sorted(expected), sorted(got))


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


@torch.no_grad()
def test_reveal_feeds_labels_and_takes_their_loss(llama):
    """Of the slots that `glance` chooses, by hand; other slots stay as they were."""
    drafter = make_drafter(llama, k=3)
    batch = random_batch(llama, lengths=(40, 31), prompt=2)
    slots = falcon.training_slots(drafter, batch)
    after = falcon.reveal(drafter, llama, slots, 0.5)
    revealed = slots.learns & ~after.learns
    assert revealed.any() and not (after.learns & ~slots.learns).any()
    for row in range(2):
        for slot in range(slots.learns.shape[1]):
            shift = 3 if revealed[row, slot] else 0
            assert torch.equal(after.hidden[row, slot], batch.hidden[row, slot + shift])
            assert after.token_ids[row, slot] == batch.input_ids[row, slot + shift + 1]
    for untouched in ("labels", "label_ids", "phase"):
        assert getattr(after, untouched) is getattr(slots, untouched)
    after = falcon.reveal(drafter, llama, slots, 1.0)  # lambda = 0
    assert torch.equal(after.learns, slots.learns)


@pytest.mark.parametrize("k, csgd", [(2, False), (2, True), (3, True)])
@torch.no_grad()
def test_loss_against_a_hand_worked_case(llama, k, csgd):
    """Every slot by itself: a forward over the blocks up to its own, three losses."""
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


def test_a_sequence_shorter_than_a_block_gives_no_loss(llama):
    total, weight = falcon.loss(
        make_drafter(llama, k=4), llama, random_batch(llama, (4, 5))
    )
    total.backward()
    assert float(total.detach()) == 0 == int(weight)


@pytest.mark.parametrize("options", [{}, {"fusion": "linear", "csgd": False}, {"k": 3}])
def test_every_weight_learns(llama, options):
    drafter = make_drafter(llama, **options)
    falcon.loss(drafter, llama, random_batch(llama))[0].backward()
    for name, weight in drafter.named_parameters():
        assert weight.grad.isfinite().all() and weight.grad.any(), name


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@torch.no_grad()
def test_acceptance_is_the_overlap_at_every_slot(llama, seed):
    batch = random_batch(llama, lengths=(12,))
    drafter = make_drafter(llama, draft_vocab=20)
    expected = 0.0
    torch.manual_seed(seed)  # so that `acceptance` begins with the same number
    phase = int(torch.randint(2, (1,)))
    for slot in range(9):
        end = (slot + phase) // 2 * 2 + 2 - phase  # of the slot's block
        ids = batch.input_ids[:, : end + 1]
        q_draft = from_scratch(drafter, llama, ids, [])[slot - end].softmax(-1)
        p_target = llama(batch.input_ids).logits[0, slot + 2].softmax(-1)
        expected += float(torch.minimum(p_target[drafter.vocab_ids], q_draft).sum())
    torch.manual_seed(seed)
    total, count = falcon.acceptance(drafter, llama, batch)
    assert count == 9 and float(total) == pytest.approx(expected, rel=1e-5)


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


def test_ranks_are_ints_and_an_unknown_vocabulary_is_no_limit():
    for tree in ([[True]], [[0], [0, -1]], [[]]):
        with pytest.raises(common.UserError, match="give a list of ranks from 0 on$"):
            falcon.Config(tree=tree, draft_vocab=0)
    with pytest.raises(common.UserError, match=r"from 0 to 8 \(draft vocabulary\)$"):
        falcon.Config(tree=[[9]], draft_vocab=9)


def test_a_drafter_starts_as_the_targets_top_layers():
    target = make_llama()
    for place, weight in enumerate(p for p in target.parameters() if p.dim() == 1):
        weight.fill_(0.5 + place)  # all norms differ
    drafter = make_drafter(target, fusion="linear")
    for own, theirs in zip(drafter.layers, target.model.layers[1:], strict=True):
        for name, weight in own.named_parameters():
            torch.testing.assert_close(
                weight, theirs.get_parameter(name), atol=1e-6, rtol=1e-6
            )
    pair = torch.randn(2, 64, dtype=torch.float64)
    torch.testing.assert_close(drafter.fusion(pair), pair[:, :32] + pair[:, 32:])
