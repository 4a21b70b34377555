"""Fixtures that the tests share; tiny.py has what they import."""

import gc
import os

# A name that is not there fails at once, and no test depends on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

import chat
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from tiny import make_llama


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
    """A folder for runs of bench.py, see chat.py."""
    return chat.make_measured(tmp_path_factory.mktemp("measured"))


@pytest.fixture
def fresh_accelerate():
    """Make accelerate forget the settings that it keeps for the rest of a process."""

    def forget():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    yield forget
    forget()
