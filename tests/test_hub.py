"""Drafters on the hub, and folders that export.py writes for transformers."""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from chat import letters, refused
from tiny import make_llama, make_streamer, untrained
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import glide
from support import cli
from support.interop import export

ROOT = Path(__file__).parent.parent
TRAINABLE = [name for name in cli.METHODS if name in cli.trainable()]
SPECIAL = ["<end>", "<user>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def saved_drafter(method, target, folder):
    module = cli.import_method(method)
    drafter = untrained(module, target).to(torch.bfloat16)
    drafter.save_pretrained(folder)
    return module, drafter


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A random chat target that writes the characters of ASCII, one a token."""
    folder = tmp_path_factory.mktemp("hub") / "target"
    tokenizer = letters(SPECIAL, "<end>", TEMPLATE, count=94)
    tokenizer.save_pretrained(folder)
    target = make_llama(vocab=len(tokenizer), layers=2, seed=2, eos_token_id=0)
    target.float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory):
    """transformers copies generate.py there, and not into the cache of the user."""
    from transformers import dynamic_module_utils

    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", folder)
        patch.setattr(sys, "path", [*sys.path, folder])
        yield


# ---------------------------------------------------------------------- load_drafter


@pytest.mark.parametrize("method", [*TRAINABLE, "medusa"])
def test_a_drafter_is_loaded_by_its_id_as_from_pretrained_does(method, llama, tmp_path):
    """Without a network, from a cache as the hub's client writes it. Its card says what
    it is.
    """
    commit = "a" * 40
    repository = tmp_path / "models--org--drafter"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "v2"):
        (repository / "refs" / name).write_text(commit)
    module, drafter = saved_drafter(method, llama, repository / "snapshots" / commit)
    for more in ({}, {"revision": "v2"}):
        given = {"cache_dir": tmp_path} | more
        theirs = module.Drafter.from_pretrained("org/drafter", **given)
        ours = common.load_drafter(module.Drafter, "org/drafter", llama, **given)
        assert ours.config == theirs.config == drafter.config
        weights = ours.state_dict()
        for name, weight in theirs.state_dict().items():
            assert torch.equal(weights[name], weight.to(weights[name]))
    missing = "org/drafter holds no .* drafter, or .* train.py --out org/drafter"
    for other in ({"cache_dir": ROOT / "no"}, given | {"revision": "v3"}):
        with refused(missing):
            common.load_drafter(module.Drafter, "org/drafter", llama, **other)
    card = (repository / "snapshots" / commit / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "- speculative-decoding" in card
    if (cli.ROOT / "checkpoints" / method).is_dir():  # else a copy of another method
        assert f"- {method.replace('_', '-')}" in card
    assert "Paper: https://arxiv.org/abs/2" in card


def test_a_mistake_in_a_method_is_not_taken_for_a_damaged_file(
    llama, tmp_path, monkeypatch
):
    module, _ = saved_drafter("glide", llama, tmp_path)

    def begin(self, config):
        raise NameError("a student's")

    monkeypatch.setattr(module.Drafter, "__init__", begin)
    with pytest.raises(NameError, match="a student's"):
        common.load_drafter(module.Drafter, tmp_path, llama)


def test_what_cannot_be_an_id_is_looked_for_here_only(llama, tmp_path, monkeypatch):
    """The hub would be asked for half a minute where there is no network."""
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(glide.Drafter, "from_pretrained", None)
    for name in ("org/mine", "mine", "./org/mine", "/no/such", "a/b/c"):
        with refused(f"no drafter in {name}; name another folder, or make one with"):
            common.load_drafter(glide.Drafter, name, llama)


# ------------------------------------------------------------------- exported folders


MESSAGES = [{"role": "user", "content": "Hi!"}]


def inputs_of(tokenizer):
    form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return dict(tokenizer.apply_chat_template(MESSAGES, **form))


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_folder_for_custom_generate(method, target_folder, tmp_path):
    """With what transformers itself would not hand on: streamer and stop strings."""
    target, tokenizer = common.load_target(str(target_folder))
    saved_drafter(method, target, tmp_path / "drafter")
    out = tmp_path / f"{method}_out"
    export.write(method, str(tmp_path / "drafter"), out, None)
    inputs = inputs_of(tokenizer)
    options = {"do_sample": False, "max_new_tokens": 30}
    plain = target.generate(**inputs, **options)
    streamer, told = make_streamer()
    options |= {"custom_generate": str(out), "trust_remote_code": True}
    answer = target.generate(**inputs, streamer=streamer, **options)
    assert torch.equal(answer, plain)
    prompt, *rounds, last = told
    assert prompt == inputs["input_ids"][0].tolist() and last == "end"
    assert sum(rounds, prompt) == plain[0].tolist()
    stop = {"stop_strings": [tokenizer.decode(plain[0, -9:-7])], "tokenizer": tokenizer}
    expected = target.generate(**inputs, **stop, do_sample=False, max_new_tokens=30)
    assert expected.shape[1] < plain.shape[1]
    assert torch.equal(target.generate(**inputs, **stop, **options), expected)
    # Another drafter by its folder, a positional prompt, and a setting of the method.
    other = {"drafter": str(tmp_path / "drafter"), "settings": {}}
    if method == "glide":
        other["settings"] = {"gamma": 0}  # every round is one token
        told.clear()
        other["streamer"] = streamer
    ids = inputs["input_ids"]
    assert torch.equal(target.generate(ids, **other, **options), plain)
    if method == "glide":
        assert len(told) == 1 + plain.shape[1] - ids.shape[1] + 1
        with pytest.raises(ValueError, match="cannot change gama"):
            target.generate(ids, **other | {"settings": {"gama": 3}}, **options)
        with pytest.raises(ValueError, match="stop_strings need tokenizer="):
            target.generate(ids, stop_strings=["a"], **options)


@pytest.mark.parametrize("method", TRAINABLE)
def test_a_folder_of_a_target_that_decodes_with_drafts(method, target_folder, tmp_path):
    target, tokenizer = common.load_target(str(target_folder))
    saved_drafter(method, target, tmp_path / "drafter")
    out = tmp_path / f"{method}_whole"
    export.write(method, str(tmp_path / "drafter"), out, str(target_folder))
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).eval()
    inputs = inputs_of(AutoTokenizer.from_pretrained(out))
    options = {"do_sample": False, "max_new_tokens": 30}
    streamer, told = make_streamer()
    answer = model.generate(**inputs, streamer=streamer, **options)
    assert torch.equal(answer, target.generate(**inputs, **options))
    assert told[-1] == "end"
    # As if it had been read from the hub.
    asked = []

    def download(name, **given):
        asked.append((name, given))
        return str(out)

    again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    again.name_or_path = "org/served"
    again.generate.func.__globals__["snapshot_download"] = download
    assert torch.equal(again.generate(**inputs, **options), answer)
    assert asked == [("org/served", {"allow_patterns": "drafter/*"})]
    # Without trust, the same folder is only the target.
    alone = AutoModelForCausalLM.from_pretrained(out)
    assert "generate" not in vars(alone)
    with refused(f"{out} exists already: give another folder"):
        export.main([method, str(tmp_path / "drafter"), str(out)])


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_a_saved_config_counts_no_layers_that_are_not_saved(tmp_path, capsys, name):
    """transformers leaves out those for multi-token prediction."""
    target = make_llama()
    setattr(target.config, name, 2)
    export.save_target(target, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[name] == 0
    assert f"without multi-token prediction ({name} is 0)" in capsys.readouterr().out
    other = tmp_path / "other"
    export.save_target(make_llama(), other)
    assert name not in json.loads((other / "config.json").read_text())


def test_an_exported_method_works_inside_a_package(
    target_folder, tmp_path, monkeypatch
):
    """Where no file of this repository can be imported."""
    target, _ = common.load_target(str(target_folder))
    saved_drafter("falcon", target, tmp_path / "drafter")
    export.write("falcon", str(tmp_path / "drafter"), tmp_path / "out", None)
    shutil.copytree(tmp_path / "out" / "custom_generate", tmp_path / "app" / "spec")
    # In a shared folder others can read the weights, as they can read the config.
    names = "config.json", "model.safetensors"
    assert len({(tmp_path / "out" / name).stat().st_mode for name in names}) == 1

    for name in ("common", "support", *cli.METHODS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    others = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    with pytest.raises(ImportError):
        importlib.import_module("common")
    falcon = importlib.import_module("app.spec.falcon")
    theirs = importlib.import_module("app.spec.common")
    assert falcon.common is theirs is not common
    target, _ = theirs.load_target(str(target_folder))
    drafter = theirs.load_drafter(falcon.Drafter, str(tmp_path / "drafter"), target)
    decode = theirs.speculate(falcon.drafts, drafter)
    ids = torch.tensor([[3, 1, 4]])
    ours = target.generate(ids, custom_generate=decode, max_new_tokens=9)
    assert torch.equal(ours, target.generate(ids, max_new_tokens=9))


def test_a_mistake_is_told_before_anything_is_written(tmp_path):
    for method, said in (("cape", "invalid choice: 'cape'"), ("glide", "no drafter")):
        with refused(said):
            export.main([method, str(tmp_path / "none"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


# -------------------------------------------- what support/interop/README.md says

PAGE = (ROOT / "support" / "interop" / "README.md").read_text()


def test_the_commands_of_the_page_write_the_folders(
    target_folder, tmp_path, monkeypatch
):
    target, tokenizer = common.load_target(str(target_folder))
    saved_drafter("glide", target, tmp_path / "checkpoints" / "mine")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^python -m support.interop.export (glide .*)", PAGE, re.M)
    for line in lines:
        export.main(line.replace("your/model", str(target_folder)).split())
    assert len(lines) == 2 and {"mine", "served"} <= set(os.listdir())
    call = r"`(target\.generate\(\*\*ids,\s+custom_generate=\"mine\"[^`]*)`"
    call = re.search(call, PAGE)
    ids = inputs_of(tokenizer)
    target.generation_config.max_new_tokens = 9
    answer = eval(" ".join(call[1].split()), {"target": target, "ids": ids})
    assert torch.equal(answer, target.generate(**ids))


def snippets():
    """The pieces of code for other programs, {first words of the comment: code}."""
    block = PAGE.split("```python\n")[-1].split("```")[0]
    pieces = re.split(r"^# ", block, flags=re.MULTILINE)[1:]
    return {piece.split(":")[0]: "# " + piece for piece in pieces}


@pytest.fixture
def scope(target_folder):
    """What a snippet finds, as the first example of the README has made it."""
    target, tokenizer = common.load_target(str(target_folder))
    drafter = untrained(glide, target)
    decode = common.speculate(glide.drafts, drafter)
    names = {"target": target, "tokenizer": tokenizer, "drafter": drafter}
    return names | {"decode": decode, "glide": glide, "common": common}


def test_the_snippet_for_spec_bench(scope):
    """Called as its run_eval does: in inference mode, with a BatchEncoding."""
    exec(snippets()["Spec-Bench"], scope)
    target, tokenizer = scope["target"], scope["tokenizer"]
    inputs = tokenizer(["Hi!"], return_tensors="pt")
    with torch.inference_mode():
        output, new, steps, lengths = scope["forward"](
            inputs, target, tokenizer, 20, drafter=scope["drafter"]
        )
        plain = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(output, plain)
    assert sum(lengths) == new == plain.shape[1] - 3
    assert len(lengths) == steps <= new and min(lengths) >= 1


def test_the_snippet_that_cancels_an_answer(scope):
    """Cancelled after the second round, as from another thread."""
    scope["ids"] = inputs_of(scope["tokenizer"])
    rounds = []

    def each(decoding, draft, path):
        rounds.append(decoding.ids.shape[1])
        if len(rounds) == 2:
            scope["cancel"].set()

    scope["decode"] = common.speculate(glide.drafts, scope["drafter"], callback=each)
    given = "stopping_criteria=criteria"
    short = f"{given}, max_new_tokens=30, do_sample=False"
    exec(snippets()["A server"].replace(given, short), scope)
    length = scope["ids"]["input_ids"].shape[1]
    plain = scope["target"].generate(**scope["ids"], max_new_tokens=30, do_sample=False)
    assert len(rounds) == 3 and scope["out"].shape[1] == rounds[1] + 1
    assert torch.equal(scope["out"], plain[:, : scope["out"].shape[1]])
    assert scope["out"].shape[1] < length + 30


@pytest.mark.slow
def test_the_snippet_for_lm_eval(scope):
    reason = "needs lm_eval: requirements-dev.txt"
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason=reason)
    from lm_eval.api.instance import Instance

    target = scope["target"]
    requests = []
    for number, text in enumerate(["Hi!", "Good-morning"]):
        asked = (text, {"until": ["zz"], "max_gen_toks": 20, "do_sample": False})
        requests.append(Instance("generate_until", {}, asked, number))
    plain = huggingface.HFLM(target, tokenizer=scope["tokenizer"], batch_size=1)
    expected = plain.generate_until(requests)
    stats = common.Stats()
    scope["decode"] = common.speculate(glide.drafts, scope["drafter"], callback=stats)
    exec(snippets()["lm_eval"], scope)
    assert scope["lm"].generate_until(requests) == expected
    assert stats.drafted > 0


# ------------------------------------------------------------------ transformers serve

COUNTED = """
_verify = Decoding.verify


def verify(self, draft):
    with open({path!r}, "a") as file:
        file.write(f"{{len(draft.tokens)}}\\n")
    return _verify(self, draft)


Decoding.verify = verify
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_transformers_serve_streams_drafted_answers(target_folder, tmp_path):
    """To the client of OpenAI, with a stop string as well."""
    reason = "needs openai, fastapi and uvicorn: requirements-dev.txt"
    openai = pytest.importorskip("openai", reason=reason)
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=reason)
    target, tokenizer = common.load_target(str(target_folder))
    saved_drafter("falcon", target, tmp_path / "drafter")
    out = tmp_path / "served"
    export.write("falcon", str(tmp_path / "drafter"), out, str(target_folder))
    counts = tmp_path / "counts"
    with (out / "custom_generate" / "common.py").open("a") as file:
        file.write(COUNTED.format(path=str(counts)))

    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(out)]
    command += ["--trust-remote-code", "--port", str(port), "--device", "cpu"]
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=tmp_path)
    try:
        address = f"http://localhost:{port}"
        for _ in range(180):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                time.sleep(1)
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        asked = inputs_of(tokenizer)
        plain = target.generate(**asked, do_sample=False, max_new_tokens=24)
        plain = plain[0, asked["input_ids"].shape[1] :]
        said = tokenizer.decode(plain, skip_special_tokens=True)
        request = {"model": str(out), "messages": MESSAGES, "max_tokens": 24}
        parts = []
        for chunk in client.chat.completions.create(**request, stream=True):
            parts += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(parts) == said and len(said) > 12
        drafted = [int(line) for line in counts.read_text().split()]
        assert drafted and max(drafted) > 1, "the answer was decoded without drafts"
        stopped = client.chat.completions.create(**request, stop=[said[9:12]])
        assert stopped.choices[0].message.content == said[:12]
    finally:
        server.kill()
        server.wait()
        log.close()
