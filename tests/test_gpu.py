"""Runs tools/gpu.py in a process of its own: autograd wants to know all devices at the start, and
none can be taken back."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_on_a_gpu_that_is_not_there():
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", "tests/tools/gpu.py", *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:]
