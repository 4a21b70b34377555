"""glide.py: lossless decoding with any drafter; the block mask; the loss; what a layer reads."""

import collections
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from test_common import family
from tiny import chi_square_p_value, make_llama, slow, teach
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopPLogitsWarper,
)

import common
import glide
import train


def make_drafter(target, **options):
    settings = {"intermediate_size": 48, "draft_vocab": 0} | options
    config = glide.Config(target=common.target_shape(target), **settings)
    torch.manual_seed(5)
    return glide.build(config, target, torch.arange(target.config.vocab_size)).double().eval()


def decode(target, drafter, ids, **options):
    options = {"do_sample": False, "max_new_tokens": 40, "stats": common.Stats()} | options
    output = target.generate(ids, custom_generate=glide.generate, drafter=drafter, **options)
    return output, options["stats"]


def make_batch(target, lengths=(9, 12, 7), prompt=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, target.config.vocab_size, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    features = train.Features(target, sequences, list(range(target.config.num_hidden_layers)), None)
    seeds = torch.arange(len(lengths)) + 7
    return train.make_batch(list(range(len(lengths))), sequences, features, seeds, 0.0, "cpu")


@pytest.fixture(scope="module")
def trained(llama):
    """A drafter that has seen a little of what the target says: right sometimes, and not always."""
    drafter = make_drafter(llama)
    teach(glide, drafter, llama, 60, 5e-3, rows=8, length=61, layers=drafter.kv_layers)
    return drafter


class Oracle:
    """Stands in for glide.propose: drafts what the target will say (or, `wrong`, never that)."""

    def __init__(self, truth, wrong=False):
        self.truth, self.wrong = truth, wrong

    def __call__(self, drafter, target, input_ids, *_):
        for place in range(input_ids.shape[1], self.truth.shape[1]):
            token = (self.truth[0, place : place + 1] + self.wrong) % target.config.vocab_size
            yield token, F.one_hot(token[0], target.config.vocab_size).double(), None


class Bigram:
    """Stands in for a target's forward: the next token depends on the newest one only.

    All else of a decode loop is real, and a thousand samples take seconds. The probabilities of
    what follows a text can be written down: a product of entries of one table.
    """

    VOCAB = 6

    def __init__(self, target, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.target = target  # gives shapes only
        self.logits = 1.5 * torch.randn(self.VOCAB, self.VOCAB, generator=generator)

    def forward(self, input_ids, cache, _options):
        n, shape = input_ids.shape[1], common.target_shape(self.target)
        rows = torch.zeros(1, shape["num_kv_heads"], n, shape["head_dim"], dtype=torch.float64)
        for layer in cache.layers:
            layer.update(rows, rows)
        return self.logits[input_ids], torch.zeros(1, n, shape["hidden_size"])

    def answer(self, generate, prompt, new, warpers=(), do_sample=False, **options):
        """The `new` tokens after a prompt."""
        length = prompt.shape[1] + new
        config = GenerationConfig(do_sample=do_sample, max_length=length)
        stop = StoppingCriteriaList([MaxLengthCriteria(length)])
        warpers = LogitsProcessorList(warpers)
        with common.forward_by(self.target, self.forward):
            ids = generate(self.target, prompt, warpers, stop, config, **options)
        return tuple(ids[0, prompt.shape[1] :].tolist())

    def sample(self, generate, prompt, new, draws, warpers=(), **options):
        """{tokens: how often} of `draws` answers."""
        torch.manual_seed(0)
        options["do_sample"] = True
        answers = (self.answer(generate, prompt, new, warpers, **options) for _ in range(draws))
        return collections.Counter(answers)

    def greedy(self, new):
        """The most probable tokens after REPEATING."""
        tokens = [int(REPEATING[0, -1])]
        for _ in range(new):
            tokens.append(int(self.logits[tokens[-1]].argmax()))
        return tuple(tokens[1:])

    def joint(self, prompt, new, warpers=()):
        """{tokens: probability} of every answer that can be drawn."""
        scores = LogitsProcessorList(warpers)(None, self.logits.clone())
        table, joint = scores.softmax(-1).tolist(), {(int(prompt[0, -1]),): 1.0}
        for _ in range(new):
            grown = {}
            for tokens, probability in joint.items():
                for token, p in enumerate(table[tokens[-1]]):
                    if p > 0:
                        grown[(*tokens, token)] = probability * p
            joint = grown
        return {tokens[1:]: probability for tokens, probability in joint.items()}


class BigramDrafter(glide.Drafter):
    """Its drafts, too, depend on the newest token only; they are neither right nor absurd."""

    def forward(self, embeds, _rotary, _glimpses, head, rows, *_):
        return 4 * head(embeds[rows]), embeds[rows]


def make_bigram_drafter(target):
    config = glide.Config(target=common.target_shape(target), draft_vocab=0)
    return BigramDrafter(config).double().eval()


@pytest.fixture(scope="module")
def bigram():
    return Bigram(make_llama(vocab=Bigram.VOCAB, layers=1, seed=3, pad_token_id=None))


REPEATING = torch.tensor([[1, 2, 3, 4, 1, 2, 3]])  # so that there is something to copy


def spy_on_drafts(monkeypatch):
    """A list that fills with (input_ids, draft) of every round."""
    rounds, real = [], common.verify

    def spy(target, input_ids, draft, *more):
        rounds.append((input_ids, draft))
        return real(target, input_ids, draft, *more)

    monkeypatch.setattr(common, "verify", spy)
    return rounds


# ----------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize("copies", [0, 6])
@pytest.mark.parametrize("gamma, length", [slow(0, 13), (1, 1), (5, 2), slow(8, 13)])
def test_greedy_output_is_the_targets(llama, trained, gamma, length, copies):
    ids = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(length))
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    for drafter in (
        trained,
        make_drafter(llama, cross_attention=False, num_layers=2),
        make_drafter(llama, draft_vocab=9, kv_layer=0),
    ):
        options = {"gamma": gamma, "copies": copies, "max_new_tokens": 30}
        output, stats = decode(llama, drafter, ids, **options)
        assert torch.equal(output, truth)
        assert stats.emitted == 30 and sum(stats.accepted) + stats.target_forwards == 30


def test_copies_save_forwards_and_are_counted(bigram):
    """A text that repeats itself: what is copied is accepted."""
    drafter, new = make_bigram_drafter(bigram.target), 60
    stats = {copies: common.Stats() for copies in (0, 10)}
    for copies in stats:
        options = {"drafter": drafter, "copies": copies, "stats": stats[copies]}
        assert bigram.answer(glide.generate, REPEATING, new, **options) == bigram.greedy(new)
    offered, accepted = (sum(column) for column in zip(*stats[10].copies))
    assert offered >= accepted > 0
    assert stats[10].target_forwards < 0.7 * stats[0].target_forwards
    drafter.config.copies = 10  # what `generate` takes if it is not told
    again = common.Stats()
    bigram.answer(glide.generate, REPEATING, new, drafter=drafter, stats=again)
    assert again.copies == stats[10].copies


@pytest.mark.parametrize("copies", [0, 6])
def test_the_bonus_token_has_room(llama, trained, monkeypatch, copies):
    """No draft is so deep that its bonus token would come after the last place."""
    rounds = spy_on_drafts(monkeypatch)
    ids = torch.tensor([[9, 8, 7, 9, 8, 7]])
    decode(llama, trained, ids, gamma=8, max_new_tokens=14, copies=copies)
    for input_ids, draft in rounds:
        depths = []
        for parent in draft.parents.tolist():
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        deepest, length = max(depths, default=0), input_ids.shape[1]
        assert length + deepest + 1 <= 20, (
            f"input: {length} of at most 20 tokens\nexpected: depth {19 - length} or less\n"
            f"got: a draft of depth {deepest}"
        )


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
        output, _ = decode(llama, trained, ids, gamma=8, eos_token_id=eos, max_new_tokens=37)
        assert torch.equal(output, expected)
        shorter, _ = decode(llama, trained, ids, gamma=8, max_new_tokens=place)
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


def test_a_drafter_says_how_many_tokens_to_draft(llama):
    ids = torch.tensor([[9, 8, 7]])
    for gamma in (2, 4):
        _, stats = decode(llama, make_drafter(llama, gamma=gamma), ids, max_new_tokens=12)
        assert max(stats.offered) == stats.offered[0] == gamma


def test_copies_of_the_config_can_be_switched_off(llama):
    drafter, offered = make_drafter(llama, copies=6), {}
    for options in ({}, {"copies": 0}):
        _, stats = decode(llama, drafter, REPEATING, max_new_tokens=12, **options)
        offered[len(options)] = sum(count for count, _ in stats.copies)
    assert offered[0] > 0 and offered[1] == 0


def test_processors_see_the_tokens_drafted_so_far(llama, trained):
    ids, seen = torch.tensor([[9, 8, 7]]), []
    cache, memory = common.GrowingCache(3), glide.new_memory(trained, llama)
    common.forward(llama, ids[:, :-1], cache)

    def processor(prefix, scores):
        seen.append(prefix[0].tolist())
        return scores

    chain = glide.propose(trained, llama, ids, cache, memory, processor)
    drafted = [int(token) for token, _, _ in itertools.islice(chain, 3)]
    assert seen == [[9, 8, 7, *drafted[:n]] for n in range(3)]


def test_stop_strings_and_streamer(llama, trained):
    """A stop string that begins in one token and ends in the next, met in the middle of a draft."""
    letters = Tokenizer(models.BPE(vocab={chr(ord("a") + i): i for i in range(48)}, merges=[]))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    ids = torch.tensor([[9, 8, 7]])
    truth = llama.generate(ids, max_new_tokens=30, do_sample=False)
    criterion = StopStringCriteria(tokenizer, [tokenizer.decode(truth[0, 12:14])])
    stop = {"stopping_criteria": [criterion]}
    expected = llama.generate(ids, max_new_tokens=30, do_sample=False, **stop)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    output, _ = decode(llama, trained, ids, max_new_tokens=30, token_streamer=streamer, **stop)
    assert torch.equal(output, expected) and output.shape[1] < 33
    assert "".join(streamer) == tokenizer.decode(output[0, 3:])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_processors_that_forbid_all_draft_tokens_end_the_draft(llama, do_sample, normalised):
    """A drafter of nine tokens, all of them forbidden: nothing is drafted, and nothing breaks."""
    drafter, ids = make_drafter(llama, draft_vocab=9), torch.tensor([[9, 8, 7]])
    forbidden = drafter.draft_ids.tolist()
    options = {"suppress_tokens": forbidden, "renormalize_logits": normalised}
    output, stats = decode(llama, drafter, ids, do_sample=do_sample, **options)
    assert output.shape == (1, 43) and stats.drafted == 0
    assert not set(output[0, 3:].tolist()) & set(forbidden)


# ----------------------------------------------------------------------------------------- sampling


WARPERS = {
    "plain": [],
    "temperature, top-p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)],
}


@pytest.mark.parametrize("warpers, copies", [("plain", 0), ("temperature, top-p", 2)])
def test_sampled_output_follows_the_target(bigram, warpers, copies):
    """All answers of three tokens after a prompt that has something to copy."""
    options = {"drafter": make_bigram_drafter(bigram.target), "gamma": 2, "copies": copies}
    warpers = WARPERS[warpers]
    counts = bigram.sample(glide.generate, REPEATING, 3, 500, warpers, **options)
    assert chi_square_p_value(counts, bigram.joint(REPEATING, 3, warpers)) > 0.001


@pytest.mark.slow
def test_negative_control_accepting_every_draft_is_noticed(bigram, monkeypatch):
    monkeypatch.setattr(common.torch, "rand", lambda *_, **__: torch.zeros(()))  # always below
    options = {"drafter": make_bigram_drafter(bigram.target), "gamma": 2}
    counts = bigram.sample(glide.generate, REPEATING, 3, 500, **options)
    assert chi_square_p_value(counts, bigram.joint(REPEATING, 3)) < 1e-6


@pytest.mark.slow
def test_negative_control_accepting_every_copy_is_noticed(bigram, monkeypatch):
    """Copies that claim to be drawn from next to nothing are always accepted; that must show."""
    real = common.Lookup.merge

    def wrong(self, draft, input_ids, room):
        merged = real(self, draft, input_ids, room)
        if merged.copied:
            claimed = merged.probs.new_full((merged.copied, merged.probs.shape[1]), 1e-9)
            merged.probs = torch.cat([merged.probs, claimed])
        return merged

    monkeypatch.setattr(common.Lookup, "merge", wrong)
    options = {"drafter": make_bigram_drafter(bigram.target), "gamma": 1, "copies": 6}
    counts = bigram.sample(glide.generate, REPEATING, 3, 500, **options)
    assert chi_square_p_value(counts, bigram.joint(REPEATING, 3)) < 1e-6


# ------------------------------------------------------------------------------------ its own cache


def test_drafting_with_a_cache_equals_drafting_from_scratch(llama, trained, monkeypatch):
    """Rows that the drafter keeps between rounds must be those it would compute again."""
    rounds = spy_on_drafts(monkeypatch)
    decode(llama, trained, torch.tensor([[9, 8, 7, 6]]), gamma=4)
    for ids, draft in rounds[1:]:
        cache = common.GrowingCache(3)
        common.forward(llama, ids[:, :-1], cache)
        steps = glide.propose(trained, llama, ids, cache, glide.new_memory(trained, llama))
        assert [int(next(steps)[0]) for _ in draft.tokens] == draft.tokens.tolist()


# ------------------------------------------------------------------------------------ mask and loss


def test_block_mask_drawing():
    mask = glide.block_mask(6, 3, torch.tensor([1]))[0, 0]
    assert drawn(mask).split() == ["......", "......", "xx....", "xx....", "xx....", "xxxxx."]


def test_block_mask_against_the_definition():
    """A position may read a row if its block comes after the row's block."""
    phases = torch.tensor([0, 1, 2, 3, 4])
    got = glide.block_mask(17, 5, phases)
    expected = torch.zeros(5, 1, 17, 17, dtype=torch.bool)
    for row, phase in enumerate(phases.tolist()):
        for query in range(17):
            for key in range(17):
                expected[row, 0, query, key] = (query + phase) // 5 > (key + phase) // 5
    assert got is not None and torch.equal(got, expected), (
        f"input: length 17, block_size 5, phase {phases.tolist()}\n"
        f"expected: {tuple(expected.shape)}, of phase 3\n{drawn(expected[3, 0])}\n"
        f"got: {got if got is None or got.shape != expected.shape else drawn(got[3, 0])}"
    )


def drawn(mask):
    """A mask (T, T) as lines of x and dots."""
    return "\n".join("".join(".x"[int(allowed)] for allowed in row) for row in mask)


def test_a_query_without_keys_gets_zero_and_finite_gradients(llama):
    layer = glide.CrossAttention(32, 4, 8).double()
    x = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    mask = glide.block_mask(4, 2, torch.tensor([0]))
    unrotated = (torch.ones(1, 4, 8), torch.zeros(1, 4, 8))
    out = layer(x, glide.Glimpse(keys, keys, unrotated), mask)
    out.square().sum().backward()
    assert torch.equal(out[:, :2], torch.zeros(1, 2, 32)) and out[:, 2:].abs().min() > 0
    assert x.grad.isfinite().all() and layer.q_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("distill", [True, False])
def test_loss_against_a_hand_worked_case(llama, distill):
    """Both losses from probabilities of one position after the other, each with its own forward."""
    batch = make_batch(llama)
    batch.seed = torch.tensor([4, 5, 8])  # phases 4, 0, 3
    drafter = make_drafter(llama, draft_vocab=30, distill=distill)
    drafter.draft_ids.copy_(torch.arange(10, 40))
    terms = []
    for row, length in enumerate((9, 12, 7)):
        for place in range(length - 1):
            if not batch.loss_mask[row, place + 1]:
                continue
            ids = batch.input_ids[row : row + 1, : place + 1]
            log_q = by_hand(drafter, llama, batch, row, place).log_softmax(-1)
            if distill:
                teacher = llama(ids).logits[0, -1, 10:40].softmax(-1)
                terms.append(-float((teacher * log_q).sum()))
            elif 10 <= (token := int(batch.input_ids[row, place + 1])) < 40:
                terms.append(-float(log_q[token - 10]))
    got = glide.loss(drafter, llama, batch)
    expected = pytest.approx(sum(terms), rel=1e-5)
    assert got is not None and got.detach().item() == expected, (
        "input: 9, 12 and 7 tokens, of which all but 3 are to be predicted, phases "
        f"4, 0, 3, draft tokens 10 to 39, distill={distill}\n"
        f"expected: {sum(terms):.6f}, the sum of {[round(term, 3) for term in terms]}\ngot: {got}"
    )


@torch.no_grad()
def by_hand(drafter, target, batch, row, place):
    """Draft logits (Vd,) of one position, from a forward over the tokens up to it."""
    phase = int(batch.seed[row]) % 5
    blocks = [(i + phase) // 5 for i in range(place + 1)]
    mask = torch.tensor([[query > key for key in blocks] for query in blocks])[None, None]
    keys, values = (x[row : row + 1, :, : place + 1] for x in batch.kv[2])
    rotary = common.rotary(target, torch.arange(place + 1)[None], -1)
    logits, _ = drafter(
        target.get_input_embeddings()(batch.input_ids[row : row + 1, : place + 1]),
        rotary,
        [glide.Glimpse(keys, values, rotary)],
        common.draft_head(target, drafter.draft_ids),
        (slice(None), -1),
        cross_mask=mask,
    )
    return logits[0]


def test_alpha_of_the_target_itself_is_one_and_of_a_subset_its_mass(llama, monkeypatch):
    batch = make_batch(llama)
    drafter = make_drafter(llama)
    where = F.pad(batch.loss_mask[:, 1:], (0, 1))
    own = common.target_logits(llama, batch.hidden[where])
    monkeypatch.setattr(glide, "training_logits", lambda *_: (own, where, None))
    total, count = glide.alpha(drafter, llama, batch)
    assert count == int(batch.loss_mask.sum()) and float(total) == pytest.approx(count, rel=1e-5)
    flat = torch.zeros_like(own)  # q_draft is 1 / V
    monkeypatch.setattr(glide, "training_logits", lambda *_: (flat, where, None))
    expected = sum(min(float(p), 1 / 48) for p in own.softmax(-1).flatten())
    assert float(glide.alpha(drafter, llama, batch)[0]) == pytest.approx(expected, rel=1e-5)


def test_expected_speedup():
    assert glide.expected_speedup(0.0, 5, 0.1) == pytest.approx(1 / 1.5)
    assert glide.expected_speedup(1.0, 5, 0.0) == 6
    of_table_1 = glide.expected_speedup(0.648, 5, 0.067)  # Vicuna-7B, GSM8K
    assert of_table_1 == pytest.approx(1.97, abs=0.005)


# ------------------------------------------------------------------------------------- architecture


def test_layers_read_the_top_of_the_target(llama):
    assert make_drafter(llama).kv_layers == [2]
    assert make_drafter(llama, num_layers=2).kv_layers == [1, 2]
    assert make_drafter(llama, num_layers=2, kv_layer=0).kv_layers == [0, 0]
    assert make_drafter(llama, cross_attention=False).kv_layers == []
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"num_layers {layers}: take 1 to 3"):
            make_drafter(llama, num_layers=layers)
    with pytest.raises(ValueError, match="kv_layer 3"):
        make_drafter(llama, kv_layer=3)


def test_a_drafter_built_from_the_targets_last_layer_is_that_layer(llama):
    """Without cross-attention: from what the last target layer got, the target's own output."""
    drafter = make_drafter(llama, cross_attention=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    states = llama(ids, output_hidden_states=True).hidden_states
    rotary = common.rotary(llama, torch.arange(4)[None], -1)
    logits, hidden = drafter(states[-2], rotary, [], llama.lm_head, (slice(None), slice(None)))
    torch.testing.assert_close(hidden, common.target_features(llama, ids)[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, llama(ids).logits, atol=1e-3, rtol=1e-3)


def test_the_final_norm_starts_as_the_targets():
    target = make_llama(layers=1)
    target.model.norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(0)))
    drafter = make_drafter(target)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)


@pytest.mark.parametrize("options, read", [({}, [2]), ({"num_layers": 2, "kv_layer": 0}, [0, 0])])
def test_the_cross_attention_starts_as_the_layer_that_it_reads(options, read):
    """Queries and the norm before them: of the layer whose keys they meet."""
    target = make_llama()
    with torch.no_grad():
        for index, layer in enumerate(target.model.layers):
            layer.input_layernorm.weight.fill_(0.4 + index)
    drafter = make_drafter(target, **options)
    own = target.model.layers[-len(read) :]
    for ours, top, index in zip(drafter.layers, own, read):
        theirs = target.model.layers[index]
        for copy, original in (
            (ours.cross_layernorm, theirs.input_layernorm),
            (ours.cross_attn.q_proj, theirs.self_attn.q_proj),
            (ours.cross_attn.o_proj, theirs.self_attn.o_proj),
            (ours.input_layernorm, top.input_layernorm),
            (ours.self_attn.q_proj, top.self_attn.q_proj),
        ):
            torch.testing.assert_close(copy.weight, original.weight, atol=1e-6, rtol=1e-6)


def mixed_gemma():
    """A Gemma-3 whose layers 0 and 2 slide and rotate in another way than 1 and 3."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = family("Gemma3", sliding_window=64, layer_types=kinds)
    positions = torch.arange(40)[None]
    sliding, full = (common.rotary(target, positions, layer)[0] for layer in (2, 3))
    assert not torch.allclose(sliding, full, atol=0.1)
    return target.requires_grad_(False)


@pytest.mark.parametrize(
    "options, read",
    [({}, [3]), ({"num_layers": 2}, [2, 3]), ({"kv_layer": 0}, [0]), ({"kv_layer": 1}, [1])],
)
def test_queries_are_rotated_as_the_keys_that_they_meet(options, read, monkeypatch):
    """Each cross-attention by the tables of its target layer, the self-attention by the top's."""
    target, seen, real = mixed_gemma(), [], glide.rope
    drafter = make_drafter(target, **options)

    def spy(x, rotary):
        seen.append((x.shape[1], rotary))
        return real(x, rotary)

    monkeypatch.setattr(glide, "rope", spy)
    expected = []
    for layer in read:
        expected += [3, 3, layer]  # self-attention's queries and keys, then the glimpse
    positions = torch.arange(9)[None]

    def check(places, what):
        tables = [common.rotary(target, places, layer) for layer in range(4)]
        for (_, got), layer in zip(seen[-len(expected) :], expected, strict=True):
            matches = [n for n in range(4) if torch.equal(tables[n][0], got[0])]
            assert layer in matches, (
                f"input: {what}, Gemma-3 with other rotary tables in layers 0, 2 than in 1, 3\n"
                f"expected: those of layer {layer}\ngot: those of layers {matches}"
            )

    batch = make_batch(target, lengths=(9,))
    glide.training_logits(drafter, target, batch)
    check(positions, "a training batch")
    cache = common.GrowingCache(4)
    common.forward(target, batch.input_ids[:, :8], cache)
    steps = glide.propose(
        drafter, target, batch.input_ids, cache, glide.new_memory(drafter, target)
    )
    next(steps)
    check(positions, "the first step of a draft")
    next(steps)
    check(torch.tensor([[9]]), "its second step")


def test_gemma_with_mixed_layers_decodes_as_it_trains():
    """Step i of a draft after P + 1 tokens is the training row P + i, whatever layer is read."""
    target = mixed_gemma()
    for options in ({}, {"kv_layer": 0}):
        drafter = make_drafter(target, **options)
        with torch.no_grad():  # Gemma's norms hold less one what they multiply by
            for name, weight in drafter.named_parameters():
                if "norm" in name:
                    weight.fill_(1.0)
        training_and_drafting_agree(drafter, target)
        ids = torch.tensor([[5, 6, 7, 5, 6]])
        truth = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(decode(target, drafter, ids, max_new_tokens=12)[0], truth)


def test_draft_vocabulary_is_the_most_frequent_tokens(llama):
    counts = torch.zeros(48)
    counts[[40, 3, 17]] = torch.tensor([5.0, 9.0, 7.0])
    config = glide.Config(target=common.target_shape(llama), intermediate_size=48, draft_vocab=3)
    assert glide.build(config, llama, counts).draft_ids.tolist() == [3, 17, 40]


def test_saved_and_loaded_drafts_are_the_same(llama, trained, tmp_path):
    trained.save_pretrained(tmp_path)
    loaded = common.load_drafter(glide.Drafter, tmp_path, llama)
    assert loaded.config == trained.config
    assert dataclasses.asdict(loaded.config)["target"]["vocab_size"] == 48
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, atol=1e-6, rtol=1e-6)


def test_drafting_in_half_precision_runs():
    target = make_llama().bfloat16()
    drafter = make_drafter(target).bfloat16()
    output, _ = decode(target, drafter, torch.tensor([[4, 5, 6]]))
    assert output.shape == (1, 43)


def training_and_drafting_agree(drafter, target):
    """Step i of a draft after P + 1 tokens is the training row P + i whose block began at P."""
    batch = make_batch(target, lengths=(14,), prompt=1)
    root = 7
    batch.seed = torch.tensor([(-root) % 5])  # a block border right before the root
    logits, where, _ = glide.training_logits(drafter, target, batch)
    rows = {int(place): row.softmax(-1) for place, row in zip(where[0].nonzero()[:, 0], logits)}
    ids = batch.input_ids
    cache = common.GrowingCache(target.config.num_hidden_layers)
    memory = glide.new_memory(drafter, target)
    common.forward(target, ids[:, :root], cache)
    for step in range(5):  # drafting fed with the sequence's own tokens instead of its choices
        steps = glide.propose(drafter, target, ids[:, : root + step + 1], cache, memory)
        _, q_draft, _ = next(steps)
        torch.testing.assert_close(q_draft, rows[root + step], atol=1e-5, rtol=1e-4)


def test_training_and_drafting_see_the_same(llama, trained):
    training_and_drafting_agree(trained, llama)


def test_consumed_tokens_read_what_came_before_them(llama):
    """Re-fed tokens: as if fed one by one, the target's rows ending before each (two layers)."""
    drafter = make_drafter(llama, num_layers=2)
    ids, memory = torch.tensor([[9, 8, 7, 6, 5, 4]]), glide.new_memory(drafter, llama)
    for end in range(1, ids.shape[1] + 1):
        cache = common.GrowingCache(3)
        if end > 1:
            common.forward(llama, ids[:, : end - 1], cache)
        one_by_one = next(glide.propose(drafter, llama, ids[:, :end], cache, memory))[1]
    at_once = next(glide.propose(drafter, llama, ids, cache, glide.new_memory(drafter, llama)))[1]
    torch.testing.assert_close(at_once, one_by_one)


def test_alpha_of_a_perfect_drafter_is_the_mass_of_what_it_can_draft(llama, monkeypatch):
    batch, drafter = make_batch(llama), make_drafter(llama)
    drafter.draft_ids = torch.arange(8)
    where = F.pad(batch.loss_mask[:, 1:], (0, 1))
    own = common.target_logits(llama, batch.hidden[where])
    monkeypatch.setattr(glide, "training_logits", lambda *_: (own[:, :8], where, None))
    mass = float(own.softmax(-1)[:, :8].sum())
    assert float(glide.alpha(drafter, llama, batch)[0]) == pytest.approx(mass, rel=1e-5)
