"""Conversations as model inputs, with or without a chat template."""

import common
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


def check_lengths(target, tokenizer, prompts: list[dict], max_new_tokens: int) -> int:
    """Most tokens of a conversation, all its answers included.

    Raises: Mistake: a conversation could outgrow the target's context.
    """
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    most = 0
    for prompt in prompts:
        messages = []
        for turn in prompt["turns"]:
            messages += [turn, ""]
        asked = encode(tokenizer, messages[:-1], "cpu")["input_ids"].shape[1]
        longest = asked + max_new_tokens * len(prompt["turns"])
        if limit and longest > limit:
            raise common.Mistake(
                f"prompt {prompt['question_id']} may take {longest} tokens and the target's "
                f"context is {limit}; lower --max-new-tokens or leave the prompt out"
            )
        most = max(most, longest)
    return most
