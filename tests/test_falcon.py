"""falcon.py: lossless decoding with any tree; alignment of blocks; masks; CSGD on worked sequences;
choosing trees."""

import collections
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import chi_square_p_value, enumerate_joint, make_llama
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

import common
import falcon
import train
from support import fitting, packed

FULL = [
    list(path) for depth in range(1, 5) for path in itertools.product(range(2), repeat=depth)
]  # 30 nodes


def make_drafter(target, **options):
    settings = (
        dict(target=common.target_shape(target), intermediate_size=48, draft_vocab=0) | options
    )
    torch.manual_seed(5)
    return (
        falcon.build(falcon.Config(**settings), target, torch.arange(target.config.vocab_size))
        .double()
        .eval()
    )


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    return target.generate(
        ids, custom_generate=falcon.generate, drafter=drafter, **options
    ), options["stats"]


def make_batch(target, lengths=(9, 14, 7), prompt=3, seed=0, progress=0.0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features, seeds = train.Features(target, sequences, [], None), torch.arange(len(lengths)) + 7
    return train.make_batch(list(range(len(lengths))), sequences, features, seeds, progress, "cpu")


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter for each k that has seen a little of what the target says, so that drafts are
    refused now and then."""
    ids = llama.generate(torch.arange(1, 9)[:, None], max_new_tokens=60, do_sample=False)
    sequences = [(row, torch.arange(len(row)) > 0) for row in ids]
    features, drafters = train.Features(llama, sequences, [], None), {}
    for k in (2, 3):
        drafter = drafters[k] = make_drafter(llama, k=k).train()
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
        for step in range(50):
            seeds = torch.arange(8) + 8 * step
            batch = train.make_batch(list(range(8)), sequences, features, seeds, step / 50, "cpu")
            (falcon.loss(drafter, llama, batch) / batch.loss_mask.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        drafter.eval()
    return drafters


@pytest.fixture
def oracle(monkeypatch):
    """Call with a text, and drafts follow it; `wrong` makes the first token at each depth from it
    another one."""

    def install(truth, wrong=False):
        def propose(drafter, target, input_ids, hidden, own, tree, depth):
            paths = falcon.prune(tree, depth, 40)
            tokens = []
            for path in paths:
                place = min(input_ids.shape[1] + len(path) - 1, truth.shape[1] - 1)
                tokens.append((int(truth[0, place]) + path[-1] + wrong) % target.config.vocab_size)
            parents = torch.tensor(
                [paths.index(p[:-1]) if p[:-1] else -1 for p in paths], dtype=torch.long
            )
            return common.Draft(input_ids.new_tensor(tokens), parents)

        monkeypatch.setattr(falcon, "propose", propose)

    return install


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("length", [1, 2, 13])
def test_greedy_output_is_the_targets(llama, trained, length):
    ids = torch.randint(1, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    random = [
        make_drafter(llama, k=k, fusion=fusion, num_layers=layers, draft_vocab=vocab)
        for k, fusion, layers, vocab in (
            (1, "lstm", 1, 0),
            (2, "cell", 2, 0),
            (3, "linear", 1, 9),
            (4, "lstm", 1, 0),
        )
    ]
    for drafter in (*trained.values(), *random):
        for options in ({"chain": True}, {"tree": FULL}, {"tree": []}):
            output, stats = decode(llama, drafter, ids, **options)
            assert torch.equal(output, truth)
            assert stats.emitted == 40 and sum(stats.accepted) + stats.target_forwards == 40


def test_the_papers_tree_is_lossless_too(llama, trained):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for drafter in trained.values():
        assert torch.equal(decode(llama, drafter, ids, **falcon.VARIANTS["paper"])[0], truth)


def test_trained_drafters_are_accepted_sometimes_and_refused_sometimes(llama, trained):
    for drafter in trained.values():
        _, stats = decode(llama, drafter, torch.tensor([[3]]), max_new_tokens=100)
        assert 0 < sum(stats.accepted) < stats.drafted and len(set(stats.accepted)) > 2


def test_a_tree_is_accepted_more_than_a_chain(llama, trained):
    rounds = [
        decode(llama, trained[2], torch.tensor([[2, 9, 30]]), max_new_tokens=100, **options)[
            1
        ].target_forwards
        for options in ({"chain": True}, {}, {"tree": falcon.PAPER_TREE})
    ]
    assert rounds[2] < rounds[0] and rounds[1] < rounds[0]


def test_an_oracle_is_always_accepted_and_its_opposite_never(llama, trained, oracle):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    oracle(truth)
    output, stats = decode(llama, trained[2], ids, max_new_tokens=37)
    assert (
        torch.equal(output, truth)
        and stats.accepted == stats.offered
        and stats.target_forwards == 8
    )
    oracle(truth, wrong=40)
    output, stats = decode(llama, trained[2], ids, max_new_tokens=37)
    assert torch.equal(output, truth) and stats.accepted == [0] * 37


def test_stopping_inside_a_draft(llama, trained, oracle):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    oracle(truth)
    for place in range(3, 12):
        eos = int(truth[0, place])
        expected = llama.generate(ids, max_new_tokens=37, do_sample=False, eos_token_id=eos)
        assert torch.equal(
            decode(llama, trained[2], ids, tree=FULL, eos_token_id=eos, max_new_tokens=37)[0],
            expected,
        )
        shorter, stats = decode(
            llama, trained[2], ids, tree=FULL, eos_token_id=None, max_new_tokens=place
        )
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


def sampled_counts(target, drafter, prompt, rounds=700):
    counts = collections.Counter()
    torch.manual_seed(0)
    for _ in range(rounds):
        output, _ = decode(
            target,
            drafter,
            prompt,
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            tree=[[0], [1], [0, 0], [0, 1], [1, 0]],
        )
        counts[tuple(output[0, prompt.shape[1] :].tolist())] += 1
    return counts


def test_sampled_output_follows_the_target(small_llama):
    prompt = torch.tensor([[1, 2, 3]])
    counts = sampled_counts(small_llama, make_drafter(small_llama), prompt)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) > 0.001


def test_negative_control_a_node_taken_without_a_draw_is_noticed(small_llama, monkeypatch):
    real = common._choose

    def greedy_for_nodes(scores, candidates, tokens, *rest):
        return (
            (candidates[0], tokens[candidates[0]])
            if candidates
            else real(scores, candidates, tokens, *rest)
        )

    monkeypatch.setattr(common, "_choose", greedy_for_nodes)
    prompt = torch.tensor([[1, 2, 3]])
    counts = sampled_counts(small_llama, make_drafter(small_llama), prompt, rounds=300)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 3)) < 1e-6


def test_other_families_and_half_precision_run():
    """GPT-2 has no rotary embedding and GPT-NeoX rotates a quarter of a head."""
    torch.manual_seed(0)
    shape = dict(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
    )
    gpt2 = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    for target in (
        GPT2LMHeadModel(gpt2),
        GPTNeoXForCausalLM(GPTNeoXConfig(**shape, bos_token_id=None)),
    ):
        target = target.double().eval()
        target.generation_config.eos_token_id = target.generation_config.bos_token_id = None
        truth = target.generate(
            torch.tensor([[4, 5, 6]]), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        output, _ = decode(
            target,
            make_drafter(target),
            torch.tensor([[4, 5, 6]]),
            max_new_tokens=20,
            pad_token_id=0,
        )
        assert torch.equal(output, truth)
    for dtype in (torch.bfloat16, torch.float16):
        target = make_llama().to(dtype)
        for fusion in ("lstm", "cell", "linear"):
            output, _ = decode(
                target, make_drafter(target, fusion=fusion).to(dtype), torch.tensor([[4, 5, 6]])
            )
            assert output.shape == (1, 43)


# ------------------------------------------------------------------- blocks, branches and the cache


def from_scratch(drafter, target, ids, branch=()):
    """Logits (k, Vd) after the committed ids and drafted tokens, in a plain forward: the features
    of drafted tokens are predicted block by block, blocks are counted back from the newest
    committed token."""
    k, total = drafter.config.k, ids.shape[1] - 1
    hidden = common.target_features(target, ids)[0][:, :-1]
    tokens = torch.cat([ids, torch.tensor([list(branch)], dtype=torch.long)], dim=1)[:, 1:]
    for end in range(total, total + len(branch) + 1, k):
        rotary = common.rotary(target, torch.arange(end)[None], -1)
        embeds = target.get_input_embeddings()(tokens[:, :end])
        mask = falcon.relaxed_mask(end, k, torch.tensor([-total % k]))
        head = common.draft_head(target, drafter.draft_ids)
        logits, features, *_ = drafter(
            hidden, embeds, rotary, head, (slice(None), slice(-k, None)), mask
        )
        hidden = torch.cat([hidden, features], dim=1)
    return logits[0]


@pytest.mark.parametrize("fusion", ["lstm", "cell", "linear"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_tree_holds_what_each_branch_alone_would_give(llama, k, fusion):
    """Every node of a tree of three passes, from a forward of its own over its branch (draft
    vocabulary included)."""
    drafter = make_drafter(llama, k=k, fusion=fusion, num_layers=2, draft_vocab=20)
    drafter.draft_ids.copy_(torch.arange(10, 30))
    some = {
        tuple(path[:end])
        for path in ([1, 0, 2] * 4, [0] * 12, [1, 0, 2, 0, 1, 0, 0, 0, 1, 0, 0, 2], [0, 2, 1] * 4)
        for end in range(1, 3 * k + 1)
    }
    for length in range(k + 1, k + 6):
        ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
        hidden = common.target_features(llama, ids)[0][:, :-1]
        draft = falcon.propose(
            drafter, llama, ids, hidden, falcon.new_memory(drafter, llama), some, 99
        )
        paths = falcon.prune(some, 99, 20)
        tokens = dict(zip(paths, draft.tokens.tolist()))
        assert len(draft.tokens) == len(paths)
        for node, path in enumerate(paths):
            assert (
                paths[draft.parents[node]] == path[:-1]
                if len(path) > 1
                else draft.parents[node] == -1
            )
            start = (len(path) - 1) // k * k
            branch = [tokens[path[:end]] for end in range(1, start + 1)]
            ranked = from_scratch(drafter, llama, ids, branch)[len(path) - start - 1].argsort(
                descending=True
            )
            assert tokens[path] == int(drafter.draft_ids[ranked[path[-1]]])


@pytest.mark.parametrize("k", [2, 3, 4])
def test_rounds_of_any_length_keep_blocks_aligned_to_the_newest_token(llama, k, monkeypatch):
    """Whatever a round adds, the newest k slots are one block; the cache holds the rows, and the
    draft the tokens, of a plain forward in which every slot sees as far as it saw when it was last
    fed."""
    drafter = make_drafter(llama, k=k, num_layers=2)
    masks = []
    real = falcon.Drafter.forward
    spy = lambda self, *a, **b: masks.append(a[5][0, 0]) or real(self, *a, **b)
    monkeypatch.setattr(falcon.Drafter, "forward", spy)
    ids = torch.randint(0, 48, (1, 40), generator=torch.Generator().manual_seed(k))
    hidden = common.target_features(llama, ids)[0]
    for steps in (
        [k + 1, 1, 1, 1, 1, 1, 1],
        [6, 2, 3, 1, 4, 2, 5, 1],
        [2 * k, k, k, 1, k, 2],
        [0, 1, 1, 1, 1, 1, 1],
    ):
        own, total, reach = falcon.new_memory(drafter, llama), 0, []
        for step in steps:
            masks.clear()
            held, total = own.cache.get_seq_length(), total + step
            tree = [[0], [0, 0], *([0] * depth for depth in range(3, 2 * k + 1))]
            draft = falcon.propose(
                drafter, llama, ids[:, : total + 1], hidden[:, total - step : total], own, tree, 99
            )
            assert own.cache.get_seq_length() == (
                total if total >= k else 0
            )  # rows of the second pass are gone
            if total < k:
                assert len(draft.tokens) == 0
                continue
            fed, rows = masks[0].shape
            assert (
                rows == total and masks[0][-k:].all()
            )  # all slots of the newest block see the newest token
            assert fed == total if held == 0 else fed % k == 0 and 0 <= fed - (total - held) < k
            reach = reach[: total - fed] + [int(row.nonzero().max()) for row in masks[0]]
            plain, rotary = (
                common.GrowingCache(2),
                common.rotary(llama, torch.arange(total)[None], -1),
            )
            mask = (torch.tensor(reach)[:, None] >= torch.arange(total))[None, None]
            embeds = llama.get_input_embeddings()(ids[:, 1 : total + 1])
            logits = real(drafter, hidden[:, :total], embeds, rotary, own.head, (0,), mask, plain)[
                0
            ]
            assert logits[-k:].argmax(-1).tolist() == draft.tokens[:k].tolist()
            for mine, theirs in zip(own.cache.layers, plain.layers):
                torch.testing.assert_close(mine.keys, theirs.keys)
                torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.parametrize("k", [2, 3])
def test_the_first_draft_token_depends_on_the_newest_token(llama, k):
    drafter = make_drafter(llama, k=k)
    for length in range(k + 1, k + 7):  # every parity
        ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
        changed = ids.clone()
        changed[0, -1] = (ids[0, -1] + 1) % 48
        difference = (
            (from_scratch(drafter, llama, ids) - from_scratch(drafter, llama, changed))
            .abs()
            .amax(-1)
        )
        assert difference.min() > 1e-6


# -------------------------------------------------------------------------------------------- masks


def drawing(mask):
    return ["".join(".x"[int(value)] for value in row) for row in mask]


def test_relaxed_mask_drawing_and_definition():
    mask = falcon.relaxed_mask(5, 2, torch.tensor([1]))
    assert drawing(mask[0, 0]) == ["x....", "xxx..", "xxx..", "xxxxx", "xxxxx"]
    for k in (1, 2, 3, 4):
        mask = falcon.relaxed_mask(13, k, torch.arange(k))
        for phase, i, j in itertools.product(range(k), range(13), range(13)):
            assert bool(mask[phase, 0, i, j]) == ((j + phase) // k <= (i + phase) // k)


def test_tree_sight_drawing_and_definition():
    sight = falcon.tree_sight(torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 0, 0]), 2)
    assert drawing(sight) == ["xxxxx....", "xxx..xx..", "xxx....xx"]
    assert drawing(falcon.tree_sight(sight, torch.tensor([0, 2]), 2)) == [
        "xxxxx....xx..",
        "xxx....xx..xx",
    ]
    generator = torch.Generator().manual_seed(0)
    for k in (2, 3):
        sight, lineage = (
            torch.ones(1, 4, dtype=torch.bool),
            [[]],
        )  # the blocks (by first row) that a branch may see
        for width in (3, 5, 4):
            parent = torch.randint(len(lineage), (width,), generator=generator)
            rows = sight.shape[1]
            lineage = [[*lineage[p], rows + n * k] for n, p in enumerate(parent.tolist())]
            sight = falcon.tree_sight(sight, parent, k)
            for n, row in itertools.product(range(width), range(sight.shape[1])):
                assert bool(sight[n, row]) == (
                    row < 4 or any(start <= row < start + k for start in lineage[n])
                )


# -------------------------------------------------------------------------------- CSGD and the loss


def test_glancing_worked_by_hand():
    """k = 2 leaves no choice of length; all slots wrong at rate 1/2 replaces the first slot of
    every block."""
    where = torch.ones(1, 8, dtype=torch.bool)
    assert drawing(falcon.glance(where, where, 0.5, 2, torch.tensor([4]))) == ["x.x.x.x."]
    assert drawing(falcon.glance(where, where, 0.5, 2, torch.tensor([5]))) == [
        ".x.x.x.x"
    ]  # phase 1
    assert drawing(falcon.glance(where, where, 0.0, 2, torch.tensor([4]))) == ["........"]
    right = ~where
    assert drawing(falcon.glance(right, where, 0.5, 2, torch.tensor([4]))) == [
        "........"
    ]  # nothing was wrong
    where[0, :3] = False
    assert drawing(falcon.glance(where, where, 0.6, 2, torch.tensor([4]))) == [
        "....x.x."
    ]  # the prompt stays
    where = torch.ones(1, 6, dtype=torch.bool)
    outcomes = {
        drawing(falcon.glance(where, where, 0.5, 3, torch.tensor([3 * n])))[0] for n in range(60)
    }
    assert outcomes == {
        "xx.x..",
        "x..xx.",
        "x..x..",
    }  # N = 3: runs of two and one, or of one until no block is left
    outcomes = {
        drawing(falcon.glance(where, where, 0.34, 3, torch.tensor([3 * n])))[0] for n in range(60)
    }
    assert outcomes == {"x..x..", "xx....", "...xx."}
    assert not falcon.glance(
        where, where, 0.5, 1, torch.tensor([4])
    ).any()  # one slot a block: nothing to couple


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
            assert (
                not replaced[row, : -int(seed[row]) % k].any()
                and not (replaced[row] & ~where[row]).any()
            )


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
        end = min(
            (slot + phase) // k * k + k - phase, tokens.shape[1] - 1
        )  # where the slot's block ends
        features, inputs = hidden[:, :end].clone(), tokens[:, 1 : end + 1].clone()
        for other in range(end):
            if (row, other) in replaced:
                features[0, other], inputs[0, other] = (
                    hidden[0, other + k],
                    tokens[0, other + k + 1],
                )
        blocks = [(i + phase) // k for i in range(end)]
        mask = torch.tensor([[a >= b for b in blocks] for a in blocks])[None, None]
        rotary = common.rotary(llama, torch.arange(end)[None], -1)
        embeds = llama.get_input_embeddings()(inputs)
        return drafter(features, embeds, rotary, head, (0, slot), mask)[:2]

    slots = [
        (row, slot)
        for row, length in enumerate(batch.lengths.tolist())
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
            expected, count = (
                expected + float((l1 + 0.3 * (0.9 * kl + 0.1 * hard)).detach()),
                count + 1,
            )
    assert count == len(slots) - len(replaced)
    assert float(falcon.loss(drafter, llama, batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_noise_is_bounded_and_only_of_the_learning_pass(llama, monkeypatch):
    batch, drafter, seen = make_batch(llama), make_drafter(llama, csgd=True), []
    real = falcon.Drafter.forward
    monkeypatch.setattr(
        falcon.Drafter, "forward", lambda self, *a, **b: seen.append(a[0]) or real(self, *a, **b)
    )
    monkeypatch.setattr(falcon, "glance", lambda wrong, *_: torch.zeros_like(wrong))
    falcon.loss(drafter, llama, batch)
    assert torch.equal(seen[0], batch.hidden[:, :-1]) and len(seen) == 2
    difference = (seen[1] - seen[0]).abs()
    assert 0.09 < difference.max() <= 0.1 and 0.045 < difference.mean() < 0.055
    falcon.loss(drafter, llama, batch)
    assert torch.equal(seen[1], seen[3])


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


def test_prune_orders_cuts_and_refuses():
    tree = [[0, 1], [0], [1], [0, 1, 5]]
    assert falcon.prune(tree, 9, 9) == [(0,), (1,), (0, 1), (0, 1, 5)]
    assert falcon.prune(tree, 9, 5) == [(0,), (1,), (0, 1)]
    assert falcon.prune(tree, 1, 9) == [(0,), (1,)] and falcon.prune(tree, 0, 9) == []
    for bad in ([[0], [1, 0]], [[]], [[-1]]):
        with pytest.raises(ValueError, match="tree path"):
            falcon.prune(bad, 9, 9)


def test_fit_tree_against_all_trees():
    """Ranks 3, depths up to 4; the best of all prefix-closed trees of at most 6 nodes, found by
    enumeration."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        rates = torch.rand(4, 3, generator=generator) * torch.tensor([0.7, 0.3, 0.1])
        counts = torch.stack([rates * 1000, torch.full_like(rates, 1000)])
        verify = [0.0] + [10 + 0.4 * n + (2 if n > 4 else 0) for n in range(1, 8)]
        draft = [2.0, 4.5]

        def speed(tree, rates=rates, verify=verify, draft=draft):
            worth = [
                float(torch.prod(torch.stack([rates[d, r] for d, r in enumerate(path)])))
                for path in tree
            ]
            passes = -(-max(map(len, tree), default=0) // 2)
            return (1 + sum(worth)) / ((draft[passes - 1] if passes else 0) + verify[1 + len(tree)])

        trees, all_trees = {frozenset()}, {frozenset()}
        for _ in range(6):
            trees = {
                tree | {(*path, r)}
                for tree in trees
                for path in [(), *tree]
                if len(path) < 4
                for r in range(2)
                if (*path, r) not in tree
            }
            all_trees |= trees
        best = max(map(speed, all_trees))
        found = fitting.fit_tree(counts[:, :, :2], verify, draft, 2)
        assert speed(found) == pytest.approx(best, rel=1e-5) and found
        falcon.prune(found, 9, 9)
    assert fitting.fit_tree(counts * torch.tensor([0, 1])[:, None, None], verify, draft, 2) == []


def test_rank_acceptance_counts_ranks_of_the_truth(llama, oracle, trained):
    truth = llama.generate(torch.tensor([[9, 8, 7]]), max_new_tokens=12, do_sample=False)
    oracle(truth)
    tree = [[0], [1], [0, 0], [0, 1], [1, 0]]
    hits, trials = fitting.tree_acceptance(trained[2], llama, truth, 3, tree)
    assert hits.tolist() == [[12, 0], [11, 0]] and trials.tolist() == [[12, 12], [11, 11]]
    oracle(truth, wrong=47)  # now rank 1 holds the truth
    hits, trials = fitting.tree_acceptance(trained[2], llama, truth, 3, [[0], [1], [1, 1]])
    assert hits.tolist() == [[0, 12], [0, 11]] and trials.tolist() == [[12, 12], [0, 11]]


def test_rank_acceptance_agrees_with_decoding(llama, trained):
    """Of a chain, the share of rounds that accept a first token, if rounds were to start
    everywhere."""
    text = llama.generate(
        torch.tensor([[3]]), max_new_tokens=80, do_sample=False
    )  # the end is new to the drafter
    chain, expected = [[0], [0, 0], [0, 0, 0]], [0, 0, 0]
    hits, trials = fitting.tree_acceptance(trained[2], llama, text, 40, chain)
    for end in range(40, 81):
        _, stats = decode(
            llama,
            trained[2],
            text[:, :end],
            tree=chain,
            max_new_tokens=min(4, 82 - end),
            attention_mask=torch.ones(1, end, dtype=torch.long),
        )
        for depth in range(stats.accepted[0]):
            expected[depth] += 1
    assert hits[:, 0].tolist() == expected and 0 < expected[1] < expected[0] < 41 == trials[0, 0]


# ------------------------------------------------------------------------------------- architecture


def test_layers_and_final_norm_start_as_the_targets(llama):
    drafter = make_drafter(llama, num_layers=2)
    for own, theirs in zip(drafter.layers, llama.model.layers[1:]):
        for name, weight in own.named_parameters():
            torch.testing.assert_close(weight, theirs.get_parameter(name), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(drafter.norm.weight, llama.model.norm.weight, atol=1e-6, rtol=1e-6)


def test_the_lstm_recurs_and_the_other_fusions_do_not(llama):
    for fusion, recurs in (("lstm", True), ("cell", False), ("linear", False)):
        drafter = make_drafter(llama, fusion=fusion)
        features, embeds = torch.randn(2, 1, 4, 32, dtype=torch.float64)
        rotary = common.rotary(llama, torch.arange(4)[None], -1)
        mask = torch.eye(4, dtype=torch.bool)[None, None]  # attention to oneself only
        first = drafter(features, embeds, rotary, llama.lm_head, (0,), mask)[1]
        features[0, 0] += 1
        second = drafter(features, embeds, rotary, llama.lm_head, (0,), mask)[1]
        assert ((first - second).abs().amax(-1)[1:] > 1e-9).tolist() == [recurs] * 3


def test_packed_weights_draft_the_same(llama):
    target = make_llama().float()
    drafter, ids = make_drafter(target).float(), torch.tensor([[9, 8, 7]])
    plain, packed_too = (
        decode(target, drafter, ids),
        decode(packed.pack(target), packed.pack(drafter), ids),
    )
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
    assert (
        loaded.config == trained[3].config
        and dataclasses.asdict(loaded.config)["target"]["vocab_size"] == 48
    )
    for name, weight in trained[3].state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=1e-6, rtol=1e-6)
    ids = torch.tensor([[9, 8, 7]])
    assert decode(llama, loaded, ids)[1].accepted == decode(llama, trained[3], ids)[1].accepted
