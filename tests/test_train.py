"""train.py on a tiny target: a step, resume, interrupts, processes, damaged files."""

import contextlib
import copy
import itertools
import json
import math
import resource
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from chat import options, refused
from safetensors.torch import load_file
from tiny import family, make_drafts, random_batch, snapshot

import common
import glide
import train
from support import cli
from support.training import data
from support.training.features import Features

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
PINNED = {  # mean loss, acceptance rate
    "glide": (3.66535, 0.18325),
    "specdecpp": (2.77903, 0.19599),
    "falcon": (3.52719, 0.15644),  # the loss: with the slots that CSGD reveals today
    "ctc_drafter": (25.32317, 0.16727),
    "medusa": (10.24182, 0.15768),
}


@pytest.fixture
def trained(folder, tmp_path):
    """train.py into a folder of tmp_path; returns the folder."""

    def run(name, *more, method="glide"):
        train.main(options(folder, tmp_path / name, *more, method=method))
        return tmp_path / name

    return run


def state_of(out):
    return torch.load(out / "training_state.pt", weights_only=True)


def config_in(out):
    return json.loads((out / "config.json").read_text())


def curve_of(out):
    return json.loads((out / "curve.json").read_text())


# ----------------------------------------------------------------------- what a step is


def test_a_run_is_that_of_a_plain_loop(folder, trained, monkeypatch):
    """Order, seeds, progress, learning rate, clip, normalisation: written out again."""
    # No step is split, whatever the environment says.
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    steps, clip, peak, rise = 15, 1.9, 0.0018, 0.2
    seen = []
    loss = glide.loss

    def noted(drafter, target, batch):
        seen.append(batch.progress)
        return loss(drafter, target, batch)

    monkeypatch.setattr(glide, "loss", noted)
    monkeypatch.setattr(train, "check_learned", lambda *_: None)
    more = ["--steps", steps, "--clip", clip, "--lr", peak]
    out = trained("out", *more, "--seed", 5, "--warmup", rise)
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1  # safetensors would hide weights from others
    assert seen == [step / steps for step in range(steps)]
    assert curve_of(out)[-1]["tokens"] == steps * 4 * 14  # without the prompts

    target, tokenizer = common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 512)[:20]
    learned = torch.cat([ids[mask] for ids, mask in sequences])
    counts = torch.bincount(learned, minlength=48)
    torch.manual_seed(5)
    config = glide.Config(draft_vocab=32, intermediate_size=16)
    drafter = glide.build(config, target, counts)
    weights = list(drafter.parameters())
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.01)
    clipped, average = 0, None
    for step in range(steps):
        # 20 conversations are five batches, all of one length.
        epoch, place = divmod(step, 5)
        generator = torch.Generator().manual_seed(5 * 1_000_003 + epoch)
        permutation = torch.randperm(20, generator=generator)
        batches = torch.randperm(5, generator=generator)
        rows = permutation[4 * batches[place] :][:4].tolist()
        ids = torch.stack([sequences[i][0] for i in rows])
        mask = torch.stack([sequences[i][1] for i in rows])
        hidden, kv = common.target_features(target, ids, [1])
        batch = common.Batch(ids, mask, hidden, kv, step / steps)
        torch.manual_seed(5 * 1_000_003 + step)
        total, count = loss(drafter, target, batch)
        mean = float(total.detach() / count)
        average = mean if average is None else 0.95 * average + 0.05 * mean
        (total / count).backward()
        clipped += bool(torch.nn.utils.clip_grad_norm_(weights, clip) > clip)
        part = step / steps
        rate = min(1, (part + 0.001) / rise, (1 - part) / 0.2)
        optimizer.param_groups[0]["lr"] = peak * rate
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < clipped < steps
    assert curve_of(out)[-1]["loss"] == pytest.approx(average, abs=1e-3)
    ours = state_of(out)["model"]
    torch.testing.assert_close(ours, dict(drafter.state_dict()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("method", PINNED)
@torch.no_grad()
def test_weights_mean_what_they_meant_when_the_shipped_ones_were_trained(method):
    """Given weights give given numbers; layers of the Gemma-3 rotate in two ways."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = family("Gemma3", sliding_window=64, layer_types=kinds)
    random_weights(target)
    module = cli.import_method(method)
    _, drafter = make_drafts(method, target)
    random_weights(drafter)
    batch = random_batch(target, layers=range(4))
    for measure, expected in zip((module.loss, module.acceptance), PINNED[method]):
        torch.manual_seed(0)
        total, count = measure(drafter, target, batch)
        assert float(total) / float(count) == pytest.approx(expected, abs=5e-5)


def random_weights(module):
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))


def loss_and_gradient(out):
    """The mean loss of a run, and the optimizer's mean of its unclipped gradients."""
    state = state_of(out)
    moments = state["optimizer"]["state"]
    means = [moments[index]["exp_avg"].flatten() for index in sorted(moments)]
    return state["progress"]["average"], torch.cat(means)


class Scaled(torch.nn.Module):
    """The loss of numbers is their sum times a parameter, its weight their count."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        return (self.factor * batch).sum(), len(batch)


def test_gradients_are_those_of_the_mean_by_hand():
    """A step may have nothing to learn."""
    accelerator = Accelerator(cpu=True)
    for batch, mean in (([1.0, 2.0, 6.0], 3.0), ([], 0.0)):
        model = Scaled()
        assert train.gradients(accelerator, model, torch.tensor(batch)) == 2 * mean
        assert model.factor.grad == mean


def random_lines(path):
    """Write twelve conversations of unequal lengths, whose losses weigh differently."""
    generator = torch.Generator().manual_seed(3)
    lines = []
    for length in range(12, 48, 3):
        ids = torch.randint(5, 48, (length,), generator=generator).tolist()
        lines.append(json.dumps({"prompt_ids": ids[:3], "response_ids": ids[3:]}))
    path.write_text("\n".join(lines))
    return path


NO_CHANCE = ["--steps", 4, "--clip", 1000, "--block-size", 1]  # one phase of the mask


def test_two_processes_have_the_loss_of_one(folder, tmp_path, trained, capfd):
    """accelerate starts them, not torchrun."""
    argv = ["--data", random_lines(tmp_path / "data.jsonl"), *NO_CHANCE]
    two = options(folder, tmp_path / "two", *argv)
    debug_launcher(train.main, (two,))  # with gloo
    assert capfd.readouterr().err.count("step 4, ") == 1  # one of them reports
    one = trained("one", *argv)
    (ours, slope), (whole, expected) = map(loss_and_gradient, (tmp_path / "two", one))
    assert ours == pytest.approx(whole, rel=1e-6)
    assert (slope - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("method", PINNED)
def test_chance_is_the_seed_s(folder, tmp_path, trained, method):
    more = ["--data", random_lines(tmp_path / "data.jsonl"), "--steps", 3]
    more += ["--layers", "[1]"] if method == "specdecpp" else []
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        out = trained(str(number), *more, "--seed", seed, method=method)
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    target, _ = common.load_target(str(folder))
    common.load_drafter(cli.import_method(method).Drafter, out, target)


def test_every_step_of_every_process_has_numbers_of_its_own():
    numbers = set()
    for seed, step, process in itertools.product(range(3), range(5), range(2)):
        place = SimpleNamespace(num_processes=2, process_index=process)
        train.seed_step(place, seed, step)
        numbers.add(torch.rand(1).item())
    assert len(numbers) == 3 * 5 * 2


def test_measuring_changes_nothing_that_is_learned(trained, monkeypatch):
    """An acceptance that uses random numbers has the same ones every time."""
    seen = []

    def acceptance(drafter, target, batch):
        seen.append(torch.rand(1))
        return seen[-1], 1

    monkeypatch.setattr(glide, "acceptance", acceptance)
    seldom = trained("seldom", "--steps", 6, "--eval-every", 6)
    assert len(seen) == 1
    often = trained("often", "--steps", 6, "--eval-every", 1)
    assert len(seen) == 1 + 6 and len({float(x) for x in seen}) == 1
    models = [state_of(out)["model"] for out in (seldom, often)]
    torch.testing.assert_close(*models, atol=0, rtol=0)
    drafter = torch.nn.Linear(1, 1)
    torch.manual_seed(3)
    train.measure(glide, drafter, None, {"alpha": [None]}, [])
    ours = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.rand(1))


@pytest.mark.parametrize("answer", ["w2", "w2 w3"])
def test_data_without_anything_to_learn_is_refused(tmp_path, trained, answer):
    """Three labels need an answer of three tokens, with its end: the second has them,
    and not the first, whose answers have more in all.
    """
    turns = [{"role": role, "content": "w2"} for role in ("user", "assistant")]
    lines = [{"messages": turns * 4}, {"prompt": "w1", "response": answer}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    argv = ["--data", path, "--held-out", 0, "--steps", 1, "--labels", 3]
    none = refused("nothing to learn for ctc_drafter: all answers are too short")
    with none if answer == "w2" else contextlib.nullcontext():
        trained("out", *argv, method="ctc_drafter")


def test_training_lowers_the_loss_and_a_finished_drafter_is_never_overwritten(
    trained, capsys
):
    run = partial(trained, "out", "--steps", 18, "--lr", "1e-2")
    out = run()
    first, *_, last = curve_of(out)
    assert [row["step"] for row in curve_of(out)] == [4, 8, 12, 16, 18]
    assert last["loss"] < first["loss"] and last["alpha"] > first["alpha"]
    said = ", ".join(f"{key} {value}" for key, value in last.items())
    assert said in capsys.readouterr().err
    assert load_file(out / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    before = snapshot(out)
    with refused("already holds a drafter"):
        run()
    run("--resume")
    assert "is finished" in capsys.readouterr().err
    assert snapshot(out) == before


# --------------------------------------------------------------------- what is measured


def spy(monkeypatch, name):
    """A list that receives the sequences that a function of glide.py is called with."""
    monkeypatch.setattr(train, "check_learned", lambda *_: None)
    rows = []
    plain = getattr(glide, name)

    def spied(drafter, target, batch):
        for ids, mask in zip(batch.input_ids, batch.loss_mask):
            rows.append(tuple(ids[: int(mask.nonzero().max()) + 1].tolist()))
        return plain(drafter, target, batch)

    monkeypatch.setattr(glide, name, spied)
    return rows


def test_held_out_conversations_are_measured_not_learned(
    folder, tmp_path, trained, monkeypatch
):
    """The last four; another file has them as well, and their first turns."""
    lines = (folder / "data.jsonl").read_text().splitlines()
    rows = []
    firsts = []
    for line in lines:
        record = json.loads(line)
        rows.append(tuple(record["prompt_ids"] + record["response_ids"]))
        record["response_ids"] = record["response_ids"][:5]
        firsts.append(json.dumps(record))
    parts = {"a": lines[:6] + lines[20:] + firsts[20:], "b": lines[6:]}
    for name, part in parts.items():
        (tmp_path / name).write_text("\n".join(part) + "\n")
    learned = spy(monkeypatch, "loss")
    measured = spy(monkeypatch, "acceptance")
    trained("out", "--data", tmp_path / "a", tmp_path / "b", "--steps", 5)
    assert sorted(learned) == sorted(rows[:20])  # an epoch
    assert sorted(set(measured)) == sorted(rows[20:])


def test_eval_alpha_is_that_of_a_file(tmp_path, trained, monkeypatch):
    """Its conversations are whole, whatever is kept of those that are learned."""
    record = {"prompt_ids": [5] * 8, "response_ids": list(range(6, 36))}
    (tmp_path / "answers.jsonl").write_text(json.dumps(record) + "\n")
    measured = spy(monkeypatch, "acceptance")
    more = ["--eval", tmp_path / "answers.jsonl", "--max-length", 10, "--held-out", 0]
    [row] = curve_of(trained("out", "--steps", 1, *more))
    assert measured == [tuple(record["prompt_ids"] + record["response_ids"])]
    assert row["alpha"] is None and 0 < row["eval_alpha"] < 1


def test_an_acceptance_rate_is_a_mean_over_positions():
    """Not over batches: a batch of one position counts as one position."""

    class Method:
        def acceptance(drafter, target, batch):
            assert not drafter.training
            return torch.tensor(1.0), batch

    drafter = torch.nn.Linear(1, 1).train()
    measured = {"alpha": [1, 9], "eval_alpha": []}
    row = train.measure(Method, drafter, None, measured, [])
    assert row == {"alpha": 0.2, "eval_alpha": None}
    assert drafter.training
    # A signal ends a measurement, and what is measured is not kept.
    assert train.measure(None, drafter, None, measured, [True]) is None


# ----------------------------------------------------------------------------- --resume


# Two checkpoints of four files each, and one run that keeps the target's features.
KILLED = [(renames, False) for renames in range(8)] + [(5, True)]


@pytest.mark.parametrize("renames, features", KILLED)
def test_a_killed_run_ends_with_the_same_weights_bit_for_bit(
    folder, tmp_path, trained, monkeypatch, renames, features
):
    """It dies before a rename; what is then in its folder can be loaded and resumed."""
    left = iter(range(renames))
    replace = Path.replace

    def dying(self, other):
        if self.parent.name == ".part" and next(left, None) is None:
            raise SystemExit
        return replace(self, other)

    more = ["--features", tmp_path / "features"] if features else []
    more += ["--steps", 3, "--save-every", 1, "--eval-every", 1]
    whole = trained("whole", *more)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Path, "replace", dying)
        trained("cut", *more)
    if renames > 3 or (tmp_path / "cut" / "config.json").exists():
        target, _ = common.load_target(str(folder))
        assert common.load_drafter(glide.Drafter, tmp_path / "cut", target)
    again = ["--resume"] if renames else []  # nothing was saved yet
    cut = trained("cut", *more, *again, "--gamma", 3)  # this may change
    assert config_in(cut)["gamma"] == 3
    models = [state_of(out)["model"] for out in (cut, whole)]
    torch.testing.assert_close(*models, atol=0, rtol=0)
    curves = [[row | {"minutes": 0} for row in curve_of(out)] for out in (cut, whole)]
    assert curves[0] == curves[1]
    assert not list(cut.glob(".part*"))


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=lambda x: x.name)
def test_an_interrupt_is_answered_at_once_saves_and_ends_the_run(
    trained, tmp_path, monkeypatch, capfd, request, kind
):
    """Ctrl-C sends SIGINT; `kill` and cluster schedulers send SIGTERM."""

    def unheard(*_):  # this would end pytest
        pytest.fail("train.py does not listen")

    request.addfinalizer(partial(signal.signal, kind, signal.signal(kind, unheard)))
    loss = glide.loss

    def interrupted(*given):
        capfd.readouterr()
        signal.raise_signal(kind)
        said = capfd.readouterr().err
        assert "saving; the same command with --resume" in said
        return loss(*given)

    monkeypatch.setattr(glide, "loss", interrupted)
    monkeypatch.setattr(train, "check_learned", lambda *_: None)
    with pytest.raises(SystemExit, match="130"):
        trained("out", "--steps", 100000)
    out = tmp_path / "out"
    assert curve_of(out) == []
    assert state_of(out)["progress"]["step"] == 1 and config_in(out)


def test_a_run_does_not_go_on_as_another_one(folder, tmp_path, trained):
    """Options of its method and of train.py decide it, and what is in its files."""
    out = trained("out", "--steps", 1)
    lines = (folder / "data.jsonl").read_text().splitlines()
    (tmp_path / "other").write_text("\n".join(lines[1:]) + "\n")
    target, tokenizer = common.load_target(str(folder))
    target.model.norm.weight[0] += 1
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    for option, value, said in (
        ("--block-size", 4, "3, now 4"),
        ("--lr", 1, "0.002, now 1.0"),
        ("--data", tmp_path / "other", "of content"),
        ("--target", tmp_path / "target", "of content"),
    ):
        with refused(f"started with {option} {said}"):
            trained("out", "--steps", 4, option, value, "--resume")
    kept = state_of(out)
    names = "method dtype seed batch_size lr warmup clip max_length held_out"
    for name in names.split():
        identity = kept["identity"] | {name: "other"}
        torch.save(kept | {"identity": identity}, out / "training_state.pt")
        option = name.replace("_", "-")
        with refused(f"started with --{option}"):
            trained("out", "--steps", 4, "--resume")


def test_minutes_are_those_of_all_sittings(trained, monkeypatch):
    """By a clock that shows a second more at each look: six of them are 0.1 minutes."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(train, "time", clock)
    for minutes, steps, more in ((0.1, 6, []), (0.2, 12, ["--resume"])):
        last = curve_of(trained("out", "--minutes", minutes, *more))[-1]
        assert (last["step"], last["minutes"]) == (steps, minutes)


def test_layers_counted_from_the_top_can_be_resumed(trained):
    for more in (["--steps", 2], ["--steps", 4, "--resume"]):
        out = trained("out", "--layers", "[0,-1]", *more, method="specdecpp")
    assert curve_of(out)[-1]["step"] == 4


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, trained, monkeypatch):
    """What was saved before stays, and can be resumed."""
    loss = glide.loss
    calls = []

    def diverging(*given):
        total, weight = loss(*given)
        calls.append(None)
        return (total * math.nan if len(calls) == 6 else total), weight

    monkeypatch.setattr(glide, "loss", diverging)
    monkeypatch.setattr(train, "check_learned", lambda *_: None)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with refused("at step 5 the loss is nan"):
        trained("out", "--steps", 8)
    # Ctrl-C means what it did.
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    state = state_of(tmp_path / "out")
    assert all(x.isfinite().all() for x in state["model"].values())
    assert state["progress"]["step"] == 4
    trained("out", "--steps", 8, "--resume")


def test_init_starts_from_a_drafter_and_says_what_it_lacks(trained, capsys):
    """A second layer has the weights that `build` copies, not random ones."""
    more = ["--steps", 1, "--lr", 0]  # a step that moves nothing
    one = trained("one", *more, "--kv-layer", 0)
    new = trained("new", *more, "--num-layers", 2)
    capsys.readouterr()
    init = ["--init", one]
    same = trained("same", *more, *init)
    assert "lacks" not in capsys.readouterr().err
    assert config_in(same)["kv_layer"] == 0
    two = trained("two", *more, *init, "--num-layers", 2)
    said = capsys.readouterr().err
    assert f"{one} lacks: layers.1." in said
    new, two = (load_file(out / "model.safetensors") for out in (new, two))
    copied = [name for name in new if name.startswith("layers.1.self_attn.")]
    assert copied
    for name in copied:
        torch.testing.assert_close(two[name], new[name])
    with refused("does not fit the options"):
        trained("other", *more, *init, "--intermediate-size", 8)
    # The same command goes on, as train.sh has it.
    again = trained("same", "--steps", 2, "--lr", 0, *init, "--resume")
    assert state_of(again)["progress"]["step"] == 2


def test_a_draft_vocabulary_is_chosen_anew_if_it_is_asked_for(folder, tmp_path, capsys):
    """The text of --init and that of --data share no token."""
    for name, answer in (("old", [5, 6, 7]), ("new", [20, 21, 22])):
        line = json.dumps({"prompt_ids": [3, 4], "response_ids": 4 * answer}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * 4)

    def vocabulary(name, data, *more):
        words = f"--method glide --target {folder} --out {tmp_path / name} --device cpu"
        words += f" --data {tmp_path / data}.jsonl --steps 1 --lr 0 --held-out 1"
        train.main([*words.split(), *map(str, more)])
        _, _, said = capsys.readouterr().err.partition("vocabulary has ")
        weights = load_file(tmp_path / name / "model.safetensors")
        return set(weights["vocab_ids"].tolist()), said

    old, said = vocabulary("first", "old", "--draft-vocab", 3)
    assert old == {5, 6, 7} and said.startswith("3 tokens and covers 100.0% of these")
    init = ["new", "--init", tmp_path / "first"]
    kept, said = vocabulary("kept", *init)
    assert kept == {5, 6, 7} and said.startswith("3 tokens and covers 0.0% of these")
    new, said = vocabulary("anew", *init, "--draft-vocab", 3)
    assert new == {20, 21, 22} and said.startswith("3 tokens and covers 100.0% of")
    more, _ = vocabulary("more", *init, "--draft-vocab", 4)
    assert more > {20, 21, 22}


def test_stored_features_are_those_of_the_target(folder, tmp_path):
    """Of sequences of unequal length; a file that is of no use is written anew."""
    target, _ = common.load_target(str(folder), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    sequences = []
    for length in (3, 29, 12):
        ids = torch.randint(5, 48, (length,), generator=generator)
        sequences.append((ids, torch.ones(length, dtype=torch.bool)))

    def check(layers):
        for part in (sequences, sequences[::-2]):
            ours = Features(target, layers, str(tmp_path)).batch(part, 0.5)
            fresh = Features(target, layers).batch(part, 0.5)
            assert torch.equal(ours.input_ids, fresh.input_ids)
            assert ours.kv.keys() == fresh.kv.keys() == set(layers)
            real = ours.loss_mask  # all but the padding
            pairs = [(ours.hidden[real], fresh.hidden[real])]
            for layer in layers:
                for a, b in zip(ours.kv[layer], fresh.kv[layer]):
                    pairs.append((a.transpose(1, 2)[real], b.transpose(1, 2)[real]))
            for a, b in pairs:
                torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)

    for layers in ([1], [0, 1], []):
        check(layers)
    files = snapshot(tmp_path)
    assert len(files) == 3
    (tmp_path / "new").touch()  # others may read it, and what is kept as well
    modes = {path.stat().st_mode for path in [*files, tmp_path / "new"]}
    assert len(modes) == 1
    (tmp_path / "new").unlink()
    for file in files:
        file.write_bytes(file.read_bytes()[:100])  # damaged
    check([1])
    assert all(len(content) > 100 for content in snapshot(tmp_path).values())
    target.model.norm.weight += 0.5  # another target
    check([1])


def test_kept_features_that_cannot_be_read_are_named(folder, tmp_path, monkeypatch):
    """They may be another user's, and are not taken from them by writing anew."""
    target, _ = common.load_target(str(folder))
    sequences = [(torch.arange(5, 9), torch.ones(4, dtype=torch.bool))]
    features = Features(target, [1], str(tmp_path))
    features.batch(sequences, 0.0)
    before = snapshot(tmp_path)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError) as refusal:
        patch.setattr(Path, "read_bytes", forbidden)
        features.batch(sequences, 0.0)
    assert snapshot(tmp_path) == before
    [path] = before
    assert str(path) in str(refusal.value)


# ------------------------------------------------------------------------ damaged files


def test_a_damaged_or_hostile_state_is_refused_and_left(trained):
    out = trained("out", "--steps", 2)
    path = out / "training_state.pt"
    whole = path.read_bytes()
    other = state_of(out)
    other["config"]["gone"] = 1  # a field of another version
    hostile = {"model": Path("pickled")}  # runs code when it is read
    half = whole[: len(whole) // 2]
    for content in (b"", b"junk", half, {"model": 3}, hostile, other):
        if isinstance(content, dict):
            torch.save(content, path)
        else:
            path.write_bytes(content)
        before = snapshot(out)
        with refused("is damaged or of another version"):
            trained("out", "--steps", 2, "--resume")
        assert snapshot(out) == before


@pytest.mark.parametrize("method", PINNED)
def test_a_damaged_drafter_is_refused_in_a_line(llama, tmp_path, method):
    """Whatever config.json holds; weights that are not finite in the target's dtype."""
    module = cli.import_method(method)
    drafter = make_drafts(method, llama)[1].float()
    drafter.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    whole = config.read_text()
    shape = '{"target": {"vocab_size": "many"}}'
    message = f"holds no {method} drafter, or a damaged one"
    texts = ["", "null", "[]", '{"target": null}', shape]
    if method == "glide":  # transformers refuses the width of its layers
        texts.append(whole.replace('"num_heads": 4', '"num_heads": 3'))
        assert texts[-1] != whole
    for text in texts:
        config.write_text(text)
        with refused(message) as refusal:
            common.load_drafter(module.Drafter, tmp_path, llama)
        assert "\n" not in str(refusal.value)
    config.write_text(whole)
    common.load_drafter(module.Drafter, tmp_path, llama)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with refused(message):
        common.load_drafter(module.Drafter, tmp_path, llama)
    weight = next(drafter.parameters()).detach().flatten()
    for value, target in ((math.nan, llama), (7e4, copy.deepcopy(llama).half())):
        weight[0] = value
        drafter.save_pretrained(tmp_path)
        with refused("holds weights that are not finite in torch.float"):
            common.load_drafter(module.Drafter, tmp_path, target)


def test_a_full_disk_leaves_the_old_checkpoint(trained):
    """A file's size is limited; what was there before is there, byte for byte."""
    out = trained("out", "--steps", 2)
    before = snapshot(out)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = len(before[out / "model.safetensors"]) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, most))
    try:
        with refused("cannot save to .*make room, then continue with"):
            trained("out", "--steps", 4, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert snapshot(out) == before
