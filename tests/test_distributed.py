"""Two processes with gloo: the losses of one, a target in halves, a killed rank.

And targets in several places: partly on disk, and tensor-parallel.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_faults import TRAINED, Run, assert_whole
from test_train import folder, options  # noqa: F401  folder is a fixture
from tiny import make_llama, slow
from transformers import AutoModelForCausalLM

import common
import train

torch.set_num_threads(1)


def environment(rank, world, port):
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in told.items()}


def launch(argv, world=2):
    """train.py as torchrun would start it, in forks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world):
            for name, value in environment(rank, world, port).items():
                patch.setenv(name, value)
            runs.append(Run(argv))
    return runs


def arguments(method, folder, out, *more):  # noqa: F811
    argv = options(folder, out, "--steps", "4", "--eval-every", "1", *more)
    argv += ["--clip", "1000"]  # a clipped gradient would hide by what it was divided
    argv[argv.index("glide")] = method
    if method == "specdecpp":
        place = argv.index("--intermediate-size")
        del argv[place : place + 2]
        argv += ["--layers", "[1]"]  # both would be the target itself, with nothing to learn
    return argv


def losses(out):
    curve = json.loads((out / "curve.json").read_text())
    return [row["loss"] for row in curve if row["loss"] is not None]


def mean_gradient(out):
    """The optimizer's running mean of all gradients, as one vector."""
    state = torch.load(out / "training_state.pt", weights_only=True)["optimizer"]["state"]
    return torch.cat([state[index]["exp_avg"].flatten() for index in sorted(state)])


@pytest.mark.parametrize(
    "more", [["--accumulate", "2"], ["--shard-target"]], ids=["in parts", "sharded target"]
)
@pytest.mark.parametrize(
    "method", [name if name == "specdecpp" else slow(name) for name in TRAINED]
)
def test_two_processes_have_the_losses_of_one(folder, tmp_path, method, more):  # noqa: F811
    """And its gradients, also where each takes its share of a step in parts."""
    train.main(arguments(method, folder, tmp_path / "one"))
    runs = launch(arguments(method, folder, tmp_path / "two", *more))
    for code, text in [run.end() for run in runs]:
        assert code == 0, text
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 4 and two == pytest.approx(one, abs=2e-3)
    expected = mean_gradient(tmp_path / "one")
    assert (mean_gradient(tmp_path / "two") - expected).norm() < 0.02 * expected.norm()
    target, _ = common.load_target(str(folder))
    first, second = (
        common.load_drafter(importlib.import_module(method).Drafter, folder, target).state_dict()
        for folder in (tmp_path / "one", tmp_path / "two")
    )
    for name in first:
        torch.testing.assert_close(first[name].float(), second[name].float(), atol=0.02, rtol=0.02)


def test_a_sharded_target_is_in_halves_before_and_after_a_forward(folder, tmp_path, monkeypatch):  # noqa: F811
    """Each process holds half of every layer's weights, and the same features come out."""
    target, _ = common.load_target(str(folder))
    ids = torch.arange(5, 25)[None]
    whole = common.target_features(target, ids, [1])
    shard = train.shard

    def checked(target, device, world):
        full = sum(p.numel() for layer in target.model.layers for p in layer.parameters())
        shard(target, device, world)

        def held():
            weights = [p for layer in target.model.layers for p in layer.parameters()]
            return sum(p.to_local().numel() for p in weights)

        assert held() <= full // 2 + 64
        hidden, kv = common.target_features(target, ids, [1])
        torch.testing.assert_close(hidden, whole[0])
        torch.testing.assert_close(kv[1], whole[1][1])
        assert held() <= full // 2 + 64
        print("SEEN", held(), full)

    monkeypatch.setattr(train, "shard", checked)  # the forks inherit it
    runs = launch(arguments("glide", folder, tmp_path / "two", "--shard-target"))
    for code, text in [run.end() for run in runs]:
        assert code == 0 and "SEEN" in text, text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_with_a_message(folder, tmp_path, victim):  # noqa: F811
    out = tmp_path / "out"
    runs = launch(options(folder, out, "--steps", "100000", "--save-every", "2"))
    begun = time.monotonic()
    while not (out / "config.json").exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    assert runs[victim].kill()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(runs[1 - victim].process, signal.SIGKILL))
    signal.alarm(60)  # so that a hang is a failure and not a hang
    code, text = runs[1 - victim].end()
    signal.alarm(0)
    assert code == 2 and "Traceback" not in text
    assert text.endswith(
        "train.py: another process of this run has ended or is out of reach; go on with --resume\n"
    )
    step = assert_whole(out, common.load_target(str(folder))[0])
    train.main(options(folder, out, "--steps", str(step + 3), "--resume"))


def test_sharding_alone_is_refused(folder, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="--shard-target needs torchrun"):
        train.main(arguments("glide", folder, tmp_path / "out", "--shard-target"))
    assert not (tmp_path / "out").exists()
    assert "RANK" not in os.environ and sys.argv[0] != "train.py"


# ------------------------------------------------------------------------ targets in several places


@pytest.fixture
def whole(tmp_path):
    """A target that is saved in tmp_path, with a drafter of each method."""
    target = make_llama(tie_word_embeddings=True).float()
    target.save_pretrained(tmp_path / "target")
    for name in TRAINED:
        module = importlib.import_module(name)
        own = {"layers": [0, 1]} if name == "specdecpp" else {}
        torch.manual_seed(1)
        config = module.Config(target=common.target_shape(target), **own)
        module.build(config, target, torch.arange(48)).save_pretrained(tmp_path / name)
    return target


def decode(target, name, place, **options):
    module = importlib.import_module(name)
    drafter = common.load_drafter(module.Drafter, place / name, target)
    options |= {"stop": "fixed"} if name == "specdecpp" else {}
    return plain(target, custom_generate=module.generate, drafter=drafter, **options)


def plain(target, **options):
    return target.generate(
        torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=12, do_sample=False, **options
    ).tolist()


@pytest.mark.slow
def test_a_target_partly_on_disk(whole, tmp_path):
    """device_map: what accelerate moves about is decoded like a target in one place."""
    places = dict.fromkeys([f"model.layers.{i}" for i in range(3)], "disk")
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places |= dict.fromkeys(rest, "cpu")
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert target.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    assert all(decode(target, name, tmp_path) == plain(whole) for name in TRAINED)


def half(rank, port, place):
    """What one of two processes of a tensor-parallel target does."""
    os.environ.update(environment(rank, 2, port))
    dist.init_process_group("gloo")
    target = AutoModelForCausalLM.from_pretrained(place / "target", tp_plan="auto").eval()
    target.requires_grad_(False)
    weight, said = target.model.layers[0].mlp.up_proj.weight, {}
    assert weight.to_local().numel() * 2 == weight.numel()
    for name in TRAINED:
        try:
            stats = common.Stats()
            said[name] = decode(target, name, place, stats=stats), stats.accepted
        except ValueError as error:
            said[name] = str(error)
    (place / f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_tensor_parallel_target(whole, tmp_path):
    """Each process holds half of every layer; both decode what the whole target does."""
    context = torch.multiprocessing.get_context("fork")
    processes = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(2):
        processes.append(context.Process(target=half, args=(rank, port, tmp_path)))
        processes[-1].start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first.pop("glide").startswith("GLIDE reads all KV heads of the target")
    assert len(first) == len(TRAINED) - 1 and all(ids == plain(whole) for ids, _ in first.values())
