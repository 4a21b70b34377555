"""Conversations in and out: read prompts and training data in the usual forms, or let a chat target
write its own.

`make_conversations` is self-distillation in the manner of Magpie (Xu et al. 2024,
arXiv:2406.08464): given its chat template up to where the user's words would begin, an instruct
model writes a plausible request, and then answers it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache


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
        for number, line in enumerate(_read(file, path), 1):
            if not line.strip():
                continue
            try:
                ids, mask = _tokenize(json.loads(line), tokenizer)
                if not all(type(token) is int for token in ids):
                    raise TypeError("token ids must be integers")
            except Exception as error:  # whatever the tokenizer or its template makes of it
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"{path}, line {number}: not a conversation ({reason})") from None
            if ids and (min(ids) < 0 or max(ids) >= len(tokenizer)):
                raise ValueError(
                    f"{path}, line {number}: token ids {min(ids)} to {max(ids)}, but the target "
                    "has "
                    f"{len(tokenizer)} tokens; make data for this target with train.py --make-data"
                )
            if any(mask[1:max_length]):
                mask = [False, *mask[1:max_length]]
                sequences.append((torch.tensor(ids[:max_length]), torch.tensor(mask)))
    if not sequences:
        raise ValueError(f"{path} holds no conversation with a response")
    return sequences


def hold_out(sequences: list[tuple[Tensor, Tensor]], count: int) -> tuple[list, list]:
    """The last `count` sequences, and those before them that do not occur among the last: they are
    for training.

    Raises:
        ValueError: nothing is left to train on.
    """
    held_out = sequences[len(sequences) - count :]
    unseen = {tuple(ids.tolist()) for ids, _ in held_out}
    kept = [
        each
        for each in sequences[: len(sequences) - count]
        if tuple(each[0].tolist()) not in unseen
    ]
    if not kept:
        raise ValueError(
            f"every conversation is among the {count} held out; give more data, or a smaller "
            "--held-out"
        )
    return held_out, kept


def read_prompts(paths: list[Path], count: int) -> list[dict]:
    """`count` prompts spread evenly over the files (0: all), each {"question_id", "category",
    "turns"}."""
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
                if (
                    not isinstance(turns, list)
                    or not turns
                    or not all(isinstance(turn, str) for turn in turns)
                ):
                    raise TypeError
                "".join(turns).encode()  # a lone half of a surrogate pair is JSON and no text
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ValueError(
                    f'{path}, line {number}: not a JSON object with "turns": ["...", ...]'
                ) from None
            prompts.append(
                {
                    "question_id": record.get("question_id", f"{path.stem}-{number}"),
                    "category": str(record.get("category", path.stem)),
                    "turns": turns,
                }
            )
    if not prompts:
        raise ValueError(
            f"no prompts in {', '.join(map(str, paths)) or 'prompts'}; "
            'give --prompts FILE with lines {"turns": ["..."]}'
        )
    count = min(count or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _read(file, path: str):
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
    if "response" in record:
        messages = [
            {"role": "user", "content": record["prompt"]},
            {"role": "assistant", "content": record["response"]},
        ]
    elif "conversations" in record:
        roles = {
            "human": "user",
            "gpt": "assistant",
            "system": "system",
            "user": "user",
            "assistant": "assistant",
        }
        messages = [
            {"role": roles[turn["from"]], "content": turn["value"]}
            for turn in record["conversations"]
        ]
    else:
        messages = record["messages"]
    if not all(isinstance(message["content"], str) for message in messages):
        raise TypeError("what is said must be a string")
    if not tokenizer.chat_template:  # no template: the turns' texts one after the other
        pieces = [
            tokenizer(m["content"] + "\n", add_special_tokens=not i)["input_ids"]
            for i, m in enumerate(messages)
        ]
        said = [m["role"] == "assistant" for m in messages]
        return sum(pieces, []), [s for piece, s in zip(pieces, said) for _ in piece]
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


def _template(tokenizer, messages: list[dict], open_answer: bool) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=open_answer, return_dict=True
    )["input_ids"]


def make_conversations(
    target,
    tokenizer,
    count: int,
    path: str,
    seed: int = 0,
    batch_size: int = 16,
    max_new_tokens: int = 320,
) -> None:
    """Append self-distilled conversations to `path` until it holds `count`.

    Every second batch is answered greedily, the others at temperature 0.8. Requests must end by
    themselves, be new and have 4 to 100 words; answers that mostly repeat themselves (under 30%
    distinct 4-grams) are dropped. A batch is appended by one write; an interrupted run goes on
    where it stopped, and a half-written last line is cut off.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not show where the user's
            words begin.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "this target's tokenizer has no chat template; self-distilled data needs a chat model"
        )
    mark = "USER-WORDS"
    marked = [{"role": "user", "content": mark}]
    shape = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    if shape.count(mark) != 1:
        raise ValueError(
            "the chat template does not hold the user's words exactly once, so none can be sampled"
        )
    opening, closing = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in shape.split(mark)
    )
    ends = target.generation_config.eos_token_id
    if ends is None:
        raise ValueError(
            "this target's generation config names no eos_token_id, so its answers would never end"
        )
    ends = set(ends if isinstance(ends, list) else [ends])
    kept = _whole_lines(path)
    seen = {record["prompt"] for record in kept}
    bar = tqdm(total=count, initial=len(kept), desc="conversations", disable=None)
    done = tried = len(kept)
    while done < count:
        torch.manual_seed(seed * 1_000_003 + tried)
        tried += batch_size
        temperature = 0.8 * (tried // batch_size % 2)
        requests = _continue(target, [opening] * batch_size, ends, 128, 1.0)
        prompts = []
        for ids in requests:
            text = tokenizer.decode(ids[:-1], skip_special_tokens=True).strip()
            if ids[-1] in ends and 4 <= len(text.split()) <= 100 and text not in seen:
                seen.add(text)
                prompts.append((text, opening + ids[:-1] + closing))
        lines = []
        answers = _continue(target, [p for _, p in prompts], ends, max_new_tokens, temperature)
        for (text, prompt_ids), ids in zip(prompts, answers):
            grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
            if len(ids) > 1 and len(set(grams)) >= 0.3 * len(grams):
                lines.append(
                    json.dumps(
                        {
                            "prompt": text,
                            "response": tokenizer.decode(ids, skip_special_tokens=True),
                            "temperature": temperature,
                            "finished": ids[-1] in ends,
                            "prompt_ids": prompt_ids,
                            "response_ids": ids,
                        }
                    )
                    + "\n"
                )
        lines = lines[: count - done]
        with open(path, "ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        done += len(lines)
        bar.update(len(lines))
    bar.close()


def _whole_lines(path: str) -> list[dict]:
    """The records of the complete lines of `path`, which is cut after the last of them; none if
    there is no such file.

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
    whole, half = text[: (end := text.rfind(b"\n") + 1)], text[end:]
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


def _continue(
    target, prompts: list[list[int]], ends: set[int], max_new_tokens: int, temperature: float
) -> list:
    """New token ids, the end token included, for prompts of different lengths, batched with left
    padding.

    Every 32 tokens the rows that have ended leave the batch.
    """
    longest, pad, result = max(map(len, prompts), default=0), min(ends), [[] for _ in prompts]
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device
    )
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    rows, cache = list(range(len(prompts))), DynamicCache(config=target.config)
    while rows:
        start = ids.shape[1]
        new = min(32, longest + max_new_tokens - start)
        ids = target.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=new,
            pad_token_id=pad,
            **sampling,
        )
        going = []
        for place, (row, tokens) in enumerate(zip(rows, ids[:, start:].tolist())):
            end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
            result[row] += tokens[:end]
            if end is None and len(result[row]) < max_new_tokens:
                going.append(place)
        rows = [rows[place] for place in going]
        if rows:
            keep = torch.tensor(going, device=ids.device)
            cache.batch_select_indices(keep)
            ids = ids[keep]
            mask = torch.cat([mask[keep], mask.new_ones(len(rows), ids.shape[1] - start)], dim=1)
    return result
