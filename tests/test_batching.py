"""Several sequences at once: each must come out as if it were alone, whatever the others do."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from test_bench import command, files, run  # noqa: F401  a fixture: target, GLIDE drafter, prompts
from test_families import make_drafter, make_target, most_free
from test_house import METHODS
from tiny import chi_square_p_value, enumerate_joint, make_llama, slow

import bench
import common
import glide
from support import batching

PROMPTS = [torch.tensor([ids]) for ids in ([1, 5, 9, 2, 8, 3, 1], [4, 4], [7], [2, 10, 3, 6])]


def draft_of(target, gamma=3):
    """GLIDE with a drafter that is often right: its layer is the target's last one."""
    config = glide.Config(target=common.target_shape(target), intermediate_size=48, draft_vocab=0)
    drafter = glide.build(config, target, torch.arange(config.target["vocab_size"])).double().eval()
    return {"custom_generate": glide.generate, "drafter": drafter, "gamma": gamma}


def plain(target, ids, **options):
    """What transformers' own greedy decoding makes of one prompt."""
    return target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "target_name", ["Llama", slow("Gemma2, capped"), slow("GPT2"), slow("GPTNeoX")]
)
def test_rows_of_different_lengths_equal_plain_decoding(target_name, method, tmp_path):
    target, _, _ = make_target(target_name)
    arguments = make_drafter(method, target, tmp_path)
    lengths = [14, 3, 20, 9]
    for free in ({}, most_free(method)):
        stats = [common.Stats() for _ in PROMPTS]
        options = [{"max_new_tokens": n, "stats": each} for n, each in zip(lengths, stats)]
        given = arguments | free
        outputs = batching.generate(target, PROMPTS, options, do_sample=False, **given)
        assert not free or any(offered for each in stats for offered, _ in each.copies)
        for ids, n, output, each in zip(PROMPTS, lengths, outputs, stats):
            assert torch.equal(output, plain(target, ids, max_new_tokens=n))
            assert each.emitted == n and each.target_forwards == len(each.accepted)


def test_rows_keep_their_own_pace(llama):
    """In one round one row accepts more than another, and each has the rounds it has alone."""
    arguments, alone, together = draft_of(llama), [], [common.Stats() for _ in PROMPTS]
    arguments["max_new_tokens"] = 30
    for ids in PROMPTS:
        alone.append(common.Stats())
        plain(llama, ids, stats=alone[-1], **arguments)
    seen = []

    def note(_module, args, _kwargs):
        seen.append(args[0].shape)

    hook = llama.register_forward_pre_hook(note, with_kwargs=True)
    own = [{"stats": each} for each in together]
    batching.generate(llama, PROMPTS, own, do_sample=False, **arguments)
    hook.remove()
    assert [each.accepted for each in together] == [each.accepted for each in alone]
    assert any(len(set(column)) > 1 for column in zip(*(each.accepted for each in together)))
    prefills = 2  # one of most prompts; the prompt of one token is a round ahead
    rounds = max(each.target_forwards for each in together)
    assert rounds <= len(seen) <= rounds + prefills, "every round is one forward for all"


def test_joint_forward_against_single_ones(llama):
    """Trees, chains and prompts side by side: logits, hidden states, caches as for each alone."""
    torch.manual_seed(0)
    tree = torch.tensor([-1, 0, 0, 2])
    mask = common.ancestor_mask(tree, 3, llama.dtype)
    branches = {"attention_mask": mask, "position_ids": torch.tensor([[3, 4, 5, 5, 6]])}
    chain = {"attention_mask": None, "position_ids": torch.tensor([[2, 3]])}
    calls = [  # (tokens, cached rows, options)
        (torch.randint(48, (1, 5)), 3, branches),
        (torch.randint(48, (1, 1)), 6, {}),
        (torch.randint(48, (1, 4)), 0, {"logits_to_keep": 1}),
        (torch.randint(48, (1, 2)), 2, chain),
    ]
    past, results, caches = [torch.randint(48, (1, n)) for _, n, _ in calls], [], []
    for joint in (False, True):
        caches.append([common.GrowingCache(3) for _ in calls])
        for ids, cache in zip(past, caches[-1]):
            if ids.numel():
                common.forward(llama, ids, cache)
        requests = [(ids, cache, options) for (ids, _, options), cache in zip(calls, caches[-1])]
        if joint:
            results.append(batching.joint_forward(llama, requests))
        else:
            results.append([common.forward(llama, x, cache, **own) for x, cache, own in requests])
    for (logits, hidden), (joint_logits, joint_hidden), one, other in zip(*results, *caches):
        torch.testing.assert_close(joint_logits, logits, atol=1e-12, rtol=0)
        torch.testing.assert_close(joint_hidden, hidden, atol=1e-12, rtol=0)
        for a, b in zip(one.layers, other.layers):
            torch.testing.assert_close(b.keys, a.keys, atol=1e-12, rtol=0)
            torch.testing.assert_close(b.values, a.values, atol=1e-12, rtol=0)


def test_rows_do_not_see_each_other(llama):
    """What another row holds must not matter at all: its keys are masked, not only unlikely."""
    ids, outputs = torch.tensor([[3, 1, 4]]), []
    for other in (torch.tensor([[5, 5, 5, 5]]), torch.tensor([[9, 2, 6, 7]])):
        requests = [(ids, common.GrowingCache(3), {}), (other, common.GrowingCache(3), {})]
        outputs.append(batching.joint_forward(llama, requests)[0][0])
    assert torch.equal(*outputs)


def test_a_row_that_ends_leaves_the_others(llama):
    whole = [plain(llama, ids, max_new_tokens=24) for ids in PROMPTS]
    end = int(whole[0][0, PROMPTS[0].shape[1] + 4])  # ends the first row early
    options = {"max_new_tokens": 24, "eos_token_id": end, "pad_token_id": 0}
    truth = [plain(llama, ids, **options) for ids in PROMPTS]
    assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, PROMPTS)}) > 1
    options |= draft_of(llama)
    outputs = batching.generate(llama, PROMPTS, do_sample=False, **options)
    assert all(map(torch.equal, outputs, truth))
    padded = batching.padded_generate(llama, PROMPTS, max_new_tokens=24, do_sample=False)
    assert all(map(torch.equal, padded, whole))


def test_padded_rows_are_cut_at_their_end():
    """At the first end token of the answer; one inside a prompt is text like any other."""
    target, options = make_llama(), {"max_new_tokens": 24}
    end = int(plain(target, PROMPTS[0], **options)[0, 12])
    target.generation_config.eos_token_id = [end]
    for prompts in (PROMPTS, [torch.tensor([[end, 5, end, 9]]), *PROMPTS]):
        truth = [plain(target, ids, **options) for ids in prompts]
        assert len({row.shape[1] - ids.shape[1] for row, ids in zip(truth, prompts)}) > 1
        padded = batching.padded_generate(target, prompts, do_sample=False, **options)
        assert all(map(torch.equal, padded, truth))


@pytest.mark.slow
def test_sampled_rows_follow_the_target(small_llama):
    arguments, counts = draft_of(small_llama), [{}, {}]
    prompts = [torch.tensor([[1, 2]]), torch.tensor([[4, 0, 3]])]
    torch.manual_seed(1)
    for _ in range(300):
        options = {"max_new_tokens": 2, "do_sample": True, "top_k": 0, **arguments}
        outputs = batching.generate(small_llama, prompts, **options)
        for count, ids, output in zip(counts, prompts, outputs):
            key = tuple(output[0, ids.shape[1] :].tolist())
            count[key] = count.get(key, 0) + 1
    for count, ids in zip(counts, prompts):
        assert chi_square_p_value(count, enumerate_joint(small_llama, ids, 2)) > 1e-3
    wrong = enumerate_joint(small_llama, prompts[1], 2)
    assert chi_square_p_value(counts[0], wrong) < 1e-6  # the test can fail


def test_the_same_seed_gives_the_same_samples(llama):
    arguments, outputs = draft_of(llama), []
    for _ in range(2):
        torch.manual_seed(5)
        options = {"max_new_tokens": 12, "do_sample": True, **arguments}
        outputs.append(batching.generate(llama, PROMPTS, **options))
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_one_row_fails_and_nothing_is_left_behind(llama, bad):
    """A row too long, or a criterion that raises in the middle: its error, no thread waits on."""
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
    output = plain(llama, PROMPTS[0], max_new_tokens=8, **arguments)
    assert torch.equal(output, plain(llama, PROMPTS[0], max_new_tokens=8))


def test_bench_measures_batches(files, capsys):  # noqa: F811
    result, out = run(capsys, command(files, "--batch-size", "2"))
    batch = result["batch"]
    assert (batch["size"], batch["batches"]) == (2, 1) and "arms" not in result
    assert list(batch["arms"]) == ["alone", "baseline", "glide"]
    assert batch["arms"]["baseline"]["loop"] in ("padded", "joint")
    for arm in batch["arms"].values():
        assert arm["identical_to_greedy"] and arm["tokens_per_s"] > 0
    assert batch["arms"]["baseline"]["speedup"] == 1 and batch["arms"]["glide"]["tau"] > 1
    assert "1 batches of 2 prompts" in out and "| glide " in out
    assert json.dumps(result) in out


def test_bench_repeats_prompts_to_fill_a_batch(files, capsys):  # noqa: F811
    options = ("--batch-size", "5", "--num-prompts", "1", "--temperature", "1")
    batch = run(capsys, command(files, *options))[0]["batch"]
    assert batch["size"] == 5 and batch["arms"]["glide"]["identical_to_greedy"] is None


def test_the_figures_of_batches_are_those_of_their_raw_record(files, capsys, monkeypatch):  # noqa: F811
    """Tokens, forwards and seconds of each arm, noted aside and added up again by hand."""
    tokens, forwards, seconds, whole = {}, {}, {}, []
    generate, timed, now = batching.generate, batching.timed, [""]

    def count(target, prompts, options=None, **shared):
        output = generate(target, prompts, options, **shared)
        made = sum(own["stats"].target_forwards for own in options)
        forwards[now[0]] = forwards.get(now[0], 0) + made
        return output

    def note(arm, *args):
        if args[-1]["max_new_tokens"] < 20:  # the warm-up, which does not count
            now[0] = "warm-up"
            return timed(arm, *args)
        now[0], start = arm.name, time.perf_counter()
        rows = timed(arm, *args)
        took = time.perf_counter() - start
        assert arm.answers[-1].seconds <= took
        whole.append(took)
        tokens[arm.name] = tokens.get(arm.name, 0) + sum(map(len, rows))
        seconds[arm.name] = seconds.get(arm.name, 0.0) + arm.answers[-1].seconds
        return rows

    monkeypatch.setattr(batching, "generate", count)
    monkeypatch.setattr(batching, "timed", note)
    argv = command(files, "--batch-size", "2", "--max-new-tokens", "20")
    arms = run(capsys, argv)[0]["batch"]["arms"]
    assert sum(whole) / 2 < sum(seconds.values())
    rates = {name: tokens[name] / seconds[name] for name in tokens}
    loop = arms["baseline"]["loop"]
    baseline = max(rates["transformers"], rates["plain"])
    assert baseline == rates[{"padded": "transformers", "joint": "plain"}[loop]]
    assert tokens["glide"] == tokens["alone"]  # of three turns, in two rounds of two prompts
    assert arms["glide"]["tau"] == pytest.approx(tokens["glide"] / forwards["glide"], abs=1e-4)
    assert arms["glide"]["tau"] > 1 and arms["baseline"]["tau"] == arms["alone"]["tau"] == 1.0
    for name in ("glide", "alone"):
        assert arms[name]["tokens_per_s"] == pytest.approx(rates[name], rel=1e-4)
        assert arms[name]["speedup"] == pytest.approx(rates[name] / baseline, abs=1e-4)


def test_what_is_left_over_after_the_last_whole_batch_is_left_out(files, capsys):  # noqa: F811
    (files / "three.jsonl").write_text('{"turns": ["a"]}\n' * 3)
    argv = command(files, "--batch-size", "2", "--max-new-tokens", "2")
    argv[argv.index("--prompts") + 1] = str(files / "three.jsonl")
    assert run(capsys, argv)[0]["batch"]["batches"] == 1


def test_a_batch_that_differs_is_counted(llama):
    """Rows are compared with transformers' own loop, one by one."""
    options = {"max_new_tokens": 6, "do_sample": False}
    prompt = {"turns": ["x"]}

    def cheat(target, ids, *args, stats, **kwargs):
        ids = torch.cat([ids, ids.new_full((1, 6), 7)], dim=1)
        stats.target_forwards += 6
        return ids

    def encode(*_):
        return {"input_ids": PROMPTS[0]}

    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    own = {"custom_generate": bench.plain_generate}
    arms = [bench.Arm("transformers", {}), bench.Arm("plain", own, reports=True)]
    arms.append(bench.Arm("cheat", {"custom_generate": cheat}, reports=True))
    arms.append(bench.Arm("peer", {}))  # takes one sequence at a time, so it is left out
    found = batching.measure(llama, tokenizer, arms, [prompt] * 4, 2, encode, options)
    assert found["batches"] == 2 and set(found["arms"]) == {"alone", "baseline", "cheat"}
    assert found["arms"]["cheat"]["diverged"] == 4 and found["arms"]["cheat"]["tau"] == 1.0
    assert found["arms"]["alone"]["identical_to_greedy"]


@pytest.mark.parametrize("option", [["--peers"], ["--refit"], ["--sweep"], ["--show"]])
def test_what_takes_one_sequence_says_so(files, option):  # noqa: F811
    with pytest.raises(ValueError, match="one sequence at a time; leave out --batch-size"):
        bench.parse(command(files, "--batch-size", "2", *option))


def test_batches_keep_conversations_apart_and_are_redrawn_whole(monkeypatch):
    """The first prompt of a batch has fewer turns: the second goes on with its own answers.

    They are bare texts: the end of a turn is for the chat template to write.
    """
    asked, redrawn, order = [], [], []

    def encode(_, said, device):
        asked.append(list(said))
        return {"input_ids": torch.tensor([[1]])}

    def timed(arm, target, ids, options):
        order.append(arm.name)
        arm.answers.append(SimpleNamespace(tokens=[0], seconds=1.0))
        return [[len(arm.answers), row] for row in range(len(ids))]

    def decode(ids, skip_special_tokens=False):
        return str(ids) if skip_special_tokens else f"{ids} <end>"

    monkeypatch.setattr(batching, "timed", timed)
    monkeypatch.setattr(batching, "summary", lambda arms, turns, options: redrawn.extend(turns))
    prompts = [{"turns": ["a1"]}, {"turns": ["b1", "b2", "b3"]}] * 2
    tokenizer = SimpleNamespace(decode=decode)
    pair = [bench.Arm("transformers", {}), bench.Arm("plain", {}, reports=True)]
    target = SimpleNamespace(device="cpu")
    batching.measure(target, tokenizer, pair, prompts, 2, encode, {"do_sample": False})
    assert asked[:2] == [["a1"], ["b1"]]  # of the warm-up
    assert asked[5] == ["b1", "[1, 1]", "b2", "[2, 0]", "b3"]
    assert [turn["prompt"] for turn in redrawn] == [0, 0, 0, 1, 1, 1]
    assert order[3:12:3] == ["alone", "transformers", "plain"]  # who begins a turn
