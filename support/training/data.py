"""Conversations and prompts: read, check, order for training."""

import functools
import gzip
import inspect
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

# ShareGPT's names, and those of chat templates.
NAMES = {"from": "role", "value": "content"}
SPEAKERS = {"human": "user", "gpt": "assistant"}
ROLES = ("system", "developer", "user", "assistant", "tool")
# What an answer depends on (CONDITIONS), or says besides its content (PARTS). Learning
# the answer without it would be wrong, so a line is left out if the chat template does
# not write it.
CONDITIONS = {"tools", "documents", "system_prompt", "history", "context", "input"}
CONDITIONS |= {"instruction", "images", "image", "videos", "audio", "weights"}
PARTS = {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"}
# The keys of a line that has ids and was written by train.py --make-data.
MADE = {"prompt_ids", "response_ids", "prompt", "response", "temperature", "finished"}
# The chat template of a target that has none.
PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
AS_IT_IS = "leave it out of the data, or give prompt_ids and response_ids"


# ---------------------------------------------------------------------- conversations


def read_conversations(
    path: str, tokenizer, max_length: int, target=None
) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks, each (T,), of a JSONL file, plain or gzipped.

    A line is {"prompt_ids", "response_ids"}, {"prompt", "response"} or {"prompt",
    "completion"}, {"messages"}, or ShareGPT's {"conversations"}. The loss is on the
    assistant's tokens. A line that cannot be used is left out, and a long one is cut
    after `max_length` tokens. Either is reported on stderr, and so are keys that are
    not read and answers that are not learned.

    max_length: tokens that are kept of each.
    Raises UserError for no file, no JSONL, or no line that can be used.
    """
    sequences = []
    skipped = defaultdict(list)  # numbers of lines, by the reason
    unread = Counter()  # lines, by the key
    cut = lost = 0  # answers
    limit = f"{max_length} tokens (--max-length or the target's context)"
    size = len(tokenizer)  # once, because it is slow with thousands of added tokens
    lines = _lines(path)
    for number, line in tqdm(lines, f"reading {path}", leave=False, disable=None):
        try:
            ids, answers, keys = _tokenize(_object(line), tokenizer, size)
            if target is not None:  # which may have fewer tokens than the tokenizer
                common.check_ids(target, torch.tensor(ids))
            mask = _loss_mask(len(ids), answers)[:max_length]
            if not mask.any():
                raise common.UserError(f"no answer within {limit}")
        except (common.UserError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            reason = "the JSON is nested too deep" if deep else str(error)
            skipped[reason].append(number)
            continue
        sequences.append((torch.tensor(ids[:max_length]), mask))
        unread.update(keys)
        cut += sum(stop > max_length for _, stop in answers)
        lost += sum(start == stop for start, stop in answers)

    notes = [_skip_note(reason, numbers) for reason, numbers in skipped.items()]
    if not sequences:
        reasons = "; ".join(notes[:3]) or "it is empty"
        raise common.UserError(f"{path} holds nothing to learn from: {reasons}")
    if skipped:
        notes.append(f"skipped {len(lines) - len(sequences)} of {len(lines)} lines")
    if unread:
        counts = (
            f"{key} ({count:,} line{'s' if count > 1 else ''})"
            for key, count in unread.items()
        )
        notes.append(f"not read: {', '.join(counts)}")
    if cut:
        notes.append(f"answers cut after {limit}: {cut}")
    if lost:
        notes.append(
            "answers not learned, because the chat template writes them differently in "
            f"an earlier turn, or because nobody asked: {lost}"
        )
    if os.environ.get("RANK", "0") == "0":  # each process of torchrun reads the data
        for note in notes:
            print(f"{path}: {note}", file=sys.stderr)
    return sequences


# How files of other kinds begin: their name, and what makes JSONL of them.
KINDS = {
    b"PAR1": (
        "Parquet",
        "pandas writes it: read_parquet(FILE).to_json('NEW.jsonl', orient='records', "
        "lines=True)",
    ),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -d FILE"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW.jsonl"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW.jsonl"),
    b"[": ("a JSON array", "jq -c '.[]' FILE > NEW.jsonl"),
    b"{\n": ("JSON over several lines", "jq -c . FILE > NEW.jsonl"),
    b"{\r\n": ("JSON over several lines", "jq -c . FILE > NEW.jsonl"),
}


def _lines(path: str) -> list[tuple[int, bytes]]:
    """The lines of a file with their numbers, without blank ones."""
    if Path(path).is_dir():
        raise common.UserError(f"{path} is a folder: name its files")
    if not Path(path).exists():
        raise common.UserError(f"no file {path}: check the path")
    content = Path(path).read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise common.UserError(
                f"{path} is damaged ({error}); make it again"
            ) from error
    content = content.removeprefix(b"\xef\xbb\xbf")  # a mark that says UTF-8
    for mark, (kind, remedy) in KINDS.items():
        if content.lstrip(b" \r\n\t").startswith(mark):
            raise common.UserError(
                f"{path} is {kind}; data is JSONL in UTF-8, an object a line: {remedy}"
            )
    return [item for item in enumerate(content.split(b"\n"), 1) if item[1].strip()]


def _object(line: bytes) -> dict:
    """The JSON object that a line holds, without what is null."""
    try:
        record = _without_null(json.loads(line.decode()))
    except UnicodeDecodeError:
        raise common.UserError(
            "not UTF-8 (iconv -f LATIN1 -t UTF-8 FILE > NEW.jsonl, if it is Latin-1)"
        ) from None
    except RecursionError:
        raise common.UserError("the JSON is nested too deep") from None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise common.UserError("no JSON object")
    return record


def _without_null(value):
    """The same JSON value without keys whose value is null."""
    # Tables (Arrow, Parquet, pandas) give each row the keys of all rows, also within
    # messages, tools and the arguments of calls.
    if isinstance(value, dict):
        return {key: _without_null(x) for key, x in value.items() if x is not None}
    if isinstance(value, list):
        return [_without_null(x) for x in value]
    return value


def _tokenize(record: dict, tokenizer, size: int) -> tuple[list[int], list, set]:
    """Token ids of a line, where its answers start and stop, and keys not read.

    size: number of ids that the tokenizer knows.
    """
    if not {"prompt_ids", "response_ids"} <= record.keys():
        conversation, rest = _conversation(record)
        messages = _to_last_answer(conversation)
        variables, unread = _variables(messages, rest, tokenizer)
        ids, answers, fields = _locate(messages, variables, tokenizer)
        if len(messages) < len(conversation):
            fields.add("messages after the last answer")
        return ids, answers, unread | fields
    prompt, response = record["prompt_ids"], record["response_ids"]
    lists = isinstance(prompt, list) and isinstance(response, list)
    ids = prompt + response if lists else [None]
    make = "make data for this target with train.py --make-data"
    if not all(type(x) is int and 0 <= x < size for x in ids):
        raise common.UserError(
            f"token ids must be lists of numbers from 0 to below {size}; {make}"
        )
    if not response or len(ids) == 1:
        raise common.UserError("response_ids hold nothing to learn")
    for key, part in (("prompt", prompt), ("response", response)):
        text = record.get(key)
        if isinstance(text, str) and not _says(part, text.strip(), tokenizer):
            raise common.UserError(
                f"{key}_ids do not hold the text of {key}, so they are another "
                f"tokenizer's; {make}"
            )
    return ids, [(len(prompt), len(ids))], record.keys() - MADE


def _says(ids: list[int], text: str, tokenizer) -> bool:
    """Whether ids hold a text, which may have been kept without special tokens."""
    text = unicodedata.normalize("NFKC", text)  # as many tokenizers do
    skip = (tokenizer.decode(ids, skip_special_tokens=each) for each in (False, True))
    return any(text in unicodedata.normalize("NFKC", decoded) for decoded in skip)


def _loss_mask(length: int, answers: list[tuple[int, int]]) -> Tensor:
    """(length,) bool, True for the tokens of answers."""
    mask = torch.zeros(length, dtype=torch.bool)
    for start, stop in answers:
        mask[start:stop] = True
    mask[0] = False  # nothing predicts the first token
    return mask


def _skip_note(reason: str, numbers: list[int]) -> str:
    """Why some lines cannot be used, with the numbers of the first five."""
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    lines = "line" if len(numbers) == 1 else "lines"
    return f"{lines} {', '.join(map(str, numbers[:5]))}{more}: {reason}"


# ------------------------------------------------------------ from a line to messages


def _conversation(record: dict) -> tuple[list[dict], dict]:
    """The messages of a line, and what else the line says."""
    rest = dict(record)
    answer = next((key for key in ("response", "completion") if key in rest), None)
    if "prompt" in rest and answer:
        turns = []
        for role, said in (
            ("user", rest.pop("prompt")),
            ("assistant", rest.pop(answer)),
        ):
            # TRL's prompts and completions may be lists of messages.
            turns += (
                said if isinstance(said, list) else [{"role": role, "content": said}]
            )
    else:
        turns = rest.pop("messages" if rest.get("messages") else "conversations", None)
        if not isinstance(turns, list):
            raise common.UserError(
                "no conversation; give prompt and response (or completion), messages, "
                "conversations (ShareGPT's), or prompt_ids and response_ids"
            )
    if system := rest.pop("system", None):
        turns = [{"role": "system", "content": system}, *turns]
    if isinstance(rest.get("tools"), str) and rest["tools"]:
        try:
            rest["tools"] = json.loads(rest["tools"])
        except (ValueError, RecursionError):
            raise common.UserError("its tools are not valid JSON") from None
    return [_message(turn) for turn in turns], rest


def _to_last_answer(messages: list[dict]) -> list[dict]:
    """A conversation without what follows its last answer."""
    answered = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
    if not answered:
        raise common.UserError("no answer, a message by assistant (ShareGPT's gpt)")
    if answered == [0]:
        raise common.UserError("the only answer comes first, where nobody asked")
    return messages[: answered[-1] + 1]


def _message(turn) -> dict:
    """A message with its role, its content and all else that it says."""
    if not isinstance(turn, dict):
        raise common.UserError("a message is not a JSON object")
    message = {NAMES.get(key, key): value for key, value in turn.items() if value != []}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if content is None and PARTS & message.keys():
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise common.UserError(
            "a message needs a role, and content that is text or parts of text"
        )
    role = SPEAKERS.get(role, role)
    if role not in ROLES:
        raise common.UserError(f"a message by {role!r}: take {', '.join(ROLES)}")
    if message.pop("weight", 1) != 1:  # OpenAI's: 0 keeps an answer out of the loss
        raise common.UserError(f"weights of messages are not used: {AS_IT_IS}")
    return message | {"role": role, "content": content}


def _is_text(part) -> bool:
    """Whether a part of a message, in OpenAI's form, is text and not a picture."""
    match part:
        case {"type": "text", "text": str()}:
            return True
    return False


def chat(texts: list[str]) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# ----------------------------------------------------------- from messages to tokens


def render(messages: list[dict], tokenizer, variables=None, ask: bool = False) -> str:
    """Messages in the target's chat template, and the head of an answer if `ask`.

    variables: {name: value} of the template, such as tools or documents.
    Raises UserError if the template does not accept them, or their text is broken.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=None if tokenizer.chat_template else PLAIN,
            add_generation_prompt=ask,
            tokenize=False,
            **(variables or {}),
        )
    except Exception as error:  # a template is a program, which may fail in any way
        reason = common.one_line(error)
        raise common.UserError(
            f"the chat template does not accept it: {reason}"
        ) from error
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Refuse half an emoji, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise common.UserError(
            "broken text: half of a character such as an emoji"
        ) from None


def token_ids(text: str, tokenizer) -> list[int]:
    """Ids of a rendered conversation."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.chat_template:  # which writes the special tokens itself
        return ids
    # Some tokenizers put special tokens before a text and others after it. Those after
    # it would end a request before it is answered.
    whole = tokenizer(text)["input_ids"]
    before = next((n for n in range(len(whole)) if whole[n : n + len(ids)] == ids), 0)
    return whole[: before + len(ids)]


def _variables(messages, rest: dict, tokenizer) -> tuple[dict, set[str]]:
    """What else a line says: variables of the chat template, and keys that it ignores.

    Whether the template reads a key is found by trying. What is empty counts as absent.
    Raises UserError for a key that changes what an answer means and is not written.
    """
    named = rest.pop("chat_template_kwargs", {})
    if not isinstance(named, dict):
        raise common.UserError("chat_template_kwargs is not a JSON object")
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
    reserved -= {"tools", "documents"}
    written = {}
    unread = set()
    plain = _both(messages, tokenizer, {})
    for key, value in {**rest, **named}.items():
        if value in ("", [], {}):
            continue
        texts = None
        if key not in reserved:
            texts = _accepted(messages, tokenizer, written | {key: value})
        # If the template takes this value by default, only its opposite makes a
        # difference.
        if texts and _holds(texts[1], value):
            opposite = written | {key: not value}
            if texts != plain or _accepted(messages, tokenizer, opposite) != texts:
                written[key], plain = value, texts
                continue
        if key in CONDITIONS or key in named:
            raise common.UserError(
                f"the target's chat template does not write {key}; {AS_IT_IS}"
            )
        unread.add(key)
    return written, unread


def _both(messages, tokenizer, variables: dict) -> tuple[str, str]:
    """The request for the last answer, and the whole conversation."""
    request = render(messages[:-1], tokenizer, variables, ask=True)
    return request, render(messages, tokenizer, variables)


def _accepted(messages, tokenizer, variables: dict) -> tuple[str, str] | None:
    """As `_both`; None if these variables are refused.

    A name may be that of a parameter in transformers, or of a function that the
    template calls, such as namespace.
    """
    try:
        return _both(messages, tokenizer, variables)
    except common.UserError:
        return None


def _holds(text: str, value) -> bool:
    """Whether all words of a JSON value are in a text, as they are or as JSON."""
    if isinstance(value, str):
        as_json = json.dumps(value, ensure_ascii=False)[1:-1]
        return value.strip() in text or as_json in text
    if isinstance(value, dict):  # templates may leave out ids and types
        return all(_holds(text, x) for k, x in value.items() if k not in ("id", "type"))
    return not isinstance(value, list) or all(_holds(text, x) for x in value)


def _locate(messages, variables: dict, tokenizer) -> tuple[list[int], list, set[str]]:
    """Token ids of a conversation, where its answers start and stop, fields not read.

    An answer that cannot be located stops where it starts.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    unread = set()
    whole = render(messages, tokenizer, variables)
    for message in messages:
        if message["role"] != "assistant":
            unread |= _unread_fields(message, whole)
    # The conversation up to each answer, as it was when the target wrote this answer.
    moments = []
    for n in places:
        *moment, fields = _last_answer(messages[: n + 1], variables, tokenizer)
        moments.append(moment)
        unread |= fields
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
            "the answer cannot be located: it is empty, or the chat template rewrites "
            "what is before it; give prompt_ids and response_ids"
        )
    return ids, answers, unread


def _last_answer(messages, variables, tokenizer) -> tuple[list[int], int, set[str]]:
    """Token ids up to the end of the last message, where it starts, fields not read.

    Raises UserError if the template does not write all that the message says.
    """
    if len(messages) == 1:  # nobody asked, and transformers renders no empty chat
        return [], 0, set()
    request, text = _both(messages, tokenizer, variables)
    before = render(messages[:-1], tokenizer, variables)
    turn = text[_shared(before, text) :]
    unread = _unread_fields(messages[-1], turn)
    begin = _shared(request, text)  # where the answer begins in the text
    if tail := _special_tail(tokenizer).search(text, begin):
        # The target stops at the first of the special tokens at the end. Templates may
        # write more, such as a newline or another end.
        said = json.dumps(messages[-1], ensure_ascii=False)
        if tail[1] in text[begin : tail.start()] and tail[1] in said:
            raise common.UserError(
                f"an answer continues after its end, {tail[1]}; cut it there"
            )
        text = text[: tail.end(1)]
    request_ids, ids = token_ids(request, tokenizer), token_ids(text, tokenizer)
    start = _shared(request_ids, ids)
    if begin < len(request):
        # Some templates ask for an answer with the head of a thought, which a finished
        # answer lacks. But what comes before the head has to be the same.
        start = start if text.startswith(before) else len(ids)
    elif start < len(request_ids):
        # A token holds the end of the request and the beginning of the answer, such as
        # two newlines. After this request the target cannot write it, so it is not
        # learned, but only the tokens behind it, which are those of the answer alone.
        alone = token_ids(text[begin:], tokenizer)
        start = len(ids) - _shared(alone[::-1], ids[::-1])
    return ids, start, unread


def _unread_fields(message: dict, text: str) -> set[str]:
    """The fields of a message that the template does not write in a text.

    Raises UserError if one of them changes what is said: the content, a thought, a
    call, a picture.
    """
    if not _holds(text, message["content"]):
        raise _unwritten(f"the whole text of messages by {message['role']}")
    unread = set()
    for key in message.keys() - {"role", "content"}:
        # Numbers and marks, such as {"train": false}, cannot be found in a text.
        findable = isinstance(message[key], (str, list, dict))
        if not (findable and _holds(text, message[key])):
            if key in PARTS | CONDITIONS:
                raise _unwritten(key)
            unread.add(f"{key} of messages")
    for call in message.get("tool_calls", []):
        # As text, arguments have to be written as they are: as JSON of a text they
        # would be quoted twice.
        match call:
            case {"function": {"arguments": str(arguments)}}:
                if arguments not in text:
                    raise _unwritten("arguments that are text instead of an object")
    return unread


def _unwritten(thing: str) -> common.UserError:
    return common.UserError(
        f"the target's chat template does not write {thing}; {AS_IT_IS}"
    )


@functools.lru_cache(maxsize=1)  # some tokenizers have thousands
def _special_tail(tokenizer) -> re.Pattern:
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
    """Yield the sequences (batch_size,) of each step, and fresh seeds (batch_size,).

    They depend on the step's number and `seed` alone. Every epoch is a new permutation,
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
                chance = torch.Generator().manual_seed(seed * 7_368_787 + step)
                seeds = torch.randint(2**31, (batch_size,), generator=chance)
                yield batches[place], seeds


# ---------------------------------------------------------------------------- prompts


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all).

    Returns {"question_id", "category", "turns"} of each.
    Raises UserError for a missing file, a line that is not a prompt, or no line at all.
    """
    prompts = []
    for path in paths:
        if not path.exists():
            raise common.UserError(f"no prompt file {path}: check the path")
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
    check_text("".join(turns))
    return turns
