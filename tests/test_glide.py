"""glide.py: lossless decoding with good, bad and hostile drafters; the block mask; the loss; the
ablations."""

import collections
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import chi_square_p_value, enumerate_joint, make_llama
from tokenizers import Tokenizer, decoders, models
from transformers import (
    PreTrainedTokenizerFast,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import common
import glide
import train


def make_drafter(target, **options):
    vocab = target.config.vocab_size
    settings = (
        dict(target=common.target_shape(target), intermediate_size=48, draft_vocab=0) | options
    )
    torch.manual_seed(5)
    return glide.build(glide.Config(**settings), target, torch.arange(vocab)).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    return target.generate(
        ids, custom_generate=glide.generate, drafter=drafter, **options
    ), options["stats"]


def make_batch(target, lengths=(9, 12, 7), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, list(range(target.config.num_hidden_layers)), None)
    return train.make_batch(
        list(range(len(lengths))), sequences, features, torch.arange(len(lengths)) + 7, 0.0, "cpu"
    )


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter that has seen a little of what the target says, so that some drafts are accepted
    and some refused."""
    drafter = make_drafter(llama).train()
    ids = llama.generate(torch.arange(1, 9)[:, None], max_new_tokens=60, do_sample=False)
    sequences = [(row, torch.arange(len(row)) > 0) for row in ids]
    features = train.Features(llama, sequences, drafter.kv_layers, None)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for step in range(100):
        batch = train.make_batch(
            list(range(8)), sequences, features, torch.arange(8) + step, 0.0, "cpu"
        )
        (glide.loss(drafter, llama, batch) / batch.loss_mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


class Oracle:
    """Stands in for glide.propose: drafts what the target will say (or, `wrong`, never that)."""

    def __init__(self, truth, wrong=False):
        self.truth, self.wrong = truth, wrong

    def __call__(
        self, drafter, target, input_ids, cache, own, logits_processor=None, do_sample=False
    ):
        for place in range(input_ids.shape[1], self.truth.shape[1]):
            token = (self.truth[0, place : place + 1] + self.wrong) % target.config.vocab_size
            yield token, F.one_hot(token[0], target.config.vocab_size).double(), None


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("gamma", [0, 1, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_greedy_output_is_the_targets(llama, trained, gamma, length):
    ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=40, do_sample=False)
    for drafter in (
        trained,
        make_drafter(llama),
        make_drafter(llama, cross_attention=False, num_layers=2),
        make_drafter(llama, draft_vocab=9, kv_layer=0),
    ):
        output, stats = decode(llama, drafter, ids, gamma=gamma)
        assert torch.equal(output, truth)
        assert stats.emitted == 40 and sum(stats.accepted) + stats.target_forwards == 40


def test_the_trained_drafter_is_accepted_sometimes_and_refused_sometimes(llama, trained):
    _, stats = decode(llama, trained, torch.tensor([[3]]), max_new_tokens=100)
    assert 0 < sum(stats.accepted) < stats.drafted and len(set(stats.accepted)) > 2


@pytest.mark.parametrize("gamma", [1, 5, 8])
def test_an_oracle_is_always_accepted_and_its_opposite_never(llama, trained, monkeypatch, gamma):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    monkeypatch.setattr(glide, "propose", Oracle(truth))
    output, stats = decode(llama, trained, ids, max_new_tokens=37, gamma=gamma)
    assert torch.equal(output, truth) and stats.accepted == stats.offered
    assert stats.target_forwards == math.ceil(37 / (gamma + 1))
    monkeypatch.setattr(glide, "propose", Oracle(truth, wrong=True))
    output, stats = decode(llama, trained, ids, max_new_tokens=37, gamma=gamma)
    assert torch.equal(output, truth) and stats.accepted == [0] * 37


def test_stopping_inside_a_draft(llama, trained, monkeypatch):
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=37, do_sample=False)
    monkeypatch.setattr(glide, "propose", Oracle(truth))
    for place in range(3, 12):
        eos = int(truth[0, place])
        expected = llama.generate(ids, max_new_tokens=37, do_sample=False, eos_token_id=eos)
        assert torch.equal(
            decode(llama, trained, ids, gamma=8, eos_token_id=eos, max_new_tokens=37)[0], expected
        )
        shorter = decode(llama, trained, ids, gamma=8, max_new_tokens=place)[0]
        assert torch.equal(shorter, truth[:, : 3 + place])


def test_token_id_zero_is_a_token_like_any_other():
    target = make_llama(seed=11)
    with torch.no_grad():
        target.lm_head.weight[0] *= 3  # makes 0 frequent
    drafter, ids = make_drafter(target), torch.tensor([[0, 0, 4]])
    mask = torch.ones_like(ids)  # 0 is also this target's padding token
    truth = target.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert (truth[0, 3:] == 0).any()
    assert torch.equal(decode(target, drafter, ids, attention_mask=mask)[0], truth)


def test_logits_processors_see_each_prefix(llama, trained):
    for options in (
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [3, 4, 5]},
    ):
        ids = torch.tensor([[9, 8, 7]])
        truth = llama.generate(ids, max_new_tokens=40, do_sample=False, **options)
        assert torch.equal(decode(llama, trained, ids, **options)[0], truth)


def test_stop_strings_and_streamer(llama, trained):
    """A stop string that begins in one token and ends in the next, met in the middle of a draft."""
    letters = Tokenizer(models.BPE(vocab={chr(ord("a") + i): i for i in range(48)}, merges=[]))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)

    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    stop = {
        "stopping_criteria": [StopStringCriteria(tokenizer, [tokenizer.decode(truth[0, 12:14])])]
    }
    expected = llama.generate(ids, max_new_tokens=30, do_sample=False, **stop)
    streamer = Streamer()
    output, _ = decode(llama, trained, ids, max_new_tokens=30, token_streamer=streamer, **stop)
    assert torch.equal(output, expected) and output.shape[1] < 33
    assert streamer.tokens == output[0, 3:].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_p": 0.8}])
def test_sampled_output_follows_the_target(small_llama, options):
    """Joint distribution of the first three tokens, with a drafter that is neither right nor
    absurd."""
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    counts = collections.Counter()
    torch.manual_seed(0)
    for _ in range(700):
        output, _ = decode(
            small_llama,
            drafter,
            prompt,
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            gamma=2,
            **options,
        )
        counts[tuple(output[0, 2:].tolist())] += 1
    assert chi_square_p_value(counts, exact(small_llama, prompt, **options)) > 0.001


def exact(target, prompt, **options):
    """Joint distribution of three tokens under temperature and top-p, from transformers' own
    processors."""
    warpers = [TemperatureLogitsWarper(options["temperature"])] if "temperature" in options else []
    warpers += [TopPLogitsWarper(options["top_p"])] if "top_p" in options else []

    class Warped:
        def __call__(self, ids):
            output = target(ids)
            for warp in warpers:
                output.logits[:, -1] = warp(ids, output.logits[:, -1].float())
            return output

    return {outcome: p for outcome, p in enumerate_joint(Warped(), prompt, 3).items() if p > 0}


def test_negative_control_accepting_every_draft_is_noticed(small_llama, monkeypatch):
    drafter, prompt = make_drafter(small_llama), torch.tensor([[1, 2]])
    counts = collections.Counter()
    torch.manual_seed(0)
    monkeypatch.setattr(
        common.torch, "rand", lambda *_, **__: torch.zeros(())
    )  # the acceptance test always passes
    for _ in range(700):
        output, _ = decode(
            small_llama, drafter, prompt, do_sample=True, top_k=0, max_new_tokens=3, gamma=2
        )
        counts[tuple(output[0, 2:].tolist())] += 1
    assert chi_square_p_value(counts, exact(small_llama, prompt)) < 1e-6


def test_drafting_with_a_cache_equals_drafting_from_scratch(llama, trained, monkeypatch):
    """Rows that the drafter keeps between rounds must be those it would compute again."""
    drafts = []
    real = common.verify
    monkeypatch.setattr(
        common, "verify", lambda *a, **k: drafts.append((a[1], a[2].tokens)) or real(*a, **k)
    )
    decode(llama, trained, torch.tensor([[9, 8, 7, 6]]), gamma=4)
    for ids, tokens in drafts[1:]:
        cache = common.GrowingCache(3)
        common.forward(llama, ids[:, :-1], cache)
        steps = glide.propose(trained, llama, ids, cache, glide.new_memory(trained, llama))
        assert [int(next(steps)[0]) for _ in tokens] == tokens.tolist()


# ------------------------------------------------------------------------------------ mask and loss


def test_block_mask_drawing():
    mask = glide.block_mask(6, 3, torch.tensor([1]))[0, 0]
    assert ["".join(".x"[int(v)] for v in row) for row in mask] == [
        "......",
        "......",
        "xx....",
        "xx....",
        "xx....",
        "xxxxx.",
    ]


def test_block_mask_against_the_definition():
    phases = torch.arange(5)
    mask = glide.block_mask(17, 5, phases)
    for row, phase in enumerate(phases.tolist()):
        for j in range(17):
            for k in range(17):
                assert bool(mask[row, 0, j, k]) == ((j + phase) // 5 > (k + phase) // 5)


def test_a_query_without_keys_gets_zero_and_finite_gradients(llama):
    layer = glide.CrossAttention(32, 4, 8).double()
    x = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    mask = glide.block_mask(4, 2, torch.tensor([0]))
    out = layer(x, (torch.ones(1, 4, 8), torch.zeros(1, 4, 8)), keys, keys, mask)
    out.square().sum().backward()
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 32)) and out[:, 2:].abs().min() > 0
    assert x.grad.isfinite().all() and layer.q_proj.weight.grad.isfinite().all()


def test_loss_against_a_hand_worked_case(llama):
    """Both losses from probabilities computed position by position, each with a forward of its
    own."""
    batch = make_batch(llama)
    batch.seed = torch.tensor([4, 5, 8])  # phases 4, 0, 3
    for distill in (True, False):
        drafter = make_drafter(llama, draft_vocab=30, distill=distill)
        drafter.draft_ids.copy_(torch.arange(10, 40))
        expected = 0.0
        for row, length in enumerate(batch.lengths.tolist()):
            for place in range(length - 1):
                if not batch.loss_mask[row, place + 1]:
                    continue
                ids = batch.input_ids[row : row + 1, : place + 1]
                phase = int(batch.seed[row]) % 5
                blocks = [(i + phase) // 5 for i in range(place + 1)]
                mask = torch.tensor([[a > b for b in blocks] for a in blocks])[None, None]
                kv = [tuple(x[row : row + 1, :, : place + 1] for x in batch.kv[2])]
                rotary = common.rotary(llama, torch.arange(place + 1)[None], -1)
                head = common.draft_head(llama, drafter.draft_ids)
                logits, _ = drafter(
                    llama.get_input_embeddings()(ids),
                    rotary,
                    kv,
                    head,
                    (slice(None), -1),
                    cross_mask=mask,
                )
                log_q = logits[0].detach().log_softmax(-1)
                if distill:
                    teacher = llama(ids).logits[0, -1, 10:40].softmax(-1)
                    expected -= float((teacher * log_q).sum())
                elif 10 <= (token := int(batch.input_ids[row, place + 1])) < 40:
                    expected -= float(log_q[token - 10])
        assert float(glide.loss(drafter, llama, batch)) == pytest.approx(expected, rel=1e-5)


def test_alpha_of_the_target_itself_is_one_and_of_a_subset_its_mass(llama, monkeypatch):
    batch = make_batch(llama)
    drafter = make_drafter(llama)
    where = F.pad(batch.loss_mask[:, 1:], (0, 1))
    own = common.target_logits(llama, batch.hidden[where])
    monkeypatch.setattr(glide, "training_logits", lambda *_: (own, where))
    total, count = glide.alpha(drafter, llama, batch)
    assert count == int(batch.loss_mask.sum()) and float(total) == pytest.approx(count, rel=1e-5)
    monkeypatch.setattr(
        glide, "training_logits", lambda *_: (torch.zeros_like(own), where)
    )  # q_draft is 1 / V
    expected = sum(min(float(p), 1 / 48) for p in own.softmax(-1).flatten())
    assert float(glide.alpha(drafter, llama, batch)[0]) == pytest.approx(expected, rel=1e-5)


def test_expected_speedup():
    assert glide.expected_speedup(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
    assert glide.expected_speedup(1.0, 5, 0.0) == 6
    assert glide.expected_speedup(0.648, 5, 0.067) == pytest.approx(
        1.97, abs=0.005
    )  # Table 1, Vicuna-7B, GSM8K


# ------------------------------------------------------------------------------------- architecture


def test_layers_read_the_top_of_the_target(llama):
    assert make_drafter(llama).kv_layers == [2]
    assert make_drafter(llama, num_layers=2).kv_layers == [1, 2]
    assert make_drafter(llama, num_layers=2, kv_layer=0).kv_layers == [0, 0]
    assert make_drafter(llama, cross_attention=False).kv_layers == []
    with pytest.raises(ValueError, match="kv_layer 3"):
        make_drafter(llama, kv_layer=3)


def test_a_drafter_built_from_the_targets_last_layer_is_that_layer(llama):
    """Without cross-attention, feeding what the last target layer got gives the target's own
    output."""
    drafter = make_drafter(llama, cross_attention=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    states = llama(ids, output_hidden_states=True).hidden_states
    rotary = common.rotary(llama, torch.arange(4)[None], -1)
    logits, hidden = drafter(states[-2], rotary, [], llama.lm_head, (slice(None), slice(None)))
    torch.testing.assert_close(hidden, common.target_features(llama, ids)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, llama(ids).logits, atol=1e-3, rtol=1e-3)


def test_draft_vocabulary_is_the_most_frequent_tokens(llama):
    counts = torch.zeros(48)
    counts[[40, 3, 17]] = torch.tensor([5.0, 9.0, 7.0])
    config = glide.Config(target=common.target_shape(llama), intermediate_size=48, draft_vocab=3)
    assert glide.build(config, llama, counts).draft_ids.tolist() == [3, 17, 40]


def test_saved_and_loaded_drafts_are_the_same(llama, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = common.load_drafter(glide.Drafter, tmp_path, llama)
    assert (
        loaded.config == trained.config
        and dataclasses.asdict(loaded.config)["target"]["vocab_size"] == 48
    )
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=1e-6, rtol=1e-6)


def test_drafting_in_half_precision_runs():
    target = make_llama().bfloat16()
    drafter = make_drafter(target).bfloat16()
    output, _ = decode(target, drafter, torch.tensor([[4, 5, 6]]))
    assert output.shape == (1, 43)


def test_training_and_drafting_see_the_same(llama, trained):
    """Step i of a draft after P + 1 tokens is the training row P + i whose block began at P."""
    batch = make_batch(llama, lengths=(14,), prompt=1)
    root = 7
    batch.seed = torch.tensor([(-root) % 5])  # a block border right before the root
    logits, where = glide.training_logits(trained, llama, batch)
    rows = {int(place): row.softmax(-1) for place, row in zip(where[0].nonzero()[:, 0], logits)}
    ids = batch.input_ids
    cache, own = common.GrowingCache(3), glide.new_memory(trained, llama)
    common.forward(llama, ids[:, :root], cache)
    for step in range(5):  # drafting fed with the sequence's own tokens instead of its choices
        q_draft = next(glide.propose(trained, llama, ids[:, : root + step + 1], cache, own))[1]
        torch.testing.assert_close(q_draft, rows[root + step], atol=1e-5, rtol=1e-4)


def test_consumed_tokens_read_what_came_before_them(llama):
    """With two layers the rows of re-fed tokens matter: as if fed one by one, the target's rows
    ending before each."""
    drafter = make_drafter(llama, num_layers=2)
    ids, own = torch.tensor([[9, 8, 7, 6, 5, 4]]), glide.new_memory(drafter, llama)
    for end in range(1, ids.shape[1] + 1):
        cache = common.GrowingCache(3)
        if end > 1:
            common.forward(llama, ids[:, : end - 1], cache)
        one_by_one = next(glide.propose(drafter, llama, ids[:, :end], cache, own))[1]
    at_once = next(glide.propose(drafter, llama, ids, cache, glide.new_memory(drafter, llama)))[1]
    torch.testing.assert_close(at_once, one_by_one)
