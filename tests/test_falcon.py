"""falcon.py: lossless decoding with any tree, alignment of blocks, masks, CSGD, choosing trees."""

import collections
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from tiny import chi_square_p_value, enumerate_joint, make_llama, slow, teach
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import common
import falcon
import train
from support import fitting, packed

# every path of two ranks to depth 4: 30 nodes
FULL = [list(path) for d in range(1, 5) for path in itertools.product(range(2), repeat=d)]
# ways to choose a tree; after ten tokens or so the texts of the tiny targets begin to repeat
TREES = {
    "static": {"tree": [[0], [1], [0, 0], [0, 1], [1, 0]]},
    "confidence": {"best_nodes": 4, "passes": 2},
    "copies": {"copies": 3},
    "both": {"best_nodes": 4, "copies": 6, "passes": 2, "least_worth": 0.02},
}


def make_drafter(target, **options):
    settings = {"intermediate_size": 48, "draft_vocab": 0} | options
    config = falcon.Config(target=common.target_shape(target), **settings)
    torch.manual_seed(5)
    return falcon.build(config, target, torch.arange(target.config.vocab_size)).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    options |= {"custom_generate": falcon.generate, "drafter": drafter}
    return target.generate(ids, **options), options["stats"]


def one_round(drafter, target, ids, memory=None, hidden=None, depth=99, stats=None, **options):
    """One round of `propose`, from nothing unless a memory and new features are given."""
    memory = memory or falcon.new_memory(drafter, target)
    if hidden is None:
        hidden = common.target_features(target, ids)[0][:, :-1]
    config = dataclasses.replace(drafter.config, **options)
    stats = stats or common.Stats()
    return falcon.propose(drafter, target, ids, hidden, memory, config, depth, stats)


def random_ids(length, seed, vocab=48):
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def attempt(function, *inputs):
    """What a function gives, or the error it ends with, to be shown beside what was expected."""
    try:
        return function(*inputs)
    except Exception as problem:
        return problem


def drawing(mask):
    if not isinstance(mask, torch.Tensor):
        return repr(mask)
    return ["".join(".x"[int(value)] for value in row) for row in mask.flatten(0, -2)]


def says(call, expected, got):
    """What a failed comparison prints."""
    lines = [f"input     {call}"]
    for name, value in (("expected", expected), ("got", got)):
        rows = value if isinstance(value, list) else [value]
        lines += [f"{name if n == 0 else '':9} {row}" for n, row in enumerate(rows)]
    return "\n" + "\n".join(lines)


def make_batch(target, lengths=(9, 14, 7), prompt=3, seed=0, progress=0.0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, [], None)
    seeds = torch.arange(len(lengths)) + 7
    return train.make_batch(list(range(len(lengths))), sequences, features, seeds, progress, "cpu")


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter for each k that has seen a little of what the target says; some drafts fail."""
    drafters = {k: make_drafter(llama, k=k) for k in (2, 3)}
    for drafter in drafters.values():
        teach(falcon, drafter, llama, 50, 5e-3)
    return drafters


@pytest.fixture
def oracle(monkeypatch):
    """Call with a text and drafts follow it; `wrong` is added to the first token at each depth."""

    def install(truth, wrong=0):
        def propose(drafter, target, input_ids, hidden, memory, config, depth, stats):
            paths = falcon.prune(config.tree, depth, 40)
            tokens = []
            for path in paths:
                place = min(input_ids.shape[1] + len(path) - 1, truth.shape[1] - 1)
                tokens.append((int(truth[0, place]) + path[-1] + wrong) % target.config.vocab_size)
            parents = [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]
            parents = torch.tensor(parents, dtype=torch.long)
            return common.Draft(input_ids.new_tensor(tokens), parents)

        monkeypatch.setattr(falcon, "propose", propose)

    return install


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("length", [1, slow(2), slow(13)])
def test_greedy_output_is_the_targets(llama, trained, length):
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=20, do_sample=False)
    cases = [(drafter, options) for drafter in trained.values() for options in TREES.values()]
    cases += [
        (trained[2], {"chain": True}),
        (trained[3], {"tree": FULL}),
        (trained[3], {"tree": []}),
        (make_drafter(llama, k=1), TREES["confidence"]),
        (make_drafter(llama, k=2, fusion="cell", num_layers=2), {"tree": FULL}),
        (make_drafter(llama, k=3, fusion="linear", draft_vocab=9), TREES["both"]),
        (make_drafter(llama, k=4), {"chain": True}),
    ]
    for drafter, options in cases:
        output, stats = decode(llama, drafter, ids, max_new_tokens=20, **options)
        assert torch.equal(output, truth), options
        assert stats.emitted == 20 and sum(stats.accepted) + stats.target_forwards == 20


def test_the_papers_tree_is_lossless_too(llama, trained):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for drafter in trained.values():
        assert torch.equal(decode(llama, drafter, ids, **falcon.VARIANTS["paper"])[0], truth)


def test_trained_drafters_are_accepted_sometimes_and_refused_sometimes(llama, trained):
    for drafter in trained.values():
        _, stats = decode(llama, drafter, torch.tensor([[3]]), max_new_tokens=100)
        assert 0 < sum(stats.accepted) < stats.drafted and len(set(stats.accepted)) > 2


def test_a_chain_has_no_second_choices_whatever_the_tree(llama, trained):
    options = {"chain": True, "best_nodes": 5, "tree": FULL, "max_new_tokens": 12}
    _, stats = decode(llama, trained[2], torch.tensor([[9, 8, 7]]), **options)
    assert stats.drafted == sum(stats.offered) > 0


def test_a_tree_is_accepted_more_than_a_chain(llama, trained):
    rounds = []
    for options in ({"chain": True}, {}, {"tree": falcon.PAPER_TREE}):
        prompt = torch.tensor([[2, 9, 30]])
        _, stats = decode(llama, trained[2], prompt, max_new_tokens=50, **options)
        rounds.append(stats.target_forwards)
    assert rounds[2] < rounds[0] and rounds[1] < rounds[0]


def test_an_oracle_is_always_accepted_and_its_opposite_never(llama, trained, oracle):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    oracle(truth)
    output, stats = decode(llama, trained[2], ids, max_new_tokens=37)
    assert torch.equal(output, truth)
    assert stats.accepted == stats.offered and stats.target_forwards == 8
    oracle(truth, wrong=40)
    output, stats = decode(llama, trained[2], ids, max_new_tokens=37)
    assert torch.equal(output, truth) and stats.accepted == [0] * 37


def test_stopping_inside_a_draft(llama, trained, oracle):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    oracle(truth)
    for place in range(3, 12):
        eos = int(truth[0, place])
        limits = {"max_new_tokens": 37, "eos_token_id": eos}
        expected = llama.generate(ids, do_sample=False, **limits)
        assert torch.equal(decode(llama, trained[2], ids, tree=FULL, **limits)[0], expected)
        limits = {"max_new_tokens": place, "eos_token_id": None}
        shorter, stats = decode(llama, trained[2], ids, tree=FULL, **limits)
        assert torch.equal(shorter, truth[:, : 3 + place]) and stats.emitted == place


def test_logits_processors_see_each_prefix(llama, trained):
    for options in (
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 4, 5]},
    ):
        ids = torch.tensor([[9, 8, 7]])
        truth = llama.generate(ids, max_new_tokens=40, do_sample=False, **options)
        assert torch.equal(decode(llama, trained[2], ids, tree=FULL, **options)[0], truth)


def sampled_counts(target, drafter, prompt, rounds, **options):
    """How often each continuation of three tokens was drawn, and how many nodes were copies."""
    counts, copied = collections.Counter(), 0
    torch.manual_seed(0)
    for _ in range(rounds):
        options |= {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "stats": common.Stats()}
        output, stats = decode(target, drafter, prompt, **options)
        counts[tuple(output[0, prompt.shape[1] :].tolist())] += 1
        copied += sum(offered for offered, _ in stats.copies)
    return counts, copied


REPEATING = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])  # so that there is something to copy


@pytest.mark.parametrize("name", [pytest.param("static", marks=pytest.mark.slow), "both"])
def test_sampled_output_follows_the_target(small_llama, name):
    drafter = make_drafter(small_llama)
    counts, copied = sampled_counts(small_llama, drafter, REPEATING, 300, **TREES[name])
    assert chi_square_p_value(counts, enumerate_joint(small_llama, REPEATING, 3)) > 0.001
    assert (copied > 0) == (name == "both")


@pytest.mark.parametrize("name", [pytest.param("static", marks=pytest.mark.slow), "both"])
def test_negative_control_a_node_taken_without_a_draw_is_noticed(small_llama, monkeypatch, name):
    real = common._draw

    def first_node(scores, siblings, draft):
        return int(draft.tokens[0]) if len(draft.tokens) else real(scores, siblings, draft)

    monkeypatch.setattr(common, "_draw", first_node)
    drafter = make_drafter(small_llama)
    counts, _ = sampled_counts(small_llama, drafter, REPEATING, 100, **TREES[name])
    assert chi_square_p_value(counts, enumerate_joint(small_llama, REPEATING, 3)) < 1e-6


@pytest.mark.slow
def test_other_families_and_half_precision_run():
    """GPT-2 has no rotary embedding and GPT-NeoX rotates a quarter of a head."""
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    neox = GPTNeoXConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        bos_token_id=None,
    )
    ids = torch.tensor([[4, 5, 6]])
    for target in (GPT2LMHeadModel(gpt2), GPTNeoXForCausalLM(neox)):
        target = target.double().eval()
        target.generation_config.eos_token_id = target.generation_config.bos_token_id = None
        limits = {"max_new_tokens": 20, "pad_token_id": 0}
        truth = target.generate(ids, do_sample=False, **limits)
        for options in ({}, TREES["both"]):
            output, _ = decode(target, make_drafter(target), ids, **limits, **options)
            assert torch.equal(output, truth)
    for dtype in (torch.bfloat16, torch.float16):
        target = make_llama().to(dtype)
        for fusion in ("lstm", "cell", "linear"):
            drafter = make_drafter(target, fusion=fusion).to(dtype)
            assert decode(target, drafter, ids, **TREES["both"])[0].shape == (1, 43)


def test_a_table_for_part_of_a_head_is_widened():
    cos = torch.tensor([[[0.1, 0.2, 0.1, 0.2]]])
    wide = falcon.whole_head(cos, 8, fill=1.0)[0, 0]
    assert wide.tolist() == pytest.approx([0.1, 0.2, 1, 1, 0.1, 0.2, 1, 1])
    assert torch.equal(falcon.whole_head(cos, 4, fill=1.0), cos)


# ------------------------------------------------------------------- blocks, branches and the cache


def from_scratch(drafter, target, ids, branch=()):
    """Logits (k, Vd) after the committed ids and drafted tokens, in a plain forward.

    The features of drafted tokens are predicted block by block; blocks are counted back from the
    newest committed token.
    """
    k = drafter.config.k
    total = ids.shape[1] - 1
    hidden = common.target_features(target, ids)[0][:, :-1]
    tokens = torch.cat([ids, torch.tensor([list(branch)], dtype=torch.long)], dim=1)[:, 1:]
    for end in range(total, total + len(branch) + 1, k):
        rotary = common.rotary(target, torch.arange(end)[None], -1)
        embeds = target.get_input_embeddings()(tokens[:, :end])
        mask = falcon.relaxed_mask(end, k, torch.tensor([-total % k]))
        features = drafter(hidden, embeds, rotary, mask)[0][:, -k:]
        hidden = torch.cat([hidden, features], dim=1)
    return common.draft_head(target, drafter.draft_ids)(features[0])


@pytest.mark.parametrize("fusion", ["lstm", slow("cell"), "linear"])
@pytest.mark.parametrize("k", [slow(1), 2, 3, slow(4)])
def test_a_tree_holds_what_each_branch_alone_would_give(llama, k, fusion):
    """Every node of a tree of three passes, from a forward of its own over its branch."""
    drafter = make_drafter(llama, k=k, fusion=fusion, num_layers=2, draft_vocab=20)
    drafter.draft_ids.copy_(torch.arange(10, 30))
    deepest = ([1, 0, 2] * 4, [0] * 12, [1, 0, 2, 0, 1, 0, 0, 0, 1, 0, 0, 2], [0, 2, 1] * 4)
    some = {tuple(path[:end]) for path in deepest for end in range(1, 3 * k + 1)}
    paths = falcon.prune(some, 99, 20)
    for length in range(k + 1, k + 6):
        ids = random_ids(length, seed=length)
        draft = one_round(drafter, llama, ids, tree=some)
        tokens = dict(zip(paths, draft.tokens.tolist()))
        alone = {}
        assert len(draft.tokens) == len(paths)
        for path, parent in zip(paths, draft.parents.tolist()):
            assert parent == (paths.index(path[:-1]) if len(path) > 1 else -1)
            start = (len(path) - 1) // k * k
            branch = tuple(tokens[path[:end]] for end in range(1, start + 1))
            if branch not in alone:
                alone[branch] = from_scratch(drafter, llama, ids, branch)  # (k, Vd)
            ranked = alone[branch][len(path) - start - 1].argsort(descending=True)
            assert tokens[path] == int(drafter.draft_ids[ranked[path[-1]]])


@pytest.mark.parametrize("k", [2, 3, 4])
def test_rounds_of_any_length_keep_blocks_aligned_to_the_newest_token(llama, k, monkeypatch):
    """Whatever a round adds, the newest k slots are one block.

    The cache holds the rows, and the draft the tokens, of a plain forward in which every slot sees
    as far as it saw when it was last fed.
    """
    drafter = make_drafter(llama, k=k, num_layers=2)
    masks = []
    real = falcon.Drafter.forward

    def spy(self, features, embeds, rotary, mask, *rest, **more):
        masks.append(mask[0, 0])
        return real(self, features, embeds, rotary, mask, *rest, **more)

    monkeypatch.setattr(falcon.Drafter, "forward", spy)
    ids = random_ids(40, seed=k)
    hidden = common.target_features(llama, ids)[0]
    tree = [[0] * depth for depth in range(1, 2 * k + 1)]
    for steps in (
        [k + 1, 1, 1, 1, 1, 1, 1],
        [6, 2, 3, 1, 4, 2, 5, 1],
        [2 * k, k, k, 1, k, 2],
        [0, 1, 1, 1, 1, 1, 1],
    ):
        memory, total, reach = falcon.new_memory(drafter, llama), 0, []
        for step in steps:
            masks.clear()
            held = memory.cache.get_seq_length()
            total += step
            new = hidden[:, total - step : total]
            draft = one_round(drafter, llama, ids[:, : total + 1], memory, new, tree=tree)
            # rows of the second pass are gone
            assert memory.cache.get_seq_length() == (total if total >= k else 0)
            if total < k:
                assert len(draft.tokens) == 0
                continue
            fed, rows = masks[0].shape
            assert rows == total
            assert masks[0][-k:].all()  # all slots of the newest block see the newest token
            if held == 0:
                assert fed == total
            else:
                assert fed % k == 0 and 0 <= fed - (total - held) < k
            reach = reach[: total - fed] + [int(row.nonzero().max()) for row in masks[0]]
            plain = common.GrowingCache(2)
            rotary = common.rotary(llama, torch.arange(total)[None], -1)
            mask = (torch.tensor(reach)[:, None] >= torch.arange(total))[None, None]
            embeds = llama.get_input_embeddings()(ids[:, 1 : total + 1])
            predicted = real(drafter, hidden[:, :total], embeds, rotary, mask, plain)[0]
            choices = memory.head(predicted[0, -k:]).argmax(-1)
            assert choices.tolist() == draft.tokens[:k].tolist()
            for mine, theirs in zip(memory.cache.layers, plain.layers):
                torch.testing.assert_close(mine.keys, theirs.keys)
                torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.parametrize("k", [2, 3])
def test_the_first_draft_token_depends_on_the_newest_token(llama, k):
    drafter = make_drafter(llama, k=k)
    for length in range(k + 1, k + 7):  # every parity
        ids = random_ids(length, seed=length)
        changed = ids.clone()
        changed[0, -1] = (ids[0, -1] + 1) % 48
        before, after = (from_scratch(drafter, llama, each) for each in (ids, changed))
        assert (before - after).abs().amax(-1).min() > 1e-6


# -------------------------------------------------------------------------------------------- masks


def test_relaxed_mask_drawing_and_definition():
    """The drawing of the docstring; then every k and phase: no block after one's own."""
    drawn = ["x....", "xxx..", "xxx..", "xxxxx", "xxxxx"]
    got = drawing(attempt(falcon.relaxed_mask, 5, 2, torch.tensor([1])))
    assert got == drawn, says("relaxed_mask(length=5, k=2, phase=[1])", drawn, got)
    for k in (1, 2, 3, 4):
        for phase in range(k):
            block = [(slot + phase) // k for slot in range(13)]
            expected = ["".join("x" if b <= own else "." for b in block) for own in block]
            got = drawing(attempt(falcon.relaxed_mask, 13, k, torch.tensor([phase])))
            call = f"relaxed_mask(length=13, k={k}, phase=[{phase}])"
            assert got == expected, says(call, expected, got)
    both = falcon.relaxed_mask(5, 2, torch.tensor([0, 1]))
    assert both.shape == (2, 1, 5, 5) and both.dtype == torch.bool
    assert drawing(both[1]) == drawn and drawing(both[0])[0] == "xx..."  # a phase for each sequence


def test_tree_sight_drawing_and_definition():
    sight = falcon.tree_sight(torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 0, 0]), 2)
    assert drawing(sight) == ["xxxxx....", "xxx..xx..", "xxx....xx"]
    assert drawing(falcon.tree_sight(sight, torch.tensor([0, 2]), 2)) == [
        "xxxxx....xx..",
        "xxx....xx..xx",
    ]
    generator = torch.Generator().manual_seed(0)
    for k in (2, 3):
        sight = torch.ones(1, 4, dtype=torch.bool)
        lineage = [[]]  # the blocks (by first row) that a branch may see
        for width in (3, 5, 4):
            parent = torch.randint(len(lineage), (width,), generator=generator)
            rows = sight.shape[1]
            lineage = [[*lineage[p], rows + n * k] for n, p in enumerate(parent.tolist())]
            sight = falcon.tree_sight(sight, parent, k)
            for n, row in itertools.product(range(width), range(sight.shape[1])):
                seen = row < 4 or any(start <= row < start + k for start in lineage[n])
                assert bool(sight[n, row]) == seen


# -------------------------------------------------------------------------------- CSGD and the loss


def test_glancing_worked_by_hand():
    """Cases (which missed, which learn, rate, k, seed): which are shown their answers."""
    cases = [
        # k = 2 leaves no choice of length: N = 4 is the first slot of every block
        ("xxxxxxxx", "xxxxxxxx", 0.5, 2, 4, "x.x.x.x."),
        ("xxxxxxxx", "xxxxxxxx", 0.5, 2, 5, ".x.x.x.x"),  # phase 1
        ("xxxxxxxx", "xxxxxxxx", 0.0, 2, 4, "........"),  # the end of training
        ("........", "xxxxxxxx", 0.5, 2, 4, "........"),  # nothing was wrong
        ("...xxxxx", "...xxxxx", 0.6, 2, 4, "....x.x."),  # the prompt stays: N = 3, two can be had
        ("xxxxxx", "xxxxxx", 0.5, 1, 4, "......"),  # one slot a block: nothing to couple
    ]

    def glance(wrong, where, rate, k, seed):
        wrong, where = (torch.tensor([[c == "x" for c in row]]) for row in (wrong, where))
        return drawing(attempt(falcon.glance, wrong, where, rate, k, torch.tensor([seed])))

    for *inputs, expected in cases:
        got = glance(*inputs)
        call = "glance(wrong={}, where={}, rate={}, k={}, seed=[{}])".format(*inputs)
        assert got == [expected], says(call, expected, got)
    # N = 3 of blocks of three: runs of two and one, or of one until no block is left; N = 2
    for rate, expected in (
        (0.5, {"xx.x..", "x..xx.", "x..x.."}),
        (0.34, {"x..x..", "xx....", "...xx."}),
    ):
        got = {glance("xxxxxx", "xxxxxx", rate, 3, 3 * n)[0] for n in range(60)}
        call = f"glance(wrong=xxxxxx, where=xxxxxx, rate={rate}, k=3, seed=[0], [3], ... [177])"
        assert got == expected, says(call, sorted(expected), sorted(got))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_glancing_against_the_definition(k):
    generator = torch.Generator().manual_seed(k)
    for _ in range(30):
        where = torch.rand(3, 41, generator=generator) < 0.9
        wrong = where & (torch.rand(3, 41, generator=generator) < 0.5)
        seed = torch.randint(1000, (3,), generator=generator)
        replaced = falcon.glance(wrong, where, 0.4, k, seed)
        assert torch.equal(replaced, falcon.glance(wrong, where, 0.4, k, seed))
        for row in range(3):
            assert abs(int(replaced[row].sum()) - 0.4 * int(wrong[row].sum())) <= 0.5
            for start in range(-int(seed[row]) % k, 41, k):
                run = replaced[row, start : start + k].tolist()
                learns = where[row, start : start + k].tolist()
                if any(run):
                    last = max(i for i, hit in enumerate(run) if hit)
                    assert last < k - 1 and run[: last + 1] == learns[: last + 1]
            assert not replaced[row, : -int(seed[row]) % k].any()
            assert not (replaced[row] & ~where[row]).any()


@pytest.mark.parametrize("k, csgd", [(2, False), (2, True), (3, True)])
def test_loss_against_a_hand_worked_case(llama, k, csgd):
    """Every slot by itself: its block's inputs, replaced where CSGD says, one forward, three
    losses."""
    batch = make_batch(llama, progress=0.25)
    drafter = make_drafter(llama, k=k, csgd=csgd, noise=0.0, distill_weight=0.3, draft_vocab=30)
    drafter.draft_ids.copy_(torch.arange(10, 40))
    head, expected, count = common.draft_head(llama, drafter.draft_ids), 0.0, 0

    def forward(row, slot, replaced):
        phase = int(batch.seed[row]) % k
        hidden, tokens = batch.hidden[row : row + 1], batch.input_ids[row : row + 1]
        # where the slot's block ends
        end = min((slot + phase) // k * k + k - phase, tokens.shape[1] - 1)
        features, inputs = hidden[:, :end].clone(), tokens[:, 1 : end + 1].clone()
        for other in range(end):
            if (row, other) in replaced:
                features[0, other] = hidden[0, other + k]
                inputs[0, other] = tokens[0, other + k + 1]
        blocks = [(i + phase) // k for i in range(end)]
        mask = torch.tensor([[a >= b for b in blocks] for a in blocks])[None, None]
        rotary = common.rotary(llama, torch.arange(end)[None], -1)
        embeds = llama.get_input_embeddings()(inputs)
        feature = drafter(features, embeds, rotary, mask)[0][0, slot]
        return head(feature), feature

    slots = [
        (row, slot)
        for row, length in enumerate((9, 14, 7))
        for slot in range(length - k - 1)
        if batch.loss_mask[row, slot + k + 1]
    ]
    replaced = set()
    if csgd:
        where = torch.zeros(3, 13, dtype=torch.bool)
        wrong = where.clone()
        for row, slot in slots:
            where[row, slot] = True
            answer = head(batch.hidden[row, slot + k]).argmax()
            wrong[row, slot] = forward(row, slot, replaced)[0].argmax() != answer
        chosen = falcon.glance(wrong, where, 0.4 * 0.75, k, batch.seed)
        replaced = set(map(tuple, chosen.nonzero().tolist()))
        assert len(replaced) >= 3
    for row, slot in slots:
        if (row, slot) not in replaced:
            logits, feature = forward(row, slot, replaced)
            answer = batch.hidden[row, slot + k]
            difference = (feature - answer).abs()
            l1 = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean()
            p, log_q = head(answer).softmax(-1), logits.log_softmax(-1)
            kl, hard = (p * (p.log() - log_q)).sum(), -log_q[p.argmax()]
            expected += float((l1 + 0.3 * (0.9 * kl + 0.1 * hard)).detach())
            count += 1
    assert count == len(slots) - len(replaced)
    assert float(falcon.loss(drafter, llama, batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_noise_is_bounded_and_only_of_the_learning_pass(llama, monkeypatch):
    batch, drafter, seen = make_batch(llama), make_drafter(llama, csgd=True), []
    real = falcon.Drafter.forward

    def spy(self, features, *rest, **more):
        seen.append(features)
        return real(self, features, *rest, **more)

    monkeypatch.setattr(falcon.Drafter, "forward", spy)
    monkeypatch.setattr(falcon, "glance", lambda wrong, *_: torch.zeros_like(wrong))
    falcon.loss(drafter, llama, batch)
    assert torch.equal(seen[0], batch.hidden[:, :-1]) and len(seen) == 2
    noise = seen[1] - seen[0]
    assert 0.09 < noise.max() <= 0.1 and -0.1 <= noise.min() < -0.09
    assert noise.mean().abs() < 0.005 and 0.045 < noise.abs().mean() < 0.055
    falcon.loss(drafter, llama, batch)
    assert torch.equal(seen[1], seen[3])


def test_blocks_of_one_slot_need_no_first_pass(llama, monkeypatch):
    passes, real = [], falcon.training_pass
    monkeypatch.setattr(falcon, "training_pass", lambda *args: passes.append(args) or real(*args))
    for k in (1, 2):
        falcon.loss(make_drafter(llama, k=k, csgd=True), llama, make_batch(llama))
    assert len(passes) == 1 + 2


def test_no_slot_sees_its_answer(llama):
    """Changing what lies beyond a block changes none of its predictions."""
    for k in (2, 3):
        batch, drafter = make_batch(llama, lengths=(14,)), make_drafter(llama, k=k)
        logits, _, _, where = falcon.training_pass(drafter, llama, batch)
        slots = where[0].nonzero().flatten().tolist()
        for place in range(5, 14):
            other = make_batch(llama, lengths=(14,))
            other.hidden[:, place:] += 1
            other.input_ids[:, place + 1 :] = 1
            changed = falcon.training_pass(drafter, llama, other)[0]
            for slot, before, after in zip(slots, logits, changed):
                if slot + k <= place:
                    torch.testing.assert_close(before, after)


def test_a_sequence_shorter_than_a_block_gives_no_loss(llama):
    batch = make_batch(llama, lengths=(2, 3), prompt=1)
    value = falcon.loss(make_drafter(llama, k=4), llama, batch)
    value.backward()
    assert float(value.detach()) == 0


@pytest.mark.parametrize(
    "options", [{}, {"fusion": "cell"}, {"fusion": "linear", "csgd": False}, {"k": 3}]
)
def test_training_lowers_the_loss(llama, options):
    drafter = make_drafter(llama, **options).train()
    optimizer, values = torch.optim.AdamW(drafter.parameters(), lr=3e-3), []
    for _ in range(25):
        value = falcon.loss(drafter, llama, make_batch(llama, progress=0.9))
        value.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(value.detach()))
    assert values[-1] < 0.7 * values[0]


def test_alpha_of_the_target_itself_is_one_and_of_a_subset_its_mass(llama, monkeypatch):
    batch, drafter = make_batch(llama), make_drafter(llama)
    drafter.draft_ids = torch.arange(10, 30)
    where = F.pad(batch.loss_mask, (0, 2))[:, 3:15]
    features = F.pad(batch.hidden, (0, 0, 0, 2))[:, 2:14][where]
    own = common.target_logits(llama, features, drafter.draft_ids)
    monkeypatch.setattr(falcon, "training_pass", lambda *_: (own, features, features, where))
    total, count = falcon.alpha(drafter, llama, batch)
    mass = common.target_logits(llama, features).softmax(-1)[:, 10:30].sum()
    assert count == int(where.sum()) and float(total) == pytest.approx(float(mass), rel=1e-5)


# -------------------------------------------------------------------------------------------- trees


def test_the_papers_tree_has_its_counts_by_depth():
    lengths = collections.Counter(map(len, falcon.PAPER_TREE))
    assert [lengths[depth] for depth in range(1, 9)] == [20, 19, 19, 15, 16, 10, 10, 9]
    assert len(falcon.prune(falcon.PAPER_TREE, 99, 99)) == 118 == len(falcon.PAPER_TREE)
    assert falcon.layered_tree([2, 3]) == [[0], [1], [0, 0], [0, 1], [1, 0]]
    five = [[0, 0], [0, 1], [1, 0], [0, 2], [2, 0]]  # [1, 1] is worth less than [2, 0]
    assert falcon.layered_tree([3, 5])[3:] == five


def test_prune_orders_cuts_and_refuses():
    tree = [[0, 1], [0], [1], [0, 1, 5]]
    assert falcon.prune(tree, 9, 9) == [(0,), (1,), (0, 1), (0, 1, 5)]
    assert falcon.prune(tree, 9, 5) == [(0,), (1,), (0, 1)]
    assert falcon.prune(tree, 1, 9) == [(0,), (1,)] and falcon.prune(tree, 0, 9) == []
    for bad in ([[0], [1, 0]], [[]], [[-1]]):
        with pytest.raises(ValueError, match="tree path"):
            falcon.prune(bad, 9, 9)


def test_fit_tree_against_all_trees():
    """Two ranks, depths up to 4: the best of all trees of at most 6 nodes, found by enumeration."""
    paths = [path for d in range(1, 5) for path in itertools.product(range(2), repeat=d)]
    trees = all_trees = {frozenset()}
    for _ in range(6):
        grown = {(tree, path) for tree in trees for path in paths if path not in tree}
        trees = {tree | {path} for tree, path in grown if not path[:-1] or path[:-1] in tree}
        all_trees = all_trees | trees
    generator = torch.Generator().manual_seed(1)
    verify = [0.0] + [10 + 0.4 * n + (2 if n > 4 else 0) for n in range(1, 8)]
    draft = [2.0, 4.5]
    for _ in range(4):
        rates = torch.rand(4, 2, generator=generator) * torch.tensor([0.7, 0.3])
        counts = torch.stack([rates * 1000, torch.full_like(rates, 1000)])
        share = rates.tolist()

        def speed(tree, share=share):
            worth = [math.prod(share[d][r] for d, r in enumerate(path)) for path in tree]
            passes = -(-max(map(len, tree), default=0) // 2)
            drafting = draft[passes - 1] if passes else 0.0
            return (1 + sum(worth)) / (drafting + verify[1 + len(tree)])

        best = max(all_trees, key=speed)
        found = attempt(fitting.fit_tree, counts, verify, draft, 2)
        right = isinstance(found, list) and len(found) > 0
        right = right and speed(found) == pytest.approx(speed(best), rel=1e-5)
        call = (
            f"fit_tree(shares by depth and rank {share}, verify_ms={verify}, draft_ms={draft}, k=2)"
        )
        best = sorted(map(list, best), key=lambda path: (len(path), path))
        assert right, says(call, f"{best}, {speed(best):.4f} tokens a ms", repr(found))
        falcon.prune(found, 9, 9)
    nothing = counts * torch.tensor([0, 1])[:, None, None]
    assert fitting.fit_tree(nothing, verify, draft, 2) == []
    sure = torch.stack([torch.full((6, 2), 9.0), torch.full((6, 2), 10.0)])  # six levels of 0.9
    one_pass = fitting.fit_tree(sure, [50.0] * 12, [1.0], 2)
    assert one_pass and max(map(len, one_pass)) == 2  # a pass gives k tokens, no more


def random_blocks(k, branches, ranks, seed, ties=False):
    """{path: [slot][rank] probabilities, falling}, below some leaves of the first block."""
    generator = torch.Generator().manual_seed(seed)
    blocks = {}
    leaves = list(itertools.product(range(ranks), repeat=k))
    chosen = torch.randperm(len(leaves), generator=generator)[:branches].tolist()
    for path in [(), *(leaves[n] for n in chosen)]:
        q = torch.rand(k, ranks, generator=generator).sort(descending=True).values
        if ties:
            q = (4 * q).ceil() / 4
        blocks[path] = q.tolist()
    return blocks


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_paths_against_brute_force(k, ties):
    """All paths, their products, sorted: by worth, then by ranks."""
    for seed in range(20):
        blocks = random_blocks(k, branches=seed % 4, ranks=3, seed=seed, ties=ties)
        worth = {(): 1.0}
        for branch, slots in blocks.items():
            for end in range(1, k + 1):
                for ranks in itertools.product(range(3), repeat=end):
                    path = branch + ranks
                    worth[path] = worth[path[:-1]] * slots[end - 1][ranks[-1]]
        for nodes, least, depth in ((1, 0.0, 99), (7, 0.0, 99), (40, 0.2, 99), (9, 0.1, k + 1)):
            config = falcon.Config(k=k, best_nodes=nodes, least_worth=least)
            kept = [p for p, w in worth.items() if p and w >= least and len(p) <= depth]
            expected = sorted(kept, key=lambda path: (-worth[path], path))[:nodes]
            got = falcon.best_paths(blocks, config, depth)
            assert got == expected, says(f"best_paths({blocks}, {config})", expected, got)
            assert all(not path[:-1] or path[:-1] in got[:n] for n, path in enumerate(got))


def test_best_paths_as_in_the_docstring():
    config = falcon.Config(k=2, best_nodes=4)
    blocks = {(): [[0.6, 0.3], [0.5, 0.4]]}
    assert falcon.best_paths(blocks, config, 9) == [(0,), (0, 0), (1,), (0, 1)]
    assert falcon.best_paths(blocks, config, 1) == [(0,), (1,)]


@pytest.mark.parametrize("k, nodes", [(1, 6), (2, 9), (2, 14)])
def test_a_confident_tree_is_the_best_of_all_that_its_passes_can_give(llama, k, nodes):
    """Six tokens can be drafted: all 6 + 36 + ... sequences, each block from its own forward."""
    drafter = make_drafter(llama, k=k, draft_vocab=6)
    drafter.draft_ids.copy_(torch.arange(10, 16))
    for length, passes in ((k + 1, 1), (k + 4, 2), (k + 5, 2)):
        ids = random_ids(length, seed=length)
        worth = {(): 1.0}
        own = {}  # each node's probability in its slot
        for level in range(0, passes * k, k):
            for branch in [path for path in worth if len(path) == level]:
                q = from_scratch(drafter, llama, ids, branch).detach().softmax(-1)  # (k, 6)
                for end in range(1, k + 1):
                    for more in itertools.product(range(10, 16), repeat=end):
                        path = branch + more
                        own[path] = float(q[end - 1, more[-1] - 10])
                        worth[path] = worth[path[:-1]] * own[path]
        best = sorted(own, key=lambda path: -worth[path])[:nodes]
        for room in (99, 1):
            stats = common.Stats(trace=[])
            options = {"best_nodes": nodes, "passes": passes}
            draft = one_round(drafter, llama, ids, depth=room, stats=stats, **options)
            drafted = []
            for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()):
                drafted.append((*drafted[parent], token) if parent >= 0 else (token,))
            expected = best
            if room == 1:
                expected = sorted(((t,) for t in range(10, 16)), key=lambda path: -worth[path])
            assert drafted == expected[:nodes]
            assert stats.noted["k"] == k
            q_nodes = [own[path] for path in drafted]
            assert stats.noted["q_nodes"] == pytest.approx(q_nodes, rel=1e-4)


def test_less_worth_is_not_drafted(llama, trained):
    """A round drafts what reaches the threshold, which may be nothing; the output stays."""
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    drafted = []
    for least in (0.0, 0.05, 0.08, 1.1):
        options = {"best_nodes": 8, "least_worth": least}
        output, stats = decode(llama, trained[2], ids, **options)
        assert torch.equal(output, truth)
        drafted.append(stats.drafted)
    assert drafted[0] > drafted[1] > drafted[2] > drafted[3] == 0, drafted


def test_confidence_is_accepted_more_than_a_tree_of_as_many_nodes(llama, trained):
    ids = torch.tensor([[2, 9, 30]])
    rounds = []
    for options in ({"tree": falcon.layered_tree([3, 2])}, {"best_nodes": 5}):
        _, stats = decode(llama, trained[2], ids, max_new_tokens=100, **options)
        rounds.append(stats.target_forwards)
    assert rounds[1] < rounds[0]


def test_copies_are_offered_and_accepted(small_llama):
    """With seven tokens an answer soon falls into a loop, which copies follow."""
    ids, drafter = torch.tensor([[1, 2, 3]]), make_drafter(small_llama)
    _, without = decode(small_llama, drafter, ids, copies=0)
    _, stats = decode(small_llama, drafter, ids, copies=10)
    offered, accepted = (sum(column) for column in zip(*stats.copies))
    assert 0 < accepted < offered and stats.target_forwards < without.target_forwards
    assert not any(offered for offered, _ in without.copies)


def test_options_of_a_call_stay_with_it(llama, trained):
    config = dataclasses.replace(trained[2].config)
    decode(llama, trained[2], torch.tensor([[9, 8, 7]]), tree=[[0]], **TREES["both"])
    assert trained[2].config == config
    assert falcon.Config().tree == falcon.layered_tree([4, 4, 3, 2])


def test_as_many_passes_as_asked_for(llama):
    """A drafter of one token is sure of it, and so as deep as its passes reach, two levels each."""
    drafter, prompt = make_drafter(llama, draft_vocab=1), torch.tensor([[9, 8, 7]])
    for passes in (1, 3):
        options = {"best_nodes": 9, "passes": passes, "max_new_tokens": 8}
        _, stats = decode(llama, drafter, prompt, **options)
        assert stats.offered[0] == 2 * passes


def test_a_record_says_how_a_round_was_drafted(llama, trained):
    stats = common.Stats(trace=[])
    decode(llama, trained[2], torch.tensor([[9, 8, 7]]), stats=stats, **TREES["both"])
    for record in stats.trace:
        if len(record["draft"].tokens) > record["draft"].copied:
            assert record["k"] == 2
            assert len(record["q_nodes"]) == len(record["draft"].tokens) - record["draft"].copied
            assert all(0 < q <= 1 for q in record["q_nodes"])


def test_rank_acceptance_counts_ranks_of_the_truth(llama, oracle, trained):
    truth = llama.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=12, do_sample=False)
    oracle(truth)
    tree = [[0], [1], [0, 0], [0, 1], [1, 0]]
    hits, trials = fitting.tree_acceptance(falcon, trained[2], llama, truth, 3, tree)
    assert hits.tolist() == [[12, 0], [11, 0]] and trials.tolist() == [[12, 12], [11, 11]]
    oracle(truth, wrong=47)  # now rank 1 holds the truth
    hits, trials = fitting.tree_acceptance(falcon, trained[2], llama, truth, 3, [[0], [1], [1, 1]])
    assert hits.tolist() == [[0, 12], [0, 11]] and trials.tolist() == [[12, 12], [0, 11]]


def test_rank_acceptance_agrees_with_decoding(llama, trained):
    """Of a chain, the share of rounds that accept a first token, if they began everywhere."""
    # the end is new to the drafter
    text = llama.generate(torch.tensor([[3]]), max_new_tokens=80, do_sample=False)
    chain, expected = [[0], [0, 0], [0, 0, 0]], [0, 0, 0]
    hits, trials = fitting.tree_acceptance(falcon, trained[2], llama, text, 40, chain)
    for end in range(40, 81):
        mask = torch.ones(1, end, dtype=torch.long)
        options = {"max_new_tokens": min(4, 82 - end), "attention_mask": mask, "tree": chain}
        _, stats = decode(llama, trained[2], text[:, :end], **options)
        for depth in range(stats.accepted[0]):
            expected[depth] += 1
    assert hits[:, 0].tolist() == expected and 0 < expected[1] < expected[0] < 41 == trials[0, 0]


# ------------------------------------------------------------------------------------- architecture


def test_layers_and_final_norm_start_as_the_targets():
    target = make_llama()
    for place, norm in enumerate(p for p in target.parameters() if p.dim() == 1):
        norm.fill_(0.5 + place)  # a random target's are all 1, as a new drafter's are
    drafter = make_drafter(target, num_layers=2)
    for own, theirs in zip(drafter.layers, target.model.layers[1:]):
        for name, weight in own.named_parameters():
            torch.testing.assert_close(weight, theirs.get_parameter(name), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight, atol=1e-6, rtol=1e-6)


def test_the_lstm_recurs_and_the_other_fusions_do_not(llama):
    for fusion, recurs in (("lstm", True), ("cell", False), ("linear", False)):
        drafter = make_drafter(llama, fusion=fusion)
        features, embeds = torch.randn(2, 1, 4, 32, dtype=torch.float64)
        rotary = common.rotary(llama, torch.arange(4)[None], -1)
        mask = torch.eye(4, dtype=torch.bool)[None, None]  # attention to oneself only
        first = drafter(features, embeds, rotary, mask)[0][0]
        features[0, 0] += 1
        second = drafter(features, embeds, rotary, mask)[0][0]
        assert ((first - second).abs().amax(-1)[1:] > 1e-9).tolist() == [recurs] * 3


def test_packed_weights_draft_the_same(llama):
    target = make_llama().float()
    drafter, ids = make_drafter(target).float(), torch.tensor([[9, 8, 7]])
    plain = decode(target, drafter, ids)
    packed_too = decode(packed.pack(target), packed.pack(drafter), ids)
    assert torch.equal(plain[0], packed_too[0]) and plain[1].accepted == packed_too[1].accepted


def test_draft_vocabulary_is_the_most_frequent_tokens(llama):
    counts = torch.zeros(48)
    counts[[40, 3, 17]] = torch.tensor([5.0, 9.0, 7.0])
    config = falcon.Config(target=common.target_shape(llama), intermediate_size=48, draft_vocab=3)
    assert falcon.build(config, llama, counts).draft_ids.tolist() == [3, 17, 40]
    for wrong in ({"k": 0}, {"fusion": "gru"}):
        with pytest.raises(ValueError, match="fusion is lstm, cell or linear, k at least 1"):
            make_drafter(llama, **wrong)


def test_saved_and_loaded_drafts_are_the_same(llama, trained, tmp_path):
    trained[3].save_pretrained(tmp_path)
    loaded = common.load_drafter(falcon.Drafter, tmp_path, llama)
    assert loaded.config == trained[3].config
    assert dataclasses.asdict(loaded.config)["target"]["vocab_size"] == 48
    for name, weight in trained[3].state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=1e-6, rtol=1e-6)
    ids = torch.tensor([[9, 8, 7]])
    assert decode(llama, loaded, ids)[1].accepted == decode(llama, trained[3], ids)[1].accepted
