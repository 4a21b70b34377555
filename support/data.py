"""Conversations and prompts: read, check, hold out, order for training."""

import gzip
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
    {"messages"}, ShareGPT's {"conversations"} or {"text"}. The loss is on
    the assistant's tokens, and on all tokens of a plain text.

    Raises:
        Mistake: missing or empty file, or a line of none of these forms.
    """
    sequences = []
    for number, record in tqdm(_records(path), desc=f"reading {path}", leave=False, disable=None):
        try:
            ids, mask = _tokenize(record, tokenizer)
        except (common.Mistake, jinja2.TemplateError) as error:
            raise common.Mistake(f"{path}, line {number}: {error}") from error
        mask = mask[:max_length]
        if any(mask[1:]):
            mask[0] = False  # nothing predicts the first token
            sequences.append((torch.tensor(ids[:max_length]), torch.tensor(mask)))
    if not sequences:
        raise common.Mistake(f"{path} holds no conversation with a response to learn from")
    return sequences


def _records(path: str) -> list[tuple[int, dict]]:
    """Line numbers and JSON objects of a file, without blank lines."""
    if Path(path).is_dir():
        raise common.Mistake(f"{path} is a folder: name its files")
    if not Path(path).is_file():
        raise common.Mistake(f"no data file {path}; train.py --make-data 2000 --out FILE makes one")
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            lines = file.readlines()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise common.Mistake(f"{path} is damaged or not gzip ({error}); make it again") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise common.Mistake(f"{path}, line {number}: no JSON ({error})") from error
        if not isinstance(record, dict):
            raise common.Mistake(f"{path}, line {number}: no JSON object")
        records.append((number, record))
    return records


def _tokenize(record: dict, tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a record, and which of them are to be learned."""
    if {"prompt_ids", "response_ids"} <= record.keys():
        prompt, response = record["prompt_ids"], record["response_ids"]
        size = len(tokenizer)
        lists = isinstance(prompt, list) and isinstance(response, list)
        if not (lists and all(type(x) is int and 0 <= x < size for x in prompt + response)):
            raise common.Mistake(
                f"prompt_ids and response_ids must be lists of ids below {size}; make data for "
                "this target with train.py --make-data"
            )
        return prompt + response, [False] * len(prompt) + [True] * len(response)
    if isinstance(record.get("text"), str):
        ids = tokenizer(record["text"])["input_ids"]
        return ids, [True] * len(ids)
    try:
        messages = _messages(record)
    except (KeyError, TypeError):
        raise common.Mistake(
            "no conversation; give prompt and response, messages, conversations (ShareGPT's), "
            "text, or prompt_ids and response_ids"
        ) from None
    pieces = _templated if tokenizer.chat_template else _joined
    ids, mask = [], []
    for message, piece in pieces(messages, tokenizer):
        learned = message["role"] == "assistant" and bool(message["content"].strip())
        ids += piece
        mask += [learned] * len(piece)
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


def _joined(messages: list[dict], tokenizer):
    """Each message and its ids, as one text without a chat template."""
    for index, message in enumerate(messages):
        text = message["content"] + "\n"
        yield message, tokenizer(text, add_special_tokens=index == 0)["input_ids"]


def _templated(messages: list[dict], tokenizer):
    """Each message and the ids that it adds, by the chat template."""
    done = []  # ids of the turns before
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:  # transformers fills in no template without a message
            raise common.Mistake("the conversation begins with an answer: leave the answer out")
        asked = tokenizer.apply_chat_template(
            messages[:index], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        ids = tokenizer.apply_chat_template(messages[: index + 1], return_dict=True)["input_ids"]
        if asked[: len(done)] != done or ids[: len(asked)] != asked:
            raise common.Mistake(
                "the chat template rewrites earlier turns, or the tokenizer merges a request and "
                "its answer, so answers cannot be located; give prompt_ids and response_ids"
            )
        yield {"role": "user"}, asked[len(done) :]
        yield message, ids[len(asked) :]
        done = ids


def chat(texts: list[str]) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# --------------------------------------------------------------------- sequences for training


def join_turns(sequences: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Drop a sequence that another one begins with, which learns its tokens.

    A first turn is then computed once, within the two-turn sequence.
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


def hold_out(sequences: list[tuple[Tensor, Tensor]], count: int) -> tuple[list, list]:
    """The last `count` sequences, and the earlier ones that share no text.

    Two share a text if one begins with the other, such as a first turn with
    the same and a second one.

    Raises: Mistake: nothing is left to train on.
    """
    border = len(sequences) - count
    held_out = [ids.tolist() for ids, _ in sequences[border:]]
    kept = []
    for ids, mask in sequences[:border]:
        ours = ids.tolist()
        same = (ours[: len(theirs)] == theirs[: len(ours)] for theirs in held_out)
        if not any(same):
            kept.append((ids, mask))
    if not kept:
        raise common.Mistake(
            f"every conversation is among the {count} held out; give more data, or a smaller "
            "--held-out"
        )
    return sequences[border:], kept


def token_counts(sequences, vocab_size: int) -> Tensor:
    """How often each token (V,) is to be predicted; prompts do not count."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids, mask in sequences:
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


class Order:
    """Which sequences a step trains on, as a function of its number.

    Every epoch is a new permutation. To save padding, WINDOW batches at a
    time are sorted by length, cut into batches, and shuffled as batches.

    Args: lengths: tokens of each sequence.
    """

    WINDOW = 32

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epochs: dict[int, list[int]] = {}

    def epoch(self, number: int) -> list[int]:
        """An epoch's permutation; it first completes the batch before."""
        if number in self.epochs:
            return self.epochs[number]
        count = len(self.lengths)
        size = self.batch_size
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(count, generator=generator)
        begun = -number * count % size
        parts = [order[:begun]]
        for window in order[begun:].split(self.WINDOW * size):
            window = window[self.lengths[window].argsort(stable=True)]
            whole = len(window) // size
            shuffled = torch.randperm(whole, generator=generator).tolist()
            parts += [window[i * size : (i + 1) * size] for i in shuffled]
            parts.append(window[whole * size :])
        self.epochs[number] = torch.cat(parts).tolist()
        return self.epochs[number]

    def step(self, step: int) -> tuple[list[int], Tensor]:
        """A step's sequences (batch_size,), with fresh seeds (batch_size,)."""
        size = self.batch_size
        count = len(self.lengths)
        places = range(step * size, (step + 1) * size)
        chosen = [self.epoch(place // count)[place % count] for place in places]
        generator = torch.Generator().manual_seed(self.seed * 7_368_787 + step)
        return chosen, torch.randint(2**31, (size,), generator=generator)


# ----------------------------------------------------------------------------------- prompts


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all).

    Returns: of each {"question_id", "category", "turns"}.
    """
    prompts = []
    for path in paths:
        if not path.exists():
            raise common.Mistake(f"no prompt file {path}")
        for number, record in _records(str(path)):
            turns = record.get("turns")
            if not (isinstance(turns, list) and turns and all(isinstance(x, str) for x in turns)):
                raise common.Mistake(f'{path}, line {number}: no "turns", a list of texts')
            prompts.append(
                {
                    "question_id": record.get("question_id", f"{path.stem}-{number}"),
                    "category": str(record.get("category", path.stem)),
                    "turns": turns,
                }
            )
    if not prompts:
        raise common.Mistake('no prompts: give a file with lines {"turns": ["..."]}')
    count = min(count or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def read_requests(path: str) -> list[str]:
    """A file's requests: one per line, or first turns of FastChat's .jsonl."""
    if path.endswith((".jsonl", ".jsonl.gz")):
        return [prompt["turns"][0] for prompt in read_prompts([Path(path)], 0)]
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
