"""Long texts and long chats: a drafter's window, and caches kept over turns."""

import warnings

import pytest
import torch
from chat import refused
from tiny import (
    decode,
    each_once,
    family,
    make_drafts,
    make_glide,
    make_llama,
    sampled_p_value,
)

import common
import glide
from support import cli

METHODS = ("glide", "cape", "specdecpp", "falcon", "ctc_drafter")
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 24},
}
GREEDY = {"do_sample": False, "eos_token_id": None}


# ----------------------------------------------------------------------- the window


BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_local_experts": 4}
# Targets with windows inside and outside of the drafter's, which holds 5 to 10 tokens.
WINDOWS = {
    "Gemma3": BOTH_KINDS | {"sliding_window": 24},
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Phi3": {"sliding_window": 8},
    "Mixtral": EXPERTS | {"sliding_window": 6},
    "Starcoder2": {"sliding_window": 6},
    "GptOss": EXPERTS | BOTH_KINDS | {"sliding_window": 8},
    "GPTNeo": {"attention_types": [[["global"], 4]]},  # others of its family have one
}


@pytest.mark.parametrize("method, name", each_once(cli.present(), WINDOWS))
def test_greedy_answers_stay_the_targets_own_beyond_every_window(method, name):
    """That of the target, in all layers or some, and that of the drafter, which is
    renewed.
    """
    more = WINDOWS[name]
    target = family(name, vocab_size=13, **more)
    if "num_local_experts" in more:
        target = target.float()  # experts have no float64
    sliding = "sliding_attention" in common.sliding_windows(target)
    assert sliding == ("sliding_window" in more)
    windows = ({}, {"window": 1}, {"window": 5}) if method in METHODS else ({},)
    for length in (1, 3, 30):
        ids = torch.randint(1, 13, (1, length), generator=torch.Generator())
        options = GREEDY | {"max_new_tokens": 40}
        plain = target.generate(ids, **options)
        for window in windows:
            drafts, _ = make_drafts(method, target, **window)
            assert torch.equal(decode(target, ids, drafts, **options)[0], plain)


def test_sampled_answers_follow_the_target_over_renewals(small_llama):
    drafts, _ = make_drafts("ctc_drafter", small_llama, window=1)
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    decoder = common.speculate(drafts)
    p_value = sampled_p_value(small_llama, prompt, 3, 300, custom_generate=decoder)
    assert p_value > 1e-3


def rounds(target, ids, drafts, new_tokens):
    """The drafts of an answer: length of the text, tokens, parents."""
    decoding = common.start(target, input_ids=ids, max_new_tokens=new_tokens, **GREEDY)
    got = []
    for draft in drafts(decoding):
        got.append((decoding.ids.shape[1], draft.tokens.tolist(), draft.parents))
        decoding.verify(draft)
    return got


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_where_a_text_exceeds_twice_the_window(method):
    """Up to there, the drafter sees the whole text."""
    target = make_llama()
    ids = torch.tensor([[9, 8, 7, 6]])
    whole, _ = make_drafts(method, target, window=None)
    shown, _ = make_drafts(method, target, window=8)
    before, after = (rounds(target, ids, x, 60) for x in (whole, shown))
    same = [x for x in before if x[0] <= 16]
    assert len(same) > 3 and after[: len(same)] == same
    assert after != before, "a window that changes nothing is none"


@torch.no_grad()
def test_a_renewed_drafter_reads_the_newest_tokens_rows_and_positions():
    """GLIDE's own pass over the newest eight tokens, worked out here."""
    target = make_llama()
    drafter = make_glide(target, num_layers=2, kv_layer=-1)
    ids = torch.randint(1, 48, (1, 30), generator=torch.Generator())
    decoding = common.start(target, input_ids=ids, max_new_tokens=2, **GREEDY)
    draft = next(glide.drafts(decoding, drafter, window=8, gamma=1))
    assert decoding.hidden.shape == (1, 29, 32)

    _, kv = common.target_features(target, ids[:, :-1], drafter.kv_layers)
    kv = {layer: tuple(x[:, :, 22:] for x in both) for layer, both in kv.items()}
    places = torch.arange(8)
    cross = (places[:, None] > torch.arange(7))[None, None]
    positions = torch.arange(22, 30)[None]
    hidden = drafter(target, ids[:, 22:], positions, kv, cross_mask=cross)
    q_draft = common.target_logits(target, hidden[0, -1]).softmax(-1)
    torch.testing.assert_close(draft.probs[0], q_draft, check_dtype=False)


def test_a_window_is_an_int_or_none():
    target = make_llama()
    decoding = common.start(target, input_ids=torch.tensor([[3]]), max_new_tokens=4)
    for window in (0, -1, 2.5, True, "wide"):
        with refused("take an int of at least 1, or No"):
            next(glide.drafts(decoding, make_glide(target), window=window))


# -------------------------------------------------------------- caches kept over turns


def chat(target, drafts, turns, keep=True):
    """Answers of 12 tokens to turns, each a function of the text so far."""
    text = torch.zeros(1, 0, dtype=torch.long)
    decoding = None
    answers = []
    for turn in turns:
        text = turn(text)
        options = GREEDY | {"max_new_tokens": 12}
        after = decoding if keep else None
        decoding = common.start(target, after=after, input_ids=text, **options)
        for draft in drafts(decoding):
            decoding.verify(draft)
        answers.append(decoding.ids[0, text.shape[1] :].tolist())
        text = decoding.ids
    return answers


def asked(*tokens):
    return lambda text: torch.cat([text, torch.tensor([tokens])], dim=1)


def edited(text):
    """A token of the first turn is another one now, and the last turn is gone."""
    text = text[:, :-10].clone()
    text[0, 9] = 3
    return torch.cat([text, torch.tensor([[4, 4]])], dim=1)


TURNS = [asked(5, 6, 7), asked(8, 9), edited, asked(1), asked(7, 7, 7, 7)]


@pytest.mark.parametrize("method, name", each_once(METHODS, FAMILIES, "falcon"))
def test_a_chat_that_keeps_its_caches_gets_the_same_answers(method, name):
    target = family(name, **FAMILIES[name])
    drafts, _ = make_drafts(method, target)
    kept = chat(target, drafts, TURNS)
    assert kept == chat(target, drafts, TURNS, keep=False)
    assert len(kept) == 5 and all(len(answer) == 12 for answer in kept)


def plain(decoding):
    while not decoding.done:
        yield common.chain([], decoding.ids)


def test_only_what_is_new_is_read():
    target = make_llama()
    common.check_target(target)
    read = []
    hook = target.get_input_embeddings().register_forward_pre_hook(
        lambda module, given: read.append(given[0].shape[1])
    )
    first = common.start(
        target, input_ids=torch.arange(1, 20)[None], max_new_tokens=1, **GREEDY
    )
    first.verify(common.chain([], first.ids))
    more = torch.cat([first.ids, torch.tensor([[5, 6, 7]])], dim=1)
    read.clear()
    second = common.start(
        target, after=first, input_ids=more, max_new_tokens=1, **GREEDY
    )
    hook.remove()
    # The newest token of the first answer, and all but the last one of the new turn.
    assert read == [3] and second.hidden.shape[1] == 22
    whole, _ = common.target_features(target, more[:, :-1])
    torch.testing.assert_close(second.hidden, whole)


def test_an_interrupted_turn_can_be_taken_over(monkeypatch):
    """Its last forward has left rows that nothing was committed for."""
    target = make_llama()
    drafts, _ = make_drafts("glide", target)
    ids = torch.tensor([[5, 6, 7]])
    options = GREEDY | {"max_new_tokens": 12}
    decoding = common.start(target, input_ids=ids, **options)
    steps = drafts(decoding)
    decoding.verify(next(steps))
    draft = next(steps)
    common.score(target, decoding.ids, draft, decoding.cache)  # and then Ctrl-C
    again = common.start(target, after=decoding, input_ids=decoding.ids, **options)
    for draft in drafts(again):
        again.verify(draft)
    expected = target.generate(input_ids=decoding.ids, **options)
    assert torch.equal(again.ids, expected)


def test_a_cache_that_does_not_fit_is_refused_or_read_anew():
    target, other = make_llama(), make_llama(seed=1)
    ids = torch.tensor([[5, 6, 7]])
    options = GREEDY | {"max_new_tokens": 4, "input_ids": ids}
    first = common.start(target, **options)
    with refused("another target's: pass the newest"):
        common.start(other, after=first, **options)
    second = common.start(target, after=first, **options)
    with refused("taken over already"):
        common.start(target, after=first, **options)
    target.float()
    with pytest.warns(UserWarning, match="the whole text is read anew"):
        third = common.start(target, after=second, **options)
    assert third.hidden.dtype == torch.float32
    for draft in plain(third):
        third.verify(draft)
    assert torch.equal(third.ids, target.generate(**options))


def test_rows_from_the_other_side_of_a_long_ropes_border_are_read_anew():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    border = {"original_max_position_embeddings": 8}
    target = family("Phi3", rope_parameters=rope | border, **border)
    text = torch.arange(5, 17)[None]
    options = GREEDY | {"max_new_tokens": 2}
    first = common.start(target, input_ids=text[:, :4], **options)
    with warnings.catch_warnings(action="error"):
        first = common.start(target, after=first, input_ids=text[:, :6], **options)
    options["input_ids"] = text
    with pytest.warns(UserWarning, match="the whole text is read anew"):
        second = common.start(target, after=first, **options)
    for draft in plain(second):
        second.verify(draft)
    assert torch.equal(second.ids, target.generate(**options))


def test_each_method_that_reads_a_text_has_a_window():
    for method in (*cli.trainable(), "beam"):
        # torch.no_grad wraps as well, so __wrapped__ tells nothing.
        drafts = cli.import_method(method).drafts
        assert "window" in drafts.__code__.co_varnames, method
