"""train.py on a tiny target: what is learned from, resume, interrupts, two processes, bad input."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_copying import needed_to_train
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import common
import glide
import train
from support import cli, data
from support.features import fingerprint

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a word tokenizer and chat template, and 24 conversations about nothing."""
    folder = tmp_path_factory.mktemp("tiny")
    words = ["<end>", "<user>", "<assistant>", "<system>", "<unk>"] + [f"w{i}" for i in range(43)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", pad_token="<end>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(24):
            ids = torch.randint(5, 48, (20,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    return folder


def options(folder, out, *more):
    argv = f"--method glide --target {folder} --data {folder}/data.jsonl --out {out} --device cpu"
    argv += " --draft-vocab 32 --intermediate-size 16 --held-out 4 --eval-every 4 --save-every 4"
    return [*argv.split(), *more]


def run(*arguments, cwd=ROOT):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)


class Run:
    """train.py in a fork, which spares the seconds of importing, or in a real process.

    What it says on stdout and stderr is kept.
    """

    def __init__(self, argv, limit=None, real=False):
        self.output, write = os.pipe()
        if real:
            argv = [sys.executable, "train.py", *argv]
            self.process = subprocess.Popen(argv, cwd=ROOT, stderr=write, stdout=write).pid
        else:
            self.process = os.fork()
            if not self.process:
                self.child(argv, write, limit)
        os.close(write)

    @staticmethod
    def child(argv, write, limit):
        code = 70
        try:
            os.dup2(write, 2)
            sys.argv, sys.stderr = ["train.py", *argv], os.fdopen(2, "w", buffering=1)
            sys.stdout = sys.stderr
            if limit is not None:  # no file may grow beyond this many bytes
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            cli.run(train.main)
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # noqa: B036  must not reach the copy of pytest
            os.write(2, f"Traceback: {error!r}".encode())
        finally:
            os._exit(code)

    def kill(self):
        os.kill(self.process, signal.SIGKILL)
        return self.end()[0] == -signal.SIGKILL

    def end(self):
        """(exit code, output) once it has ended."""
        with os.fdopen(self.output) as file:
            text = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]), text


def spy_on_batches(monkeypatch):
    """Lists of the sequences that the loss, and alpha, were computed on, in order."""
    seen = {"loss": [], "alpha": []}
    for name, rows in seen.items():
        plain = getattr(glide, name)

        def spied(drafter, target, batch, plain=plain, rows=rows):
            for ids, mask in zip(batch.input_ids, batch.loss_mask):
                length = int(mask.nonzero().max()) + 1  # what follows is padding
                rows.append(tuple(ids[:length].tolist()))
            return plain(drafter, target, batch)

        monkeypatch.setattr(glide, name, spied)
    return seen["loss"], seen["alpha"]


def weights(out):
    return torch.load(out / "training_state.pt", weights_only=True)["model"]


def test_reading_every_form(folder, tmp_path):
    _, tokenizer = train.common.load_target(str(folder))
    roles = ("user", "assistant", "user", "assistant")
    texts = ("w1", "w2", "w3", "w4")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    records = [
        {"prompt_ids": [5, 6], "response_ids": [7, 8]},
        {"prompt": "w1 w2", "response": "w3"},
        {"messages": messages},
        {"conversations": [{"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}]},
        {"text": "w1 w2 w3"},
    ]
    path = tmp_path / "forms.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    learned = [
        [tokenizer.convert_ids_to_tokens(int(i)) for i in ids[mask]]
        for ids, mask in data.read_conversations(str(path), tokenizer, 64)
    ]
    assert learned == [
        ["w2", "w3"],
        ["w3", "<end>"],
        ["w2", "<end>", "w4", "<end>"],
        ["w2", "<end>"],
        ["w2", "w3"],
    ]


def test_loss_is_on_responses_and_never_on_the_first_token(folder):
    _, tokenizer = train.common.load_target(str(folder))
    for ids, mask in data.read_conversations(str(folder / "data.jsonl"), tokenizer, 15):
        assert len(ids) == len(mask) == 15
        assert mask.tolist() == [False] * 6 + [True] * 9


def test_several_data_files_and_no_held_out_conversation_in_training(folder, tmp_path, monkeypatch):
    lines = (folder / "data.jsonl").read_text().splitlines()
    parts = {"a": [*lines[:6], *lines[20:]], "b": lines[6:]}  # both end with the same four
    for name, part in parts.items():
        (tmp_path / name).write_text("\n".join(part) + "\n")
    learned, measured = spy_on_batches(monkeypatch)
    more = ["--data", str(tmp_path / "a"), str(tmp_path / "b")]
    train.main(options(folder, tmp_path / "out", "--steps", "5", *more))
    _, tokenizer = train.common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 512)
    rows = [tuple(ids.tolist()) for ids, _ in sequences]
    assert sorted(learned) == sorted(rows[:20])  # an epoch
    assert sorted(set(measured)) == sorted(rows[20:])
    (tmp_path / "same").write_text("\n".join([lines[0]] * 4) + "\n")
    with pytest.raises(ValueError, match="every conversation is among the 2 held out"):
        more = ["--data", str(tmp_path / "same")]
        train.main(options(folder, tmp_path / "out2", "--steps", "1", *more))


def test_a_first_turn_is_learned_within_the_second(folder, tmp_path, monkeypatch):
    lines = [([4, 5], [6, 7]), ([5], [7]), ([4, 5, 6, 7, 8], [9]), ([4, 5, 6, 7, 8], [10])]
    records = [{"prompt_ids": prompt, "response_ids": answer} for prompt, answer in lines]
    (tmp_path / "turns").write_text("\n".join(map(json.dumps, [*records, records[1]])) + "\n")
    learned = []

    def spied(drafter, target, batch, plain=glide.loss):
        for ids, mask in zip(batch.input_ids, batch.loss_mask):
            learned.append((ids[: mask.nonzero().max() + 1].tolist(), ids[mask].tolist()))
        return plain(drafter, target, batch)

    monkeypatch.setattr(glide, "loss", spied)
    more = ["--data", str(folder / "data.jsonl"), str(tmp_path / "turns"), "--held-out", "1"]
    more += ["--batch-size", "13"]  # 24 and 4 less a held-out and a first turn: two steps an epoch
    train.main(options(folder, tmp_path / "out", "--steps", "2", *more))
    ours = [each for each in learned if each[0][:2] == [4, 5] and len(each[0]) <= 6]
    assert sorted(ours) == [([4, 5, 6, 7, 8, 9], [6, 7, 9]), ([4, 5, 6, 7, 8, 10], [10])]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 3}',
        "[1]",
        "{",
        '{"messages": [{"role": "user"}]}',
        '{"text": null}',
        '{"prompt_ids": [1], "response_ids": [4800]}',
    ],
)
def test_bad_line_is_named_by_number(folder, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "w1 w2"}\n' + line + "\n")
    with pytest.raises(ValueError, match="bad.jsonl, line 2: "):
        train.main(options(folder, tmp_path / "out", "--steps", "1", "--data", str(path)))


@pytest.mark.parametrize(
    "more, said",
    [
        (["--steps", "1", "--minutes", "1"], "either --steps or --minutes"),
        (["--steps", "1", "--resume"], "nothing to resume"),
        (["--steps", "1", "--data", "missing.jsonl"], "missing.jsonl"),
        (["--steps", "1", "--target", "no/such-target"], "no/such-target"),
        (["--steps", "1", "--batch-size", "3", "--accumulate", "2"], "multiple"),
        (["--steps", "1", "--kv-layer", "7"], "kv_layer 7"),
    ],
)
def test_bad_options_are_named(folder, tmp_path, more, said):
    with pytest.raises(ValueError, match=said):
        train.main(options(folder, tmp_path / "out", *more))


@pytest.mark.parametrize(
    "more, said",
    [
        (["--data", "missing.jsonl"], "train.py: no data file missing.jsonl"),
        (["--method", "nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(folder, tmp_path, more, said):
    code, text = Run(options(folder, tmp_path / "out", "--steps", "1", *more)).end()
    assert code == 2 and "Traceback" not in text
    assert said in text.splitlines()[-1]


def test_training_lowers_the_loss_and_never_overwrites_a_drafter(folder, tmp_path):
    train.main(options(folder, tmp_path / "a", "--steps", "40"))
    first, *_, last = json.loads((tmp_path / "a" / "curve.json").read_text())
    assert last["step"] == 40
    assert last["loss"] < first["loss"] and last["alpha"] > first["alpha"]
    assert load_file(tmp_path / "a" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="already holds a drafter"):
        train.main(options(folder, tmp_path / "a", "--steps", "40"))


@pytest.mark.parametrize("features", [False, True])
def test_resume_gives_the_same_weights_bit_for_bit(folder, tmp_path, features):
    more = ["--features", str(tmp_path / "features")] if features else []
    train.main(options(folder, tmp_path / "whole", "--steps", "12", *more))
    killed = Run(options(folder, tmp_path / "cut", "--steps", "12", *more))
    while not (tmp_path / "cut" / "training_state.pt").exists():
        time.sleep(0.01)
    killed.kill()  # at whatever moment
    train.main(options(folder, tmp_path / "cut", "--steps", "12", "--resume", *more))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    curves = []
    for name in ("whole", "cut"):
        curve = json.loads((tmp_path / name / "curve.json").read_text())
        curves.append([row | {"minutes": None} for row in curve])
    assert curves[0] == curves[1]


def test_interrupt_saves_and_exits_cleanly(folder, tmp_path):
    run = Run(options(folder, tmp_path / "out", "--steps", "100000"))
    while not (tmp_path / "out" / "training_state.pt").exists():
        time.sleep(0.01)
    os.kill(run.process, signal.SIGINT)
    code, text = run.end()
    assert code == 0 and "Traceback" not in text
    assert json.loads(text.splitlines()[-1])["interrupted"] is True


def test_a_step_in_parts_has_the_losses_of_a_whole_one(folder, tmp_path):
    losses = []
    for name, parts in (("whole", "1"), ("parts", "2")):
        more = ["--steps", "6", "--eval-every", "1", "--accumulate", parts]
        train.main(options(folder, tmp_path / name, *more))
        curve = json.loads((tmp_path / name / "curve.json").read_text())
        losses.append([row["loss"] for row in curve])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_options_of_a_method_count_also_if_they_are_off_or_resume(folder, tmp_path):
    out, more = tmp_path / "out", ["--eval-answers", "0"]
    off = ["--draft-vocab", "0", "--no-distill"]
    train.main(options(folder, out, *more, "--steps", "1", *off))
    begun = json.loads((out / "config.json").read_text())
    assert begun["draft_vocab"] == 0 and begun["distill"] is False
    again = ["--resume", "--gamma", "3", "--draft-vocab", "0"]
    train.main(options(folder, out, *more, "--steps", "2", *again))
    assert json.loads((out / "config.json").read_text()) == begun | {"gamma": 3}


def test_init_says_what_does_not_come_from_there(folder, tmp_path, capsys):
    more = ["--steps", "1", "--eval-answers", "0"]
    train.main(options(folder, tmp_path / "one", *more))
    init = ["--init", str(tmp_path / "one")]
    train.main(options(folder, tmp_path / "same", *more, *init))
    assert "has no weights" not in capsys.readouterr().err
    train.main(options(folder, tmp_path / "two", *more, *init, "--num-layers", "2"))
    said = capsys.readouterr().err
    assert f"{tmp_path}/one has no weights for these options, or more: layers.1." in said


def test_what_init_lacks_begins_as_without_it(folder, tmp_path):
    """A second layer's weights are those that `build` copies from the target, not random ones."""
    more = ["--steps", "1", "--eval-answers", "0", "--lr", "0"]  # a step that moves nothing
    train.main(options(folder, tmp_path / "one", *more))
    train.main(options(folder, tmp_path / "new", *more, "--num-layers", "2"))
    init = ["--init", str(tmp_path / "one"), "--num-layers", "2"]
    train.main(options(folder, tmp_path / "two", *more, *init))
    new, two = (load_file(tmp_path / name / "model.safetensors") for name in ("new", "two"))
    copied = [name for name in new if name.startswith("layers.1.self_attn.")]
    assert copied
    for name in copied:
        torch.testing.assert_close(two[name], new[name])


def test_a_head_trains_on_the_drafter_of_another_method(folder, tmp_path):
    """The loss and alpha get the target's K/V that the other drafter reads."""
    base = tmp_path / "base"
    more = ["--steps", "1", "--eval-answers", "0"]
    train.main(options(folder, base, *more))
    argv = f"--method specdecpp --stage head --base glide --base-checkpoint {base} --held-out 4"
    argv += f" --target {folder} --data {folder}/data.jsonl --out {tmp_path}/head --device cpu"
    train.main([*argv.split(), *more])
    [row] = json.loads((tmp_path / "head" / "curve.json").read_text())
    assert row["loss"] > 0 and row["alpha"] > 0
    assert 0 <= row["auc"] <= 1 and 0 <= row["ece"] <= 1 and 0 <= row["kl"] <= row["bce"]


@pytest.mark.slow  # the real launcher; test_distributed.py has the losses of all methods
def test_torchrun_trains(folder, tmp_path):
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --master-port 29611 train.py".split()
    done = run(*torchrun, *options(folder, tmp_path / "out", "--steps", "6"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "config.json").is_file()


def test_features_from_disk_equal_features_on_the_fly(folder, tmp_path):
    target, tokenizer = train.common.load_target(str(folder), dtype=torch.bfloat16)
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 64)[:9]
    sequences = [(ids[: 20 - i], mask[: 20 - i]) for i, (ids, mask) in enumerate(sequences)]
    stored = train.Features(target, sequences, [1], str(tmp_path))
    wider = train.Features(target, sequences, [0, 1], str(tmp_path))
    for features in (stored, wider, train.Features(target, sequences, [1], str(tmp_path))):
        made = train.make_batch([0, 5, 2], sequences, features, torch.arange(3), 0.0, "cpu")
        direct = train.Features(target, sequences, [1], None)
        fresh = train.make_batch([0, 5, 2], sequences, direct, torch.arange(3), 0.0, "cpu")
        for row, length in enumerate(len(sequences[i][0]) for i in (0, 5, 2)):
            pairs = [(made.hidden[row], fresh.hidden[row])]
            for ours, theirs in zip(made.kv[1], fresh.kv[1]):
                pairs.append((ours[row].transpose(0, 1), theirs[row].transpose(0, 1)))
            for a, b in pairs:
                ours, theirs = a[:length].float(), b[:length].float()
                torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_stored_features_keep_the_layers_of_earlier_runs(folder, tmp_path, monkeypatch):
    """Two methods that take turns with other layers in one folder need a forward each, no more."""
    target, tokenizer = common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 64)[:3]
    wanted = []
    target_features = common.target_features

    def noted(target, ids, layers):
        wanted.append(layers)
        return target_features(target, ids, layers)

    monkeypatch.setattr(common, "target_features", noted)
    for layer in (0, 1, 0, 1):
        train.Features(target, sequences, [layer], str(tmp_path)).compute_all()
    assert wanted == [[0], [0, 1]]


# ------------------------------------------------------------------------------ what a figure means


def test_forty_steps_are_those_of_a_plain_loop(folder, tmp_path, monkeypatch):
    """Order, seeds, progress, learning rate, clip and normalisation, all written out once more."""
    out = tmp_path / "out"
    steps = 40
    clip = 2.5
    peak = 0.0018  # learning rate
    rise = 0.1  # share of the run that warms up
    progress = []
    loss = glide.loss

    def noted(drafter, target, batch):
        progress.append(batch.progress)
        return loss(drafter, target, batch)

    monkeypatch.setattr(glide, "loss", noted)
    more = ["--steps", str(steps), "--clip", str(clip), "--lr", str(peak), "--seed", "5"]
    train.main(options(folder, out, *more, "--warmup", str(rise)))
    assert progress == [step / steps for step in range(steps)]
    curve = json.loads((out / "curve.json").read_text())
    assert curve[-1]["tokens"] == steps * 4 * 14  # of four answers a step, without their prompts
    target, tokenizer = common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 512)[:20]
    counts = torch.bincount(torch.cat([ids[mask] for ids, mask in sequences]), minlength=48)
    torch.manual_seed(5)
    shape = common.target_shape(target)
    config = glide.Config(target=shape, draft_vocab=32, intermediate_size=16)
    drafter = glide.build(config, target, counts).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    clipped = 0
    for step in range(steps):
        epoch, place = divmod(step, 5)  # 20 conversations are five batches, all of one length
        generator = torch.Generator().manual_seed(5 * 1_000_003 + epoch)
        permutation = torch.randperm(20, generator=generator)
        batches = torch.randperm(5, generator=generator)
        rows = permutation[4 * batches[place] :][:4].tolist()
        ids = torch.stack([sequences[i][0] for i in rows])
        mask = torch.stack([sequences[i][1] for i in rows])
        generator = torch.Generator().manual_seed(5 * 7_368_787 + step)
        seeds = torch.randint(2**31, (4,), generator=generator)
        hidden, kv = common.target_features(target, ids, [1])
        batch = common.Batch(ids, mask, hidden, kv, seeds, step / steps)
        (loss(drafter, target, batch) / mask.sum()).backward()
        squares = sum(float(p.grad.square().sum()) for p in drafter.parameters())
        if squares**0.5 > clip:
            clipped += 1
            for p in drafter.parameters():
                p.grad *= clip / (squares**0.5 + 1e-6)
        warm = min(1, (step / steps + 0.001) / rise)
        lr = peak * warm * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < clipped < steps
    ours = weights(out)
    for name, value in drafter.state_dict().items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-6)


def epochs_of(order, count, number):
    """The first epochs, read off the steps one after the other."""
    stream = []
    for step in range(number * count // order.batch_size + 1):
        stream += order.step(step)[0]
    return [stream[i * count : (i + 1) * count] for i in range(number)]


def test_a_first_turn_is_joined_with_its_second_wherever_the_two_stand():
    """Two conversations of two turns and one of one; answers are marked, first turns come later."""

    def sequence(ids, answered):
        return torch.tensor(ids), torch.tensor([place in answered for place in range(len(ids))])

    joined = data.join_turns(
        [
            sequence([1, 2, 3, 4, 5], {4}),
            sequence([7, 8], {1}),
            sequence([1, 2, 3], {1, 2}),
            sequence([1, 9, 9], {2}),
            sequence([7, 8, 6, 5], {3}),
        ]
    )
    assert [(ids.tolist(), mask.int().tolist()) for ids, mask in joined] == [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        ([1, 9, 9], [0, 0, 1]),
        ([7, 8, 6, 5], [0, 1, 0, 1]),
    ]


@pytest.mark.parametrize("count, size", [(24, 4), (301, 4), (7, 16), (1, 2)])
def test_each_epoch_is_a_permutation_and_no_two_are_equal(count, size):
    lengths = torch.randint(5, 300, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    epochs = epochs_of(train.Order(lengths, size, 0), count, 6)
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count == 1 or len({tuple(epoch) for epoch in epochs}) == 6
    other = epochs_of(train.Order(lengths, size, 1), count, 6)
    assert count < 20 or not any(epoch in epochs for epoch in other)


def test_a_step_depends_on_its_number_only():
    """So a resumed run sees what the interrupted one would have seen; and no seed comes twice."""
    lengths = list(range(10, 60))
    order = train.Order(lengths, 4, 7)
    steps = [order.step(step) for step in range(40)]
    for step in (0, 39, 12, 13):
        chosen, seeds = train.Order(lengths, 4, 7).step(step)
        assert chosen == steps[step][0] and torch.equal(seeds, steps[step][1])
    assert len({int(seed) for _, seeds in steps for seed in seeds}) == 160


def test_a_batch_holds_sequences_of_like_length_and_short_ones_do_not_come_first():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (4000,), generator=generator).tolist()
    for epoch in (0, 1):  # 4000 = 571 x 7 + 3: batches of the second epoch begin elsewhere
        order, padded, means = train.Order(lengths, 7, 0), 0, []
        for step in range(571 * epoch + 1, 571 * (epoch + 1)):
            rows = [lengths[i] for i in order.step(step)[0]]
            padded += max(rows) * len(rows) - sum(rows)
            means.append(sum(rows) / len(rows))
        assert padded < 0.1 * sum(lengths)  # in random order it is half
        first, last = means[:280], means[280:]
        assert abs(sum(first) / len(first) - sum(last) / len(last)) < 20
        assert sum(a < b for a, b in zip(means, means[1:])) < 0.6 * len(means)


def test_what_is_measured_is_not_what_is_learned(folder, tmp_path, monkeypatch):
    learned, measured = spy_on_batches(monkeypatch)
    train.main(options(folder, tmp_path / "out", "--steps", "8"))
    assert len(set(measured)) == 4 and not set(measured) & set(learned)


def test_alpha_is_a_mean_over_positions(folder):
    """Not over batches: a batch of one position counts as one position."""

    class Method:
        def alpha(drafter, target, batch):
            return torch.tensor(float(batch)), batch

    drafter = torch.nn.Linear(1, 1).train()
    assert train.acceptance(Method, drafter, None, [1, 3], {}) == 1.0
    Method.alpha = lambda drafter, target, batch: (torch.tensor(1.0), batch)
    assert train.acceptance(Method, drafter, None, [1, 9], {}) == 0.2
    assert train.acceptance(Method, drafter, None, [], {}) is None and drafter.training


def test_sequences_are_cut_at_the_targets_context(folder, tmp_path):
    """It has 128 positions, the default of --max-length is 512."""
    record = {"prompt_ids": [5] * 6, "response_ids": [6] * 200}
    (tmp_path / "long.jsonl").write_text((json.dumps(record) + "\n") * 2)
    for more, length in (([], 128), (["--max-length", "50"], 50)):
        argv = options(folder, tmp_path, "--data", str(tmp_path / "long.jsonl"), *more)
        args, _ = train.parse([*argv, "--held-out", "0"])
        *_, sequences, _ = train.load(args, train.Place(0, 1, "cpu"))
        assert {len(ids) for ids, _ in sequences} == {length}


@pytest.mark.parametrize("more, half", [([], False), (["--bf16"], True), (["--no-bf16"], False)])
def test_a_step_of_backward_by_hand(folder, tmp_path, more, half):
    """A loss of its one weight for each token of the answers, in half precision if asked for."""

    class Model(torch.nn.Linear):
        def forward(self, batch):
            seen.append((tuple(batch.loss_mask.shape), torch.is_autocast_enabled("cpu")))
            return self.weight.sum() * batch.loss_mask.sum()

    seen, model = [], Model(1, 1)
    target, tokenizer = common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 64)
    args, _ = train.parse(
        options(folder, tmp_path, "--batch-size", "6", "--accumulate", "2", *more)
    )
    features, seeds = train.Features(target, sequences, [], None), torch.arange(6)
    step = (train.Place(0, 1, "cpu"), [7, 3, 1, 0, 9, 8], sequences, features, seeds, 0.0)
    loss, tokens = train.backward(args, model, *step)
    assert seen == [((3, 20), half)] * 2 and tokens == 6 * 14
    assert loss == pytest.approx(model.weight.item()) and model.weight.grad.item() == 1


def test_draft_tokens_are_those_of_answers_not_of_prompts(folder, tmp_path):
    """Token 5 fills all prompts and stands in no answer; it cannot be drafted."""
    generator = torch.Generator().manual_seed(2)
    with open(tmp_path / "data.jsonl", "w") as file:
        for _ in range(12):
            answer = (6 + torch.randperm(32, generator=generator)).tolist()
            file.write(json.dumps({"prompt_ids": [5] * 30, "response_ids": answer}) + "\n")
    more = ["--steps", "1", "--data", str(tmp_path / "data.jsonl")]
    train.main(options(folder, tmp_path / "out", *more))
    assert weights(tmp_path / "out")["draft_ids"].tolist() == list(range(6, 38))


def test_minutes_count_over_all_sittings(folder, tmp_path, monkeypatch):
    """A clock that goes on by a second a reading: in two sittings as many steps as in one."""
    interrupt_at = [10**9]

    def clock():
        ticks.append(None)
        if len(ticks) == interrupt_at[0]:
            signal.raise_signal(signal.SIGINT)
        return float(len(ticks))

    monkeypatch.setattr(train.time, "monotonic", clock)
    steps = []
    for name, moment in (("whole", 10**9), ("cut", 20)):
        ticks, interrupt_at[0] = [], moment
        train.main(options(folder, tmp_path / name, "--minutes", "1"))
        if name == "cut":
            assert len(ticks) < 25
            ticks = [None] * 1000  # the computer was off, its clock went on
            train.main(options(folder, tmp_path / name, "--minutes", "1", "--resume"))
        curve = json.loads((tmp_path / name / "curve.json").read_text())
        steps.append(curve[-1]["step"])
        assert curve[-1]["minutes"] == pytest.approx(1, abs=0.05)
    assert abs(steps[0] - steps[1]) <= 2 and steps[0] > 30


def test_an_interrupt_and_the_end_of_time_are_agreed_upon():
    assert train.Place(0, 1, "cpu").largest(0.1, 1.0) == [0.1, 1.0]


# ----------------------------------------------------------------------- features and their target


def test_any_weight_changes_the_mark(folder):
    """So features of a fine-tuned target are never those of the old one, frozen head or not."""
    target, _ = common.load_target(str(folder))
    again, _ = common.load_target(str(folder))
    mark = fingerprint(target)
    assert fingerprint(again) == mark
    for name, weight in target.state_dict().items():
        flat = weight.view(-1)
        for place in (0, len(flat) // 2 + 1 if len(flat) > 2 else 0, len(flat) - 1):
            kept = flat[place].item()
            flat[place] = kept + 1e-3
            assert fingerprint(target) != mark, name
            flat[place] = kept
        if weight.dim() == 2:  # rows in another order have the same sum
            weight[[0, 1]] = weight[[1, 0]]
            assert fingerprint(target) != mark, name
            weight[[0, 1]] = weight[[1, 0]]
    assert fingerprint(target) == mark
    target.config.rms_norm_eps = 1e-3
    assert fingerprint(target) != mark
    assert fingerprint(again.to(torch.bfloat16)) != mark


def test_features_of_a_changed_target_are_made_anew(folder, tmp_path):
    target, tokenizer = common.load_target(str(folder))
    sequences = data.read_conversations(str(folder / "data.jsonl"), tokenizer, 64)[:3]

    def hidden():
        stored = train.Features(target, sequences, [1], str(tmp_path))
        return train.make_batch([0, 2], sequences, stored, torch.arange(2), 0.0, "cpu").hidden

    before = hidden()
    target.model.layers[0].mlp.up_proj.weight += 0.5  # the head stays as it was
    after = hidden()
    assert (before - after).abs().max() > 0.1
    fresh, _ = common.target_features(target, torch.stack([sequences[i][0] for i in (0, 2)]))
    torch.testing.assert_close(after.float(), fresh, atol=0.05, rtol=0.05)


def test_features_are_those_of_their_own_sequence(folder, tmp_path):
    """Forty sequences of unequal length, in two files, are found again in any order."""
    target, _ = common.load_target(str(folder))
    generator = torch.Generator().manual_seed(4)
    sequences = []
    for length in torch.randint(2, 30, (40,), generator=generator).tolist():
        ids = torch.randint(5, 48, (length,), generator=generator)
        sequences.append((ids, torch.ones(length, dtype=torch.bool)))
    stored = train.Features(target, sequences, [0], str(tmp_path))
    for index in (39, 3, 17, 0, 21):
        ids = sequences[index][0][None]
        hidden, kv = stored.of([index], ids)
        fresh, fresh_kv = common.target_features(target, ids, [0])
        torch.testing.assert_close(hidden.float(), fresh, atol=0.05, rtol=0.05)
        torch.testing.assert_close(kv[0][1].float(), fresh_kv[0][1], atol=0.05, rtol=0.05)
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 2


# ------------------------------------------------------------------------------- evaluation answers


@pytest.fixture
def roomy(folder, tmp_path):
    """The tiny target with room for an answer, and two evaluation prompts of two and one turns."""
    place = Path(shutil.copytree(folder, tmp_path / "roomy"))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    turns = [["w1 w2 w3", "w4"], ["w5 w6 w7 w8"]]
    text = "".join(json.dumps({"turns": each}) + "\n" for each in turns)
    (tmp_path / "prompts.jsonl").write_text(text)
    return place, tmp_path / "prompts.jsonl"


def test_eval_alpha_is_that_of_greedy_answers_to_prompts(roomy, tmp_path, monkeypatch):
    """Both turns, answered as plain greedy decoding answers them; made once and kept."""
    folder, prompts = roomy
    out = tmp_path / "out"
    learned, measured = spy_on_batches(monkeypatch)
    more = ["--eval-prompts", str(prompts), "--block-size", "1", "--steps"]
    argv = options(folder, out, *more)
    train.main([*argv, "2"])
    target, tokenizer = common.load_target(str(folder))

    def answered(*texts):
        """Prompt and greedy answer to the last of some messages."""
        roles = ("user", "assistant", "user")
        chat = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([ids["input_ids"]])
        whole = target.generate(ids, max_new_tokens=128, do_sample=False)[0].tolist()
        expected[tuple(whole)] = ids.shape[1]
        return tokenizer.decode(whole[ids.shape[1] :], skip_special_tokens=True)

    expected = {}  # {whole conversation: tokens before the answer}
    said = answered("w1 w2 w3")
    answered("w1 w2 w3", said, "w4")
    answered("w5 w6 w7 w8")
    assert set(expected) <= set(measured) and len(set(measured)) == 4 + 3
    [row] = json.loads((out / "curve.json").read_text())
    state = common.load_drafter(glide.Drafter, out, target)
    state.load_state_dict(weights(out))
    total = count = 0
    for ids, asked in expected.items():
        mask = torch.arange(len(ids)) >= asked
        part = [(torch.tensor(ids), mask)]
        [batch] = train.in_batches(part, train.Features(target, part, [1], None), "cpu")
        accepted, positions = glide.alpha(state, target, batch)
        total, count = total + float(accepted), count + positions
    assert row["eval_alpha"] == pytest.approx(total / count, abs=2e-4)
    [kept] = out.glob("answers-*.jsonl")
    made = kept.read_bytes()
    monkeypatch.setattr(data, "evaluation_answers", None)  # a second run reads them
    train.main([*argv, "3", "--resume"])
    assert kept.read_bytes() == made
    assert len(json.loads((out / "curve.json").read_text())) == 2


@pytest.mark.parametrize("features", [True, False], ids=["with features", "in the checkpoint"])
def test_answers_of_another_target_are_not_taken(roomy, tmp_path, features):
    """Wherever they are kept: a run that goes on with another target asks that one."""
    folder, prompts = roomy
    prompts.write_text('{"turns": ["w1 w2"]}\n')
    out, kept = tmp_path / "out", tmp_path / "kept"
    more = ["--eval-prompts", str(prompts)] + ["--features", str(kept)] * features
    train.main(options(folder, out, *more, "--steps", "1"))
    target, _ = common.load_target(str(folder))
    target.model.norm.weight.mul_(2).add_(torch.rand(16))
    target.save_pretrained(folder)
    train.main(options(folder, out, *more, "--steps", "2", "--resume"))
    assert len(list((kept if features else out).glob("answers-*.jsonl"))) == 2


def test_without_evaluation_answers_there_is_no_eval_alpha(roomy, tmp_path):
    folder, prompts = roomy
    more = ["--eval-prompts", str(prompts), "--eval-answers", "0", "--steps", "1"]
    train.main(options(folder, tmp_path / "out", *more))
    [row] = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert row["eval_alpha"] is None and row["alpha"] > 0


def test_eval_answers_are_counted_by_turn_not_by_prompt(roomy, tmp_path):
    """Two answers are those to the first prompt's two turns; the second prompt is not asked."""
    folder, prompts = roomy
    more = ["--eval-prompts", str(prompts), "--eval-answers", "2"]
    args, _ = train.parse(options(folder, tmp_path / "out", *more))
    target, tokenizer = common.load_target(str(folder))
    place = train.Place(0, 1, "cpu")
    assert len(train.evaluation_sequences(args, target, tokenizer, "", place)) == 2


def test_stored_features_are_not_those_of_other_texts_as_long(folder, tmp_path):
    target, _ = common.load_target(str(folder))
    mask = torch.ones(6, dtype=torch.bool)
    for first in (5, 20):
        ids = torch.arange(first, first + 6)
        stored = train.Features(target, [(ids, mask)], [], str(tmp_path))
        hidden, _ = stored.of([0], ids[None])
        fresh, _ = common.target_features(target, ids[None])
        torch.testing.assert_close(hidden.float(), fresh, atol=0.05, rtol=0.05)


def test_the_loss_shown_is_a_slow_mean(folder, tmp_path, monkeypatch):
    losses = iter([4.0, 2.0, 8.0])
    monkeypatch.setattr(train, "backward", lambda *_: (next(losses), 1))
    train.main(options(folder, tmp_path / "out", "--steps", "3", "--eval-answers", "0"))
    [row] = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert row["loss"] == round(0.95 * (0.95 * 4 + 0.05 * 2) + 0.05 * 8, 4)


def test_measurements_and_checkpoints_come_each_in_its_own_steps(folder, tmp_path, monkeypatch):
    saved, save = [], train.save

    def noted(drafter, out, state):
        saved.append(state["step"])
        save(drafter, out, state)

    monkeypatch.setattr(train, "save", noted)
    monkeypatch.setattr(train, "backward", lambda *_: (1.0, 1))
    more = ["--steps", "7", "--eval-every", "2", "--save-every", "3", "--eval-answers", "0"]
    train.main(options(folder, tmp_path / "out", *more, "--held-out", "0"))
    curve = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert saved == [3, 6, 7] and [row["step"] for row in curve] == [2, 4, 6, 7]


def test_evaluation_answers_are_whole_whatever_is_trained_on(roomy, tmp_path, monkeypatch):
    folder, prompts = roomy
    _, alpha = spy_on_batches(monkeypatch)
    more = ("--steps", "1", "--max-length", "10", "--held-out", "0", "--eval-prompts", str(prompts))
    train.main(options(folder, tmp_path / "out", *more))
    [path] = (tmp_path / "out").glob("answers-*.jsonl")
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(alpha) == sorted(tuple(x["prompt_ids"] + x["response_ids"]) for x in said)
    assert max(map(len, alpha)) > 10


# ------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--method", "glide", "--help"]])
def test_help_shows_every_option_and_its_default(argv, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # one option a line
    with pytest.raises(SystemExit) as ended:
        train.main(argv)
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith("usage: ")
    told = re.split(r"\n  (?=-)", said)[1:]  # an option each
    assert len(told) > 25
    for text in told:
        assert "(default: " in text or text.startswith(("--out ", "-h, "))
    assert ("--block-size" in said) == ("glide" in argv)
    assert "cape" not in said


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--method", "cape", "--data", "x", "--out", "y"], "cape has nothing to train"),
        (["--method", "glide"], "give --out"),
        (["--plot", "x"], "name the curves"),
        (["--method"], "--method"),
        (["--out", "x"], "nothing to do: give --method"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(argv, said):
    with pytest.raises(ValueError, match=said) as caught:
        train.main(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # it starts python twice
def test_a_copied_method_trains_with_these_files_alone(folder, tmp_path):
    """What the README lists for another project; a method that is not there is named."""
    for name in ["common.py", "glide.py", *needed_to_train()]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    out = tmp_path / "out"
    done = run("train.py", *options(folder, out, "--steps", "2"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    done = run("train.py", "--method", "falcon", "--data", "x", "--out", "y", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no falcon.py here" in done.stderr.splitlines()[-1]
