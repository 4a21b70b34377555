"""Long answers on the real default target: the same tokens as plain decoding, flat memory, no
growing overhead."""

import gc
import statistics
import time
from pathlib import Path

import pytest
from test_house import METHODS

import bench
import common
from support import packed

pytestmark = pytest.mark.long  # a quarter of an hour
LENGTH = 2000


class Rounds:
    """A streamer that notes when each round's tokens arrive, and the memory then in use."""

    def __init__(self):
        self.times, self.sizes, self.bytes = [], [], []

    def put(self, tokens):
        self.times.append(time.perf_counter())
        if len(self.times) > 1:  # after the prompt
            self.sizes.append(tokens.shape[-1])
            self.bytes.append(4096 * int(Path("/proc/self/statm").read_text().split()[1]))

    def end(self):
        pass

    def round_time(self, start: float, end: float) -> float:
        """Median seconds of the rounds between two shares of the answer."""
        seconds = [later - earlier for earlier, later in zip(self.times[1:], self.times[2:])]
        return statistics.median(seconds[int(start * len(seconds)) : int(end * len(seconds))])


@pytest.fixture(scope="module")
def plain():
    """(target, prompt, Rounds and tokens of plain decoding)."""
    target, tokenizer = common.load_target()
    packed.pack(target)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a very long story about a lighthouse."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    target.generation_config.eos_token_id = None  # go on and on
    rounds, stats = Rounds(), common.Stats()

    def loop(target, input_ids, *args, **kwargs):
        commit, common.commit = common.commit, lambda *given: commit(*given, streamer=rounds)
        rounds.put(input_ids)
        try:
            return bench.plain_generate(target, input_ids, *args, stats=stats, **kwargs)
        finally:
            common.commit = commit

    output = target.generate(**ids, max_new_tokens=LENGTH, do_sample=False, custom_generate=loop)
    return target, ids, rounds, output


@pytest.mark.parametrize("name", METHODS)
def test_two_thousand_tokens(plain, name):
    target, ids, reference, expected = plain
    arm = bench.make_arms(target, bench.parse(["--method", name]))[2]  # after two plain ones
    rounds = Rounds()
    gc.collect()
    output = target.generate(
        **ids, max_new_tokens=LENGTH, do_sample=False, token_streamer=rounds, **arm.kwargs
    )

    assert output.shape == expected.shape == (1, ids["input_ids"].shape[1] + LENGTH)
    differ = (output != expected).nonzero()
    if len(differ):  # only where two logits tie within rounding
        place = int(differ[0, 1])
        best = target(expected[:, :place]).logits[0, -1].topk(2).values
        assert best[0] - best[1] < 1e-3, (
            f"differs at token {place}, margin {float(best[0] - best[1])}"
        )

    middle = next(n for n in range(len(rounds.sizes)) if sum(rounds.sizes[:n]) >= LENGTH // 2)
    grown = (
        rounds.bytes[-1] - rounds.bytes[middle]
    )  # the buffer doubled before; a row of logits a token is 200 MB
    assert grown < 60e6, f"memory grew by {grown / 1e6:.0f} MB in the second half"

    growth = rounds.round_time(0.9, 1) / rounds.round_time(0.05, 0.15)
    attention = reference.round_time(0.9, 1) / reference.round_time(0.05, 0.15)
    print(
        f"{name}: {LENGTH / len(rounds.sizes):.2f} tokens a round; a round grows to {growth:.2f} "
        "of its time, plain "
        f"decoding's to {attention:.2f}; {grown / 1e6:.0f} MB more in the second half"
    )
    assert growth < 1.6 * attention
