"""What a GPU would object to, seen without one (pretend.py): mixed devices, needless waits, graphs
of too much.

test_gpu.py runs these in a process of their own; by hand: python -m pytest tests/tools/gpu.py
"""

import contextlib
import copy
import importlib
import itertools
import random

import pretend
import pytest
import torch
from safetensors.torch import load_file
from test_batching import PROMPTS
from test_bench import command, files, run  # noqa: F401  a fixture: target, GLIDE drafter, prompts
from test_families import VOCAB, make_drafter, make_target
from test_faults import TRAINED
from test_house import METHODS
from test_train import folder, options  # noqa: F401  a fixture: target, conversations
from tiny import slow

import bench
import common
import train
from support import batching, graphs, talks

OPTIONS = {
    "greedy": {"do_sample": False},
    "penalised": {"do_sample": False, "repetition_penalty": 1.4},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}
# without -m slow a chain, and a tree that is made in several passes
EACH = [name if name in ("glide", "falcon") else slow(name) for name in METHODS]
EACH_TRAINED = [name if name == "falcon" else slow(name) for name in TRAINED]
# a round, besides one a token (SpecDec++ looks at each drafted one, whether drafting is to end); a
# new method may wait as often as the one that does most
WAITS = {"glide": 3, "cape": 7, "specdecpp": 8, "falcon": 6, "ctc_drafter": 5}


def drafter_for(method, target, where, **config):
    """As everywhere, but the device has no LSTM: Falcon joins features and tokens as the shipped
    one does."""
    if method == "falcon":
        config = {"fusion": "linear"}
    return make_drafter(method, target, where, **config)


def moved(x):
    return copy.deepcopy(x).to("pretend") if isinstance(x, torch.nn.Module) else x


def test_the_device_keeps_the_rules_of_a_gpu():
    with pretend.gpu() as counts:
        there, here = torch.arange(3.0, device="pretend"), torch.ones(3)
        assert (
            (there + 1).device.type == "pretend"
            and there.tolist() == [0, 1, 2]
            and counts["waits"] == 1
        )
        assert there[torch.tensor([2])].cpu().equal(torch.tensor([2.0])) and counts["copies"] == 1
        assert there[there > 0].shape == (2,) and counts["waits"] == 3
        for mixed in (
            lambda: there + here,
            lambda: torch.cat([here, there]),
            lambda: here[there.long()],
        ):
            with pytest.raises(AssertionError, match="mixes devices"):
                mixed()


@pytest.mark.parametrize("broken", ["nothing", "a wait", "a copy", "a number of the host"])
def test_a_graph_repeats_only_what_it_may(broken):
    host = [2.0]

    def compute():
        if broken == "a wait":
            return x * float(x.sum())
        return x * (
            host[0]
            if broken == "a number of the host"
            else torch.full((3,), host[0]).to("pretend")
            if broken == "a copy"
            else factor
        )

    with pretend.gpu():
        x, factor = torch.ones(3, device="pretend"), torch.full((3,), 2.0, device="pretend")
        graph = pretend.Graph()
        if broken in ("a wait", "a copy"):
            with (
                pytest.raises(AssertionError, match="while a graph is recorded"),
                pretend.record(graph),
            ):
                compute()
            return
        with pretend.record(graph):
            y = compute()
        assert y.isnan().all(), "nothing is computed yet"
        x.copy_(torch.full((3,), 5.0))
        factor.fill_(3.0)
        host[0] = 3.0
        graph.replay()
        assert y.tolist() == [15.0 if broken == "nothing" else 10.0] * 3


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("target_name", ["Llama", slow("Gemma2, capped")])
def test_decodes_on_the_device_as_on_the_cpu(target_name, method, tmp_path):
    target, ids, truth = make_target(target_name)
    arguments = drafter_for(method, target, tmp_path)
    for kind, chosen in OPTIONS.items():
        torch.manual_seed(5)
        expected = target.generate(ids, max_new_tokens=10, **chosen, **arguments)
        assert kind != "greedy" or torch.equal(expected, truth[:, : expected.shape[1]])
        with pretend.gpu() as counts:
            there = {name: moved(value) for name, value in arguments.items()}
            target_there, ids_there, stats = moved(target), ids.to("pretend"), common.Stats()
            torch.manual_seed(5)
            counts.clear()
            output = target_there.generate(
                ids_there, max_new_tokens=10, stats=stats, **chosen, **there
            )
            if kind == "greedy":  # four waits in generate itself and before the first round
                rounds = WAITS.get(method, max(WAITS.values())) * stats.target_forwards
                assert counts["waits"] <= rounds + stats.emitted + 4
            assert torch.equal(output.cpu(), expected), kind


@pytest.mark.parametrize("method", EACH)
@pytest.mark.parametrize("target_name", ["Llama", slow("Gemma3"), slow("GPT2")])
def test_recorded_graphs_equal_plain_decoding(target_name, method, tmp_path, monkeypatch):
    """Every forward after the prompt's is a replay, whose operators are not launched one by one."""
    pretend.stand_in_for_cuda(monkeypatch)
    target, ids, truth = make_target(target_name)
    arguments = drafter_for(method, target, tmp_path)
    with pretend.gpu() as counts:
        target, launched = moved(target), {}
        there = {name: moved(value) for name, value in arguments.items()}
        for recorded in (False, True):
            used = graphs.use(target, ids.shape[1] + 10 + 32)
            with used if recorded else contextlib.nullcontext() as joint:
                if recorded:
                    assert len(joint.recorded) == sum(n <= joint.length for n in graphs.SIZES)
                for _ in range(2):  # the second answer finds the first one's rows in memory
                    counts.clear()
                    output = target.generate(
                        ids.to("pretend"), max_new_tokens=10, do_sample=False, **there
                    )
                    assert torch.equal(output.cpu(), truth[:, : output.shape[1]])
            launched[recorded] = counts["operators"]
        assert launched[True] < 0.9 * launched[False]


@pytest.mark.parametrize("method", EACH)
def test_batches_on_the_device(method, tmp_path, monkeypatch):
    alone = batching.Sequence.run

    def with_rules(sequence):  # which hold for one thread
        with pretend.gpu():
            alone(sequence)

    target, _, _ = make_target("Llama")
    arguments = drafter_for(method, target, tmp_path)
    expected = batching.generate(target, PROMPTS, max_new_tokens=12, do_sample=False, **arguments)
    monkeypatch.setattr(batching.Sequence, "run", with_rules)
    with pretend.gpu():
        there = {name: moved(value) for name, value in arguments.items()}
        outputs = batching.generate(
            moved(target),
            [ids.to("pretend") for ids in PROMPTS],
            max_new_tokens=12,
            do_sample=False,
            **there,
        )
        for output, ids in zip(outputs, expected):
            assert torch.equal(output.cpu(), ids)


@pytest.mark.parametrize("method", EACH_TRAINED)
def test_trains_on_the_device_as_on_the_cpu(method, tmp_path):
    module = importlib.import_module(method)
    target, _, _ = make_target("Llama")
    few = {}
    if method == "specdecpp":  # with all the target's layers there is nothing to learn
        few = {"layers": [0]}
    drafter = drafter_for(method, target, tmp_path, **few)["drafter"].float()
    generator, results = torch.Generator().manual_seed(0), []
    sequences = [
        (torch.randint(1, VOCAB, (n,), generator=generator), torch.arange(n) >= 3)
        for n in (9, 14, 6)
    ]
    for place in ("cpu", "pretend"):
        with pretend.gpu():
            model = copy.deepcopy(target).to(place)
            student = copy.deepcopy(drafter).to(place).train()
            features = train.Features(model, sequences, list(student.kv_layers), None)
            batch = train.make_batch([0, 1, 2], sequences, features, torch.arange(3), 0.3, place)
            loss = module.loss(student, model, batch)
            loss.backward()
            with torch.no_grad():
                total, _ = module.alpha(student.eval(), model, batch)
            gradients = [p.grad for p in student.parameters() if p.grad is not None]
            size = max(float(gradient.abs().max()) for gradient in gradients)
            results.append([float(loss.detach()), float(total), size])
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_the_clock_of_a_gpu_counts_in_its_queue(monkeypatch):
    """Events are a second apart here, and tell milliseconds; taking one must not wait for the
    device."""

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.moment = next(moments)

        def elapsed_time(self, end):
            return 1000.0 * (end.moment - self.moment)

    moments, layer = itertools.count(), torch.nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = bench.Clock(cuda=True)
    with clock.watch({"target": [layer]}), clock.timer("verify"):
        layer(torch.ones(1, 2))
        layer(torch.ones(1, 2))
    assert clock.total("target") == 2.0 and clock.total("drafter") == 0.0
    [(name, start, end)] = clock.timers
    assert name == "verify" and bench.between(start, end) == 5.0


@pytest.mark.slow
def test_bench_on_the_device(files, capsys):  # noqa: F811
    on_cpu, _ = run(capsys, command(files, "--num-prompts", "1", "--device", "cpu"))
    with pretend.gpu():
        result, _ = run(capsys, command(files, "--num-prompts", "1", "--device", "pretend"))
    assert result["arms"]["glide"]["identical_to_greedy"]
    for figure in ("tau", "alpha", "n_discarded_per_token"):
        here, there = (each["arms"]["glide"][figure] for each in (on_cpu, result))
        assert there == pytest.approx(here), figure
    refused = pytest.raises(ValueError, match="CUDA devices, not on pretend; leave it out")
    with pretend.gpu(), refused:
        bench.parse(command(files, "--graphs", "--device", "pretend"))


@pytest.mark.slow
def test_train_on_the_device(folder, tmp_path, monkeypatch):  # noqa: F811
    """The drafter is the CPU's up to rounding. Its tensors cannot be pickled, so it is moved to the
    CPU before."""
    save = train.save
    monkeypatch.setattr(
        train, "save", lambda drafter, out, _: save(copy.deepcopy(drafter).to("cpu"), out, None)
    )
    train.main(options(folder, tmp_path / "cpu", "--steps", "6"))
    with pretend.gpu():
        train.main(
            options(folder, tmp_path / "device", "--steps", "6", "--device", "pretend", "--no-bf16")
        )
    drafters = [load_file(tmp_path / name / "model.safetensors") for name in ("cpu", "device")]
    for a, b in zip(*(d.values() for d in drafters)):
        torch.testing.assert_close(a.float(), b.float(), atol=1e-2, rtol=1e-2)


def test_answers_for_training_on_the_device_are_those_of_the_cpu():
    target, _, _ = make_target("Llama")
    for temperature in (0.0, 0.8):
        answers = []
        for place in ("cpu", "pretend"):
            with pretend.gpu():
                prompts = [[1, 2, 3], [4], [5, 6]]
                there = copy.deepcopy(target).to(place)
                there.generation_config.eos_token_id = 0
                said = talks.replies(there, prompts, temperature, 34, random.Random(1))
                answers.append([answer for _, answer in said])
        assert answers[0] == answers[1] and len({len(answer) for answer in answers[0]}) > 1
