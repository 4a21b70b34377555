"""Several sequences at once: each must come out as if it were alone, whatever the others do."""

import functools

import pytest
import torch
from tiny import chi_square_p_value, enumerate_joint, family, make_arm, make_llama

import common
from support import batching, cli
from support.arms import plain_loops
from support.prompts import answer_padded

IDS = ([1, 5, 9, 2, 8, 3, 1], [4, 4], [7], [2, 10, 3, 6, 2, 10])  # the last one repeats itself
PROMPTS = [torch.tensor([ids]) for ids in IDS]
GREEDY = {"do_sample": False}
TARGETS = {
    "Llama": lambda: make_llama(),
    "Gemma2": lambda: family("Gemma2", final_logit_softcapping=2.0).requires_grad_(False),
}


@functools.cache
def target_of(name):
    return TARGETS[name]()


def decode(target, arm, prompts=PROMPTS, options=None, copies=0):
    """The answers to all prompts at once, and their Stats; options: for each prompt."""
    decodings = []
    for ids, own in zip(prompts, options):
        decodings.append(common.open_decoding(target, ids, copies, common.Stats(), **own))
    return batching.generate(target, *arm, decodings), [each.stats for each in decodings]


def plain(target, ids, **options):
    """What transformers' own greedy decoding makes of one prompt."""
    return target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("method", cli.present())
def test_sequences_of_different_lengths_equal_plain_decoding(method, target_name):
    target = target_of(target_name)
    arm = make_arm(method, target)
    lengths = [14, 3, 20, 9]
    options = [{"max_new_tokens": n, **GREEDY} for n in lengths]
    drafted = []
    for copies in (0, 6):
        outputs, stats = decode(target, arm, options=options, copies=copies)
        for ids, n, output, own in zip(PROMPTS, lengths, outputs, stats):
            assert torch.equal(output, plain(target, ids, max_new_tokens=n))
            assert own.emitted == n and own.target_forwards == len(own.accepted)
        drafted.append(sum(own.drafted for own in stats))
    if method in ("glide", "falcon"):  # others may draft what is copied themselves
        assert drafted[1] != drafted[0]


def test_sequences_keep_their_own_pace(llama):
    """Each has the rounds it has alone, and every round is one forward for all."""
    arm = make_arm("glide", llama)
    options = {"max_new_tokens": 30, **GREEDY}
    alone = []
    for ids in PROMPTS:
        alone.append(decode(llama, arm, [ids], [options])[1][0])
    seen = []
    hook = llama.register_forward_pre_hook(lambda *_: seen.append(1))
    together = decode(llama, arm, options=[options] * 4)[1]
    hook.remove()
    assert [own.accepted for own in together] == [own.accepted for own in alone]
    assert any(len(set(column)) > 1 for column in zip(*(own.accepted for own in together)))
    assert len(seen) == max(own.target_forwards for own in together)


def test_a_joint_forward_equals_single_ones(llama):
    """Trees side by side: logits, hidden states and caches as for each alone."""
    generator = torch.Generator().manual_seed(0)
    drafts = []
    for parents in ([-1, 0, 0, 2], [], [-1, -1, 0], [-1]):
        tokens = torch.randint(48, (len(parents),), generator=generator)
        drafts.append(common.Draft(tokens, torch.tensor(parents, dtype=torch.long)))
    options = {"max_new_tokens": 20, **GREEDY}
    ours, theirs = (
        [common.open_decoding(llama, ids, **options) for ids in PROMPTS] for _ in range(2)
    )
    joint = batching.joint_forward(llama, ours, drafts)
    for one, other, draft, (logits, hidden) in zip(ours, theirs, drafts, joint):
        prefix = other.ids.shape[1] - 1
        fed, mask, positions = common.tree_inputs(other.ids, draft, prefix, llama.dtype)
        expected = common.forward(llama, fed, other.cache, mask, positions)
        torch.testing.assert_close(logits, expected[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(hidden, expected[1], atol=1e-12, rtol=0)
        for a, b in zip(one.cache.layers, other.cache.layers):
            torch.testing.assert_close(a.keys, b.keys, atol=1e-12, rtol=0)
            torch.testing.assert_close(a.values, b.values, atol=1e-12, rtol=0)


def test_a_sequence_that_ends_leaves_the_others(llama):
    whole = [plain(llama, ids, max_new_tokens=24) for ids in PROMPTS]
    end = int(whole[0][0, PROMPTS[0].shape[1] + 4])  # ends the first one early
    options = {"max_new_tokens": 24, "eos_token_id": end, "pad_token_id": 0}
    truth = [plain(llama, ids, **options) for ids in PROMPTS]
    assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, PROMPTS)}) > 1
    for arm in (make_arm("glide", llama), (plain_loops()[1].module, {})):
        outputs, _ = decode(llama, arm, options=[options | GREEDY] * 4)
        assert all(map(torch.equal, outputs, truth))


def test_sampled_sequences_follow_the_target(small_llama):
    arm = make_arm("glide", small_llama)
    prompts = [torch.tensor([[1, 2]]), torch.tensor([[4, 0, 3]])]
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 0}
    counts = [{}, {}]
    torch.manual_seed(1)
    for _ in range(300):
        outputs, _ = decode(small_llama, arm, prompts, [options] * 2)
        for count, ids, output in zip(counts, prompts, outputs):
            answer = tuple(output[0, ids.shape[1] :].tolist())
            count[answer] = count.get(answer, 0) + 1
    for count, ids in zip(counts, prompts):
        assert chi_square_p_value(count, enumerate_joint(small_llama, ids, 2)) > 1e-3
    wrong = enumerate_joint(small_llama, prompts[1], 2)
    assert chi_square_p_value(counts[0], wrong) < 1e-6  # the test can fail


def test_padded_sequences_are_cut_at_their_end():
    """At the first end token of the answer; one inside a prompt is text like any other."""
    target = make_llama()
    end = int(plain(target, PROMPTS[0], max_new_tokens=24)[0, 12])
    target.generation_config.eos_token_id = [end]
    prompts = [torch.tensor([[end, 5, end, 9]]), *PROMPTS]
    truth = [plain(target, ids, max_new_tokens=24) for ids in prompts]
    assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, prompts)}) > 1
    asked = [ids[0].tolist() for ids in prompts]
    padded = answer_padded(target, asked, max_new_tokens=24, **GREEDY)
    assert padded == [row[0, len(ids) :].tolist() for row, ids in zip(truth, asked)]


def test_batches_are_filled_and_left_over_prompts_left_out():
    assert batching.groups([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert batching.groups([1, 2], 5) == [[1, 2, 1, 2, 1]]
