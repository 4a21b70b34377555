"""Training data that a chat target writes itself, in the manner of Magpie.

Given its chat template up to the user's words, an instruct model writes a
plausible request and answers it (Xu et al. 2024, arXiv:2406.08464).
"""

import json
import os
import random
from pathlib import Path

import torch
from tqdm import tqdm

import common
from support import data
from support.prompts import answer_padded

BATCH = 64  # conversations held at a time
MOST = 320  # tokens of an answer
SECOND_REQUESTS = (  # how second requests begin; "" leaves it to the target
    *("Rewrite your previous answer", "Make it shorter", "Summarise", "Translate your answer"),
    *("Explain why", "Give me an example of", "Now write", "What if", "List the", "Using the"),
    *("Which of these", "", "", "", "", ""),
)


class Maker:
    """Writes conversations with a chat target.

    The target invents requests at temperature 1, which must end by themselves
    and have 4 to 100 words. Answers are greedy, or drawn at temperature 0.8
    and dropped if they mostly repeat themselves.

    Args:
        second_turns: share of conversations with a second turn.
        greedy: share of conversations that are answered greedily.
    Raises:
        Mistake: the target does not chat.
    """

    def __init__(self, target, tokenizer, second_turns: float = 0.0, greedy: float = 0.5):
        self.target = target
        self.tokenizer = tokenizer
        self.second_turns = second_turns
        self.greedy = greedy
        ends = target.generation_config.eos_token_id  # one id, several or None
        self.ends = [ends] if isinstance(ends, int) else ends
        if not (tokenizer.chat_template and self.ends):
            raise common.Mistake(
                "this target has no chat template or no eos_token_id: take another"
            )
        # What the template writes before and after requests, between turns.
        mark = "SOMEBODY'S-WORDS"
        chat = data.chat([mark] * 3)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        pieces = [self.ids(piece) for piece in text.split(mark)]
        if len(pieces) != 4 or (second_turns and pieces[1] != pieces[3]):
            raise common.Mistake(
                "the chat template rewrites what was said; leave out --second-turns, or take "
                "another target"
            )
        self.opening, _, self.between, self.closing = pieces

    def fill(self, path: str, count: int, requests=(), seed: int = 0) -> None:
        """Append records to `path` until it holds `count`; resumes a run.

        Args: requests: asked first, once each.
        """
        kept = whole_lines(path)
        self.seen = {record["prompt"] for record in kept}
        self.chance = random.Random(seed * 1_000_003 + len(kept))
        torch.manual_seed(self.chance.getrandbits(32))
        waiting = [text for text in dict.fromkeys(requests) if text not in self.seen]
        done = len(kept)
        in_vain = 0
        bar = tqdm(total=count, initial=done, desc="conversations", disable=None)
        with bar, open(path, "ab") as file:
            while done < count:
                size = min(BATCH, count - done)
                given, waiting = waiting[:size], waiting[size:]
                records = self.hold(given, size)[: count - done]
                file.write("".join(json.dumps(record) + "\n" for record in records).encode())
                file.flush()
                done += len(records)
                bar.update(len(records))
                in_vain = 0 if records else in_vain + size
                if in_vain >= 500:
                    raise common.Mistake(
                        f"the last {in_vain} conversations were of no use (requests without an "
                        "end, answers that repeat themselves): give --requests FILE"
                    )

    def hold(self, given: list[str], size: int) -> list[dict]:
        """Hold `size` conversations, the first with requests that are `given`.

        Returns: a record per usable turn, those of a conversation together.
        """
        # 1. First requests must be new.
        thought = self.think_up([self.opening] * (size - len(given)), [""])
        texts = given + [text for text in dict.fromkeys(thought) if text and text not in self.seen]
        self.seen.update(texts)

        # 2. First turns. Cut an answer before another turn to 40-140 tokens.
        temperatures = [0.8 * (self.chance.random() >= self.greedy) for _ in texts]
        two = [self.chance.random() < self.second_turns for _ in texts]
        most = [self.chance.randint(40, 140) if second else MOST for second in two]
        firsts = self.answer([self.opening] * len(texts), texts, temperatures, most)

        # 3. Second turns.
        chosen = [n for n, first in enumerate(firsts) if first and two[n]]
        contexts = []
        for n in chosen:
            said = firsts[n]["prompt_ids"] + firsts[n]["response_ids"]
            ended = said[-1:] == self.between[:1]  # it is there already
            contexts.append(said + self.between[ended:])
        texts = self.think_up(contexts, SECOND_REQUESTS)
        temperatures = [temperatures[n] for n in chosen]
        seconds = self.answer(contexts, texts, temperatures, [MOST] * len(chosen))
        for n, second in zip(reversed(chosen), reversed(seconds)):
            firsts.insert(n + 1, second)
        return [record for record in firsts if record]

    def think_up(self, contexts: list[list[int]], beginnings) -> list[str]:
        """A request per context with one of the beginnings; "" if unusable."""
        starts = [self.ids(self.chance.choice(beginnings)) for _ in contexts]
        prompts = [context + start for context, start in zip(contexts, starts)]
        texts = []
        for start, said in zip(starts, self.say(prompts, 128, 1.0)):
            text = self.text(start + said[:-1])
            ended = bool(said) and said[-1] in self.ends
            texts.append(text if ended and 4 <= len(text.split()) <= 100 else "")
        return texts

    def answer(self, contexts, texts, temperatures, most: list[int]) -> list[dict | None]:
        """A record of the answer to each text; None without a usable answer.

        contexts: ids before each text. most: tokens to keep of each answer.
        """
        records = [None] * len(texts)
        for temperature in (0.0, 0.8):
            rows = [n for n, text in enumerate(texts) if text and temperatures[n] == temperature]
            prompts = [contexts[n] + self.ids(texts[n]) + self.closing for n in rows]
            for n, prompt, said in zip(rows, prompts, self.say(prompts, MOST, temperature)):
                said = said[: most[n]]
                grams = [tuple(said[i : i + 4]) for i in range(len(said) - 3)]
                loops = temperature > 0 and len(set(grams)) < 0.3 * len(grams)
                if len(said) >= 2 and not loops:
                    records[n] = {
                        "prompt": texts[n],
                        "response": self.text(said),
                        "temperature": temperature,
                        "finished": said[-1] in self.ends,
                        "prompt_ids": prompt,
                        "response_ids": said,
                    }
        return records

    def say(self, prompts: list[list[int]], most: int, temperature: float) -> list[list[int]]:
        """Answer all prompts at once; temperature 0 is greedy.

        Answers end with an end token, after `most` tokens or with the context.
        """
        width = max(map(len, prompts), default=0)
        config = self.target.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or 2**31
        most = min(most, limit - width)
        if not prompts or most < 1:
            return [[] for _ in prompts]
        how = {"do_sample": False}
        if temperature:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return answer_padded(self.target, prompts, max_new_tokens=most, **how)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


def whole_lines(path: str) -> list[dict]:
    """The records of `path`, which is cut after its last complete line."""
    if path.endswith(".gz"):
        raise common.Mistake(f"cannot append to {path}; give --out a plain .jsonl file")
    if not Path(path).is_file():
        return []
    text = Path(path).read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    half = text[len(whole) :]
    start = b'{"prompt": "'
    try:
        records = [json.loads(line) for line in whole.splitlines()]
        ours = all(isinstance(record["prompt"], str) for record in records)
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours or half[: len(start)] != start[: len(half)]:
        raise common.Mistake(f"{path} holds something other than conversations; give another --out")
    os.truncate(path, len(whole))
    return records
