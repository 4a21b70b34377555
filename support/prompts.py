"""Conversations as model inputs, and transformers' answers to a batch of them."""

import torch

from support import data


def encode(tokenizer, messages: list[str], device) -> dict:
    """Model inputs of messages by user, assistant, user and so on.

    Returns: {"input_ids", "attention_mask"}, each (1, T).
    """
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            data.chat(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n".join(messages) + "\n", return_tensors="pt")
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}


def answer_padded(target, prompts: list[list[int]], **options) -> list[list[int]]:
    """Let transformers answer prompts at once; each answer goes up to its end token.

    Args: options: of target.generate.
    """
    # Prompts end in the same column; the padding before them is masked.
    width = max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])  # (B, T)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    fed, mask = fed.to(target.device), mask.to(target.device)
    ends = target.generation_config.eos_token_id  # one id, several or None
    ends = [ends] if isinstance(ends, int) else ends or []
    output = target.generate(fed, attention_mask=mask, pad_token_id=0, **options)  # (B, T + n)
    answers = []
    for row in output[:, width:].tolist():  # padding follows an end
        length = next((n + 1 for n, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:length])
    return answers
