"""Conversations and prompts: read, check, order for training."""

import functools
import gzip
import itertools
import json
import os
import re
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import common

# ShareGPT's names, and those of chat templates.
NAMES = {"from": "role", "value": "content"}
ROLES = {"human": "user", "gpt": "assistant"}
# What a message may say beside its content.
BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# The chat template of a target that has none.
PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


# ---------------------------------------------------------------------- conversations


def read_conversations(
    path: str, tokenizer, max_length: int, target=None
) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks, each (T,), of a JSONL file, plain or gzipped.

    A line is {"prompt_ids", "response_ids"}, {"prompt", "response"} or {"prompt",
    "completion"}, {"messages"}, or ShareGPT's {"conversations"}. The loss is on the
    assistant's tokens. Lines that cannot be used are reported on stderr, and so are
    answers that are cut or not learned.

    max_length: tokens that are kept of each.
    Raises UserError for no file, no JSONL, or no line that can be used.
    """
    sequences = []
    skipped = defaultdict(list)  # numbers of lines, by the reason
    cut = lost = 0  # answers
    limit = f"{max_length} tokens (--max-length or the target's context)"
    lines = _lines(path)
    for number, line in tqdm(lines, f"reading {path}", leave=False, disable=None):
        try:
            ids, answers = _tokenize(_object(line), tokenizer)
            if target is not None:  # which may have fewer tokens than the tokenizer
                common.check_ids(target, torch.tensor(ids))
            mask = _loss_mask(len(ids), answers)[:max_length]
            if not mask.any():
                raise common.UserError(f"no answer within {limit}")
        except common.UserError as reason:
            skipped[str(reason)].append(number)
            continue
        sequences.append((torch.tensor(ids[:max_length]), mask))
        cut += sum(stop > max_length for _, stop in answers)
        lost += sum(start == stop for start, stop in answers)

    notes = [_skip_note(reason, numbers) for reason, numbers in skipped.items()]
    if not sequences:
        reasons = "; ".join(notes[:3]) or "it is empty"
        raise common.UserError(f"{path} holds nothing to learn from: {reasons}")
    if skipped:
        notes.append(f"skipped {len(lines) - len(sequences)} of {len(lines)} lines")
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


def _lines(path: str) -> list[tuple[int, bytes]]:
    """The lines of a file with their numbers, without blank ones."""
    if Path(path).is_dir():
        raise common.UserError(f"{path} is a folder: name its files")
    if not Path(path).exists():
        raise common.UserError(f"no file {path}: name one that is there")
    content = Path(path).read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise common.UserError(
                f"{path} is damaged ({error}); make it again"
            ) from error
    if content.lstrip().startswith(b"["):
        raise common.UserError(
            f"{path} is a JSON array; data is JSONL, an object a line: "
            "jq -c '.[]' FILE > NEW.jsonl"
        )
    if content.startswith(b"PAR1"):
        raise common.UserError(
            f"{path} is Parquet; data is JSONL, which pandas writes: "
            "read_parquet(FILE).to_json('NEW.jsonl', orient='records', lines=True)"
        )
    return [item for item in enumerate(content.split(b"\n"), 1) if item[1].strip()]


def _object(line: bytes) -> dict:
    """The JSON object that a line holds."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise common.UserError("the JSON is nested too deep") from None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise common.UserError("no JSON object")
    return record


def _tokenize(record: dict, tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a line, and where its answers start and stop in them."""
    if not {"prompt_ids", "response_ids"} <= record.keys():
        messages, tools = _conversation(record)
        return _locate(messages, tools, tokenizer)
    prompt, response = record["prompt_ids"], record["response_ids"]
    lists = isinstance(prompt, list) and isinstance(response, list)
    ids = prompt + response if lists else [None]
    if not all(type(x) is int and 0 <= x < len(tokenizer) for x in ids):
        raise common.UserError(
            f"token ids must be lists of numbers from 0 to below {len(tokenizer)}; "
            "make data for this target with train.py --make-data"
        )
    if not response or len(ids) == 1:
        raise common.UserError("response_ids hold nothing to learn")
    return ids, [(len(prompt), len(ids))]


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
    return f"line {', '.join(map(str, numbers[:5]))}{more}: {reason}"


# ------------------------------------------------------------ from a line to messages


def _conversation(record: dict) -> tuple[list[dict], list | None]:
    """The messages of a line and its tools, as chat templates want them."""
    answer = next((key for key in ("response", "completion") if key in record), None)
    if "prompt" in record and answer:
        turns = []
        for role, said in (("user", record["prompt"]), ("assistant", record[answer])):
            # TRL's prompts and completions may be lists of messages.
            turns += (
                said if isinstance(said, list) else [{"role": role, "content": said}]
            )
    else:
        turns = record.get("messages") or record.get("conversations")
        if not isinstance(turns, list):
            raise common.UserError(
                "no conversation; give prompt and response (or completion), messages, "
                "conversations (ShareGPT's), or prompt_ids and response_ids"
            )
    if record.get("system"):
        turns = [{"role": "system", "content": record["system"]}, *turns]
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise common.UserError("its tools are not valid JSON") from None
    return [_message(turn) for turn in turns], tools or None


def _message(turn) -> dict:
    """A message with its role, its content and all else that it says."""
    if not isinstance(turn, dict):
        raise common.UserError("a message is not a JSON object")
    # transformers leaves null out as well.
    told = {key: value for key, value in turn.items() if value not in (None, [])}
    message = {NAMES.get(key, key): value for key, value in told.items()}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    if content is None and any(key in message for key in BESIDE):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise common.UserError(
            "a message needs a role, and content that is text or parts of text"
        )
    return message | {"role": ROLES.get(role, role), "content": content}


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


def render(
    messages: list[dict], tokenizer, tools: list | None = None, ask=False
) -> str:
    """Messages in the target's chat template, and the head of an answer if `ask`.

    Raises UserError if the template does not accept them, or their text is broken.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=None if tokenizer.chat_template else PLAIN,
            add_generation_prompt=ask,
            tokenize=False,
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
    # A chat template writes the special tokens itself.
    special = not tokenizer.chat_template
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def _locate(messages, tools, tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids up to the last answer's end, and where answers start and stop in them.

    An answer that cannot be located stops where it starts.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise common.UserError("no answer, a message by assistant (ShareGPT's gpt)")
    _check_complete(messages[: places[-1] + 1], tools, tokenizer)
    # The conversation up to each answer, as it was when the target wrote this answer.
    moments = [_last_answer(messages[: n + 1], tools, tokenizer) for n in places]
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
            "the answer cannot be located, because the chat template rewrites what "
            "stands before it, or because nobody asked; give prompt_ids and "
            "response_ids"
        )
    return ids, answers


def _last_answer(messages, tools, tokenizer) -> tuple[list[int], int]:
    """Token ids up to the end of the last message, and where it starts in them."""
    if len(messages) == 1:  # nobody asked, and transformers renders no empty chat
        return [], 0
    request = render(messages[:-1], tokenizer, tools, ask=True)
    text = render(messages, tokenizer, tools)
    begin = _shared(request, text)  # where the answer begins in the text
    if tail := _special_tail(tokenizer).search(text, begin):
        # The target stops at the first of the special tokens at the end. Templates go
        # on, with a newline or another end.
        text = text[: text.index(tail[1], begin) + len(tail[1])]
    request_ids, ids = token_ids(request, tokenizer), token_ids(text, tokenizer)
    start = _shared(request_ids, ids)
    if begin < len(request):
        # Some templates ask for an answer with the head of a thought, which is not
        # there once the answer is. But what stands before the head has to be the same.
        before = render(messages[:-1], tokenizer, tools)
        start = start if text.startswith(before) else len(ids)
    elif start < len(request_ids):
        # A token holds the end of the request and the beginning of the answer, such as
        # two newlines. After this request the target cannot write it, so it is not
        # learned, but only the tokens behind it, which are those of the answer alone.
        alone = token_ids(text[begin:], tokenizer)
        start = len(ids) - _shared(alone[::-1], ids[::-1])
    return ids, start


@functools.lru_cache(maxsize=1)  # some tokenizers have thousands
def _special_tail(tokenizer) -> re.Pattern:
    """Finds special tokens at the end of a text; its group 1 is the first of them."""
    tokens = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    one = "|".join(map(re.escape, tokens)) or "(?!)"  # or none
    return re.compile(rf"({one})(?:\s|{one})*\Z")


def _check_complete(messages, tools, tokenizer) -> None:
    """Refuse a conversation if the chat template leaves something out of it."""
    whole = render(messages, tokenizer, tools)
    for thing, (changed, given) in _changed(messages, tools).items():
        if (changed, given) == (messages, tools):  # it is not there
            continue
        try:
            left_out = render(changed, tokenizer, given) == whole
        except common.UserError:  # the template looks at it
            continue
        if left_out:
            raise common.UserError(
                f"the target's chat template does not write {thing}; leave it out of "
                "the data, or take another target"
            )


def _changed(messages: list[dict], tools) -> dict[str, tuple[list[dict], list | None]]:
    """{thing: (messages, tools)}: the conversation without the thing, or with another.

    If there is no such thing in it, they are equal.
    """
    others = {"tools": (messages, None)}
    for key in BESIDE:
        without = [{k: m[k] for k in m if k != key or not m[k]} for m in messages]
        others[key] = (without, tools)
    for role in {message["role"] for message in messages} - {"user", "assistant"}:
        without = [m for m in messages if m["role"] != role or not m["content"]]
        others[f"messages by {role}"] = (without, tools)
    said = {"content": "something else"}
    other = [
        m | said if m["role"] == "assistant" and m["content"] else m for m in messages
    ]
    return others | {"the content of answers": (other, tools)}


def _shared(some, others) -> int:
    """How many characters or ids two texts or lists begin with in common."""
    return len(os.path.commonprefix([some, others]))


# -------------------------------------------------------------- sequences for training


def join_turns(sequences: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Drop a sequence that another one begins with, which learns its tokens.

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


def steps(lengths: list[int], batch_size: int, seed: int, start: int = 0):
    """Yield the sequences (batch_size,) of each step, and fresh seeds (batch_size,).

    They depend on the step's number and `seed` alone. Every epoch is a new permutation,
    without what is left over from full batches.

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
    Raises UserError for a missing file, a line that is no prompt, or no line at all.
    """
    prompts = []
    for path in paths:
        if not path.exists():
            raise common.UserError(f"no prompt file {path}: name one that is there")
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
