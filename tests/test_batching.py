"""Several sequences at once: each must come out as if it were alone, whatever the others do."""

import json
import threading

import pytest
import torch
from conftest import chi_square_p_value, enumerate_joint, make_llama
from test_bench import command, files, run  # noqa: F401  a fixture: target, GLIDE drafter, prompts
from test_families import make_drafter, make_target
from test_house import METHODS

import bench
import common
import glide
from support import batching, data

PROMPTS = [torch.tensor([ids]) for ids in ([1, 5, 9, 2, 8, 3, 1], [4, 4], [7], [2, 10, 3, 6])]


def draft_of(target, gamma=3):
    """GLIDE with a drafter that is often right: its layer is the target's last one."""
    config = glide.Config(target=common.target_shape(target), intermediate_size=48, draft_vocab=0)
    drafter = glide.build(config, target, torch.arange(config.target["vocab_size"])).double().eval()
    return {"custom_generate": glide.generate, "drafter": drafter, "gamma": gamma}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target_name", ["Llama", "Gemma2, capped", "GPT2", "GPTNeoX"])
def test_rows_of_different_lengths_equal_plain_decoding(target_name, method, tmp_path):
    target, _, _ = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    lengths, stats = [14, 3, 20, 9], [common.Stats() for _ in PROMPTS]
    options = [{"max_new_tokens": n, "stats": each} for n, each in zip(lengths, stats)]
    outputs = batching.generate(target, PROMPTS, options, do_sample=False, **arguments)
    for ids, n, output, each in zip(PROMPTS, lengths, outputs, stats):
        truth = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
        )
        assert torch.equal(output, truth)
        assert each.emitted == n and each.target_forwards == len(each.accepted)


def test_rows_keep_their_own_pace(llama):
    """In one round one row accepts more than another, and each has the rounds it has alone."""
    arguments, alone, together = draft_of(llama), [], [common.Stats() for _ in PROMPTS]
    for ids in PROMPTS:
        alone.append(common.Stats())
        llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            stats=alone[-1],
            **arguments,
        )
    seen = []
    hook = llama.register_forward_pre_hook(
        lambda _m, args, _k: seen.append(args[0].shape), with_kwargs=True
    )
    batching.generate(
        llama,
        PROMPTS,
        [{"stats": each} for each in together],
        max_new_tokens=30,
        do_sample=False,
        **arguments,
    )
    hook.remove()
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert any(len(set(column)) > 1 for column in zip(*(each.accepted for each in together)))
    prefills = 1 + (
        min(ids.shape[1] for ids in PROMPTS) == 1
    )  # the prompt of one token is a round ahead
    rounds = max(each.target_forwards for each in together)
    assert rounds <= len(seen) <= rounds + prefills, "every round is one forward for all"


def test_joint_forward_against_single_ones(llama):
    """Trees, chains and prompts side by side: logits, hidden states and caches as for each
    alone."""
    torch.manual_seed(0)
    tree = torch.tensor([-1, 0, 0, 2])
    mask = common.ancestor_mask(tree, 3, llama.dtype)
    calls = [
        (
            torch.randint(48, (1, 5)),
            3,
            {"attention_mask": mask, "position_ids": torch.tensor([[3, 4, 5, 5, 6]])},
        ),
        (torch.randint(48, (1, 1)), 6, {}),
        (torch.randint(48, (1, 4)), 0, {"logits_to_keep": 1}),
        (
            torch.randint(48, (1, 2)),
            2,
            {"attention_mask": None, "position_ids": torch.tensor([[2, 3]])},
        ),
    ]
    past, results, caches = [torch.randint(48, (1, n)) for _, n, _ in calls], [], []
    for joint in (False, True):
        caches.append([common.GrowingCache(3) for _ in calls])
        for ids, cache in zip(past, caches[-1]):
            if ids.numel():
                common.forward(llama, ids, cache)
        requests = [(ids, cache, options) for (ids, _, options), cache in zip(calls, caches[-1])]
        results.append(
            batching.joint_forward(llama, requests)
            if joint
            else [common.forward(llama, ids, cache, **options) for ids, cache, options in requests]
        )
    for (logits, hidden), (joint_logits, joint_hidden), one, other in zip(*results, *caches):
        torch.testing.assert_close(joint_logits, logits, atol=1e-12, rtol=0)
        torch.testing.assert_close(joint_hidden, hidden, atol=1e-12, rtol=0)
        for a, b in zip(one.layers, other.layers):
            torch.testing.assert_close(b.keys, a.keys, atol=1e-12, rtol=0)
            torch.testing.assert_close(b.values, a.values, atol=1e-12, rtol=0)


def test_rows_do_not_see_each_other(llama):
    """What another row holds must not matter in the least: its keys are masked, not only
    unlikely."""
    ids, outputs = torch.tensor([[3, 1, 4]]), []
    for other in (torch.tensor([[5, 5, 5, 5]]), torch.tensor([[9, 2, 6, 7]])):
        caches = [common.GrowingCache(3), common.GrowingCache(3)]
        outputs.append(
            batching.joint_forward(llama, [(ids, caches[0], {}), (other, caches[1], {})])[0][0]
        )
    assert torch.equal(*outputs)


def test_a_row_that_ends_leaves_the_others(llama):
    arguments, plain = draft_of(llama), []
    for ids in PROMPTS:
        plain.append(
            llama.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        )
    end = int(plain[0][0, PROMPTS[0].shape[1] + 4])  # ends the first row early
    truth = [
        llama.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
        )
        for ids in PROMPTS
    ]
    assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, PROMPTS)}) > 1
    outputs = batching.generate(
        llama,
        PROMPTS,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
        **arguments,
    )
    assert all(map(torch.equal, outputs, truth))
    padded = batching.padded_generate(llama, PROMPTS, max_new_tokens=24, do_sample=False)
    assert all(map(torch.equal, padded, plain))


def test_padded_rows_are_cut_at_their_end():
    target, options = make_llama(), {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(PROMPTS[0], attention_mask=torch.ones_like(PROMPTS[0]), **options)
    target.generation_config.eos_token_id = [int(plain[0, 12])]
    truth = [
        target.generate(ids, attention_mask=torch.ones_like(ids), **options) for ids in PROMPTS
    ]
    assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, PROMPTS)}) > 1
    assert all(map(torch.equal, batching.padded_generate(target, PROMPTS, **options), truth))


def test_sampled_rows_follow_the_target(small_llama):
    arguments, counts = draft_of(small_llama), [{}, {}]
    prompts = [torch.tensor([[1, 2]]), torch.tensor([[4, 0, 3]])]
    torch.manual_seed(1)
    for _ in range(300):
        outputs = batching.generate(
            small_llama, prompts, max_new_tokens=2, do_sample=True, top_k=0, **arguments
        )
        for count, ids, output in zip(counts, prompts, outputs):
            key = tuple(output[0, ids.shape[1] :].tolist())
            count[key] = count.get(key, 0) + 1
    for count, ids in zip(counts, prompts):
        assert chi_square_p_value(count, enumerate_joint(small_llama, ids, 2)) > 1e-3
    assert (
        chi_square_p_value(counts[0], enumerate_joint(small_llama, prompts[1], 2)) < 1e-6
    )  # the test can fail


def test_the_same_seed_gives_the_same_samples(llama):
    arguments, outputs = draft_of(llama), []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(
            batching.generate(llama, PROMPTS, max_new_tokens=12, do_sample=True, **arguments)
        )
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_one_row_fails_and_nothing_is_left_behind(llama, bad):
    """A row too long for the target, or a criterion that raises in the middle: its error, and no
    thread waits on."""
    arguments, before = draft_of(llama), threading.active_count()
    options = [{"max_new_tokens": 600 if row == bad else 8} for row in range(4)]
    with pytest.raises(ValueError, match="exceed the target's context of 512"):
        batching.generate(llama, PROMPTS, options, do_sample=False, **arguments)

    def raises(ids, scores):
        if ids.shape[1] > 12:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    options = [{"stopping_criteria": [raises]} if row == bad else {} for row in range(4)]
    with pytest.raises(KeyboardInterrupt):
        batching.generate(llama, PROMPTS, options, max_new_tokens=20, do_sample=False, **arguments)
    assert threading.active_count() == before
    output = llama.generate(PROMPTS[0], max_new_tokens=8, do_sample=False, **arguments)
    assert torch.equal(output, llama.generate(PROMPTS[0], max_new_tokens=8, do_sample=False))


def test_bench_measures_batches(files, capsys):  # noqa: F811
    result, out = run(capsys, command(files, "--batch-size", "2"))
    batch = result["batch"]
    assert (batch["size"], batch["batches"]) == (2, 1) and "arms" not in result
    assert list(batch["arms"]) == ["alone", "baseline", "glide"]
    assert batch["arms"]["baseline"]["loop"] in ("padded", "joint")
    assert all(
        arm["identical_to_greedy"] and arm["tokens_per_s"] > 0 for arm in batch["arms"].values()
    )
    assert batch["arms"]["baseline"]["speedup"] == 1 and batch["arms"]["glide"]["tau"] > 1
    assert "1 batches of 2 prompts" in out and "| glide " in out
    assert json.dumps(result) in out


def test_bench_repeats_prompts_to_fill_a_batch(files, capsys):  # noqa: F811
    result, _ = run(
        capsys, command(files, "--batch-size", "5", "--num-prompts", "1", "--temperature", "1")
    )
    assert (
        result["batch"]["size"] == 5
        and result["batch"]["arms"]["glide"]["identical_to_greedy"] is None
    )


@pytest.mark.parametrize("option", [["--peers"], ["--refit"], ["--sweep"], ["--show"]])
def test_what_takes_one_sequence_says_so(files, option):  # noqa: F811
    with pytest.raises(ValueError, match="one sequence at a time; leave out --batch-size"):
        bench.parse(command(files, "--batch-size", "2", *option))


def test_training_data_of_a_batch_is_that_of_each_row(llama):
    """data._continue drops rows that have ended, every 32 tokens; the others must not notice."""
    options = dict(max_new_tokens=90, do_sample=False, pad_token_id=0)
    plain = [
        llama.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, ids.shape[1] :
        ].tolist()
        for ids in PROMPTS
    ]
    unused = next(token for token in range(48) if not any(token in row for row in plain))
    for ends in ({plain[0][5]}, {plain[1][40], plain[2][70]}, {unused}):
        rows = data._continue(llama, [ids[0].tolist() for ids in PROMPTS], ends, 90, 0.0)
        cut = [next((i + 1 for i, token in enumerate(row) if token in ends), 90) for row in plain]
        assert rows == [row[:n] for row, n in zip(plain, cut)]
    assert data._continue(llama, [], {1}, 5, 0.0) == []
