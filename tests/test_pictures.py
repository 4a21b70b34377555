"""Titles of the pictures say what the numbers say."""

import pictures
import pytest

pytest.importorskip("matplotlib")


def prices(*times):
    return {"context": 256, "by_tokens": dict(zip(("1", "4", "8", "64"), times))}


POINTS = {"K": {"2": [0.6, 0.5, 20.0], "4": [0.5, 1.0, 25.0]}}
POINTS |= {"head": {"0.7": [0.5, 0.9, 24.0]}, "oracle": {"": [0.4, 0.0, 50.0]}}
TITLES = [  # of which picture, of which numbers
    (
        pictures.costs,
        prices(10, 10.9, 11.1, 30),
        "4 tokens for little more than the price of one; 64 for 3.0 times that",
    ),
    (
        pictures.stop_rules,
        POINTS,  # the oracle is no stop rule
        "The best stop rule (K) reaches 50% of the oracle's speed",
    ),
]


@pytest.mark.parametrize("draw, numbers, title", TITLES)
def test_a_title_says_what_the_numbers_say(draw, numbers, title, tmp_path):
    draw(numbers, tmp_path)
    [path] = tmp_path.glob("*.svg")
    assert f">{title}<" in path.read_text()


def test_methods_keep_their_colours():
    assert pictures.colour("glide:gamma=2") == pictures.colour("glide") == "C0"
    assert pictures.colour("ctc_drafter+copies") == pictures.colour("ctc_drafter@x")
    assert pictures.colour("cape:cpu") == "C1"
    assert pictures.colour("medusa") == pictures.colour("lookup") == "C8"
