"""Conversations as model inputs, and transformers' answers to a batch of them."""

import torch

import common
from support.training import data


def encode(tokenizer, messages: list[str], device) -> dict:
    """Model inputs of messages by user, assistant, user and so on.

    Returns {"input_ids", "attention_mask"}, each (1, T).
    """
    text = data.render(data.chat(messages), tokenizer, ask=True)
    ids = torch.tensor([data.token_ids(text, tokenizer)], device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def answer_padded(target, prompts: list[list[int]], **options) -> list[list[int]]:
    """Let transformers answer prompts at once; each answer goes up to its end token.

    options: of target.generate.
    """
    # Prompts end in the same column; the padding before them is masked.
    width = max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])  # (B, T)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    common.check_ids(target, fed)
    output = target.generate(
        fed.to(target.device),
        attention_mask=mask.to(target.device),
        pad_token_id=0,
        **options,
    )  # (B, T + n)
    eos_ids = common.eos_ids(target.generation_config)
    answers = []
    for new in output[:, width:].tolist():  # padding follows an end
        stops = (n + 1 for n, token in enumerate(new) if token in eos_ids)
        length = next(stops, len(new))
        answers.append(new[:length])
    return answers
