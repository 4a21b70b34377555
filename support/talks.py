"""Many talks with a target at once, one token a step each: continuous batching."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import common


@dataclass
class Row:
    """A row of the batch, and the talk that it holds, if any."""

    talk: object = None  # a generator, see `converse`
    first: int = 0  # the talk's first column in the cache
    feed: list[int] = field(default_factory=list)  # what the target reads next
    said: list[int] = field(default_factory=list)  # what it has said since it was asked
    temperature: float = 0.0
    most: int = 0  # tokens that it may say

    def go_on(self, answer: list[int] | None) -> list:
        """Hand the talk its answer; if that ends it, what it returns, in a list."""
        try:
            feed, self.temperature, self.most = self.talk.send(answer)
            self.feed = list(feed)
            self.said = []
            return []
        except StopIteration as end:
            self.talk = None
            return [end.value]


@torch.no_grad()
def converse(target, begin, batch_size: int, chance: random.Random):
    """Hold many talks with the target at once (continuous batching); yields what each returns.

    A talk is a generator. It yields (ids for the target to read, temperature, most new tokens),
    gets back the ids that the target says to that, and may then yield again. An answer ends with an
    end token, or where the limit or the context does; its last token has not been read yet.

    Every row reads one token a step: one that the talk gave, or the one it has just said. So a row
    whose talk has ended begins another one in the next column of the cache, beside longer ones, and
    a mask hides what the former left there. Columns that no row needs any more are cut off:

        column   0 1 2 3 4 5 6
        row 0    a a a a a a a
        row 1    . . . . c c c        c began when b had ended

    Args:
        begin: called for a new talk whenever a row is free; None for none at the moment.
        chance: where sampling draws from.
    """
    config = target.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    ends = end_tokens(target)
    cache = common.GrowingCache(config.num_hidden_layers)
    width = 0
    rows = [Row() for _ in range(batch_size)]
    while True:
        for row in rows:
            while row.talk is None and (talk := begin()) is not None:
                row.talk = talk
                row.first = width
                yield from row.go_on(None)
        busy = [index for index, row in enumerate(rows) if row.talk]
        if not busy:
            return
        if 2 * len(busy) <= len(rows):
            rows = [rows[index] for index in busy]
            _keep_rows(cache, torch.tensor(busy, device=target.device))
        unused = min(row.first for row in rows if row.talk)
        if unused >= 64:
            for layer in cache.layers:
                layer.keep(0, torch.arange(unused, width))
            for row in rows:
                row.first -= unused
            width -= unused

        fed = torch.tensor([[row.feed.pop(0) if row.talk else 0] for row in rows])  # (B, 1)
        first = torch.tensor([[row.first if row.talk else width] for row in rows])  # (B, 1)
        logits = target(
            fed.to(target.device),
            attention_mask=(torch.arange(width + 1) >= first).to(target.device),  # (B, width + 1)
            position_ids=(width - first).to(target.device),
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]  # (B, V)
        width += 1
        for row, token in zip(rows, _choose(logits, rows, chance)):
            if row.talk is None:
                continue
            full = width - row.first >= limit
            if not row.feed and not full:
                row.said.append(token)
                row.feed = [token]
                full = len(row.said) == row.most
            if full or (row.said and token in ends):
                yield from row.go_on(row.said)


def end_tokens(target) -> set[int]:
    """The tokens that end an answer of the target; none where its generation config names none."""
    ends = target.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def _keep_rows(cache, rows: Tensor) -> None:
    """Drop the rows of the batch that are not listed."""
    for layer in cache.layers:
        if layer.is_initialized:
            layer.adopt([x[rows] for x in layer.buffer], layer.get_seq_length())


def _choose(logits: Tensor, rows: list[Row], chance: random.Random) -> list[int]:
    """The next token of each row, from (B, V): argmax, or a draw from the softmax."""
    chosen = logits.argmax(-1)
    hot = [i for i, row in enumerate(rows) if row.talk and row.temperature and not row.feed]
    if hot:
        like = {"device": logits.device, "dtype": torch.float32}
        index = torch.tensor(hot, device=logits.device)
        temperature = torch.tensor([[rows[i].temperature] for i in hot], **like)
        sums = (logits[index].float() / temperature).softmax(-1).cumsum(-1)  # (hot, V)
        draws = torch.tensor([[1 - chance.random()] for _ in hot], **like)  # above 0, at most 1
        chosen[index] = (sums < draws * sums[:, -1:]).sum(-1)  # the first sum to reach it
    return chosen.tolist()


def replies(target, prompts: list, temperature: float, most: int, chance: random.Random):
    """One answer to each prompt, all at once; yields (prompt, answer) as they end."""

    def talk(prompt):
        answer = yield prompt, temperature, most
        return prompt, answer

    waiting = map(talk, prompts)
    yield from converse(target, lambda: next(waiting, None), len(prompts), chance)
