"""Pictures: what is drawn is what the results say, in colours for white and for black."""

import json
import re
from pathlib import Path

import pytest

import bench
import train
from support import pictures

pytest.importorskip("matplotlib")
ROOT = Path(pictures.__file__).parent.parent
ARM = {
    "speedup": 1.25,
    "speedup_ci": [1.2, 1.5],
    "draft_ms": None,
    "verify_ms": 20.0,
    "other_ms": 1.0,
    "acceptance_by_position": [0.5, 0.25],
}
RESULT = {
    "arms": {
        "baseline": ARM | {"speedup": 1.0, "speedup_ci": [1.0, 1.0], "acceptance_by_position": []},
        "falcon": ARM | {"draft_ms": 5.0},
    },
    "cost_curve": {"context": 256, "by_tokens": {"1": 10.0, "8": 12.0}},
    "sweep": {
        "points": {"oracle": {"": [0.5, 0.0, 30.0]}, "fixed": {"2": [0.6, 0.5, 28.0]}},
        "acceptance_by_confidence": [[0.25, 0.3, 40], [0.75, 0.7, 60]],
    },
}
FILES = ["acceptance", "confidence", "cost", "speedup", "stopping", "time"]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def bars(text):
    """Where every bar of a picture begins and ends, in points, in the order they were drawn."""
    corners = r'id="patch_\d+">\s*<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*"\s+clip-path'
    return [tuple(map(float, pair)) for pair in re.findall(corners, text)]


def error_bars(text):
    """Where those of a picture begin and end, from below, by the labels of its axis."""
    labels = re.findall(r' x="([\d.]+)"[^>]*>(\d\.\d)</text>', text)  # numbers on bars are longer
    (left, low), *_, (right, high) = [(float(x), float(label)) for x, label in labels]
    drawn = text[text.index("LineCollection") :].partition("</g>")[0]
    ends = re.findall(r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) ', drawn)
    scale = (high - low) / (right - left)
    return [[low + scale * (float(x) - left) for x in pair] for pair in ends]


def test_all_pictures_of_a_result(tmp_path):
    drawn = pictures.plot([RESULT], tmp_path / "new")
    assert sorted(path.name for path in drawn) == [f"{name}.svg" for name in FILES]
    text = {path.stem: path.read_text() for path in drawn}
    for shown in ("falcon", "baseline", "1.25", "1.00", "Speedup over plain decoding"):
        assert f">{shown}<" in text["speedup"]
    falcons, baselines = error_bars(text["speedup"])
    assert falcons == pytest.approx([1.2, 1.5]) and baselines == pytest.approx([1.0, 1.0])
    drawn_bars = bars(text["time"])
    drafted, verified, rest = drawn_bars[:2], drawn_bars[2:4], drawn_bars[4:]
    assert [begin for begin, _ in verified] == [end for _, end in drafted]
    assert [begin for begin, _ in rest] == [end for _, end in verified] and len(rest) == 2
    lengths = [end - begin for begin, end in (max(drafted), max(verified), max(rest))]
    assert lengths[1] / lengths[0] == pytest.approx(4, rel=1e-3)  # 20 and 5 milliseconds
    assert ">draft<" in text["time"] and ">falcon<" in text["acceptance"]
    assert "256 tokens of context" in text["cost"] and ">oracle<" in text["stopping"]
    assert ">40<" in text["confidence"] and ">60<" in text["confidence"]
    again = pictures.plot([RESULT], tmp_path / "again")
    assert [path.read_text() for path in drawn] == [path.read_text() for path in again]


def test_two_results_are_told_apart_and_what_is_missing_is_not_drawn(tmp_path):
    drawn = pictures.plot([{"arms": RESULT["arms"]}, {"arms": RESULT["arms"]}], tmp_path)
    assert [path.stem for path in drawn] == ["speedup", "time", "acceptance"]
    assert ">falcon [2]<" in drawn[0].read_text()
    assert pictures.plot([{}], tmp_path) == []


def test_text_and_lines_stand_out_on_white_and_on_black(tmp_path):
    """At least 3 : 1, which is asked of large text and of drawings; and no background."""
    for path in pictures.plot([RESULT], tmp_path):
        text = path.read_text()
        used = {colour.lower() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", text)}
        used -= {"#ffffff"}  # numbers that stand on a bar
        for colour in used:
            own = luminance(colour)
            assert 1.05 / (own + 0.05) >= 2.5 and (own + 0.05) / 0.05 >= 3, (path.name, colour)
        assert not re.search(r'id="patch_1">\s*<path[^>]*fill: #ffffff(?!; opacity: 0)', text)


def test_training_curves(tmp_path):
    folder = tmp_path / "falcon_k3"
    folder.mkdir()
    rows = [
        {"step": 1, "tokens": 1000000, "alpha": 0.1},
        {"step": 2, "tokens": 2000000, "alpha": 0.2},
    ]
    both = [row | {"eval_alpha": row["alpha"] / 2} for row in rows]
    (folder / "curve.json").write_text(json.dumps(rows))
    (tmp_path / "glide.json").write_text(json.dumps(both))
    paths = [str(folder / "curve.json"), str(tmp_path / "glide.json")]
    (drawn,) = pictures.curves(paths, tmp_path / "out")
    text = drawn.read_text()
    assert ">falcon_k3<" in text and ">glide<" in text
    assert ">glide, prompts<" in text and ">falcon_k3, prompts<" not in text
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(ValueError, match="empty.json is not a training curve"):
        pictures.curves([str(tmp_path / "empty.json")], tmp_path / "out")
    (tmp_path / "other.json").write_text('{"arms": {}}')
    with pytest.raises(ValueError, match="other.json is not a training curve"):
        pictures.curves([str(tmp_path / "other.json")], tmp_path / "out")


def test_both_commands_draw(tmp_path, capsys):
    curve, result = tmp_path / "curve.json", min((ROOT / "results").glob("*.json"))
    curve.write_text('[{"tokens": 10, "alpha": 0.5}]')
    train.main(["--plot", str(tmp_path / "a"), str(curve)])
    assert capsys.readouterr().out.split() == [str(tmp_path / "a" / "curves.svg")]
    bench.main(["--table", str(result), "--plot", str(tmp_path / "b")])
    said = capsys.readouterr().err.split()
    assert [str(path) for path in sorted((tmp_path / "b").iterdir())] == sorted(said)


def test_the_curves_that_are_kept_can_be_drawn(tmp_path):
    kept = sorted((ROOT / "results" / "curves").glob("*.json"))
    assert kept and pictures.curves([str(path) for path in kept], tmp_path)
