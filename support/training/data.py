"""Conversations and prompts: read, check, order for training."""

import gzip
import itertools
import json
import os
import re
import sys
import unicodedata
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import common
from support.prompts import render, token_ids

# The keys of a conversation's turns. The first of these that a line has is read.
FORMS = (
    ("messages",),
    ("conversations",),  # ShareGPT's
    ("prompt", "response"),
    ("prompt", "completion"),  # TRL's, whose parts may be lists of messages
)
NAMES = {"from": "role", "value": "content"}  # ShareGPT's
SPEAKERS = {"human": "user", "gpt": "assistant"}
ROLES = ("system", "developer", "user", "assistant")
# Keys that describe a conversation but are not part of it. Any other key can change
# what an answer means, so it leaves the line out.
LABELS = {"id", "idx", "index", "uuid", "prompt_id", "conversation_id", "question_id"}
LABELS |= {"source", "dataset", "category", "model", "language", "split"}
# The keys of a line that train.py --make-data wrote.
MADE = {"prompt_ids", "response_ids", "prompt", "response", "temperature", "finished"}
AS_IDS = "take it out, or give prompt_ids and response_ids"
NO_MESSAGE = (
    f"a message needs a role ({', '.join(ROLES)}) and content that is text: {AS_IDS}"
)
MAKE = "make data for this target with train.py --make-data"
NOT_JSONL = (
    "no JSON object in UTF-8; data is JSONL, an object a line (jq -c '.[]' FILE makes "
    "it from an array, to_json(orient='records', lines=True) of pandas from a table)"
)


# ---------------------------------------------------------------------- conversations


def read_conversations(
    path: str, tokenizer, max_length: int, target=None
) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks, each (T,), of a JSONL file, plain or gzipped.

    A line is {"prompt_ids", "response_ids"}, or roles and texts in one of FORMS, with
    or without a "system" text. The loss is on the assistant's tokens. A line that says
    anything else, or cannot be used, is left out, and a long one is cut after
    `max_length` tokens. All of this is counted on stderr, and so are labels, which are
    not read, and answers that are not learned.

    max_length: tokens that are kept of each.
    Raises UserError for no file, no JSONL, or no line that can be used.
    """
    sequences = []
    skipped = defaultdict(list)  # numbers of lines, by the reason
    unread = Counter()  # lines, by the key
    cut = lost = 0  # answers
    limit = f"{max_length} tokens (--max-length or the target's context)"
    size = len(tokenizer)  # once, because it is slow with thousands of added tokens
    end = special_tail(tokenizer)
    lines = _lines(path)
    for number, line in tqdm(lines, f"reading {path}", leave=False, disable=None):
        try:
            record = _object(line)
            if {"prompt_ids", "response_ids"} <= record.keys():
                ids, answers = _from_ids(record, tokenizer, size)
                besides = record.keys() - MADE
            else:
                messages, besides = _messages(record)
                ids, answers = _locate(messages, tokenizer, end)
            if target is not None:  # which may have fewer tokens than the tokenizer
                common.check_ids(target, torch.tensor(ids))
            mask = torch.zeros(len(ids), dtype=torch.bool)
            for start, stop in answers:
                mask[start:stop] = True
            mask[0] = False  # nothing predicts the first token
            mask = mask[:max_length]
            if not mask.any():
                raise common.UserError(f"no answer within {limit}")
        except common.UserError as error:
            skipped[str(error)].append(number)
            continue
        sequences.append((torch.tensor(ids[:max_length]), mask))
        unread.update(besides)
        cut += sum(stop > max_length for _, stop in answers)
        lost += answers.count((0, 0))

    notes = [f"{_numbers(numbers)}: {reason}" for reason, numbers in skipped.items()]
    if not sequences:
        reasons = "; ".join(notes[:3]) or "it is empty"
        raise common.UserError(f"{path} holds nothing to learn from: {reasons}")
    if (more := len(notes) - 10) > 0:
        notes[10:] = [f"and {more} more reasons"]
    if skipped:
        notes.append(f"skipped {len(lines) - len(sequences)} of {len(lines)} lines")
    if unread:
        notes.append(f"not read: {_counts(unread)}")
    if cut:
        notes.append(f"answers cut after {limit}: {cut}")
    if lost:
        notes.append(
            "answers not learned, because the chat template or the tokenizer changes "
            f"them there, or because nobody asked: {lost}"
        )
    if os.environ.get("RANK", "0") == "0":  # each process of torchrun reads the data
        for note in notes:
            print(f"{path}: {note}", file=sys.stderr)
    return sequences


def _numbers(numbers: list[int]) -> str:
    """The numbers of the first five of some lines."""
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    lines = "line" if len(numbers) == 1 else "lines"
    return f"{lines} {', '.join(map(str, numbers[:5]))}{more}"


def _counts(keys: Counter) -> str:
    """Keys, and in how many lines they are."""
    items = keys.items()
    return ", ".join(f"{key} ({n:,} line{'s' * (n > 1)})" for key, n in items)


def _lines(path: str) -> list[tuple[int, bytes]]:
    """The lines of a file with their numbers, without blank ones."""
    try:
        content = Path(path).read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # missing, a folder, damaged
        raise common.UserError(f"cannot read {path} ({error})") from error
    content = content.removeprefix(b"\xef\xbb\xbf")  # a mark that says UTF-8
    return [item for item in enumerate(content.split(b"\n"), 1) if item[1].strip()]


def _object(line: bytes) -> dict:
    """The JSON object that a line holds, without what is null."""
    try:
        record = json.loads(line.decode(), object_pairs_hook=_without_null)
        if b"\\u" in line:  # JSON can write half an emoji, which no tokenizer reads
            json.dumps(record, ensure_ascii=False).encode()
    except common.UserError:
        raise
    except UnicodeEncodeError:
        raise common.UserError("half of a character, such as an emoji") from None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise common.UserError(NOT_JSONL)
    return record


def _without_null(pairs: list[tuple]) -> dict:
    """A JSON object without keys whose value is null, none of them twice."""
    # Tables (Arrow, Parquet, pandas) give each row the keys of all rows.
    counts = Counter(key for key, _ in pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise common.UserError(f"the key {twice[0]!r} is there twice")
    return {key: value for key, value in pairs if value is not None}


def _from_ids(record: dict, tokenizer, size: int) -> tuple[list[int], list]:
    """Token ids of a line that has them, and where its answer starts and stops.

    size: number of ids that the tokenizer knows.
    """
    prompt, response = record["prompt_ids"], record["response_ids"]
    lists = isinstance(prompt, list) and isinstance(response, list)
    ids = prompt + response if lists else [None]
    if not all(type(x) is int and 0 <= x < size for x in ids):
        raise common.UserError(
            f"token ids must be lists of numbers from 0 to below {size}; {MAKE}"
        )
    if not response or len(ids) == 1:
        raise common.UserError("response_ids hold nothing to learn")
    for key, part in (("prompt", prompt), ("response", response)):
        text = record.get(key)
        if isinstance(text, str) and not _says(part, text.strip(), tokenizer):
            raise common.UserError(
                f"{key}_ids do not hold the text of {key}, so they are another "
                f"tokenizer's; {MAKE}"
            )
    return ids, [(len(prompt), len(ids))]


def _says(ids: list[int], text: str, tokenizer) -> bool:
    """Whether ids hold a text, which may have been kept without special tokens."""
    text = unicodedata.normalize("NFKC", text)  # as many tokenizers do
    skip = (tokenizer.decode(ids, skip_special_tokens=each) for each in (False, True))
    return any(text in unicodedata.normalize("NFKC", decoded) for decoded in skip)


# ------------------------------------------------------------ from a line to messages


def _messages(record: dict) -> tuple[list[dict], set[str]]:
    """The messages of a line up to its last answer, and what else is not read.

    Raises UserError if the line says more than roles and texts.
    """
    rest = dict(record)
    form = next((f for f in FORMS if all(rest.get(key, []) != [] for key in f)), ())
    turns = []
    for role, key in zip(("user", "assistant"), form):
        said = rest.pop(key)
        if len(form) == 2 and not isinstance(said, list):
            said = {"role": role, "content": said}
        turns += said if isinstance(said, list) else [said]
    if not turns:
        raise common.UserError(
            "no conversation; give prompt and response (or completion), messages, "
            "conversations (ShareGPT's), or prompt_ids and response_ids"
        )
    if system := rest.pop("system", None):
        turns = [{"role": "system", "content": system}, *turns]
    if not all(isinstance(turn, dict) for turn in turns):
        raise common.UserError(NO_MESSAGE)
    turns = [{NAMES.get(key, key): x for key, x in turn.items()} for turn in turns]

    empty = ["", [], {}]
    # A text that a message says as well, such as its prompt, says nothing more.
    known = empty + [turn.get("content") for turn in turns]
    besides = {key for key, value in rest.items() if value not in known}
    for turn in turns:
        fields = turn.keys() - {"role", "content"}
        besides |= {f"{key} of messages" for key in fields if turn[key] not in empty}
    if more := besides - LABELS:
        more = ", ".join(sorted(more))
        raise common.UserError(f"more than roles and texts: {more}; {AS_IDS}")

    messages = [_message(turn) for turn in turns]
    answered = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    if not answered or answered == [0]:
        raise common.UserError("no answer (by assistant, ShareGPT's gpt) to a request")
    if len(messages) > answered[-1] + 1:
        besides.add("messages after the last answer")
    return messages[: answered[-1] + 1], besides


def _message(turn: dict) -> dict:
    """A message with its role and its content, which is text."""
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, list):  # OpenAI's parts, none of which may be a picture
        parts = [part for part in content if isinstance(part, dict)]
        texts = [str(part.get("text")) for part in parts]
        whole = content == [{"type": "text", "text": text} for text in texts]
        content = "".join(texts) if whole else None
    role = SPEAKERS.get(role, role) if isinstance(role, str) else None
    if role not in ROLES or not isinstance(content, str):
        raise common.UserError(NO_MESSAGE)
    return {"role": role, "content": content}


# ----------------------------------------------------------- from messages to tokens


def _locate(messages, tokenizer, end: re.Pattern) -> tuple[list[int], list]:
    """Token ids of a conversation, and where its answers start and stop.

    An answer that is not learned starts and stops at 0.

    end: from `special_tail`.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # The conversation up to each answer, as it was when the target wrote this answer.
    moments = [_last_answer(messages[: n + 1], tokenizer, end) for n in places]
    ids = moments[-1][0]  # of the whole conversation
    answers = []
    for then, start in moments:
        # An answer is learned if the whole conversation still holds it token for token.
        # Later turns can make the template write it differently. If that changes only
        # its last token, into another end, all but this token is learned. If it changes
        # more (a thought is dropped, say), nothing is learned, because the target wrote
        # something else.
        stop = _shared(then, ids)
        located = start < stop and stop >= len(then) - 1
        answers.append((start, stop) if located else (0, 0))
    if not any(stop for _, stop in answers):
        raise common.UserError(
            "the answer cannot be located, because the chat template or the tokenizer "
            "changes what is there; give prompt_ids and response_ids"
        )
    return ids, answers


def _last_answer(messages, tokenizer, end: re.Pattern) -> tuple[list[int], int]:
    """Token ids up to the end of the last message, and where it starts.

    It starts behind them if the target would not write these tokens.
    """
    if len(messages) == 1:  # nobody asked, and transformers renders no empty chat
        return [], 0
    before = render(messages[:-1], tokenizer)
    request = render(messages[:-1], tokenizer, ask=True)
    text = render(messages, tokenizer)
    begin = _shared(request, text)  # where the answer begins in the text
    if begin < len(request):
        # Some templates ask for an answer with the head of a thought, which a finished
        # answer does not have. Then it begins where any other answer does.
        other = [*messages[:-1], {"role": "assistant", "content": "\N{INTERROBANG}"}]
        begin = min(begin, _shared(request, render(other, tokenizer)))
    if tail := end.search(text, begin):
        # The target stops at the first of the special tokens at the end. Templates may
        # write more, such as a newline or another end.
        said = messages[-1]["content"]
        if tail[1] in text[begin : tail.start()] and tail[1] in said:
            raise common.UserError(
                f"an answer continues after its end, {tail[1]}; cut it there"
            )
        text = text[: tail.end(1)]
    ids = token_ids(text, tokenizer)
    # What comes before the answer has to be as it was, in text and in tokens. A token
    # that holds the end of the request and the beginning of the answer, such as two
    # newlines, cannot be written by the target.
    asked = token_ids(text[:begin], tokenizer)
    same = begin >= len(before) and ids[: len(asked)] == asked
    return ids, len(asked) if same else len(ids)


def special_tail(tokenizer) -> re.Pattern:
    """Finds special tokens at the end of a text; its group 1 is the first of them."""
    tokens = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    one = "|".join(map(re.escape, tokens)) or "(?!)"  # or none
    return re.compile(rf"({one})(?:\s|{one})*\Z")


def _shared(some, others) -> int:
    """How many characters or ids two texts or lists begin with in common."""
    return len(os.path.commonprefix([some, others]))


# -------------------------------------------------------------- sequences for training


def join_turns(sequences: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Drop each sequence that another one begins with; that one learns its tokens.

    A first turn is then computed once and learned in one two-turn sequence only. If
    that one is held out, so is its first turn.
    """
    ids = [each.tolist() for each, _ in sequences]
    masks = [mask.clone() for _, mask in sequences]
    begins = set()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for short, long in zip(order, order[1:]):  # a prefix sorts right before
        length = len(ids[short])
        if ids[long][:length] == ids[short]:
            masks[long][:length] |= masks[short]
            begins.add(short)
    return [(sequences[i][0], masks[i]) for i in range(len(ids)) if i not in begins]


def batch_order(lengths: list[int], batch_size: int, seed: int, start: int = 0):
    """Yield the sequences (batch_size,) of each step.

    They depend only on the step's number and `seed`. Every epoch is a new permutation,
    of which the sequences that do not fill a last batch are left out.

    lengths: tokens of each sequence.
    start: the first step.
    """
    lengths = torch.tensor(lengths)
    count = len(lengths)
    indices = torch.arange(count).repeat(-(-batch_size // count))  # a batch at least
    per_epoch = len(indices) // batch_size
    for epoch in itertools.count(start // per_epoch):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = indices[torch.randperm(len(indices), generator=generator)]
        batches = []
        # To save padding, 32 batches at a time are sorted by length.
        for part in order[: per_epoch * batch_size].split(32 * batch_size):
            part = part[lengths[part].argsort(stable=True)]
            batches += part.split(batch_size)
        shuffled = torch.randperm(per_epoch, generator=generator).tolist()
        for step, place in enumerate(shuffled, epoch * per_epoch):
            if step >= start:
                yield batches[place]


# ---------------------------------------------------------------------------- prompts


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all).

    Returns {"question_id", "category", "turns"} of each.
    Raises UserError for a missing file, a line that is not a prompt, or no line at all.
    """
    prompts = []
    for path in paths:
        for number, line in _lines(str(path)):
            try:
                record = _object(line)
                turns = _turns(record)
            except common.UserError as reason:
                raise common.UserError(f"{path}, line {number}: {reason}") from reason
            prompts.append(
                {
                    "question_id": record.get("question_id", f"{path.stem}-{number}"),
                    "category": str(record.get("category", path.stem)),
                    "turns": turns,
                }
            )
    if not prompts:
        raise common.UserError('no prompts: give a file with lines {"turns": ["..."]}')
    count = min(count or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _turns(record: dict) -> list[str]:
    """What a user asks, turn after turn."""
    turns = record.get("turns")
    texts = isinstance(turns, list) and all(isinstance(x, str) for x in turns)
    if not (turns and texts):
        raise common.UserError('no "turns", a list of texts')
    return turns
