"""Training data that a chat target writes itself, in the manner of Magpie.

Given its chat template up to the user's words, an instruct model writes a plausible
request and answers it (Xu et al. 2024, arXiv:2406.08464).
"""

import contextlib
import json
import math
import os
import random
import sys
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

import common
from support import cli
from support.prompts import answer_padded, chat, context_of, render

BATCH = 32  # conversations held at a time
# How second requests begin; after "" the target continues freely.
SECOND_REQUESTS = (
    "Rewrite your previous answer",
    "Make it shorter",
    "Explain why",
    "",
    "",
)


class Maker:
    """Writes conversations with a chat target.

    The target invents requests at temperature 1. It answers them greedily or at
    temperature 0.8.

    second_turns: share of conversations with a second turn.
    greedy: share of conversations that are answered greedily.
    most: tokens of an answer.
    Raises UserError if the target does not chat.
    """

    def __init__(
        self,
        target,
        tokenizer,
        second_turns: float = 0.0,
        greedy: float = 0.5,
        most: int = 320,
    ):
        self.target = target
        self.tokenizer = tokenizer
        self.second_turns = second_turns
        self.greedy = greedy
        self.most = most
        self.eos_ids = common.eos_ids(target.generation_config)
        self.context = context_of(target)
        if not (tokenizer.chat_template and self.eos_ids):
            raise common.UserError(
                "this target has no chat template or no eos_token_id: take another"
            )
        # What the template writes before and after requests, between turns.
        mark = "SOMEBODY'S-WORDS"
        text = render(chat([mark] * 3), tokenizer, ask=True)
        pieces = [self.ids(piece) for piece in text.split(mark)]
        if len(pieces) != 4 or (second_turns and pieces[1] != pieces[3]):
            raise common.UserError(
                "the chat template rewrites what was said; leave out --second-turns, "
                "or take another target"
            )
        self.opening, _, self.between, self.closing = pieces
        # The saved ids may not include the token that ends a turn in this template, as
        # those of base models often do not. Answers would then run on into invented
        # turns.
        end = self.between[0] if self.between else None
        if end in tokenizer.all_special_ids and end not in self.eos_ids:
            self.eos_ids.add(end)
            target.generation_config.eos_token_id = sorted(self.eos_ids)
            print(
                f"the chat template ends an answer with {tokenizer.decode([end])!r}, "
                "which is not among the target's eos_token_id: it ends answers here",
                file=sys.stderr,
            )

    def fill(self, path: str, count: int, requests=(), seed: int = 0) -> list[dict]:
        """Append records to `path` until it holds `count`; returns all that it holds.

        requests: asked first, once each.
        Raises UserError if hundreds of requests in a row do not end.
        """
        held = whole_lines(path)
        asked = {record["prompt"] for record in held}
        for text in requests:
            length = len(self.opening + self.ids(text) + self.closing)
            if length >= self.context:
                raise common.UserError(
                    f"a request of {length} tokens fills the target's context of "
                    f"{self.context}: shorten {text[:40]!r}..."
                )
        waiting = [text for text in dict.fromkeys(requests) if text not in asked]
        self.chance = random.Random(seed * 1_000_003 + len(held))
        torch.manual_seed(self.chance.getrandbits(32))
        in_vain = 0  # requests since the last record
        bar = tqdm(total=count, initial=len(held), desc="answers", disable=None)
        with bar, open(path, "ab") as file:
            while len(held) < count:
                # Leave places for second turns.
                left = count - len(held)
                size = min(BATCH, math.ceil(left / (1 + self.second_turns)))
                first, waiting = waiting[:size], waiting[size:]
                records = self.converse(first, size)[:left]
                lines = [json.dumps(record) + "\n" for record in records]
                file.write("".join(lines).encode())
                file.flush()
                held += records
                bar.update(len(records))
                in_vain = 0 if records else in_vain + size
                if in_vain >= 500:
                    raise common.UserError(
                        f"the last {in_vain} requests did not end: give --requests FILE"
                    )
        return held

    def converse(self, requests: list[str], size: int) -> list[dict]:
        """Hold `size` conversations, the first with these requests.

        Returns a record of each turn, without requests that did not end.
        """
        asked = [(self.opening, text) for text in requests]
        asked += self.invent_requests([self.opening] * (size - len(requests)), [""])
        groups = {}  # what is answered at once
        for pair in asked:
            temperature = 0.0 if self.chance.random() < self.greedy else 0.8
            continued = self.chance.random() < self.second_turns
            groups.setdefault((temperature, continued), []).append(pair)
        firsts = []
        seconds = []  # turns
        for (temperature, continued), group in groups.items():
            # An answer before a second turn is cut early.
            most = self.chance.randint(40, 140) if continued else self.most
            records = self.answer(group, temperature, most)
            firsts += records
            if continued:
                contexts = [self.second_context(record) for record in records]
                more = self.invent_requests(contexts, SECOND_REQUESTS)
                seconds += self.answer(more, temperature, self.most)
        return firsts + seconds

    def second_context(self, record: dict) -> list[int]:
        """Token ids of a turn, up to the words of a second request."""
        said = record["prompt_ids"] + record["response_ids"]
        ended = said[-1:] == self.between[:1]  # the end of the answer is there already
        return said + self.between[ended:]

    def invent_requests(
        self, contexts: list, beginnings
    ) -> list[tuple[list[int], str]]:
        """Requests that the target invents, each with the ids of its context.

        contexts: lists of ids, up to the words of a request.
        beginnings: one is chosen at random for each request, which starts with it.
        Requests that did not end by themselves are left out, and contexts that leave no
        room for a request and an answer.
        Raises UserError if there is nothing that a request could follow.
        """
        contexts = [ids for ids in contexts if len(ids) < self.context // 2]
        starts = [self.ids(self.chance.choice(beginnings)) for _ in contexts]
        prompts = [context + start for context, start in zip(contexts, starts)]
        if not all(prompts):
            raise common.UserError(
                "the chat template writes nothing before a request, so the target "
                "cannot make one up: give --requests FILE with one for each answer"
            )
        asked = []
        texts = self.generate(prompts, min(128, self.context // 4), 1.0)
        for context, start, said in zip(contexts, starts, texts):
            text = self.text(start + said[:-1])
            if text and said[-1] in self.eos_ids:
                asked.append((context, text))
        return asked

    def answer(self, asked: list[tuple], temperature: float, most: int) -> list[dict]:
        """Records of the answers to (ids of the context, request)."""
        prompts = [context + self.ids(text) + self.closing for context, text in asked]
        records = []
        answers = self.generate(prompts, most, temperature)
        for (_, text), prompt, said in zip(asked, prompts, answers):
            record = {
                "prompt": text,
                "response": self.text(said),
                "temperature": temperature,
                "finished": said[-1] in self.eos_ids,
                "prompt_ids": prompt,
                "response_ids": said,
            }
            records.append(record)
        return records

    def generate(self, prompts: list, most: int, temperature: float) -> list[list[int]]:
        """What follows each prompt, up to an end token or `most` tokens.

        prompts: lists of ids that leave room in the target's context, which limits the
            answers as well.
        """
        if not prompts:
            return []
        room = self.context - max(map(len, prompts))
        if room < most and len(prompts) > 1:  # the longest would cut all answers
            alone = (self.generate([ids], most, temperature) for ids in prompts)
            return [said for [said] in alone]
        most = min(most, room)
        how = {"do_sample": False}
        if temperature:  # 0 is greedy
            how = {"do_sample": True, "temperature": temperature}
            how |= {"top_k": 0, "top_p": 1.0}
        return answer_padded(self.target, prompts, max_new_tokens=most, **how)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


@contextlib.contextmanager
def alone(path: str):
    """Keep other processes from appending to `path`.

    Raises UserError if one does so already, or if it is no place for records.
    """
    if path.endswith(".gz"):
        raise common.UserError(
            f"cannot append to {path}; give --out a plain .jsonl file"
        )
    cli.check_writable(path)
    try:
        # The lock's file stays: deleted, it could be locked by one process while
        # another locks a new file of this name.
        with FileLock(f"{path}.lock", timeout=0):
            whole_lines(path)
            yield
    except Timeout:
        raise common.UserError(
            f"another process is writing {path}: wait for it, or give another --out"
        ) from None


def whole_lines(path: str) -> list[dict]:
    """The records of `path`, which is cut after its last complete line.

    Raises UserError if it holds something else; then it is left as it was.
    """
    if not Path(path).is_file():
        return []
    content = Path(path).read_bytes()
    unended = content.rpartition(b"\n")[2]
    with contextlib.suppress(ValueError):
        json.loads(unended)  # a whole record, but for its newline
        content += b"\n"
    *lines, half = content.split(b"\n")
    start = b'{"prompt": "'
    try:
        records = [json.loads(line) for line in lines]
        ours = all(isinstance(x["prompt"], str) and "finished" in x for x in records)
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours or half[: len(start)] != start[: len(half)]:
        raise common.UserError(
            f"{path} holds something other than conversations; give another --out"
        )
    with open(path, "r+b") as file:
        file.truncate(len(content) - len(half))  # adds a byte where \n is missing
        if content.endswith(b"\n"):
            file.seek(-1, os.SEEK_END)
            file.write(b"\n")
    return records
