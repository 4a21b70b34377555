"""A tiny chat target in a folder, with conversations, for the tests of train.py and its
data.
"""

import json

import torch
from tiny import family
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<end>", "<user>", "<assistant>", "<system>", "<unk>"] + [
    f"w{i}" for i in range(43)
]


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


def options(folder, out, *more):
    """The arguments of a short run of train.py; GLIDE's drafter is the smallest."""
    words = f"--method glide --target {folder} --data {folder}/data.jsonl --out {out}"
    words += " --device cpu --draft-vocab 32 --intermediate-size 16 --held-out 4"
    return [*words.split(), "--eval-every", "4", "--save-every", "4", *map(str, more)]
