"""Fixtures that the tests share; tiny.py has what they import."""

import gc
import json
import os

# A name that is not there fails at once, and no test depends on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import chat
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tiny import make_llama, untrained


@pytest.fixture(scope="session", autouse=True)
def quiet_process():
    """One thread for each process, and less work for the garbage collector."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(scope="session")
def llama():
    return make_llama()


@pytest.fixture(scope="session")
def small_llama():
    """Seven tokens, so that joint distributions can be enumerated."""
    return make_llama(vocab=7, layers=1, seed=3)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A saved chat target and data.jsonl, see chat.py."""
    return chat.make_chat(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A folder for runs of bench.py, see `command` of chat.py: a chat target, drafters
    for it and a prompt file. Somebody has saved a penalty with the target.
    """
    import glide  # not on top: a student's file may not be importable
    import specdecpp

    folder = tmp_path_factory.mktemp("measured")
    chat.make_chat(folder / "target")
    target = make_llama(layers=2, max_position_embeddings=256)  # without an end token
    target.generation_config.repetition_penalty = 1.5
    target.save_pretrained(folder / "target")
    untrained(glide, target).save_pretrained(folder / "glide")
    draft = {"stage": "draft", "layers": [0], "stop": "fixed"}
    untrained(specdecpp, target, **draft).save_pretrained(folder / "specdecpp")
    lines = [json.dumps(prompt) for prompt in chat.TURNS]
    (folder / "prompts.jsonl").write_text("\n\n".join(lines) + "\n")
    return folder


@pytest.fixture
def fresh_accelerate():
    """Make accelerate forget the settings that it keeps for the rest of a process."""

    def forget():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    yield forget
    forget()
