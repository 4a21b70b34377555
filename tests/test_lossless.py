"""Every method and rival, on every family of targets: one training step, save, load,
and decoding that equals the target's own.
"""

import copy
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tiny import (
    FAMILIES,
    OPT,
    decode,
    each_once,
    family,
    make_drafts,
    make_streamer,
    random_batch,
    sampled_p_value,
    sighted,
    slow,
    untrained,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteriaList

import common
from support import cli

METHODS = cli.present()
VOCAB = 13  # few tokens, so that even an untrained drafter hits some
LARGE = 40  # more, for trees of 20 ranks
SMALL = 7  # so few that all answers can be enumerated
GREEDY = {"max_new_tokens": 20, "do_sample": False}
FIELDS = {"intermediate_size": 16}  # of a Config that has them
TIED = {"num_key_value_heads": 1, "tie_word_embeddings": True}
RARER = {
    "Llama, one head of keys, tied": TIED,
    "Llama, biases": {"attention_bias": True, "mlp_bias": True},
    "GPT2, untied": {"tie_word_embeddings": False},
    "OPT": OPT,
}
# Every method on Llama, and one that reads keys and values on other kinds of targets.
QUICK = each_once(METHODS, ["Llama", "Gemma3 with images", "GPT2"])
ALL = itertools.product(METHODS, [*FAMILIES, "Gemma3 with images", *RARER])
PAIRS = QUICK + [slow(*pair) for pair in ALL if pair not in QUICK]


def random_ids(length, vocab=VOCAB):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(1, vocab, (1, length), generator=generator)


@functools.cache
def make_target(name, vocab=VOCAB):
    """A tiny target in float64, a prompt of seven tokens, and 20 tokens of the target's
    own.
    """
    if name == "Gemma3 with images":
        target = sighted(vocab_size=vocab)
    else:
        options = {**FAMILIES, **RARER}[name]
        target = family(name.split(",")[0], vocab_size=vocab, **options)
    ids = random_ids(7, vocab)
    return target, ids, target.generate(ids, **GREEDY)


def train_one_step(module, drafter, target):
    """A step on three random sequences, with all parts of the contract of training."""
    batch = random_batch(target, (9, 14, 6), layers=drafter.kv_layers)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in weights]
    total, weight = module.loss(drafter.train(), target, batch)
    (total / weight).backward()
    torch.optim.SGD(weights, lr=0.01).step()
    assert all(p.isfinite().all() for p in weights)
    changed = [not torch.equal(p, old) for p, old in zip(weights, before)]
    assert any(changed), "nothing learns"
    with torch.no_grad():
        rate, count = module.acceptance(drafter.eval(), target, batch)
    assert 0 <= float(rate) <= float(count)


@functools.cache
def make_drafter(module, target):
    """A method's drafter for a target, trained by one step, saved, and loaded again."""
    vocab = target.config.get_text_config().vocab_size
    drafter = untrained(module, target, draft_vocab=vocab - 2, **FIELDS).float()
    train_one_step(module, drafter, target)
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        loaded = common.load_drafter(module.Drafter, folder, target)
    assert loaded.config == drafter.config
    for key, ours in loaded.state_dict().items():
        assert torch.equal(ours, drafter.state_dict()[key].to(ours.dtype)), key
        told = f"{key}: embedding and LM head are the target's"
        assert vocab not in ours.shape or key == "vocab_ids", told
    return loaded


def drafts_of(name, target_name, vocab=VOCAB, **changes):
    """A method's drafts for a tiny target, with a drafter that one step has trained."""
    target, _, _ = make_target(target_name, vocab)
    return make_drafts(name, target, make_drafter, **changes)[0]


# ------------------------------------------------------------------------------- greedy


def within(stats, left):
    """Whether every draft left a place for the bonus token, in an answer of `left`
    tokens.
    """
    for offered, accepted in zip(stats.offered, stats.accepted):
        if offered >= left:
            return False
        left -= accepted + 1
    return True


@pytest.mark.parametrize("method, target_name", PAIRS)
def test_greedy_output_is_the_targets_own(method, target_name):
    target, ids, truth = make_target(target_name)
    stats = common.Stats()
    streamer, told = make_streamer()
    drafts = drafts_of(method, target_name)
    decoder = common.speculate(drafts, streamer=streamer, callback=stats)
    output = target.generate(ids, custom_generate=decoder, **GREEDY)
    assert torch.equal(output, truth)
    prompt, *rounds, last = told
    assert prompt == ids[0].tolist()
    assert sum(rounds, []) == truth[0, 7:].tolist()
    assert last == "end"
    assert stats.emitted == 20
    assert stats.target_forwards == len(stats.accepted) == len(rounds)
    assert within(stats, 20)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_accepted(method):
    """Otherwise the comparisons above would never have moved a row of the cache. Most
    methods need only the first of these targets for it.
    """

    def accepted(target_name):
        target, ids, _ = make_target(target_name)
        _, stats = decode(target, ids, drafts_of(method, target_name), **GREEDY)
        return sum(stats.accepted)

    assert any(map(accepted, ("Llama", "Qwen3", "Gemma2", "GPT2")))


VARIANTS = [
    (name, each) for name in METHODS for each in cli.import_method(name).VARIANTS
]


@pytest.mark.parametrize("method, variant", VARIANTS)
def test_every_variant_is_lossless(method, variant):
    target, ids, truth = make_target("Llama", LARGE)
    changes = cli.import_method(method).VARIANTS[variant]
    drafts = drafts_of(method, "Llama", LARGE, **changes)
    assert torch.equal(decode(target, ids, drafts, **GREEDY)[0], truth)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["zero", "large", "random"])
def test_no_drafter_can_change_the_answer(kind, method):
    """All draft logits equal, near one-hot, or random."""
    target, ids, truth = make_target("Llama")
    drafts, drafter = make_drafts(method, target, make_drafter)
    if drafter is None:
        pytest.skip("it has no weights")
    saved = {name: x.clone() for name, x in drafter.state_dict().items()}
    torch.manual_seed(0)
    for weight in drafter.parameters():
        if kind == "random":
            weight.data.normal_()
        else:
            weight.data *= {"zero": 0.0, "large": 100.0}[kind]
    output, _ = decode(target, ids, drafts, **GREEDY)
    drafter.load_state_dict(saved)
    assert torch.equal(output, truth)


@pytest.mark.parametrize("method", METHODS)
def test_logits_processors_see_what_they_see_in_plain_decoding(method):
    target, ids, truth = make_target("Llama")
    options = {"max_new_tokens": 16, "do_sample": False}
    options |= {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    expected = target.generate(ids, **options)
    assert not torch.equal(expected, truth[:, :23]), "the processors change nothing"
    output, _ = decode(target, ids, drafts_of(method, "Llama"), **options)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_ends_where_plain_decoding_ends(method):
    """At an end-of-sequence token, by a criterion, and at the last token that may be
    written.
    """
    target, ids, truth = make_target("Llama")
    drafts = drafts_of(method, "Llama")
    sixth = int(truth[0, 12])
    ten = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] >= 10])])
    for options in (
        {"max_new_tokens": 20, "eos_token_id": sixth},
        {"max_new_tokens": 20, "eos_token_id": [sixth, int(truth[0, 15])]},
        {"max_new_tokens": 20, "stopping_criteria": ten},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_length": 11},
    ):
        expected = target.generate(ids, do_sample=False, **options)
        assert expected.shape[1] < truth.shape[1]
        output, _ = decode(target, ids, drafts, do_sample=False, **options)
        assert torch.equal(output, expected), options


@pytest.mark.parametrize("method", METHODS)
def test_a_processor_may_force_tokens_that_no_drafter_drafts(method):
    """transformers allows those of `prefix_allowed_tokens_fn` where all others are
    -inf, so a drafter without them drafts them as well.
    """
    target, ids, _ = make_target("Llama")
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    options["prefix_allowed_tokens_fn"] = lambda *_: [0, 1]  # the rarest two
    torch.manual_seed(0)
    for _ in range(3):
        output, _ = decode(target, ids, drafts_of(method, "Llama"), **options)
        assert set(output[0, ids.shape[1] :].tolist()) <= {0, 1}


WITH_K3 = [*((name, {}) for name in METHODS), ("falcon", {"k": 3, "fusion": "linear"})]


@pytest.mark.parametrize("method, options", WITH_K3)
def test_every_round_drafts_what_a_new_generator_would(method, options):
    """After rejections and whole drafts, and after rounds that the drafter missed: it
    reads what it has not read yet. With one layer a cached row depends only on its own
    token.
    """
    target, ids, truth = make_target("Llama")
    make = functools.partial(untrained, num_layers=1, draft_vocab=VOCAB - 2, **options)
    drafts, _ = make_drafts(method, target, make)
    decoding = common.start(target, input_ids=ids, **GREEDY)
    rejected = set()
    for number, draft in enumerate(drafts(decoding)):
        anew = next(drafts(decoding))
        assert torch.equal(draft.tokens, anew.tokens) and draft.parents == anew.parents
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs, anew.probs, atol=1e-6, rtol=1e-5)
        drafted = len(draft.tokens)
        rejected.add(drafted - len(decoding.verify(draft)))
        if number == 2:
            for _ in range(3):  # drafts of somebody else's
                decoding.verify(common.chain([], decoding.ids))
    assert torch.equal(decoding.ids, truth)
    assert len(rejected) > 1, "all rounds are alike"


class Largest(TorchDispatchMode):
    """Sees every tensor that is computed, and keeps the size of the largest."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("method", METHODS)
def test_memory_grows_with_a_prompt_and_not_with_its_square(method):
    """In the prefill and in the first draft, by the elements of the largest tensor."""
    target = family("Llama", max_position_embeddings=4096, num_hidden_layers=2)
    drafts, _ = make_drafts(method, target)
    largest = {}
    for length in (1000, 2000):
        ids = random_ids(length)
        with Largest() as seen:
            decoding = common.start(target, input_ids=ids, max_new_tokens=9)
            next(drafts(decoding))
        largest[length] = seen.elements
    assert largest[2000] < 2.5 * largest[1000], largest


# ------------------------------------------------------------------------------ sampled


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target_name", ["Llama", slow("Gemma2"), slow("GPT2")])
def test_sampled_output_follows_the_target(target_name, method):
    """On real models; what is wrong on purpose is noticed in the methods' own tests,
    where the target is a table.
    """
    target, ids, _ = make_target(target_name, SMALL)
    decoder = common.speculate(drafts_of(method, target_name, SMALL))
    assert sampled_p_value(target, ids, 2, draws=200, custom_generate=decoder) > 1e-3


# -------------------------------------------------------------------- on another device


@torch.no_grad()
def summed_loss(method, target, drafter):
    """The loss of a random batch; 0 without weights to train."""
    module = cli.import_method(method)
    if not hasattr(module, "loss"):
        return 0.0
    batch = random_batch(target, layers=drafter.kv_layers)
    torch.manual_seed(0)
    return float(module.loss(drafter, target, batch)[0])


def check_the_device(pretend):
    """Every method trains and decodes on a device that keeps a GPU's rules
    (tools/pretend.py).
    """
    FIELDS["fusion"] = "linear"  # the device has no LSTM
    with pretend.gpu():
        there = torch.ones(3, device="pretend")
        assert (there + there).tolist() == [2, 2, 2]
        with pytest.raises(AssertionError, match="mixes devices"):
            there + torch.ones(3)
    target, ids, truth = make_target("Llama")
    for method in METHODS:
        drafts, drafter = make_drafts(method, target, make_drafter)
        expected = summed_loss(method, target, drafter)
        sampling = {"max_new_tokens": 10, "do_sample": True, "top_k": 0}
        torch.manual_seed(5)
        sampled, _ = decode(target, ids, drafts, **sampling)
        with pretend.gpu():
            away = copy.deepcopy(target).to("pretend")
            there = drafter and copy.deepcopy(drafter).to("pretend")
            drafts, _ = make_drafts(method, away, lambda *_, there=there: there)
            ids_away = ids.to("pretend")
            assert summed_loss(method, away, there) == pytest.approx(expected), method
            output, _ = decode(away, ids_away, drafts, **GREEDY)
            assert torch.equal(output.cpu(), truth), method
            torch.manual_seed(5)
            output, _ = decode(away, ids_away, drafts, **sampling)
            assert torch.equal(output.cpu(), sampled), method


def check_the_counts(pretend):
    """Neither copies nor launches grow with the tree; kept rows take one copy for all
    layers.
    """
    target, ids, truth = make_target("Llama")
    right = truth[0, 7]  # the token after the prompt
    wrong = torch.tensor([token for token in range(VOCAB) if token != right])
    # Children of the root; accepted rows of the cache are in place if `right` is first.
    trees = {
        "in place": [right, *wrong[:8]],
        "moved": [wrong[0], right],
        "moved, more nodes": [*wrong[:8], right],
    }
    with pretend.gpu():
        away = copy.deepcopy(target).to("pretend")
        seen = {}
        for name, tokens in trees.items():
            decoding = common.start(away, input_ids=ids.to("pretend"), **GREEDY)
            draft = common.Draft(torch.tensor(tokens).to("pretend"), [-1] * len(tokens))
            pretend.counts.clear()
            decoding.verify(draft)
            seen[name] = dict(pretend.counts)
            # The right token is accepted, and the bonus token follows.
            assert torch.equal(decoding.ids.cpu(), truth[:, :9])
    assert seen["moved"] == seen["moved, more nodes"]
    assert seen["moved"]["to_host"] == seen["in place"]["to_host"]
    # It is told where to move from.
    assert seen["moved"]["to_device"] == seen["in place"]["to_device"] + 1
    assert seen["moved"]["launches"] > seen["in place"]["launches"]


def in_its_own_process(check):
    """Run a check on the device; autograd learns of all devices when it starts."""
    # Its weights count, whatever their type is.
    code = "import common, pretend, test_lossless\n"
    code += "common.is_plain_weight = lambda weight: weight is not None\n"
    code += f"test_lossless.{check}(pretend)"
    tests = Path(__file__).parent
    paths = [tests.parent, tests, tests / "tools"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_decodes_on_a_device_that_keeps_a_gpus_rules():
    in_its_own_process("check_the_device")


def test_a_round_asks_no_more_of_a_gpu_for_more_nodes():
    in_its_own_process("check_the_counts")
