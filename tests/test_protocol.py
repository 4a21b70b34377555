"""The protocol of bench.py, part by part: baseline, alpha, margins, costs, clocks and prompts."""

import json
import types

import pytest
import torch
from test_bench import PLAIN, TURNS, fake, files  # noqa: F401  fixtures: target, a method
from tiny import chi_square_p_value
from transformers import GenerationConfig, LogitsProcessorList, TemperatureLogitsWarper

import bench
import common
import glide
from support import arms, data, report


def test_the_baseline_is_the_faster_of_the_two_plain_loops(llama):
    turns = [{"prompt": 0, "question_id": 1, "category": "a"}]

    def arm(name, seconds):
        answer = bench.Answer(list(range(10)), seconds, seconds / 2, forwards=10, rounds=10)
        return bench.Arm(name, {}, answers=[answer], same=[None])

    for ours, theirs, faster in ((2.0, 4.0, "plain"), (4.0, 2.0, "transformers")):
        played = [arm("transformers", theirs), arm("plain", ours), arm("x", 1.0)]
        found = bench.summary(played, llama, turns, greedy=True)
        assert list(found) == ["baseline", "x"]
        assert found["baseline"]["loop"] == faster
        assert found["baseline"]["tokens_per_s"] == 5.0 and found["x"]["speedup"] == 2.0
        assert found["baseline"]["loops"] == {"transformers": 10 / theirs, "plain": 10 / ours}


def test_each_drafter_has_an_alpha_of_its_own(llama, monkeypatch):
    """Measured once for all arms that share method and drafter."""
    asked = []

    def alpha(arm, *_):
        asked.append(arm.name)
        drafter = arm.kwargs.get("drafter")
        return drafter and {"alpha_sum": [4 * drafter], "alpha_count": [4]}

    def made(name, drafter, module=glide):
        answer = bench.Answer([1, 2], 1.0, decode_seconds=0.5, forwards=2, rounds=2)
        kwargs = {"drafter": drafter} if drafter else {}
        return bench.Arm(name, kwargs, module=module, answers=[answer], same=[None])

    monkeypatch.setattr(bench, "acceptance_rate", alpha)
    plain = [made("transformers", None, None), made("plain", None, None)]
    own = [made("glide", 0.25), made("glide:gamma1", 0.25), made("glide@x", 0.75)]
    turns = [{"prompt": 0, "question_id": 1, "category": "a"}]
    found = bench.summary([*plain, *own], llama, turns, greedy=True)
    assert [found[arm.name]["alpha"] for arm in own] == [0.25, 0.25, 0.75]
    assert found["baseline"]["alpha"] is None and found["glide@x"]["against"]["glide"][0] == 1.0
    parts = found["glide@x"]["by_prompt"]
    assert parts["alpha_sum"] == [3.0] and parts["tokens"] == [2]
    assert report.paired(parts, found["glide"]["by_prompt"], "alpha") == [3.0, 3.0, 3.0]
    assert asked[1:] == ["glide", "glide@x"]


def test_a_variant_is_compared_with_its_own_plain_arm(llama):
    turns = [{"prompt": i, "question_id": i, "category": "a"} for i in range(2)]

    def made(name, seconds, plain=None):
        answers = [bench.Answer([1] * 6, s, decode_seconds=s / 2, forwards=6) for s in seconds]
        return bench.Arm(name, {}, plain=plain, answers=answers, same=[None, None])

    arms = [made("transformers", (4, 4)), made("plain", (3, 3)), made("x", (2.0, 8.0))]
    arms += [made("x:copies", (1.0, 2.0), plain="x"), made("y:copies", (1, 1), plain="y")]
    found = bench.summary(arms, llama, turns, greedy=True)
    assert found["x:copies"]["against"] == {"x": [round(10 / 3, 4), 2.0, 4.0]}
    assert found["x"]["against"] == found["y:copies"]["against"] == {}


def test_the_margin_is_that_of_the_first_token_that_differs(llama):
    """The target's two best logits after what both answers share, and nothing more."""
    prompt = torch.tensor([[3, 1, 4]])
    answer = llama.generate(prompt, max_new_tokens=6, **PLAIN)[0, 3:].tolist()
    for place in range(6):
        other = [*answer[:place], (answer[place] + 1) % 48, *answer[place + 1 :]]
        shared = torch.cat([prompt, torch.tensor([answer[:place]], dtype=torch.long)], dim=1)
        best, second = llama(shared).logits[0, -1].float().topk(2).values.tolist()
        found = bench.divergence(llama, {"input_ids": prompt}, answer, other)
        assert found["position"] == place
        assert found["top2_margin"] == pytest.approx(best - second, abs=1e-6)
    cut = bench.divergence(llama, {"input_ids": prompt}, answer, answer[:4])
    assert cut["position"] == 4
    assert bench.divergence(llama, {"input_ids": prompt}, answer, list(answer)) is None


def test_alpha_is_taken_over_all_tokens_of_the_answers_and_no_token_of_the_prompts(llama):
    """A method whose alpha is the share of tokens with an even id shows which tokens count."""
    answers = [[2, 4, 6, 8, 10, 12, 14], [1, 2]]
    turns = [
        {"prompt": 0, "input_ids": torch.tensor([[1, 3, 5]]), "answer": answers[0]},
        {"prompt": 1, "input_ids": torch.tensor([[2, 2, 2, 2, 2]]), "answer": answers[1]},
    ]
    seeds = []

    def alpha(drafter, target, batch):
        assert batch.hidden.shape[:2] == batch.input_ids.shape == batch.loss_mask.shape
        assert len(batch.input_ids) == 1
        seeds.append(batch.seed.tolist())
        counted = batch.input_ids[batch.loss_mask]
        return (counted % 2 == 0).sum(), len(counted)

    module = types.SimpleNamespace(alpha=alpha)
    arm = bench.Arm("x", {"drafter": object()}, module=module)
    even = [sum(token % 2 == 0 for token in answer) for answer in answers]
    found = bench.acceptance_rate(arm, llama, turns)
    assert found == {"alpha_sum": even, "alpha_count": [7, 2]}
    assert seeds == [[0], [1]]
    for kwargs in ({}, {"drafter": object(), "draft_model": llama}):  # nobody's, another's
        assert bench.acceptance_rate(bench.Arm("x", kwargs, module=module), llama, turns) is None


def test_costs_are_measured_for_every_listed_pair_of_tokens_and_context(files, monkeypatch):  # noqa: F811
    target, _ = common.load_target(str(files / "target"))
    seen, forward = [], common.forward

    def spy(target, ids, cache, **options):
        held = cache.get_seq_length()
        if "position_ids" in options:  # a measurement, not a filling of the cache
            first = int(options["position_ids"][0, 0])
            assert first == held, "the tokens stand right behind the context"
            seen.append((held, ids.shape[1]))
            mask = options["attention_mask"]
            assert mask is None or mask.shape[-1] == held + ids.shape[1]
        return forward(target, ids, cache, **options)

    monkeypatch.setattr(common, "forward", spy)
    curve = bench.cost_curve(target, 100, repeats=2)
    assert list(curve["by_tokens"]) == [str(n) for n in bench.COUNTS]
    assert set(curve["by_context"]) == {"128"}  # 192 is the last that fits
    assert set(curve["by_context"]["128"]) == {"1", "8"}
    expected = {(100, n) for n in bench.COUNTS} | {(128, 1), (128, 8)}
    assert {pair: seen.count(pair) for pair in seen} == dict.fromkeys(expected, 3)


def test_a_cost_is_the_median_without_the_first_forward(files, monkeypatch):  # noqa: F811
    target, _ = common.load_target(str(files / "target"))
    steps = [5.0, 0.001, 0.002, 0.004]  # seconds of the forwards of each pair; the first warms up
    moments = [0.0]

    def clock(cuda):
        reading = len(moments) - 1
        moments.append(moments[-1] + (steps[reading // 2 % 4] if reading % 2 == 0 else 0.0))
        return moments[reading]

    monkeypatch.setattr(bench, "mark", clock)
    curve = bench.cost_curve(target, 16, repeats=3)
    assert set(curve["by_tokens"].values()) == {2.0}


def test_the_clock_leaves_out_the_prefill_and_nested_modules():
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, torch.nn.ReLU())
    clock = bench.Clock()
    with clock.watch({"target": [outer], "drafter": [inner]}):
        with clock.timer("prefill"), clock.timer("draft"):
            outer(torch.zeros(1, 2))
        with clock.timer("verify"):
            outer(torch.zeros(1, 2))
            inner(torch.zeros(1, 2))
    outer(torch.zeros(1, 2))  # no longer watched
    seen = [(kind, prefill) for kind, *_, prefill in clock.calls]
    assert seen == [("target", True), ("target", False), ("drafter", False)]
    _, start, end, *_ = clock.calls[1]
    assert clock.total("target") == end - start and clock.total("drafter") > 0
    assert [name for name, *_ in clock.timers] == ["draft", "prefill", "verify"]


def test_a_part_of_a_drafter_called_alone_is_time_of_the_drafter_and_called_within_is_not_twice():
    drafter = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    target = torch.nn.Sequential(torch.nn.Linear(2, 2))
    clock = bench.Clock()
    with clock.watch({"target": [target], "drafter": [drafter]}):
        drafter(torch.zeros(1, 2))
        drafter[0](torch.zeros(1, 2))  # such as SpecDec++'s acceptance head
        target[0](torch.zeros(1, 2))  # is no target forward
    assert [kind for kind, *_ in clock.calls] == ["drafter", "drafter"]


def test_of_transformers_loops_the_prefill_ends_with_the_targets_first_forward():
    """An assistant, too, reads the prompt before that."""
    drafter, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    clock = bench.Clock(own_prefill=False)
    with clock.watch({"target": [target], "drafter": [drafter]}):
        for module in (drafter, target, drafter, target):
            module(torch.zeros(1, 2))
    seen = [(kind, prefill) for kind, *_, prefill in clock.calls]
    assert seen[:2] == [("drafter", True), ("target", True)]
    assert seen[2:] == [("drafter", False), ("target", False)]


def test_of_transformers_loops_decoding_begins_when_the_prompt_is_read():
    clock = bench.Clock(own_prefill=False)
    clock.calls = [("target", 1.0, 4.0, 7, True), ("drafter", 4.0, 5.0, 1, False)]
    clock.calls += [("target", 5.0, 6.5, 4, False), ("target", 7.0, 8.0, 2, False)]
    answer = bench.Answer([1, 2, 3, 4, 5], 9.0, in_target=2.5, in_drafter=1.0)
    assert bench.Arm("assisted", {})._seen(answer, clock, 7) == 4.0
    assert (answer.forwards, answer.rounds) == (3, 2)
    assert answer.timers == {"draft": 1.0, "verify": 2.5}
    assert answer.drafted == 4  # three beside the newest token, then one


def test_every_arm_sees_the_baselines_answers_in_rotating_order(files, fake, monkeypatch):  # noqa: F811
    target, tokenizer = common.load_target(str(files / "target"), dtype=torch.float64)
    cheat = {"custom_generate": fake.generate, "wrong": 0}
    played = [
        bench.Arm("transformers", {}),
        bench.Arm("plain", {"custom_generate": bench.plain_generate}, reports=True),
        bench.Arm("fake", cheat, reports=True),
    ]
    order, play, decode = [], bench.Arm.play, tokenizer.decode

    def spy(self, target, encoded, **options):
        order.append((self.name, decode(encoded["input_ids"][0])))
        return play(self, target, encoded, **options)

    def marked(ids, skip_special_tokens=False):
        """As if every answer ended by itself: its end is for the chat template to write."""
        return decode(ids, skip_special_tokens=True) + "<eos>" * (not skip_special_tokens)

    monkeypatch.setattr(bench.Arm, "play", spy)
    monkeypatch.setattr(tokenizer, "decode", marked)
    prompts = data.read_prompts([files / "prompts.jsonl"], 0)
    turns = bench.run(target, tokenizer, played, prompts, {**PLAIN, "max_new_tokens": 6})
    names = [name for name, _ in order[3:]]  # after the warm-up
    first, second, third = ["transformers", "plain", "fake"], ["plain", "fake"], ["fake"]
    assert names == [*first, *second, "transformers", *third, "transformers", "plain"]
    said = tokenizer.decode(turns[0]["answer"], skip_special_tokens=True)
    assert {text for _, text in order[6:9]} == {f"Hello there\n{said}\nAnd then?\n"}
    assert {text for _, text in order[9:]} == {"Two and two\n"}  # a conversation of its own
    assert played[0].answers[0].tokens == played[1].answers[0].tokens
    assert played[0].answers[0].tokens != played[2].answers[0].tokens
    assert [turn["prompt"] for turn in turns] == [0, 0, 1]
    assert [turn["question"] for turn in turns] == ["Hello there", "And then?", "Two and two"]


@pytest.mark.parametrize("loop", ["plain_generate", "copies_generate"])
def test_our_loops_without_a_drafter_equal_generate(files, loop):  # noqa: F811
    target, tokenizer = common.load_target(str(files / "target"), dtype=torch.float64)
    encoded = bench.encode(tokenizer, ["Once upon"], "cpu")
    options = {**PLAIN, "max_new_tokens": 20, "repetition_penalty": 1.3}
    ours = bench.Arm(loop, {"custom_generate": getattr(bench, loop)}, reports=True)
    answer = ours.play(target, encoded, **options)
    theirs = bench.Arm("transformers", {}).play(target, encoded, **options)
    assert answer.tokens == theirs.tokens and theirs.forwards == 20
    assert theirs.rounds == 19  # its first token belongs to the prompt's forward
    assert theirs.drafted == 0
    assert 0 < answer.in_target < answer.decode_seconds < answer.seconds
    assert 0 < theirs.in_target < theirs.decode_seconds < theirs.seconds
    if loop == "plain_generate":
        assert answer.forwards == answer.rounds == 20 and answer.timers["verify"] > 0


@pytest.mark.parametrize("loop", ["plain_generate", "copies_generate"])
def test_our_loops_sample_from_the_processed_distribution(small_llama, loop):
    """First tokens at temperature 0.4 follow the exact probabilities; a copy may be offered."""
    ids = torch.tensor([[1, 2, 1, 2, 1]])
    scores = small_llama(ids).logits[0, -1].float()
    expected = dict(enumerate((scores / 0.4).softmax(-1).tolist()))
    unprocessed = dict(enumerate(scores.softmax(-1).tolist()))
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.4)])
    config = GenerationConfig(do_sample=True, max_length=8)
    torch.manual_seed(0)
    counts = {}
    for _ in range(300):
        given = (processors, lambda ids, _: torch.tensor([True]), config, common.Stats())
        token = int(getattr(bench, loop)(small_llama, ids, *given)[0, 5])
        counts[token] = counts.get(token, 0) + 1
    assert chi_square_p_value(counts, expected) > 1e-3
    assert chi_square_p_value(counts, unprocessed) < 1e-3  # the test can fail


def test_variants_asked_of_every_method():
    found = arms.wanted(["glide", "falcon:chain", "glide@runs/x", "copies"], ["copies"])
    assert found == {
        "glide": True,
        "glide:copies": False,
        "falcon:chain": True,
        "glide@runs/x": True,
        "glide:copies@runs/x": False,
        "copies": True,
    }
    assert not any(arms.wanted(["all"], []).values())


def test_chat_template_alternates_roles(files):  # noqa: F811
    _, tokenizer = common.load_target(str(files / "target"))
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ids = bench.encode(tokenizer, ["a", "b", "c"], "cpu")["input_ids"][0]
    assert tokenizer.decode(ids) == "<user>a<assistant>b<user>c<assistant>"


def test_the_longest_conversation_counts_all_its_answers(files):  # noqa: F811
    target, tokenizer = common.load_target(str(files / "target"))
    length = bench.encode(tokenizer, ["Hello there", "", "And then?"], "cpu")["input_ids"].shape[1]
    assert bench.check_lengths(target, tokenizer, TURNS, 12) == length + 24
    exactly = (256 - length) // 2
    assert bench.check_lengths(target, tokenizer, TURNS, exactly) <= 256
    with pytest.raises(ValueError, match="prompt 1 may take"):
        bench.check_lengths(target, tokenizer, TURNS, exactly + 1)


def test_prompts_are_spread_over_the_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [str(i)]}) + "\n" for i in range(10)))
    assert [p["turns"][0] for p in data.read_prompts([path], 4)] == ["0", "2", "5", "7"]
    assert len(data.read_prompts([path], 0)) == len(data.read_prompts([path], 99)) == 10
    first = {"question_id": "p-1", "category": "p", "turns": ["0"]}
    assert data.read_prompts([path], 1) == [first]
