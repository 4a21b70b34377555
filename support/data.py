"""Conversations in and out: read prompts and training data, or let a chat target write its own.

`make_conversations` is self-distillation in the manner of Magpie (Xu et al. 2024,
arXiv:2406.08464): given its chat template up to where the user's words would begin, an instruct
model writes a plausible request, and then answers it.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import zlib
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from support import talks
from support.prompts import encode

SECOND_REQUESTS = (  # how second requests begin, "" leaving it to the target
    *("Rewrite your previous answer", "Make it shorter", "Summarise", "Translate your answer"),
    *("Explain why", "Give me an example of", "Now write", "What if", "List the", "Using the"),
    *("Which of these", "", "", "", "", ""),
)

# ------------------------------------------------------------------------------------------ reading


def read_conversations(path: str, tokenizer, max_length: int) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks, each (T,), of every conversation in a .jsonl or .jsonl.gz file.

    A line is {"prompt_ids", "response_ids"}, {"prompt", "response"}, {"messages"}, ShareGPT's
    {"conversations"}, or {"text"}. The loss is on what the assistant says, on everything for plain
    text.

    Raises:
        ValueError: missing or empty file, or a line that is not of these forms, with its number.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"no data file {path}; make one with train.py --make-data 2000 --out {path}"
        )
    sequences = []
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                ids, mask = _tokenize(json.loads(line), tokenizer)
                if not all(type(token) is int for token in ids):
                    raise TypeError("token ids must be integers")
            except Exception as error:  # whatever the tokenizer or its template makes of it
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"{path}, line {number}: not a conversation ({reason}); give prompt and "
                    "response, messages, conversations, text, or prompt_ids and response_ids"
                ) from None
            if ids and (min(ids) < 0 or max(ids) >= len(tokenizer)):
                raise ValueError(
                    f"{path}, line {number}: token ids {min(ids)} to {max(ids)}, but the target "
                    f"has {len(tokenizer)} tokens; make data for this target with "
                    "train.py --make-data"
                )
            if any(mask[1:max_length]):
                mask = [False, *mask[1:max_length]]  # nothing predicts the first token
                sequences.append((torch.tensor(ids[:max_length]), torch.tensor(mask)))
    if not sequences:
        raise ValueError(f"{path} holds no conversation with a response")
    return sequences


def join_turns(sequences: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Leave out every sequence that begins another one, which then learns the same tokens.

    So the first turn of a conversation is computed once, not once more as the second's prompt.
    """
    ids = [each.tolist() for each, _ in sequences]
    masks = [mask.clone() for _, mask in sequences]
    begins = set()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for short, long in zip(order, order[1:]):  # what begins others is sorted right before them
        length = len(ids[short])
        if ids[long][:length] == ids[short]:
            masks[long][:length] |= masks[short]
            begins.add(short)
    return [(sequences[i][0], masks[i]) for i in range(len(ids)) if i not in begins]


def hold_out(sequences: list[tuple[Tensor, Tensor]], count: int) -> tuple[list, list]:
    """The last `count` sequences, and those before them that do not occur among the last.

    Raises: ValueError: nothing is left to train on.
    """
    border = len(sequences) - count
    held_out = sequences[border:]
    unseen = {tuple(ids.tolist()) for ids, _ in held_out}
    kept = [each for each in sequences[:border] if tuple(each[0].tolist()) not in unseen]
    if not kept:
        raise ValueError(
            f"every conversation is among the {count} held out; give more data, or a smaller "
            "--held-out"
        )
    return held_out, kept


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all).

    Returns: of each {"question_id", "category", "turns"}.
    """
    prompts = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"no prompt file {path}")
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                turns = record["turns"]
                if not (isinstance(turns, list) and turns):
                    raise TypeError
                "".join(turns).encode()  # texts only, and no lone half of a surrogate pair
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f'{path}, line {number}: not a JSON object with "turns": ["...", ...]'
                ) from None
            prompt = {"question_id": record.get("question_id", f"{path.stem}-{number}")}
            prompt["category"] = str(record.get("category", path.stem))
            prompts.append(prompt | {"turns": turns})
    if not prompts:
        raise ValueError(
            f"no prompts in {', '.join(map(str, paths)) or 'prompts'}; "
            'give --prompts FILE with lines {"turns": ["..."]}'
        )
    count = min(count or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def read_requests(path: str) -> list[list[str]]:
    """The requests of a file, each a list of turns: one a line, or FastChat's .jsonl."""
    if path.endswith(".jsonl"):
        return [prompt["turns"] for prompt in read_prompts([Path(path)], 0)]
    return [[line] for line in read_lines(path)]


def read_lines(path: str) -> list[str]:
    """The lines of a text file that are not empty."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise ValueError(f"{path} holds no line of text")
    return [line for line in lines if line]


def _lines(file, path: str):
    """The lines of a file; ValueError for a damaged .gz."""
    try:
        yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is damaged or not gzip ({error}); fetch or make it again"
        ) from None


def _tokenize(record: dict, tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a record and whether each is to be learned."""
    if "response_ids" in record:
        prompt, response = list(record["prompt_ids"]), list(record["response_ids"])
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    if "text" in record:
        ids = tokenizer(record["text"])["input_ids"]
        return ids, [True] * len(ids)
    messages = _messages(record)
    if not tokenizer.chat_template:  # no template: the turns' texts one after the other
        ids, mask = [], []
        for index, message in enumerate(messages):
            text = message["content"] + "\n"
            piece = tokenizer(text, add_special_tokens=index == 0)["input_ids"]
            ids += piece
            mask += [message["role"] == "assistant"] * len(piece)
        return ids, mask
    ids, mask = [], []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _template(tokenizer, messages[:index], True)
            ids = _template(tokenizer, messages[: index + 1], False)
            if ids[: len(before)] != before:
                raise ValueError(
                    "the chat template rewrites earlier turns, so answers cannot be located"
                )
            mask += [False] * (len(before) - len(mask)) + [True] * (len(ids) - len(before))
    if not ids:
        raise ValueError("no message of the role assistant")
    return ids, mask


def _messages(record: dict) -> list[dict]:
    """What was said, as the chat templates of transformers want it."""
    if "response" in record:
        messages = _chat([record["prompt"], record["response"]])
    elif "conversations" in record:
        roles = {"human": "user", "gpt": "assistant"}
        roles |= {name: name for name in ("system", "user", "assistant")}
        turns = record["conversations"]
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
    else:
        messages = record["messages"]
    if not all(isinstance(message["content"], str) for message in messages):
        raise TypeError("what is said must be a string")
    return messages


def _chat(texts: list[str]) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def _template(tokenizer, messages: list[dict], open_answer: bool) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=open_answer, return_dict=True
    )
    return encoded["input_ids"]


# ------------------------------------------------------------------------------ what a target says


def evaluation_answers(target, tokenizer, prompts: list[dict], most: int = 128) -> list[dict]:
    """The target's greedy answers to every turn of the prompts, as bench.py would ask for them.

    Returns: {"prompt_ids", "response_ids"} of each; prompts that outgrow the context are left out.
    """
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 2**31
    records, texts = [], [[] for _ in prompts]  # what was said in each conversation
    for turn in range(max(len(prompt["turns"]) for prompt in prompts)):
        asked = {}  # {prompt ids: its conversation}
        for said, prompt in zip(texts, prompts):
            if len(prompt["turns"]) > turn and len(said) == 2 * turn:
                said.append(prompt["turns"][turn])
                ids = encode(tokenizer, said, "cpu")["input_ids"][0].tolist()
                if len(ids) + most <= context:
                    asked[tuple(ids)] = said
        for prompt_ids, answer in talks.replies(target, list(asked), 0.0, most, random.Random(0)):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            asked[prompt_ids].append(text)
            records.append({"prompt_ids": list(prompt_ids), "response_ids": answer})
    return records


def make_conversations(
    target,
    tokenizer,
    count: int,
    path: str,
    seed: int = 0,
    batch_size: int = 64,
    requests: list[list[str]] | None = None,
    openings: list[str] | None = None,
    second_turns: float = 0.0,
    greedy: float = 0.5,
    max_new_tokens: int = 320,
) -> None:
    """Append self-distilled conversations to `path` until it holds `count`.

    The given requests are asked first, then the target thinks up more at temperature 1; those must
    end by themselves, be new and have 4 to 100 words. Answers are greedy or at temperature 0.8. A
    greedy answer is kept as it is, loops included, for that is what users get; a sampled one that
    mostly repeats itself (under 30% distinct 4-grams) is dropped. Every answer is appended by one
    write; an interrupted run goes on where it stopped, and a half-written last line is cut off.

    Args:
        requests: turns of each, from `read_requests`.
        openings: how requests that the target thinks up begin, one drawn for each.
        second_turns: share of conversations with a second turn; their first answer is cut at 40 to
            140 tokens, as an evaluation cuts it, and each turn is a line.
        greedy: share of conversations that are answered greedily.
    Raises:
        ValueError: the target names no end token, or its tokenizer has no chat template, or one
            that does not show where the user's words begin.
    """
    opening, between, closing = _around_requests(tokenizer, second_turns > 0)
    ends = talks.end_tokens(target)
    if not ends:
        raise ValueError(
            "this target's generation config names no eos_token_id, so its answers would never end"
        )
    kept = _whole_lines(path)
    seen = {record["prompt"] for record in kept}
    chance = random.Random(seed * 1_000_003 + len(kept))
    waiting = iter([turns for turns in requests or [] if turns[0] not in seen])
    first_words = openings or [""]
    done, held = len(kept), 0  # lines written, talks that are going on

    def talk(turns: list[str]):
        """One conversation, see talks.converse; returns its lines."""
        temperature = 0.8 * (chance.random() >= greedy)
        two = chance.random() < second_turns
        lines, context, unread = [], [], []  # `unread`: the end of the context, still to be read
        for turn in range(1 + two):
            head = between if turn else opening
            if context and context[-1:] == head[:1]:  # the answer ended by itself
                head = head[1:]
            if turn < len(turns):
                text = turns[turn]
                ids = _ids(tokenizer, text)
                unread = unread + head + ids + closing
            else:
                start = _ids(tokenizer, chance.choice(SECOND_REQUESTS if turn else first_words))
                said = yield unread + head + start, 1.0, 128
                ids = start + said[:-1]
                text = tokenizer.decode(ids, skip_special_tokens=True).strip()
                ended = bool(said) and said[-1] in ends
                if not ended or not 4 <= len(text.split()) <= 100 or (text in seen and not turn):
                    break
                unread = closing
            seen.add(text)
            context = context + head + ids + closing
            first_of_two = two and not turn
            most = min(max_new_tokens, chance.randint(40, 140)) if first_of_two else max_new_tokens
            answer = yield unread, temperature, most
            grams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
            if len(answer) < 2 or (temperature and len(set(grams)) < 0.3 * len(grams)):
                break
            record = {
                "prompt": text,
                "response": tokenizer.decode(answer, skip_special_tokens=True),
                "temperature": temperature,
                "finished": answer[-1] in ends,
                "prompt_ids": context,
                "response_ids": answer,
            }
            lines.append(json.dumps(record) + "\n")
            context, unread = context + answer, answer[-1:]
        return lines

    def begin():
        nonlocal held
        if done + held >= count:
            return None
        held += 1
        return talk(next(waiting, []))

    bar = tqdm(total=count, initial=done, desc="conversations", disable=None)
    with open(path, "ab") as file:
        for lines in talks.converse(target, begin, batch_size, chance):
            held -= 1
            lines = lines[: count - done]
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            done += len(lines)
            bar.update(len(lines))
    bar.close()


def _ids(tokenizer, text: str) -> list[int]:
    """Token ids of a piece of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _around_requests(tokenizer, second: bool) -> tuple[list[int], list[int], list[int]]:
    """What the chat template puts before a request, between an answer and the next, and after."""
    if not tokenizer.chat_template:
        raise ValueError(
            "this target's tokenizer has no chat template; self-distilled data needs a chat model"
        )
    marks = ["USER-WORDS", "MODEL-WORDS", "MORE-WORDS"]
    pieces = _split_at(tokenizer, marks[:1])
    if pieces is None:
        raise ValueError(
            "the chat template does not hold the user's words exactly once, so none can be sampled"
        )
    between = []
    if second:
        longer = _split_at(tokenizer, marks)
        if longer is None or [longer[0], longer[1], longer[3]] != [pieces[0], pieces[1], pieces[1]]:
            raise ValueError("the chat template rewrites earlier turns; leave out --second-turns")
        between = longer[2]
    return pieces[0], between, pieces[1]


def _split_at(tokenizer, marks: list[str]) -> list[list[int]] | None:
    """Ids of what the template puts around the texts of a conversation; None if it changes them."""
    text = tokenizer.apply_chat_template(_chat(marks), tokenize=False, add_generation_prompt=True)
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        pieces.append(before)
    return [_ids(tokenizer, piece) for piece in [*pieces, text]]


def _whole_lines(path: str) -> list[dict]:
    """The records of `path`, which is cut after its last complete line; none if it is missing.

    Raises:
        ValueError: something else is in the file, which is left as it is.
    """
    if path.endswith(".gz") or Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise ValueError(
            f"cannot append to {path}; give --out a plain .jsonl file in a folder that exists"
        )
    if not Path(path).is_file():
        return []
    text = Path(path).read_bytes()
    end = text.rfind(b"\n") + 1
    whole, half = text[:end], text[end:]
    try:
        records = [json.loads(line) for line in whole.splitlines()]
        ours = all(isinstance(record["prompt"], str) for record in records)
    except (ValueError, KeyError, TypeError, RecursionError):
        ours = False
    start = b'{"prompt": "'
    if not ours or half[: len(start)] != start[: len(half)]:
        raise ValueError(f"{path} holds something else than our conversations; give another --out")
    if half:
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return records
