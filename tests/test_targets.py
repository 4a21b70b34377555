"""Targets as users have them: adapted, quantised, offloaded, in train mode, with saved
settings of a trainer's, and with a tokenizer that is not theirs."""

import itertools
import json
import pickle
import shutil
import threading
import types
from functools import partial

import accelerate
import chat
import pytest
import torch
import transformers
from chat import refused
from tiny import family, make_drafts, make_llama, random_batch, untrained

import bench
import common
import falcon
import glide
import train
from support import cli, packed, prompts
from support.measuring import arms
from support.rivals import lookup
from support.training import data

METHODS = ("glide", "cape", "specdecpp", "falcon", "ctc_drafter")
IDS = torch.tensor([[3, 1, 4, 1, 5]])
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def decode(target, drafts, ids=IDS, **options):
    decoder = common.speculate(drafts)
    return target.generate(input_ids=ids, custom_generate=decoder, **options)


def check(target, drafts_of):
    """Every method's greedy answer is the target's own. drafts_of: {method: drafts}."""
    plain = target.generate(input_ids=IDS, **GREEDY)
    for method, drafts in drafts_of.items():
        assert torch.equal(decode(target, drafts, **GREEDY), plain), method


def made(target, methods=METHODS):
    return {method: make_drafts(method, target)[0] for method in methods}


# -------------------------------------------------------------------- adapted by PEFT


def wrapped(kind, **options):
    """A float64 target in an adapter of PEFT."""
    peft = pytest.importorskip("peft", reason="needs peft: requirements-dev.txt")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(make_llama(), config).double().eval()


def adapted(**options):
    """A target with LoRA, whose adapter changes the answer."""
    target = wrapped("LoraConfig", r=4, **options).requires_grad_(False)
    torch.manual_seed(5)
    for name, weight in target.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    with target.disable_adapter():
        plain = target.generate(input_ids=IDS, **GREEDY)
    assert not torch.equal(plain, target.generate(input_ids=IDS, **GREEDY))
    return target


@pytest.mark.slow
def test_an_adapter_of_lora_counts_in_the_answer():
    """A drafter is built for the wrapped target, or was there before the adapter."""
    before = made(make_llama())
    target = adapted(target_modules=["q_proj", "down_proj"])
    check(target, before)
    check(target, made(target))
    with refused("need the rows of the LM head, which is quantised, adapted"):
        common.check_target(adapted(target_modules=["lm_head"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options",
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 3}),
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
        ("LoraConfig", {"target_modules": ["q_proj"], "alora_invocation_tokens": [4]}),
    ],
)
def test_adapters_that_act_outside_of_a_forward_are_refused(kind, options):
    drafts, _ = make_drafts("falcon", make_llama())
    target = wrapped(kind, **options)
    for use in (lambda: decode(target, drafts, **GREEDY), lambda: made(target)):
        with refused(r"do not work with learned prompts and aLoRA \(PEFT\)"):
            use()


def test_a_learned_prompt_is_noticed_after_its_model_was_tried():
    """PEFT's wrapper replaces this method of the model, and adds no module."""
    target = make_llama()
    common.check_target(target)
    target.prepare_inputs_for_generation = lambda *given, **more: {}
    with refused(r"do not work with learned prompts and aLoRA \(PEFT\)"):
        common.check_target(target)


@pytest.mark.slow
def test_rows_of_an_adapter_are_not_those_of_the_target_without_it():
    target = adapted(target_modules=["q_proj"])
    first = common.start(target, input_ids=IDS, **GREEDY)
    with target.disable_adapter():
        with pytest.warns(UserWarning, match="the whole text is read anew"):
            second = common.start(target, after=first, input_ids=first.ids, **GREEDY)
        while not second.done:
            second.verify(common.chain([], second.ids))
        assert torch.equal(second.ids, target.generate(input_ids=first.ids, **GREEDY))


# ------------------------------------------------------------- quantised and offloaded


def torchao():
    """torchao.quantization, and a configuration of it."""
    reason = "needs torchao: requirements-dev.txt"
    quantization = pytest.importorskip("torchao.quantization", reason=reason)
    return quantization, quantization.Int8WeightOnlyConfig()


def layers_of(target):
    """{name: linear layer}, without the head."""
    found = target.named_modules()
    linear = {n: x for n, x in found if isinstance(x, torch.nn.Linear)}
    return {name: linear[name] for name in linear if name != "lm_head"}


@pytest.mark.slow
def test_a_target_quantised_by_torchao_decodes_and_gets_drafters():
    quantization, config = torchao()
    target = make_llama().float()
    before = made(target)
    names = layers_of(target)
    quantization.quantize_(target, config, filter_fn=lambda _, name: name in names)
    check(target, before)
    check(target, made(target))


@pytest.mark.slow
def test_a_drafter_learns_from_a_target_saved_quantised(
    folder, tmp_path, fresh_accelerate, capsys
):
    """And a run on it is continued, because it is known to be the same target."""
    config = transformers.TorchAoConfig(torchao()[1])
    load = transformers.AutoModelForCausalLM.from_pretrained
    saved = shutil.copytree(folder, tmp_path / "target")
    load(folder, quantization_config=config).save_pretrained(saved)
    for more in (["--steps", 2], ["--steps", 3, "--resume"]):
        train.main(chat.options(saved, tmp_path / "out", *more))
        assert f"step {more[1]}, " in capsys.readouterr().err
    target, _ = common.load_target(str(saved))
    drafter = common.load_drafter(glide.Drafter, tmp_path / "out", target)
    check(target, {"glide": lambda decoding: glide.drafts(decoding, drafter)})


class Codes(torch.nn.Module):
    """A linear layer whose weight is kept as bytes (N, 1), as bitsandbytes does."""

    def __init__(self, layer):
        super().__init__()
        self.shape = layer.weight.shape
        self.scale = layer.weight.abs().amax(1, keepdim=True) / 127
        codes = (layer.weight / self.scale).round().add(128).to(torch.uint8)
        self.weight = torch.nn.Parameter(codes.reshape(-1, 1), requires_grad=False)

    def forward(self, x):
        weight = (self.weight.view(self.shape).to(x.dtype) - 128) * self.scale
        return torch.nn.functional.linear(x, weight)


def test_a_target_whose_weights_are_bytes_decodes_and_gets_drafters():
    target = make_llama()
    before = made(target)
    for name, module in layers_of(target).items():
        target.set_submodule(name, Codes(module))
    check(target, before)
    check(target, made(target))
    target.lm_head = Codes(target.lm_head)
    for drafts in before.values():
        with refused("need the rows of the LM head, which is quantised"):
            decode(target, drafts, **GREEDY)


def test_a_target_with_offloaded_layers_decodes_and_gets_drafters(tmp_path):
    target = make_llama()
    before = made(target)
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {"model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    target = accelerate.dispatch_model(
        target, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert target.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    check(target, before)
    check(target, made(target, ("glide", "specdecpp", "falcon", "ctc_drafter")))


def test_a_target_on_no_device_or_several_is_told_what_to_load(tmp_path, monkeypatch):
    drafts, drafter = make_drafts("falcon", make_llama())
    drafter.save_pretrained(tmp_path)
    target = accelerate.cpu_offload(make_llama(), torch.device("cpu"))
    methods = map(cli.import_method, cli.trainable())
    for use in (
        lambda: decode(target, drafts, **GREEDY),
        lambda: common.load_drafter(falcon.Drafter, tmp_path, target),
        *(partial(untrained, method, target) for method in methods),
    ):
        with refused("or its embedding is offloaded: load it on one device"):
            use()
    target = make_llama()
    weights = list(target.parameters())
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(target, "parameters", lambda: iter([*weights, elsewhere]))
    with refused("the target is spread over devices.* load it on one device"):
        common.check_target(target)


# ------------------------------------------------------------------- unusual families


def test_layers_may_differ_in_the_size_of_their_heads():
    """Gemma 4's full attention has larger heads than its sliding windows."""
    more = {"sliding_window": 64, "global_head_dim": 16}
    target = family("Gemma4", hidden_size_per_layer_input=0, **more).float()
    assert common.target_shape(target)["head_dim"] == 16
    check(target, made(target, ("falcon", "ctc_drafter", "specdecpp")))
    with refused("target layer 2 caches keys of shape .* take another layer"):
        untrained(glide, target)
    top = untrained(glide, target, kv_layer=-1)
    check(target, {"glide": lambda decoding: glide.drafts(decoding, top)})
    more |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}
    target = family("Gemma4", **more).float()
    check(target, made(target, ("falcon", "ctc_drafter", "specdecpp")))


def test_an_lm_head_may_be_kept_in_float32():
    """As some trainers and servers do, with a hook that converts its input."""
    target = make_llama().bfloat16()
    target.lm_head.float()
    target.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    for method, drafts in made(target).items():
        assert decode(target, drafts, **GREEDY).shape == (1, 17), method


def test_ids_may_be_of_32_bits(llama):
    plain = llama.generate(IDS, **GREEDY)
    for method, drafts in made(llama).items():
        got = decode(llama, drafts, IDS.int(), **GREEDY)
        assert torch.equal(got, plain), method


def test_positions_may_be_rotated_by_complex_numbers():
    """As DeepSeek-V2's are; its cached keys are shared by all heads."""
    mla = {"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8, "qk_head_dim": 16}
    mla |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
    mla |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    mla |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
    target = family("DeepseekV2", n_group=1, topk_group=1, **mla).float()
    check(target, made(target, ("specdecpp", "falcon", "ctc_drafter")))
    with refused("caches keys of shape .* take another layer"):
        untrained(glide, target)


def test_a_model_with_images_answers_texts():
    """`generate` hands on Qwen2.5-VL's positions, a row of them for each axis."""
    shape = family("Llama").config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    keys += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    text = {key: shape[key] for key in keys}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    sight = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=sight | {"out_hidden_size": 32},
    )
    torch.manual_seed(1)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    target = model.eval().requires_grad_(False)
    check(target, made(target, ("glide", "falcon", "ctc_drafter")))


EXPERTS = {"num_local_experts": 4}
GEMMA_3N = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}
GEMMA_3N |= {"altup_num_inputs": 2, "num_kv_shared_layers": 0, "laurel_rank": 4}
GEMMA_3N |= {"activation_sparsity_pattern": [0.0] * 4}
GEMMA_3N |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
SMALL_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.3}
FULL = {"layer_types": ["full_attention"] * 4}
SLIDING = {"sliding_window": 6}
REMEDY = "delete sliding_window and layer_types from target.config"
TWO_KINDS = {"layer_types": ["conv", "full_attention"] * 2}
# A family, options of it, and what the message says.
REFUSED = [
    ("Mpt", {}, "do not fit this target .* take another"),
    ("Falcon", {"alibi": True}, "do not fit this target .* take another"),
    ("Lfm2", TWO_KINDS, "do not work with the attention of lfm2 .conv"),
    ("Llama4", {}, "do not work with .* llama4_text .chunked_attention"),
    ("Gemma3n", GEMMA_3N, "do not fit this target .* take another"),
    ("ModernBertDecoder", {}, "do not fit this target .* take another"),
    # The decoder that transformers returns includes the head.
    ("Llama4", EXPERTS | FULL, "do not fit this target"),
    # Other layers lie between the last hidden states and the head.
    ("Electra", {"is_decoder": True, "embedding_size": 16}, "do not fit"),
    ("Roberta", {"is_decoder": True}, "do not fit"),
    ("OPT", SMALL_OPT, "do not fit this target"),
    # Windows and choices of keys that count cache rows, longer than a trial's text.
    ("GPTNeo", {"attention_types": [[["global", "local"], 2]]}, "gpt_neo .it counts"),
    ("Doge", {}, "doge .it counts cache rows"),
    # These slide in all layers if there is a window, and read no kinds of layers.
    ("Mistral", SLIDING | FULL, REMEDY),
    ("Mixtral", SLIDING | FULL | EXPERTS, REMEDY),
    ("Starcoder2", SLIDING | FULL, REMEDY),
]


@pytest.mark.parametrize("name, more, message", REFUSED)
def test_unusual_decoders_are_refused(name, more, message):
    special = {"bos_token_id": 1, "eos_token_id": 2}
    target = family(name, **special | more).float()
    with refused(message):
        common.start(target, input_ids=IDS, **GREEDY)


# ------------------------------------------------------------------ a trial of a target


def test_a_target_is_tried_once_and_again_when_it_has_changed(monkeypatch):
    peft = pytest.importorskip("peft", reason="needs peft: requirements-dev.txt")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    seen = []  # the model of each trial
    run = common._compare
    monkeypatch.setattr(
        common, "_compare", lambda model: seen.append(model) or run(model)
    )
    target, other = make_llama(), make_llama()
    for change, count in (
        (lambda: None, 1),
        (lambda: target.set_attn_implementation("eager"), 1),
        (target.float, 1),
        (target.train, 1),
        (lambda: peft.inject_adapter_in_model(lora, target), 1),
        (lambda: setattr(target.config, "sliding_window", None), 0),
    ):
        change()
        before = len(seen)
        for _ in range(3):
            common.check_target(target)
        assert len(seen) == before + count
    common.check_target(other)
    assert len(seen) == 6
    assert target not in seen and other not in seen, "a twin is tried"


ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
BORDER = {"original_max_position_embeddings": 8}


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "packed", "Phi3"])
def test_a_trial_changes_nothing_and_disturbs_no_other_thread(kind):
    """The tables of a long RoPE are those of the newest forward."""
    options = {"Mistral": {"sliding_window": 4}}
    options["Phi3"] = {"rope_parameters": ROPE | BORDER} | BORDER
    target = family("Llama" if kind == "packed" else kind, **options.get(kind, {}))
    target = packed.pack(target.float()) if kind == "packed" else target
    # A hook that cannot be copied, and a layer that keeps what its first forward makes.
    hook = partial(lambda *given: None, threading.Lock())
    target.get_decoder().layers[0].register_forward_hook(hook)
    ids = torch.arange(3, 15)[None]
    plain = target.generate(ids, **GREEDY)

    def state():
        buffers = [(name, x.tolist()) for name, x in target.named_buffers()]
        hooks = [list(module._forward_hooks) for module in target.modules()]
        return target.config.to_json_string(), buffers, hooks

    before, answers = state(), []

    def ask():
        for _ in range(5):
            answers.append(target.generate(ids, **GREEDY))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        common._TRIED.pop(target, None)
        common.check_target(target)
    thread.join()
    assert all(torch.equal(answer, plain) for answer in answers) and len(answers) == 5
    assert state() == before


def test_what_a_forward_raises_in_a_trial_is_one_line(monkeypatch):
    target = make_llama()
    target.config.sliding_window = 7

    def broken(input_ids, **options):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(target, "forward", broken)
    with refused(r"do not fit this target \(RuntimeError: no kernel for this\): call"):
        common.check_target(target)
    assert target.config.sliding_window == 7
    monkeypatch.undo()
    target.config.sliding_window = None
    common.check_target(target)  # nothing is remembered of the failure


def test_a_trial_notices_that_accepted_rows_stay_where_they_were(monkeypatch):
    monkeypatch.setattr(common.GrowingCache, "move", lambda *given: None)
    with refused("do not fit this target .its logits or last hidden states"):
        common.check_target(make_llama())


def count_rows(module, args, kwargs):
    """A hook before a decoder's forward: its positions become cache rows."""
    cache = kwargs.get(common.CACHE)
    rows = 0 if cache is None else cache.get_seq_length()
    ids = args[0] if args else kwargs["input_ids"]
    return args, kwargs | {"position_ids": rows + torch.arange(ids.shape[1])[None]}


def test_a_trial_tells_rows_from_positions_in_half_precision():
    """And rounding alone is not taken for that."""
    for name in ("Llama", "GPT2"):
        target = family(name)
        target.get_decoder().register_forward_pre_hook(count_rows, with_kwargs=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with refused("states are off by .*; or take another target"):
                common.check_target(target.to(dtype))
    for name in ("Llama", "Gemma2", "GPT2", "Mixtral"):
        target = family(name, **EXPERTS if name == "Mixtral" else {})
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            common.check_target(target.to(dtype))


def test_logits_of_minus_infinity_are_compared_as_such():
    target = make_llama()
    target.lm_head.bias = torch.nn.Parameter(torch.zeros(48, dtype=torch.float64))
    target.lm_head.bias.data[40:] = float("-inf")
    common.check_target(target)


# Keys that a family does not read, left over from the model that it was made from.
LEFTOVER = {"window": {"sliding_window": 18}}
LEFTOVER["kinds"] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LEFTOVER["kinds"] |= LEFTOVER["window"]


@pytest.mark.parametrize("leftover", LEFTOVER)
@pytest.mark.parametrize("name", ["Llama", "Olmo2", "Granite", "Glm", "GPT2", "Cohere"])
def test_keys_that_a_model_does_not_read_are_refused_with_the_remedy(name, leftover):
    """The cache of `generate` obeys them, and a mask would."""
    target = family(name, **LEFTOVER[leftover])
    with refused("does not read, delete sliding_window and layer_types from"):
        common.check_target(target)
    for key in LEFTOVER[leftover]:
        delattr(target.config, key)
    common.check_target(target)
    assert common.sliding_windows(target) == {"full_attention": None}


@pytest.mark.parametrize("method", ["glide", "specdecpp", "falcon", "ctc_drafter"])
def test_a_drafter_can_be_pickled(method):
    drafter = untrained(cli.import_method(method), make_llama())
    again = pickle.loads(pickle.dumps(drafter))
    assert torch.equal(again.vocab_ids, drafter.vocab_ids)


def test_dropout_is_told_from_another_computation():
    target = family("GPT2", resid_pdrop=0.5).float()
    untrained(falcon, target)
    with refused(r"do not fit this target .*: call target.eval\(\)"):
        untrained(falcon, target.train())


# ---------------------------------------------------------------- what training leaves


def test_gradient_checkpointing_in_train_mode_is_right_or_refused():
    """It drops the cache in transformers 5.23, and no longer in 5.24."""
    target = make_llama()
    drafts = made(target, ("glide",))
    target.gradient_checkpointing_enable()
    check(target, drafts)
    plain = target.generate(IDS, **GREEDY)
    target.train()
    try:
        assert torch.equal(decode(target, drafts["glide"], **GREEDY), plain)
    except common.UserError as error:
        assert "call target.eval()" in str(error)
    target.gradient_checkpointing_disable()
    check(target, drafts)


SAVED = {"output_attentions": True, "output_hidden_states": True, "use_cache": False}
SAVED |= {"output_router_logits": True}


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_settings_of_a_trainer_do_not_change_a_forward(name):
    target = family(name, **EXPERTS if name == "Mixtral" else {}).float()
    target.set_attn_implementation("eager")  # sdpa returns no attention weights
    plain = target.generate(IDS, **GREEDY)
    for key, value in SAVED.items():
        if hasattr(target.config, key):
            setattr(target.config, key, value)
    draft = common.chain([], IDS)
    seen = []
    hook = target.register_forward_hook(lambda *given: seen.append(given[-1]))
    decoding = common.start(target, input_ids=IDS, **GREEDY)
    decoding.verify(draft)
    hook.remove()
    assert seen[0].get("attentions") is None and seen[0].get("router_logits") is None
    for drafts in made(target).values():  # in `build` as well
        assert torch.equal(decode(target, drafts, **GREEDY), plain)


@pytest.mark.parametrize("method", [*METHODS[2:], "glide"])
def test_no_loss_depends_on_the_default_dtype(method):
    target = make_llama()
    module = cli.import_method(method)
    drafter = untrained(module, target)
    batch = random_batch(target, layers=drafter.kv_layers)
    losses = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            losses.append(float(module.loss(drafter, target, batch)[0].detach()))
        finally:
            torch.set_default_dtype(torch.float32)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---------------------------------------------------------------------- the tokenizer


def test_token_ids_without_an_embedding_are_told_of(llama):
    for wrong in (48, -1):
        ids = torch.tensor([[3, wrong, 4]])
        with refused(f"token id {wrong}, but the target has 48 tokens: take its own"):
            common.start(llama, input_ids=ids, max_new_tokens=4)


def test_a_tokenizer_with_more_tokens_than_the_target(folder, tmp_path, capsys):
    """Tokens were added, and the embedding not resized: such lines are left out."""
    target, tokenizer = common.load_target(str(folder))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    lines = [{"prompt": f"w{i}", "response": "w2 w3"} for i in range(8)]
    lines.append({"prompt": "w1", "response": "<tool_call> w3"})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(data.read_conversations(str(path), tokenizer, 64, target)) == 8
    told = "token id 48, but the target has 48 tokens: take its own tokenizer"
    assert f"line 9: {told}" in capsys.readouterr().err
    path.write_text(json.dumps(lines[-1]))
    with refused(f"holds nothing to learn from: line 1: {told}"):
        data.read_conversations(str(path), tokenizer, 64, target)
    asked = prompts.encode(tokenizer, ["w1 <tool_call>"], "cpu")
    for drafts in (None, lookup.drafts):  # plain decoding by transformers, and ours
        arm = arms.Arm("an arm", target, drafts=drafts)
        with refused(told):
            bench.play(arm, asked, {"max_new_tokens": 3})
    with refused(told):
        prompts.answer_padded(target, asked["input_ids"].tolist(), max_new_tokens=3)


# ----------------------------------------- one token after another, by public reports


def test_a_constraint_that_allows_nothing_is_the_targets_own_error(llama):
    """transformers raises it where the constraint has no token left, and so do we."""
    allowed = {0: [5, 7], 1: [9]}
    drafts, _ = make_drafts("glide", llama)

    def fn(_, text):
        return allowed.get(len(text) - 5, [])

    for options in ({}, {"custom_generate": common.speculate(drafts)}):
        with pytest.raises(ValueError, match="prefix_allowed_tokens_fn"):
            llama.generate(IDS, prefix_allowed_tokens_fn=fn, **GREEDY, **options)


STATES = {(): [5, 7], (5,): [9, 11], (7,): [8], (5, 9): [2], (5, 11): [12]}
STATES |= {(5, 11, 12): [2], (7, 8): [2]}
# Here the end is the highest id, as in Llama 3, so a trial would take it first.
HIGH = {(): [30, 31, 39], (30,): [20, 39], (31,): [21], (30, 20): [39], (31, 21): [39]}


@pytest.mark.parametrize("states, end", [(STATES, 2), (HIGH, 39)], ids=["low", "high"])
@pytest.mark.parametrize("method", cli.present())
def test_an_automaton_is_asked_only_for_its_states(method, states, end):
    """Not for one that it lacks, nor about a text that has ended."""
    target = make_llama(vocab=40)
    drafts, _ = make_drafts(method, target)
    for sampled, kind in itertools.product((False, True), ("automaton", "trie")):

        def fn(_, text, kind=kind):
            said = tuple(text[5:].tolist())
            return states[said] if kind == "automaton" else states.get(said, [])

        options = {"max_new_tokens": 20, "eos_token_id": end, "do_sample": sampled}
        options |= {"prefix_allowed_tokens_fn": fn}
        answer = decode(target, drafts, **options)
        assert answer[0, -1] == end
        if not sampled:
            assert torch.equal(answer, target.generate(IDS, **options))


def compiled():
    target = family("Mistral", sliding_window=6).float()
    target.model.compile(backend="eager")
    return target


def test_a_compiled_target_is_tried_as_if_it_were_not():
    """Its twin would otherwise run the original, with another window."""
    common.check_target(compiled())


@pytest.mark.slow
def test_a_compiled_target_decodes_and_gets_drafters():
    target = compiled()
    check(target, made(target, ("glide", "falcon")))
