"""Conversations in a target's chat template: as text, as tokens, as model inputs."""

import datetime

import torch

import common

# The chat template of a target that has none.
PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


# Some templates write today's date (strftime_now). The same data would then be other
# tokens tomorrow: a run could not be resumed, and kept features would be of no use. A
# template that does so gets a function that writes one day, whatever the day is.
DAY = datetime.datetime(2025, 1, 1)
CODES = [*"aAbBcdfHIjmMpSuUwWxXyYZ", *(f"-{code}" for code in "dHIjmMS")]
ONE_DAY = "{% macro strftime_now(form) %}{{ form"
ONE_DAY += "".join(f" | replace('%{x}', '{DAY.strftime('%' + x)}')" for x in CODES)
ONE_DAY += " }}{% endmacro %}\n"


def context_of(target) -> int:
    """The longest text that a target reads, in tokens."""
    config = target.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or 2**31  # none: no limit


def chat(texts: list[str]) -> list[dict]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def render(messages: list[dict], tokenizer, ask: bool = False) -> str:
    """Messages in the target's chat template, and the head of an answer if `ask`.

    messages: {"role", "content"}, whose content is a text. A template that does not
        write it is given a list of one part, as those of models for pictures want it.
    Raises UserError if the template does not write what is asked, or the last message.
    Earlier answers may be changed: many templates drop their thoughts.
    """
    parts = []
    for message in messages:
        part = {"type": "text", "text": message["content"]}
        parts.append(message | {"content": [part]})
    template = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN
    if "strftime_now" in template:
        template = ONE_DAY + template
    refusals = []
    for form in (messages, parts):
        try:
            text = tokenizer.apply_chat_template(
                form,
                chat_template=template,
                add_generation_prompt=ask,
                tokenize=False,
            )
        except Exception as error:  # a template is a program, which may fail in any way
            refusals.append(f"does not accept it: {common.one_line(error)}")
            continue
        role = _unwritten(messages, text)
        if role is None:
            return text
        refusals.append(f"does not write the whole text of messages by {role}")
    raise common.UserError(f"the target's chat template {refusals[0]}")


def _unwritten(messages: list[dict], text: str) -> str | None:
    """The role of a message whose text is not written; None if all are.

    An answer is only looked for if it is the last message.
    """
    place = 0  # turns are written one after another, a system message anywhere
    for number, message in enumerate(messages, 1):
        role, said = message["role"], message["content"].strip()
        if role == "assistant" and number < len(messages):
            continue
        turn = role in ("user", "assistant")
        found = text.find(said, place if turn else 0)
        if found < 0:
            return role
        if turn:
            place = found + len(said)
    return None


def token_ids(text: str, tokenizer) -> list[int]:
    """Ids of a rendered conversation."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if tokenizer.chat_template:  # which writes the special tokens itself
        return ids
    # Some tokenizers put special tokens before a text and others after it. Those after
    # it would end a request before it is answered.
    whole = tokenizer(text)["input_ids"]
    before = next((n for n in range(len(whole)) if whole[n : n + len(ids)] == ids), 0)
    return whole[: before + len(ids)]


def encode(tokenizer, messages: list[str], device) -> dict:
    """Model inputs of messages by user, assistant, user and so on.

    Returns {"input_ids", "attention_mask"}, each (1, T).
    """
    text = render(chat(messages), tokenizer, ask=True)
    ids = torch.tensor([token_ids(text, tokenizer)], device=device)
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
