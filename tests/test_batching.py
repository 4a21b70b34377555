"""Several sequences at once: each must come out as if it were alone, whatever the others do."""

import pytest
import torch
from tiny import FAMILIES, family, make_arm, sampled_p_value

import common
from support import batching, cli

IDS = ([1, 5, 9, 2, 8, 3, 1], [4, 4], [7], [2, 10, 3, 6, 2, 10])  # the last one repeats itself
PROMPTS = [torch.tensor([ids]) for ids in IDS]
GREEDY = {"do_sample": False}


def decode(target, arm, prompts, options, copies=0):
    """The answers to all prompts at once, and their Stats; options: for each prompt."""
    decodings = []
    for ids, own in zip(prompts, options):
        decodings.append(common.open_decoding(target, ids, copies=copies, **own))
    return batching.generate(target, *arm, decodings), [each.stats for each in decodings]


@pytest.mark.parametrize("target_name", ["Llama", "Gemma2"])
@pytest.mark.parametrize("method", cli.present())
def test_sequences_of_different_lengths_equal_plain_decoding(method, target_name):
    target = family(target_name, **FAMILIES[target_name])
    arm = make_arm(method, target)
    options = [{"max_new_tokens": n, **GREEDY} for n in (14, 3, 20, 9)]
    drafted = []
    for copies in (0, 6):
        outputs, stats = decode(target, arm, PROMPTS, options, copies)
        for ids, alone, output, own in zip(PROMPTS, options, outputs, stats):
            assert torch.equal(output, target.generate(ids, **alone))
            assert own.emitted == alone["max_new_tokens"]
            assert own.target_forwards == len(own.accepted)
        drafted.append(sum(own.drafted for own in stats))
    if method in ("glide", "falcon"):  # others may draft what is copied themselves
        assert drafted[1] != drafted[0]


def test_sequences_keep_their_own_pace(llama):
    """Each has the rounds it has alone, and every round is one forward for all.

    Falcon drafts from the target's hidden states, so that these are compared as well.
    """
    arm = make_arm("falcon", llama)
    options = {"max_new_tokens": 30, **GREEDY}
    alone = []
    for ids in PROMPTS:
        alone.append(decode(llama, arm, [ids], [options])[1][0])
    seen = []
    hook = llama.register_forward_pre_hook(lambda *_: seen.append(1))
    together = decode(llama, arm, PROMPTS, [options] * 4)[1]
    hook.remove()
    assert [own.accepted for own in together] == [own.accepted for own in alone]
    assert any(len(set(column)) > 1 for column in zip(*(own.accepted for own in together)))
    assert len(seen) == max(own.target_forwards for own in together)


@pytest.mark.parametrize("place", [0, 1])
def test_sampled_sequences_follow_the_target(small_llama, place):
    """The one that is looked at stands before or after another one."""
    arm = make_arm("glide", small_llama)
    options = {"max_new_tokens": 2, "do_sample": True, "top_k": 0}

    def decode_beside_another(target, input_ids, **_):
        prompts = [torch.tensor([[1, 2]])]
        prompts.insert(place, input_ids)
        return decode(target, arm, prompts, [options] * 2)[0][place]

    prompt = torch.tensor([[4, 0, 3]])
    p_value = sampled_p_value(
        small_llama, prompt, 2, draws=300, custom_generate=decode_beside_another
    )
    assert p_value > 1e-3
