"""Fixtures that the tests share; see tiny.py for what they import.

torch is imported in the fixtures: pytest-xdist's first process only hands out tests, and starts
sooner without it.
"""

import gc
import os

# a name that is not there fails at once, and no test depends on the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest


@pytest.fixture(scope="session", autouse=True)
def quiet_process():
    """One thread for each of the processes, and less work for the garbage collector."""
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    gc.set_threshold(200_000, 50, 1000)


@pytest.fixture(scope="session")
def llama():
    from tiny import make_llama

    return make_llama()


@pytest.fixture(scope="session")
def small_llama():
    """Seven tokens, so that joint distributions can be enumerated."""
    from tiny import make_llama

    return make_llama(vocab=7, layers=1, seed=3)
