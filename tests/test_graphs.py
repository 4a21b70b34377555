"""The fixed shapes of CUDA graphs, on the CPU and unrecorded: the tokens of plain decoding."""

import contextlib
import copy

import pytest
import torch
from test_batching import draft_of
from test_bench import command, files, run  # noqa: F401  a fixture: target, GLIDE drafter, prompts
from test_families import make_drafter, make_target
from test_house import METHODS
from tiny import make_llama, slow

import bench
import common
from support import graphs


@pytest.fixture
def installed():
    """graphs.use until the end of the test; a second call takes the place of the first."""
    update = common.GrowingLayer.update
    with contextlib.ExitStack() as stack:

        def install(*args):
            stack.pop_all().close()
            return stack.enter_context(graphs.use(*args))

        yield install
    assert common.GrowingLayer.update is update, "not undone"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "target_name", ["Llama", slow("Gemma2, capped"), slow("GPT2"), slow("GPTNeoX")]
)
def test_every_method_equals_plain_decoding(target_name, method, tmp_path, installed):
    target, ids, truth = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    joint = installed(target, ids.shape[1] + 20 + 40)
    for _ in range(2):  # the second answer finds the first one's rows in memory
        stats = common.Stats()
        options = {"max_new_tokens": 20, "do_sample": False, "stats": stats}
        assert torch.equal(target.generate(ids, **options, **arguments), truth)
        assert stats.emitted == 20 and stats.drafted > 0
    assert joint.recorded, "nothing was replayed"


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("method", METHODS)
def test_compiled_drafters_equal_plain_decoding(method, tmp_path, installed):
    target, ids, truth = make_target("Llama")
    arguments = make_drafter(method, target, tmp_path)
    name = "drafter" if "drafter" in arguments else "base_drafter"
    compiled = []
    arguments[name] = graphs.compiled(arguments[name])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    installed(target, ids.shape[1] + 20 + 40)
    for _ in range(3):
        output = target.generate(ids, max_new_tokens=20, do_sample=False, **arguments)
        assert torch.equal(output, truth)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[0] > 0 and compiled[1] == compiled[2], "it compiles again and again"


def test_plain_decoding_and_short_prompts(llama, installed):
    options = {"max_new_tokens": 9, "do_sample": False}
    prompts = [torch.arange(1, n + 1)[None] for n in (1, 2, 7)]
    truth = [llama.generate(ids, **options) for ids in prompts]
    joint = installed(llama, 32)
    for ids, row in zip(prompts, truth):
        own = {"stats": common.Stats(), "custom_generate": bench.plain_generate}
        assert torch.equal(llama.generate(ids, **options, **own), row)
    assert set(joint.recorded) == {1}


def test_a_sequence_that_outgrows_the_memory_goes_on_without_graphs(llama, installed):
    ids, arguments = torch.tensor([[3, 1, 4, 1, 5]]), draft_of(llama)
    truth = llama.generate(ids, max_new_tokens=60, do_sample=False)
    for length in (7, 17, 40, 66):
        joint = installed(llama, length)
        output = llama.generate(ids, max_new_tokens=60, do_sample=False, **arguments)
        assert torch.equal(output, truth)
        assert bool(joint.recorded) == (length > 7)


def test_a_forward_against_the_usual_one(llama, installed):
    """Trees of all sizes at several lengths: logits, hidden states and cache rows."""
    torch.manual_seed(0)
    past, caches = torch.randint(48, (1, 5)), []
    calls = []
    for n in (1, 5, 2, 7, 13):  # rounded up to 1, 6, 2, 8 and 16
        parents = [int(torch.randint(-1, max(1, node), ())) for node in range(n - 1)]
        parents[:1] = [-1] * min(1, n - 1)
        calls.append((torch.randint(48, (1, n)), torch.tensor(parents, dtype=torch.long)))
    outputs = []
    for graphed in (False, True):
        joint = installed(llama, 64) if graphed else None
        cache, results = common.GrowingCache(3), []
        common.forward(llama, past, cache)
        for ids, parents in calls:
            mask = common.ancestor_mask(parents, cache.get_seq_length(), llama.dtype)
            depth = (mask[0, 0, :, cache.get_seq_length() :] == 0).sum(-1) - 1
            positions = (cache.get_seq_length() + depth)[None]
            options = {"attention_mask": mask, "position_ids": positions}
            results.append(common.forward(llama, ids, cache, **options))
            if ids.shape[1] > 2:  # refuse some
                cache.crop(-2)
        caches.append(cache)
        outputs.append(results)
    assert set(joint.recorded) == {1, 6, 2, 8, 16}
    for (logits, hidden), (fixed_logits, fixed_hidden) in zip(*outputs):
        assert logits.shape == fixed_logits.shape and hidden.shape == fixed_hidden.shape
        torch.testing.assert_close(fixed_logits, logits, atol=1e-12, rtol=0)
        torch.testing.assert_close(fixed_hidden, hidden, atol=1e-12, rtol=0)
    for a, b in zip(*(cache.layers for cache in caches)):
        torch.testing.assert_close(b.keys, a.keys, atol=1e-12, rtol=0)
        torch.testing.assert_close(b.values, a.values, atol=1e-12, rtol=0)


def test_a_cache_that_has_moved_away_does_not_come_back(llama, installed):
    """A long draft makes the cache grow into memory of its own; refused, it would fit again."""
    torch.manual_seed(0)
    ids, outputs = torch.randint(48, (1, 20)), []
    for graphed in (False, True):
        if graphed:
            installed(llama, 12)
        cache = common.GrowingCache(3)
        common.forward(llama, ids[:, :8], cache)
        common.forward(llama, ids[:, 8:9], cache)
        common.forward(llama, ids[:, 9:15], cache)
        cache.crop(-5)  # 10 rows are left, the last of them in the new memory only
        outputs.append(common.forward(llama, ids[:, 10:11], cache)[0])
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=0)


def test_the_memory_belongs_to_one_sequence(llama, installed):
    installed(llama, 32)
    first, second = common.GrowingCache(3), common.GrowingCache(3)
    for cache in (first, second):
        common.forward(llama, torch.tensor([[1, 2]]), cache)
    with pytest.raises(AssertionError, match="one sequence at a time"):
        common.forward(llama, torch.tensor([[3]]), first)


def test_room_for_the_longest_draft_may_reach_beyond_the_context(installed):
    target = make_llama(max_position_embeddings=32)
    ids, arguments = torch.tensor([[3, 1, 4, 1, 5]]), draft_of(target)
    truth = target.generate(ids, max_new_tokens=27, do_sample=False)
    joint = installed(target, 32 + graphs.SIZES[-1])
    output = target.generate(ids, max_new_tokens=27, do_sample=False, **arguments)
    assert torch.equal(output, truth) and joint.recorded


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bench_with_graphs(files, capsys, monkeypatch, compiles):  # noqa: F811
    if not compiles:  # half a minute
        monkeypatch.setattr(graphs, "compiled", copy.copy)
    plain, _ = run(capsys, command(files, "--num-prompts", "1"))
    options = ("--graphs", "--num-prompts", "1", "--max-new-tokens", "8")
    result, out = run(capsys, command(files, *options))
    for arm in result["arms"].values():
        assert arm["identical_to_greedy"] and arm["tau"] >= 1
        assert (arm["overhead"] is None) == (arm.get("loop") != "transformers")
    assert result["arms"]["glide"]["tau"] > 1 and "| glide" in out
    assert plain["arms"]["glide"]["overhead"] > 0


@pytest.mark.parametrize("option", [["--batch-size", "2"], ["--cost-curve"], ["--refit"]])
def test_what_graphs_do_not_go_with(files, option):  # noqa: F811
    with pytest.raises(ValueError, match="--graphs holds one sequence; leave out"):
        bench.parse(command(files, "--graphs", *option))
