"""What a target writes: continuous batching, requests, second turns, resumed runs."""

import gzip
import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from test_families import make_target
from test_train import folder  # noqa: F401  a fixture
from tiny import chi_square_p_value, make_llama, slow
from tokenizers import processors

import common
import train
from support import data, talks

ROOT = Path(train.__file__).parent
PROMPTS = [
    [3, 1, 4],
    [1],
    [5, 9, 2, 6, 5, 3, 5],
    [8, 9],
    [7, 9, 3, 2, 3, 8, 4],
    [6, 2],
    [6, 4, 3, 3],
]


def make(folder, path, count, *more):  # noqa: F811
    """Records of a file that train.py --make-data has made, or gone on with."""
    argv = f"--make-data {count} --target {folder} --out {path} --device cpu --data-batch 8"
    train.main([*argv.split(), *map(str, more)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(target, ids, most, ends=()):
    """What greedy decoding says to a prompt, up to an end token."""
    options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([ids])
    said = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    said = said[0, ids.shape[1] :].tolist()
    return said[: next((i + 1 for i, token in enumerate(said) if token in ends), most)]


# ------------------------------------------------------------------------------ continuous batching


def held(target, prompts, most, rows):
    """Greedy answers to prompts, in rows that are fewer."""

    def talk(prompt, most):
        answer = yield prompt, 0.0, most
        return tuple(prompt), answer

    waiting = map(talk, prompts, most)
    batch = talks.converse(target, lambda: next(waiting, None), rows, random.Random(0))
    return dict(batch)


@pytest.mark.parametrize("rows", [slow(1), 3, 20])
def test_each_talk_is_what_it_would_be_alone(rows):
    """Rows that begin late, beside longer ones, after others in the same row; cut columns."""
    target = make_llama(layers=2)
    most = [5, 90, 33, 70, 1, 40, 34]
    answers = held(target, PROMPTS, most, rows)
    assert answers == {tuple(ids): plain(target, ids, n) for ids, n in zip(PROMPTS, most)}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "Mistral, window", "Gemma2, capped"])
def test_each_talk_is_what_it_would_be_alone_in_other_families(family):
    target, most = make_target(family)[0], [5, 60, 30, 70]
    target.generation_config.eos_token_id = None
    prompts = [[token % 12 + 1 for token in ids] for ids in PROMPTS[:4]]
    answers = held(target, prompts, most, 2)
    assert answers == {tuple(ids): plain(target, ids, n) for ids, n in zip(prompts, most)}


def test_an_answer_ends_with_any_of_several_end_tokens(monkeypatch):
    target = make_llama(layers=2)
    whole = plain(target, PROMPTS[0], 30)
    for ends in ([whole[9], 47], [47, whole[9]]):
        monkeypatch.setattr(target.generation_config, "eos_token_id", ends)
        [(_, said)] = talks.replies(target, [PROMPTS[0]], 0.0, 30, random.Random(0))
        assert said == whole[: whole.index(whole[9]) + 1]


def test_a_talk_goes_on_where_it_was():
    """Asked twice, the target has read all of the talk: nothing twice, nothing left out."""
    target = make_llama(layers=2)

    def talk():
        first = yield PROMPTS[0], 0.0, 6
        second = yield [first[-1], 11, 12], 0.0, 7
        return first, second

    waiting = iter([talk()])
    [(first, second)] = talks.converse(target, lambda: next(waiting, None), 1, random.Random(0))
    assert first == plain(target, PROMPTS[0], 6)
    assert second == plain(target, [*PROMPTS[0], *first, 11, 12], 7)


def test_an_answer_ends_where_the_context_does(monkeypatch):
    target = make_llama(layers=1)
    monkeypatch.setattr(target.config, "max_position_embeddings", 12)
    for prompt, length in ((PROMPTS[0], 9), (PROMPTS[2], 5), ([1] * 11, 1), ([1] * 30, 0)):
        [(_, said)] = talks.replies(target, [prompt], 0.0, 50, random.Random(0))
        assert len(said) == length


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_follow_the_softmax(small_llama, temperature):
    """The second token, given each first one: 2000 talks of two tokens."""
    counts = {}
    prompts = [(1, 2)] * 2000
    for _, said in talks.replies(small_llama, prompts, temperature, 2, random.Random(5)):
        counts[tuple(said)] = counts.get(tuple(said), 0) + 1
    expected = {}
    ids = torch.tensor([[1, 2]])
    first = (small_llama(ids).logits[0, -1].float() / temperature).softmax(-1)
    for a in range(7):
        ids = torch.tensor([[1, 2, a]])
        second = (small_llama(ids).logits[0, -1].float() / temperature).softmax(-1)
        for b in range(7):
            expected[a, b] = float(first[a] * second[b])
    assert chi_square_p_value(counts, expected) > 1e-3


def test_each_row_has_a_temperature_of_its_own():
    """Beside a hot one, a row of almost no temperature says the greedy answer."""
    target = make_llama()
    [(_, greedy)] = talks.replies(target, [(5, 6, 7)], 0.0, 12, random.Random(0))

    def talk(temperature):
        answer = yield (5, 6, 7), temperature, 12
        return temperature, answer

    waiting = map(talk, [5.0, 1e-3])
    said = dict(talks.converse(target, lambda: next(waiting, None), 2, random.Random(0)))
    assert said[1e-3] == greedy != said[5.0]


def test_a_token_of_probability_zero_is_never_drawn():
    """The draw 1.0 - 0.0 is the last token with any probability, the smallest draw the first."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    rows = [talks.Row(talk=True, temperature=1.0)]

    class Chance:
        def __init__(self, value):
            self.random = lambda: value

    assert talks._choose(logits, rows, Chance(0.0)) == [2]
    assert talks._choose(logits, rows, Chance(1 - 2**-53)) == [1]
    assert talks._choose(logits, rows, Chance(0.4)) == [2]
    assert talks._choose(logits, rows, Chance(0.6)) == [1]


def test_the_batch_stays_full():
    """Rows that end are replaced at once: hardly more steps than tokens over rows."""
    target, steps = make_llama(layers=1), []
    target.register_forward_pre_hook(
        lambda _module, _args, given: steps.append(len(given["position_ids"])), with_kwargs=True
    )
    lengths = [5, 60, 5, 5, 60, 5, 5, 5, 5, 60, 5, 5]
    answers = held(target, [[i + 1] for i in range(12)], lengths, 4)
    assert {len(said) for said in answers.values()} == {5, 60} and len(answers) == 12
    assert len(steps) <= 75 and max(steps) == 4 and steps[-1] < 4


def test_columns_that_nobody_needs_are_cut_off(monkeypatch):
    """However many talks a row holds one after the other, the cache grows no longer than a few."""
    widths, caches = [], []
    grown = common.GrowingCache
    monkeypatch.setattr(common, "GrowingCache", lambda n: caches.append(grown(n)) or caches[-1])
    target = make_llama(layers=1)
    target.register_forward_hook(lambda *_: widths.append(caches[-1].get_seq_length()))
    held(target, [[i + 1] for i in range(20)], [20] * 20, 2)
    assert len(widths) == 200 and 60 < max(widths) < 110


# ------------------------------------------------------------------------------ conversations made


def with_bos(tokenizer):
    """The tokenizer, which from now on begins every text with <system>, its token 3."""
    template = processors.TemplateProcessing(single="<system> $A", special_tokens=[("<system>", 3)])
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("w0 w1")["input_ids"] == [3, 5, 6]
    return tokenizer


def test_made_conversations_are_what_the_target_says(folder, tmp_path):  # noqa: F811
    """Template, request, answer: greedy lines are the target's own greedy answers."""
    records = make(folder, tmp_path / "d.jsonl", 6, "--greedy", "0.5")
    target, tokenizer = common.load_target(str(folder))
    assert len(records) == 6 and len({r["prompt"] for r in records}) == 6
    assert {r["temperature"] for r in records} == {0.0, 0.8}
    for record in records:
        assert 4 <= len(record["prompt"].split()) <= 100 and len(record["response_ids"]) > 1
        assert record["prompt_ids"][0] == 1 and record["prompt_ids"][-1] == 2  # <user>, <assistant>
        words = tokenizer.decode(record["prompt_ids"][1:-2], skip_special_tokens=True)
        assert record["prompt"] == words
        assert record["finished"] == (record["response_ids"][-1] == 0)
        if not record["temperature"]:
            room = 128 - len(record["prompt_ids"])
            expected = plain(target, record["prompt_ids"], room, {0})
            assert record["response_ids"] == expected
    assert len(data.read_conversations(str(tmp_path / "d.jsonl"), tokenizer, 512)) == 6


@pytest.mark.parametrize("share, temperatures", [(0.0, {0.8}), (1.0, {0.0})])
def test_the_share_of_greedy_answers(folder, tmp_path, share, temperatures):  # noqa: F811
    (tmp_path / "r.txt").write_text("".join(f"w{i}\n" for i in range(6)))
    more = ["--greedy", share, "--requests", tmp_path / "r.txt"]
    records = make(folder, tmp_path / "d.jsonl", 4, *more)
    assert {record["temperature"] for record in records} == temperatures


def looping(target, *tokens):
    """A target that says the same tokens again and again, and never ends."""
    target.generation_config.eos_token_id = 0
    real, turn = target.lm_head.forward, itertools.cycle(tokens)

    def forward(hidden):
        logits = real(hidden)
        logits[..., 0] = -50.0
        logits[..., next(turn)] = 50.0
        return logits

    target.lm_head.forward = forward
    return target


def only_three_talks(monkeypatch):
    """No more conversations are begun, for where none is kept there would be no end."""
    converse = talks.converse

    def three(target, begin, *more):
        begun = itertools.count()
        yield from converse(target, lambda: next(begun) < 3 and begin() or None, *more)

    monkeypatch.setattr(talks, "converse", three)


def test_a_greedy_loop_is_kept_and_a_sampled_one_dropped(folder, tmp_path, monkeypatch):  # noqa: F811
    target, tokenizer = common.load_target(str(folder))
    looping(target, 9)
    requests = [[f"w{i} w1 w2 w3"] for i in range(3)]
    options = {"requests": requests, "greedy": 1.0, "max_new_tokens": 40}
    path = tmp_path / "greedy.jsonl"
    data.make_conversations(target, tokenizer, 3, str(path), **options)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["response_ids"] for record in records] == [[9] * 40] * 3
    only_three_talks(monkeypatch)
    path = tmp_path / "sampled.jsonl"
    data.make_conversations(target, tokenizer, 3, str(path), **(options | {"greedy": 0.0}))
    assert not path.read_text()


def test_a_request_that_does_not_end_is_not_asked(folder, tmp_path, monkeypatch):  # noqa: F811
    target, tokenizer = common.load_target(str(folder))
    looping(target, 9, 1).config.max_position_embeddings = 2000
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>"]})  # 1, not decoded
    words = tokenizer.decode([9, 1] * 64, skip_special_tokens=True).split()
    assert 4 <= len(words) <= 100  # for its length it would be asked
    only_three_talks(monkeypatch)
    path = tmp_path / "d.jsonl"
    data.make_conversations(target, tokenizer, 3, str(path), greedy=1.0, max_new_tokens=40)
    assert not path.read_text()


def test_given_requests_are_asked_first_and_as_they_are(folder, tmp_path):  # noqa: F811
    (tmp_path / "r.txt").write_text("w1 w2\n\n  w3 w4 w5 \nw6\n")
    records = make(folder, tmp_path / "d.jsonl", 5, "--requests", tmp_path / "r.txt")
    assert {"w1 w2", "w3 w4 w5", "w6"} < {record["prompt"] for record in records}
    turns = [["w7 w8", "w9"], ["w10"]]
    lines = "".join(json.dumps({"turns": each}) + "\n" for each in turns)
    (tmp_path / "r.jsonl").write_text(lines)
    more = ["--requests", tmp_path / "r.jsonl", "--second-turns", "1"]
    records = make(folder, tmp_path / "e.jsonl", 3, *more)
    assert {"w7 w8", "w9", "w10"} & {record["prompt"] for record in records} >= {"w7 w8", "w9"}


def test_thought_up_requests_begin_with_an_opening(folder, tmp_path):  # noqa: F811
    (tmp_path / "o.txt").write_text("w40 w41\nw42\n")
    records = make(folder, tmp_path / "d.jsonl", 6, "--openings", tmp_path / "o.txt")
    begun = {re.match("w40 w41|w42|", record["prompt"])[0] for record in records}
    assert begun == {"w40 w41", "w42"}


def eager(target, boost):
    """A target that is quick to end: the end token's logit is raised."""
    plain_forward = target.lm_head.forward

    def forward(hidden):
        logits = plain_forward(hidden)
        logits[..., 0] += boost
        return logits

    target.lm_head.forward = forward
    return target


def test_a_made_conversation_has_the_tokens_of_its_template_and_no_more(folder, tmp_path):  # noqa: F811
    """Also of a tokenizer that begins texts with a token of its own: pieces of a text do not."""
    target, tokenizer = common.load_target(str(folder))
    options = {"requests": [["w1 w2"], ["w3"]], "greedy": 1.0, "max_new_tokens": 3}
    path = tmp_path / "d.jsonl"
    data.make_conversations(looping(target, 9), with_bos(tokenizer), 2, str(path), **options)
    made = [json.loads(line)["prompt_ids"] for line in path.read_text().splitlines()]
    assert sorted(made) == [[1, 6, 7, 0, 2], [1, 8, 0, 2]]  # <user> w1 w2 <end> <assistant>


def test_short_and_known_requests_are_not_used(folder, tmp_path):  # noqa: F811
    """Of a target that ends most of its requests at once, so that they are the opening alone."""
    target, tokenizer = common.load_target(str(folder))
    eager(target, 6.0)
    for openings, known in ((["w1 w2"], 0), (["w1 w2 w3 w4"], 1)):
        path = tmp_path / f"{known}.jsonl"
        options = {"openings": openings, "max_new_tokens": 20, "greedy": 0.0, "batch_size": 4}
        data.make_conversations(target, tokenizer, 6, str(path), **options)
        asked = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
        assert len(set(asked)) == 6 and asked.count(openings[0]) <= known
        assert min(len(text.split()) for text in asked) >= 4


@pytest.mark.parametrize("turns", [1, 2], ids=["thought up", "given"])
def test_a_second_turn_holds_the_whole_first_one(folder, tmp_path, turns):  # noqa: F811
    """And reads as the chat template writes it; its answer is what the target says to all that."""
    target, tokenizer = common.load_target(str(folder))
    eager(target, 2.0).config.max_position_embeddings = 2000
    requests = [[f"w{i} w1 w5", f"w2 w{i} w7"][:turns] for i in range(8)]
    options = {"requests": requests, "second_turns": 1.0, "greedy": 1.0, "max_new_tokens": 45}
    path = tmp_path / "d.jsonl"
    data.make_conversations(target, tokenizer, 10, str(path), **options)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 10
    seen = []  # whether the first answer ended by itself
    for first, second in zip(records, records[1:]):  # the lines of a conversation stand together
        whole = first["prompt_ids"] + first["response_ids"]
        if second["prompt_ids"][: len(whole)] != whole:
            continue
        seen.append(first["finished"])
        ended = [] if first["finished"] else [0]
        words = second["prompt_ids"][len(whole) + len(ended) + 1 : -2]
        assert tokenizer.decode(words, skip_special_tokens=True) == second["prompt"]
        assert first["prompt_ids"] == [1, *tokenizer.encode(first["prompt"]), 0, 2]
        assert second["prompt_ids"] == [*whole, *ended, 1, *words, 0, 2]
        assert second["response_ids"] == plain(target, second["prompt_ids"], 45, {0})
    assert set(seen) == {False, True}


def test_no_second_turn_unless_asked_for(folder, tmp_path):  # noqa: F811
    (tmp_path / "r.jsonl").write_text('{"turns": ["w1 w2", "w3"]}\n{"turns": ["w4", "w5"]}\n')
    records = make(folder, tmp_path / "d.jsonl", 2, "--requests", tmp_path / "r.jsonl")
    assert {record["prompt"] for record in records} <= {"w1 w2", "w4"}


def test_the_share_of_second_turns(folder, tmp_path):  # noqa: F811
    """Half of the conversations have one, a line each; the others are of one line."""
    target, tokenizer = common.load_target(str(folder))
    options = {"requests": [["w1", "w2"]] * 60, "second_turns": 0.5, "batch_size": 8}
    options |= {"greedy": 1.0, "max_new_tokens": 2}
    path = tmp_path / "d.jsonl"
    data.make_conversations(looping(target, 9), tokenizer, 60, str(path), **options)
    asked = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    first, second = asked.count("w1"), asked.count("w2")
    assert first + second == 60 and 0.3 < second / first < 0.7


def test_a_first_answer_of_two_is_cut_as_an_evaluation_cuts_it(folder, tmp_path):  # noqa: F811
    target, tokenizer = common.load_target(str(folder))
    looping(target, 9).config.max_position_embeddings = 2000
    requests = [[f"w{i} w41", f"w42 w{i}"] for i in range(12)]
    path = tmp_path / "d.jsonl"
    options = {"requests": requests, "greedy": 1.0, "second_turns": 1.0, "max_new_tokens": 160}
    data.make_conversations(target, tokenizer, 24, str(path), **options)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    first = [len(r["response_ids"]) for r in records if r["prompt"].endswith(" w41")]
    second = [len(r["response_ids"]) for r in records if r["prompt"].startswith("w42 ")]
    assert 40 <= min(first) < 75 and 105 < max(first) <= 140 and len(set(first)) > 5
    assert set(second) == {160}


def test_a_resumed_run_draws_anew(folder, tmp_path):  # noqa: F811
    """Not which of the first part's conversations were greedy, in the same order once more."""
    target, tokenizer = common.load_target(str(folder))
    options = {"requests": [[f"w{i} w1"] for i in range(40)], "greedy": 0.5, "batch_size": 1}
    path = tmp_path / "d.jsonl"
    for count in (20, 40):
        data.make_conversations(
            looping(target, 9), tokenizer, count, str(path), max_new_tokens=2, **options
        )
    drawn = [json.loads(line)["temperature"] for line in path.read_text().splitlines()]
    assert len(drawn) == 40 and drawn[:20] != drawn[20:] and set(drawn) == {0.0, 0.8}


def test_make_data_resumes_and_cuts_a_half_written_line(folder, tmp_path):  # noqa: F811
    path = tmp_path / "made.jsonl"
    (tmp_path / "r.txt").write_text("".join(f"w{i} w2\n" for i in range(9)))
    more = ["--requests", tmp_path / "r.txt"]
    make(folder, path, 3, *more)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"prompt": "cut')
    records = make(folder, path, 5, *more)
    assert path.read_bytes().startswith(whole) and len(records) == 5
    assert make(folder, path, 5, *more) == records  # nothing is left to do


def test_a_resumed_run_knows_the_requests_it_has(folder, tmp_path):  # noqa: F811
    """Interrupted after every line, three requests are still asked once each."""
    (tmp_path / "r.txt").write_text("w1 w2\nw3 w4 w5\nw6\n")
    for count in range(1, 4):
        more = ["--requests", tmp_path / "r.txt", "--greedy", "1"]
        records = make(folder, tmp_path / "d.jsonl", count, *more)
        assert len(records) == count
    assert [r["prompt"] for r in records] == ["w1 w2", "w3 w4 w5", "w6"]


def test_a_template_that_rewrites_turns_is_refused_for_second_turns(folder, tmp_path):  # noqa: F811
    target, tokenizer = common.load_target(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages[-1:] %}<user> {{ m['content'] }} <end> {% endfor %}<assistant> "
    )
    with pytest.raises(ValueError, match="leave out --second-turns"):
        data.make_conversations(target, tokenizer, 2, str(tmp_path / "d"), second_turns=0.5)
    data.make_conversations(target, tokenizer, 2, str(tmp_path / "d"))


def test_a_conversation_with_nothing_left_to_learn_is_left_out(folder, tmp_path):  # noqa: F811
    """Cut to so many tokens, it ends within the prompt."""
    _, tokenizer = common.load_target(str(folder))
    path, prompt = tmp_path / "d.jsonl", " ".join(["w1"] * 30)
    path.write_text(
        json.dumps({"prompt": prompt, "response": "w2"}) + '\n{"prompt": "w1", "response": "w2"}\n'
    )
    [(ids, mask)] = data.read_conversations(str(path), tokenizer, 16)
    assert len(ids) < 16 and mask.any()


def test_without_a_template_turns_follow_each_other_as_one_text(folder, tmp_path):  # noqa: F811
    """What a tokenizer puts before a text stands before the first turn only."""
    tokenizer = with_bos(common.load_target(str(folder))[1])
    tokenizer.chat_template = None
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"w{i} w9"} for i, role in enumerate(roles)]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    [(ids, mask)] = data.read_conversations(str(tmp_path / "d.jsonl"), tokenizer, 64)
    assert ids.tolist() == [3, 5, 14, 6, 14, 7, 14, 8, 14]
    assert ids[mask].tolist() == [6, 14, 8, 14]


def test_a_template_that_hides_where_an_answer_begins_is_refused(folder, tmp_path):  # noqa: F811
    """It asks for an answer with a word that is not there once the answer is known."""
    _, tokenizer = common.load_target(str(folder))
    tokenizer.chat_template += "{% if add_generation_prompt %}w9 {% endif %}"
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "w1", "response": "w2"}\n')
    with pytest.raises(ValueError, match="answers cannot be located"):
        data.read_conversations(str(path), tokenizer, 64)


@pytest.mark.parametrize("option", ["--requests", "--openings"])
def test_files_of_requests_that_hold_nothing(folder, tmp_path, option):  # noqa: F811
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.txt holds no line of text"):
        make(folder, tmp_path / "d.jsonl", 2, option, tmp_path / "empty.txt")
    with pytest.raises(OSError, match="missing.txt"):
        make(folder, tmp_path / "d.jsonl", 2, option, "missing.txt")


# ------------------------------------------------------------------------ the conversations at hand


@pytest.mark.slow
def test_the_table_of_conversations_counts_what_is_there():
    text = (ROOT / "conversations" / "README.md").read_text()
    rows = re.findall(r"^\| (\S+\.gz) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", text, re.MULTILINE)
    assert {name for name, *_ in rows} == {
        path.name for path in (ROOT / "conversations").glob("*.gz")
    }
    for name, *said in rows:
        with gzip.open(ROOT / "conversations" / name, "rt") as file:
            records = [json.loads(line) for line in file]
        tokens = sum(len(record["response_ids"]) for record in records)
        greedy = sum(record["temperature"] == 0 for record in records)
        assert [int(n.replace(",", "")) for n in said] == [len(records), tokens, greedy], name


def test_another_seed_makes_other_conversations(folder, tmp_path):  # noqa: F811
    """Of a target with room for short answers."""
    target = Path(shutil.copytree(folder, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 14}))
    (tmp_path / "r.txt").write_text("w1 w2\nw3 w4\n")
    more = ["--requests", tmp_path / "r.txt", "--greedy", "0", "--seed"]
    made = [make(target, tmp_path / f"{n}", 2, *more, seed) for n, seed in enumerate((0, 0, 1))]
    assert made[0] == made[1] != made[2]
