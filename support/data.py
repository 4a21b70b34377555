"""Conversations and prompts: read, check, order for training."""

import gzip
import itertools
import json
import zlib
from pathlib import Path

import jinja2
import torch
from torch import Tensor
from tqdm import tqdm

import common

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names

# ----------------------------------------------------------------------------- conversations


def read_conversations(path: str, tokenizer, max_length: int) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks, each (T,), of a .jsonl or .jsonl.gz file.

    A line is {"prompt_ids", "response_ids"}, {"prompt", "response"},
    {"messages"} or ShareGPT's {"conversations"}. The loss is on the
    assistant's tokens.

    Raises:
        UserError: missing or empty file, or a line of none of these forms.
    """
    sequences = []
    for number, record in tqdm(_records(path), desc=f"reading {path}", leave=False, disable=None):
        try:
            ids, mask = _tokenize(record, tokenizer)
        except (common.UserError, jinja2.TemplateError) as error:
            raise common.UserError(f"{path}, line {number}: {error}") from error
        mask = mask[:max_length]
        if any(mask[1:]):
            mask[0] = False  # nothing predicts the first token
            sequences.append((torch.tensor(ids[:max_length]), torch.tensor(mask)))
    if not sequences:
        raise common.UserError(f"{path} holds no conversation with a response to learn from")
    return sequences


def _records(path: str) -> list[tuple[int, dict]]:
    """Line numbers and JSON objects of a file, without blank lines."""
    if Path(path).is_dir():
        raise common.UserError(f"{path} is a folder: name its files")
    if not Path(path).is_file():
        raise common.UserError(
            f"no data file {path}; train.py --make-data 2000 --out FILE makes one"
        )
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            lines = file.readlines()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise common.UserError(f"{path} is damaged or not gzip ({error}); make it again") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise common.UserError(f"{path}, line {number}: no JSON object")
        records.append((number, record))
    return records


def _tokenize(record: dict, tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a record, and which of them are to be learned."""
    try:
        if "prompt_ids" in record:
            prompt, response = record["prompt_ids"], record["response_ids"]
            ids = prompt + response
            if not all(type(x) is int and 0 <= x < len(tokenizer) for x in ids):
                raise common.UserError(
                    f"token ids must be from 0 to below {len(tokenizer)}; make data for this "
                    "target with train.py --make-data"
                )
            return ids, [False] * len(prompt) + [True] * len(response)
        messages = _messages(record)
    except (KeyError, TypeError):
        raise common.UserError(
            "no conversation; give prompt and response, messages, conversations (ShareGPT's), or "
            "prompt_ids and response_ids"
        ) from None
    if tokenizer.chat_template:
        return _templated(messages, tokenizer)
    ids, mask = [], []
    for message in messages:
        text = message["content"] + "\n"
        piece = tokenizer(text, add_special_tokens=not ids)["input_ids"]
        ids += piece
        mask += [message["role"] == "assistant"] * len(piece)
    return ids, mask


def _messages(record: dict) -> list[dict]:
    """What was said, as the chat templates of transformers want it."""
    if {"prompt", "response"} <= record.keys():
        said = [("user", record["prompt"]), ("assistant", record["response"])]
    elif "messages" in record:
        said = [(turn["role"], turn["content"]) for turn in record["messages"]]
    else:
        said = [(turn["from"], turn["value"]) for turn in record["conversations"]]
    if not all(isinstance(text, str) for _, text in said):
        raise TypeError
    return [{"role": ROLES.get(role, role), "content": text} for role, text in said]


def _templated(messages: list[dict], tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids in the chat template, and which to learn, up to the last answer."""
    ids, mask = [], []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:  # transformers fills in no template without a message
            raise common.UserError("the conversation begins with an answer: leave the answer out")
        asked = tokenizer.apply_chat_template(
            messages[:index], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        said = tokenizer.apply_chat_template(messages[: index + 1], return_dict=True)["input_ids"]
        if asked[: len(ids)] != ids or said[: len(asked)] != asked:
            raise common.UserError(
                "the chat template rewrites earlier turns, or the tokenizer merges a request and "
                "its answer, so answers cannot be located; give prompt_ids and response_ids"
            )
        mask += [False] * (len(asked) - len(ids)) + [True] * (len(said) - len(asked))
        ids = said
    return ids, mask


def chat(texts: list[str]) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# --------------------------------------------------------------------- sequences for training


def join_turns(sequences: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Drop a sequence that another one begins with, which learns its tokens.

    A first turn is then computed once and learned in one two-turn sequence
    only. If that one is held out, so is its first turn.
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

    They depend on the step's number and `seed` alone. Every epoch is a new
    permutation, without what is left over from full batches. To save padding,
    32 batches at a time are sorted by length.

    Args: lengths: tokens of each sequence. start: the first step.
    """
    lengths = torch.tensor(lengths)
    count = len(lengths)
    indices = torch.arange(count).repeat(-(-batch_size // count))  # a batch at least
    per_epoch = len(indices) // batch_size
    for epoch in itertools.count(start // per_epoch):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = indices[torch.randperm(len(indices), generator=generator)]
        batches = []
        for window in order[: per_epoch * batch_size].split(32 * batch_size):
            window = window[lengths[window].argsort(stable=True)]
            batches += window.split(batch_size)
        shuffled = torch.randperm(per_epoch, generator=generator).tolist()
        for step, place in enumerate(shuffled, epoch * per_epoch):
            if step >= start:
                generator = torch.Generator().manual_seed(seed * 7_368_787 + step)
                yield batches[place], torch.randint(2**31, (batch_size,), generator=generator)


# ----------------------------------------------------------------------------------- prompts


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all).

    Returns: of each {"question_id", "category", "turns"}.
    """
    prompts = []
    for path in paths:
        if not path.exists():
            raise common.UserError(f"no prompt file {path}")
        for number, record in _records(str(path)):
            turns = record.get("turns")
            if not (isinstance(turns, list) and turns and all(isinstance(x, str) for x in turns)):
                raise common.UserError(f'{path}, line {number}: no "turns", a list of texts')
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
