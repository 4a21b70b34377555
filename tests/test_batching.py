"""Several sequences at once: each must come out as if it were alone."""

import itertools

import pytest
import torch
from tiny import FAMILIES, each_once, family, make_drafts, sampled_p_value

import common
from support import cli
from support.measuring import batching
from support.rivals import lookup

IDS = (
    [1, 5, 9, 2, 8, 3, 1],
    [4, 4],
    [7],
    [2, 10, 3, 6, 2, 10],
)  # the last one repeats itself
PROMPTS = [torch.tensor([ids]) for ids in IDS]
GREEDY = {"do_sample": False}
KINDS = {  # of layers: all see all, or some or all a window that answers exceed
    "Llama": {},
    "Mistral": {"sliding_window": 9},
    # With tied embeddings, the tiny one would repeat its last token for ever.
    "Gemma2": FAMILIES["Gemma2"] | {"sliding_window": 9, "tie_word_embeddings": False},
}


def decode(target, drafts, prompts, options):
    """The answers to all prompts at once, and their Stats; options: for each prompt."""
    stats = {}
    for ids, own in zip(prompts, options):
        stats[common.start(target, input_ids=ids, **own)] = common.Stats()

    def count(decoding, draft, path):
        stats[decoding](decoding, draft, path)

    outputs = batching.generate(target, drafts, list(stats), callback=count)
    return outputs, list(stats.values())


@pytest.mark.parametrize(
    "method, target_name", each_once(cli.present(), KINDS, "falcon")
)
def test_sequences_of_different_lengths_equal_plain_decoding(method, target_name):
    target = family(target_name, **KINDS[target_name])
    drafts, _ = make_drafts(method, target)

    def copying(decoding):
        return lookup.with_copies(drafts(decoding), decoding, 6)

    options = [{"max_new_tokens": n, **GREEDY} for n in (14, 3, 20, 9)]
    for made in (drafts, copying):
        outputs, stats = decode(target, made, PROMPTS, options)
        for ids, alone, output, own in zip(PROMPTS, options, outputs, stats):
            assert torch.equal(output, target.generate(ids, **alone))
            assert own.emitted == alone["max_new_tokens"]
            assert own.target_forwards == len(own.accepted)


def test_sequences_keep_their_own_pace(llama):
    """Each has the rounds it has alone, and every round is one forward for all.

    Falcon drafts from the target's hidden states, so that these are compared as well.
    """
    drafts, _ = make_drafts("falcon", llama)
    options = {"max_new_tokens": 30, **GREEDY}
    alone = [decode(llama, drafts, [ids], [options])[1][0] for ids in PROMPTS]
    seen = []
    hook = llama.register_forward_pre_hook(lambda *_: seen.append(1))
    together = decode(llama, drafts, PROMPTS, [options] * 4)[1]
    hook.remove()
    assert [own.accepted for own in together] == [own.accepted for own in alone]
    rounds = zip(*(own.accepted for own in together))
    assert any(len(set(accepted)) > 1 for accepted in rounds)
    assert len(seen) == max(own.target_forwards for own in together)


def test_sampled_sequences_follow_the_target(small_llama):
    """The one that is looked at stands before another one, or after it, in turn."""
    drafts, _ = make_drafts("glide", small_llama)
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 0}
    places = itertools.cycle([0, 1])

    def decode_beside_another(target, input_ids, **_):
        place = next(places)
        prompts = [torch.tensor([[1, 2]])]
        prompts.insert(place, input_ids)
        return decode(target, drafts, prompts, [options] * 2)[0][place]

    prompt = torch.tensor([[4, 0, 3]])
    p_value = sampled_p_value(
        small_llama, prompt, 2, draws=300, custom_generate=decode_beside_another
    )
    assert p_value > 1e-3
