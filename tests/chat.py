"""A tiny chat target in a folder, with what the tests of train.py and bench.py need
beside it.
"""

import json

import pytest
import torch
from tiny import family
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import UserError


def refused(message):
    """Expects a user's mistake, told with this message (a regular expression)."""
    return pytest.raises(UserError, match=message)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<end>", "<user>", "<assistant>", "<system>", "<unk>"] + [
    f"w{i}" for i in range(43)
]


def letters(special, end, template, count=256, merges=()):
    """A chat tokenizer with a token for each byte, after the special ones.

    count: how many of them; the first 94 are the printable characters of ASCII.
    merges: pairs of bytes that have a token as well.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:count]
    pairs = map("".join, merges)
    vocab = {token: n for n, token in enumerate([*special, *alphabet, *pairs])}
    core = Tokenizer(models.BPE(vocab, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


def make_chat(folder):
    """A random Llama with a tokenizer of 48 words (w0 is token 5) and a chat template.

    data.jsonl beside it holds 24 conversations of six and fourteen random tokens.
    """
    vocab = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", unk_token="<unk>", pad_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    shape = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    shape |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,
    }
    family("Llama", 0, eos_token_id=0, **shape).float().save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(24):
            ids = torch.randint(5, 48, (20,), generator=generator).tolist()
            file.write(
                json.dumps({"prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n"
            )
    return folder


def options(folder, out, *more, method="glide"):
    """The arguments of a short run of train.py; GLIDE's drafter is the smallest."""
    words = f"--method {method} --target {folder} --data {folder}/data.jsonl"
    words += f" --out {out} --device cpu --draft-vocab 32 --held-out 4"
    if method == "glide":
        words += " --intermediate-size 16"
    return [*words.split(), "--eval-every", "4", "--save-every", "4", *map(str, more)]


TURNS = [
    {"question_id": 1, "category": "talk", "turns": ["w1 w2", "w3"]},
    {"question_id": 2, "category": "sums", "turns": ["w4 w5 w6"]},
]


def command(*extra, method="glide@glide"):
    """The arguments of a run of bench.py in such a folder."""
    words = f"--method {method} --target target --dtype float64 --prompts prompts.jsonl"
    return [*words.split(), "--max-new-tokens", "12", *extra]
