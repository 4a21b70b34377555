"""A method file and common.py, copied into a folder where nothing else is, decode; with the files
that the README names they train, too."""

import ast
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from test_house import METHODS, ROOT
from tiny import make_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

README = (ROOT / "README.md").read_text()


def needed_to_train():
    """The files that the README says to copy besides the method's."""
    [sentence] = re.findall(r"To train a copied method[^.]*also copy ((?:[^.]|\.py)*)\.\s", README)
    return re.findall(r"`([\w/]+\.py)`", sentence)


def imports(path):
    """The repository's own files that one of them imports, and what those import, without the
    methods."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.replace(".", "/")
            found |= {f for f in (f"{parts}.py", f"{parts}/__init__.py") if (ROOT / f).is_file()}
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What happened in a folder for each method, and in one more that trains."""
    top = tmp_path_factory.mktemp("elsewhere")
    words = {word: i for i, word in enumerate(["<end>", "<unk>", *(f"w{i}" for i in range(46))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    bare.save_pretrained(top / "target")
    assert bare.chat_template is None
    make_llama(vocab=48).to(torch.float32).save_pretrained(top / "target")
    turns = [{"prompt": f"w{i} w2", "response": "w3 w4 w5"} for i in range(8)]
    (top / "data.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    folders = {name: ["common.py", f"{name}.py"] for name in METHODS}
    folders["cape"] += ["glide.py"]  # what it works on
    folders["training/glide"] = ["common.py", "glide.py", *needed_to_train()]
    for folder, files in folders.items():
        for file in files:
            (top / folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, top / folder / file)
    shutil.copytree(top / "target", top / "training" / "target")
    chat = shutil.copytree(top / "target", top / "chat")
    (chat / "chat_template.jinja").write_text(
        "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    )
    shutil.copy(top / "data.jsonl", top / "training")
    script = ROOT / "tests" / "tools" / "alone.py"
    command = [sys.executable, "-I", script, *(top / folder for folder in folders)]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    return {folder: report[str(top / folder)] for folder in folders}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_file_and_common_decode_alone(told, method):
    assert not told[method]["support"]
    assert told[method]["same"] and told[method]["drafted"] > 0 and "w" in told[method]["text"]


@pytest.mark.slow
def test_the_example_of_the_readme_runs(told):
    assert told["falcon"]["example"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_lone_file_as_a_script_ends_with_one_line(told, method):
    """There is no default target to load: that needs support/default_target.py."""
    code, errors = told[method]["script"]
    assert code == 2 and errors.count("\n") == 1
    assert errors.startswith(f"{method}.py: no target named, and support/default_target.py")


@pytest.mark.slow
def test_cape_says_that_it_needs_a_drafter_of_glide(tmp_path):
    for file in ("common.py", "cape.py"):
        shutil.copy(ROOT / file, tmp_path)
    command = [sys.executable, "cape.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == (
        "cape.py: glide.py, whose drafts it expands, is not here; copy it, too\n"
    )


@pytest.mark.slow
def test_training_a_copied_method_takes_the_files_that_the_readme_names(told):
    code, errors = told["training/glide"]["train"]
    assert code == 0, errors
    assert {"config.json", "model.safetensors"} <= set(told["training/glide"]["files"])


def test_no_file_is_named_in_vain():
    needed, found = set(), {"train.py"}
    while found - needed:
        path = min(found - needed)
        needed.add(path)
        found |= imports(path)
    needed -= {"common.py", "support/default_target.py"}  # a copied method names its target
    assert set(needed_to_train()) == needed
