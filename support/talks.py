"""Training data that a chat target writes itself, in the manner of Magpie.

Given its chat template up to where the user's words would begin, an instruct model writes a
plausible request, and then answers it (Xu et al. 2024, arXiv:2406.08464).
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

import common
from support import data

SECOND_REQUESTS = (  # how second requests begin; "" leaves it to the target
    *("Rewrite your previous answer", "Make it shorter", "Summarise", "Translate your answer"),
    *("Explain why", "Give me an example of", "Now write", "What if", "List the", "Using the"),
    *("Which of these", "", "", "", "", ""),
)


@torch.no_grad()
def say(target, prompts: list[list[int]], temperatures: list[float], most: list[int]) -> list:
    """The target's answers to prompts, all at once: a list of ids of each.

    An answer ends with an end token, after `most` tokens, or where the context does.

    Args: temperatures: of each row; 0 is greedy.
    """
    config = target.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    ends = end_tokens(target)
    device = target.device
    width = max(map(len, prompts), default=0)
    # 1. Prompts end in the same column; what is left of them is masked.
    fed = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])  # (B, T)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    fed, mask = fed.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # (B, T)
    heat = torch.tensor(temperatures, device=device)[:, None]  # (B, 1)
    cache = common.GrowingCache(config.num_hidden_layers)
    answers = [[] for _ in prompts]
    going = set(range(len(prompts)))
    while True:
        # 2. See which answers have ended.
        for row in list(going):
            said = answers[row]
            full = len(said) >= most[row] or len(prompts[row]) + len(said) >= limit
            if full or (said and said[-1] in ends):
                going.discard(row)
        if not going:
            return answers
        # 3. A token more of each.
        hidden = target.get_decoder()(
            fed, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )[0][:, -1]  # (B, D)
        logits = common.target_logits(target, hidden)  # (B, V)
        drawn = common.sample((logits / heat.clamp(min=1e-3)).softmax(-1))  # (B, 1)
        fed = torch.where(heat > 0, drawn, logits.argmax(-1, keepdim=True))
        mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
        positions = positions[:, -1:] + 1
        for row, token in enumerate(fed[:, 0].tolist()):
            if row in going:
                answers[row].append(token)


def end_tokens(target) -> set[int]:
    """The tokens that end an answer of the target; none where its generation config names none."""
    ends = target.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


@dataclass
class Talk:
    """A conversation that is being held."""

    turns: list[str]  # the user's words as far as they are given
    temperature: float  # of the answers
    two: bool  # whether a second turn is wanted
    context: list[int] = field(default_factory=list)  # ids of all that was said
    lines: list[dict] = field(default_factory=list)  # a record for each answer that is kept


class Maker:
    """Writes conversations with a target.

    Requests that the target thinks up, at temperature 1, must end by themselves, be new and have 4
    to 100 words. Answers are greedy or at temperature 0.8. A greedy answer is kept as it is, loops
    included, for that is what users get; a sampled one that mostly repeats itself (under 30%
    distinct 4-grams) is dropped.

    Args:
        second_turns: share of conversations with a second turn. Their first answer is cut at 40 to
            140 tokens, as an evaluation cuts it, and each turn is a line.
        greedy: share of conversations that are answered greedily.
    Raises:
        Mistake: the target names no end token, or its tokenizer has no chat template, or one that
            does not show where the user's words begin.
    """

    def __init__(self, target, tokenizer, second_turns: float = 0.0, greedy: float = 0.5):
        self.target = target
        self.tokenizer = tokenizer
        self.second_turns = second_turns
        self.greedy = greedy
        self.most = 320  # tokens of an answer
        self.opening, self.between, self.closing = _around_requests(tokenizer, second_turns > 0)
        self.ends = end_tokens(target)
        if not self.ends:
            raise common.Mistake(
                "this target's generation config names no eos_token_id, so its answers would "
                "never end"
            )

    def fill(self, path: str, count: int, requests=(), batch_size: int = 64, seed: int = 0):
        """Append conversations to `path` until it holds `count`.

        The given requests are asked first. An interrupted run goes on where it stopped, and a
        half-written last line is cut off.

        Args:
            requests: turns of each, from `data.read_requests`.
            batch_size: how many conversations are held at a time.
        """
        kept = whole_lines(path)
        self.seen = {record["prompt"] for record in kept}
        self.chance = random.Random(seed * 1_000_003 + len(kept))
        torch.manual_seed(self.chance.getrandbits(32))
        waiting = [turns for turns in requests if turns[0] not in self.seen]
        done = len(kept)
        in_vain = 0
        bar = tqdm(total=count, initial=done, desc="conversations", disable=None)
        with bar, open(path, "ab") as file:
            while done < count:
                size = min(batch_size, count - done)
                given, waiting = waiting[:size], waiting[size:]
                given += [[]] * (size - len(given))  # the target thinks up the others
                lines = self.hold(given)[: count - done]
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
                done += len(lines)
                bar.update(len(lines))
                in_vain = 0 if lines else in_vain + size
                if in_vain >= 500:
                    raise common.Mistake(
                        f"the last {in_vain} conversations were of no use (requests without an "
                        "end, answers that repeat themselves): give --requests FILE"
                    )

    def hold(self, given: list[list[str]]) -> list[dict]:
        """Hold a conversation for each list of turns; returns the records, turns in order."""
        talks = []
        for turns in given:
            temperature = 0.8 * (self.chance.random() >= self.greedy)
            two = self.chance.random() < self.second_turns
            talks.append(Talk(turns, temperature, two))
        self.answer(self.ask(talks, 0), 0)
        self.answer(self.ask([talk for talk in talks if talk.two and talk.lines], 1), 1)
        return [line for talk in talks for line in talk.lines]

    def ask(self, talks: list[Talk], turn: int) -> list[tuple[Talk, str]]:
        """The talks that get a request, and its text; it is then in their context."""
        # 1. Where the user's words begin. An answer that has ended has its end token already.
        head = self.between if turn else self.opening
        for talk in talks:
            talk.context += head[1:] if talk.context[-1:] == head[:1] else head
        asked = []
        for talk in talks:
            if turn < len(talk.turns):
                talk.context += self._ids(talk.turns[turn])
                asked.append((talk, talk.turns[turn]))

        # 2. The target thinks up the other requests.
        others = [talk for talk in talks if turn >= len(talk.turns)]
        starts = [self._ids(self.chance.choice(SECOND_REQUESTS) if turn else "") for _ in others]
        prompts = [talk.context + start for talk, start in zip(others, starts)]
        said = say(self.target, prompts, [1.0] * len(others), [128] * len(others))
        for talk, start, more in zip(others, starts, said):
            words = start + more[:-1]
            text = self._text(words)
            ended = bool(more) and more[-1] in self.ends
            new = turn > 0 or text not in self.seen
            if ended and new and 4 <= len(text.split()) <= 100:
                talk.context += words
                asked.append((talk, text))
                self.seen.add(text)
        for talk, _ in asked:
            talk.context += self.closing
        return asked

    def answer(self, asked: list[tuple[Talk, str]], turn: int) -> None:
        """Let the target answer; each talk gets the line, if the answer is of use."""
        most = []
        for talk, _ in asked:
            cut = talk.two and not turn
            most.append(min(self.most, self.chance.randint(40, 140)) if cut else self.most)
        prompts = [talk.context for talk, _ in asked]
        answers = say(self.target, prompts, [talk.temperature for talk, _ in asked], most)
        for (talk, text), said in zip(asked, answers):
            grams = [tuple(said[i : i + 4]) for i in range(len(said) - 3)]
            loops = talk.temperature > 0 and len(set(grams)) < 0.3 * len(grams)
            if len(said) < 2 or loops:
                continue
            record = {
                "prompt": text,
                "response": self._text(said),
                "temperature": talk.temperature,
                "finished": said[-1] in self.ends,
                "prompt_ids": list(talk.context),
                "response_ids": said,
            }
            talk.lines.append(record)
            talk.context += said

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


def _around_requests(tokenizer, second: bool) -> tuple[list[int], list[int], list[int]]:
    """What the chat template puts before a request, between an answer and the next, and after."""
    if not tokenizer.chat_template:
        raise common.Mistake(
            "this target's tokenizer has no chat template; self-distilled data needs a chat model"
        )
    marks = ["USER-WORDS", "MODEL-WORDS", "MORE-WORDS"]
    pieces = _split_at(tokenizer, marks[:1])
    if pieces is None:
        raise common.Mistake(
            "the chat template does not hold the user's words exactly once, so none can be sampled"
        )
    opening, closing = pieces
    if not second:
        return opening, [], closing
    longer = _split_at(tokenizer, marks)
    if longer is None or [longer[0], longer[1], longer[3]] != [opening, closing, closing]:
        raise common.Mistake("the chat template rewrites earlier turns; leave out --second-turns")
    return opening, longer[2], closing


def _split_at(tokenizer, marks: list[str]) -> list[list[int]] | None:
    """Ids of what the template puts around the texts of a conversation; None if it changes them."""
    chat = data.chat(marks)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        pieces.append(before)
    pieces.append(text)
    return [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]


def whole_lines(path: str) -> list[dict]:
    """The records of `path`, which is cut after its last complete line; none if it is missing.

    Raises: Mistake: something else is in the file, which is left as it is.
    """
    if path.endswith(".gz") or Path(path).is_dir() or not Path(path).resolve().parent.is_dir():
        raise common.Mistake(
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
        raise common.Mistake(
            f"{path} holds something else than our conversations; give another --out"
        )
    if half:
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return records
