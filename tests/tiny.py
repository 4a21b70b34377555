"""Tiny random targets, drafters that have seen a little of them, and statistics, for
all tests.
"""

import collections
import dataclasses
import inspect
import itertools
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

import common
from support import cli
from support.training.features import Features

FAMILIES = {  # name: options of a tiny model
    "Llama": {},
    "Mistral": {"sliding_window": 27},  # prompt and answer of test_lossless.py fill it
    "Qwen3": {},
    "Gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "Gemma3": {},
    "Phi3": {"partial_rotary_factor": 0.5},
    "GPT2": {},
    "Olmo2": {},
    "Granite": {"logits_scaling": 4.0},
    "GPTNeoX": {},
    "Cohere": {"logit_scale": 0.25},
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}


def snapshot(top):
    """What is in a folder, to the byte."""
    return {path: path.read_bytes() for path in Path(top).rglob("*") if path.is_file()}


def slow(*values):
    """A case of a parametrized test that waits for `-m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_once(methods, families, others="glide"):
    """Pairs of a method and a family: every method on the first family, one on all."""
    first, *rest = families
    return [(method, first) for method in methods] + [(others, name) for name in rest]


def check(given, expected, got):
    """Fail with a text that coursework.py shortens to a line; drawings have rows."""

    def shown(what):
        rows = isinstance(what, list) and all(isinstance(row, str) for row in what)
        return "".join(f"\n    {row}" for row in what) if rows and what else what

    assert got == expected, f"{given}: expected {shown(expected)}, got {shown(got)}"


def make_batch(target, sequences, layers=(), progress=0.0):
    """A common.Batch of (token ids (T,), loss mask (T,)) pairs."""
    return Features(target, layers).batch(sequences, progress)


def random_batch(target, lengths=(9, 12, 7), prompt=3, layers=()):
    """A batch of random tokens, all but the prompts to be predicted."""
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.get_text_config().vocab_size
    sequences = []
    for length in lengths:
        ids = torch.randint(1, vocab, (length,), generator=generator)
        sequences.append((ids, torch.arange(length) >= prompt))
    return make_batch(target, sequences, layers)


def drawn(mask):
    """A bool mask (..., R, T) as lines of x and dots; of anything else, what it is."""
    if not isinstance(mask, torch.Tensor):
        return [f"no tensor, {mask!r}"]
    if mask.dtype != torch.bool or mask.ndim < 2:
        return [f"no bool mask, {mask.dtype} of shape {tuple(mask.shape)}"]
    return [
        "".join(".x"[int(allowed)] for allowed in row) for row in mask.flatten(0, -2)
    ]


def teach(method, drafter, target, steps, lr, rows=4, length=46):
    """Train on what the target says to `rows` prompts of a token; returns each step's
    loss.
    """
    prompts = torch.arange(1, rows + 1)[:, None]
    ids = target.generate(prompts, max_new_tokens=length - 1, do_sample=False)
    sequences = [(row, torch.arange(len(row)) > 0) for row in ids]
    whole = make_batch(target, sequences, drafter.kv_layers)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    losses = []
    drafter.train()
    for step in range(steps):
        torch.manual_seed(step)
        batch = dataclasses.replace(whole, progress=step / steps)
        total, weight = method.loss(drafter, target, batch)
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach() / weight))
    drafter.eval()
    return losses


def family(name, seed=1, **more):
    """A tiny random model, float64 and frozen; its distributions are neither flat nor
    certain.
    """
    torch.manual_seed(seed)
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
    if name in ("GPT2", "GPTNeo", "GPTNeoX", "OPT", "Roberta", "Electra", "Falcon"):
        shape.pop("num_key_value_heads"), shape.pop("head_dim")
    if name == "Phi3":
        shape["original_max_position_embeddings"] = 128
    text_only = name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4")
    kind = name + ("TextConfig" if text_only else "Config")
    config = getattr(transformers, kind)(**shape | more)
    kind = "GPT2LMHeadModel" if name == "GPT2" else name + "ForCausalLM"
    return getattr(transformers, kind)(config).double().eval().requires_grad_(False)


def make_llama(vocab=48, layers=3, seed=0, **more):
    shape = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
    }
    return family("Llama", seed, **shape | more)


def sighted(**more):
    """A tiny random Gemma-3 that takes images, too."""
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = family("Gemma3", **more).config.to_dict()
    config = transformers.Gemma3Config(text_config=text, vision_config=sight)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.double().eval().requires_grad_(False)


def untrained(module, target, seed=0, **fields):
    """A method's drafter for a target, in its dtype; fields: of its Config, where it
    has them. By default it drafts all tokens.
    """
    fields = {"intermediate_size": 48, "draft_vocab": 0, "stage": "head"} | fields
    known = {field.name for field in dataclasses.fields(module.Config)}
    config = module.Config(**{name: fields[name] for name in fields if name in known})
    torch.manual_seed(seed)
    counts = torch.arange(target.config.get_text_config().vocab_size)
    return module.build(config, target, counts).to(target.dtype).eval()


def make_drafts(name, target, make_drafter=untrained, **changes):
    """A method's generator of drafts, as a function of a Decoding, and its drafter or
    None.

    make_drafter: gets a module and the target. changes: settings of the method; CAPE's
        and the beam's drafter is one of GLIDE.
    """
    module = cli.import_method(name)
    owner = module if hasattr(module, "Drafter") else cli.import_method("glide")
    takes = inspect.signature(module.drafts).parameters
    if "drafter" in takes:
        drafter = make_drafter(owner, target)
        return partial(module.drafts, drafter=drafter, **changes), drafter
    if "chains" not in takes:
        return partial(module.drafts, **changes), None
    drafter = make_drafter(owner, target)
    chains = {key: changes.pop(key) for key in ("gamma",) if key in changes}

    def expanded(decoding):
        window = {key: changes[key] for key in ("window",) if key in changes}
        own = {key: changes[key] for key in changes if key != "window"}
        return module.drafts(owner.drafts(decoding, drafter, **chains, **window), **own)

    return expanded, drafter


def opened(target, **options):
    """A Decoding, by default a greedy one of at most nine tokens after three."""
    given = {"input_ids": torch.tensor([[9, 8, 7]]), "max_new_tokens": 9}
    return common.start(target, **given | {"do_sample": False} | options)


def decode(target, ids, drafts, **options):
    """The target's `generate` with drafts, a function of a Decoding, and what it
    counts.
    """
    stats = common.Stats()
    decoder = common.speculate(drafts, callback=stats)
    return target.generate(ids, custom_generate=decoder, **options), stats


def make_streamer():
    """A streamer of transformers, and what it is told: lists of ids, then "end"."""
    told = []
    streamer = types.SimpleNamespace(
        put=lambda ids: told.append(ids.flatten().tolist()),
        end=partial(told.append, "end"),
    )
    return streamer, told


def make_glide(target, **options):
    """An untrained drafter of GLIDE."""
    # Not imported on top: a student's file may not be importable.
    return untrained(cli.import_method("glide"), target, seed=5, **options)


def joint_of(next_probs, length):
    """Exact probabilities of all answers of `length` tokens, {tokens: probability}.

    next_probs: the probabilities of the next token, given the tokens of the answer.
    """
    joint = {(): 1.0}
    for _ in range(length):
        joint = {
            (*tokens, token): probability * p
            for tokens, probability in joint.items()
            for token, p in enumerate(next_probs(tokens))
            if p > 0
        }
    return joint


def enumerate_joint(target, prompt, length, top_k=0):
    """`joint_of` a target's answers; top_k: how many tokens may come next, 0: all."""

    def next_probs(tokens):
        ids = torch.cat([prompt, prompt.new_tensor([tokens])], dim=1)
        logits = target(ids).logits[0, -1].float()
        if top_k:
            logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
        return logits.softmax(-1).tolist()

    return joint_of(next_probs, length)


def chi_square_p_value(counts, expected):
    """P-value of counts {outcome: n} against probabilities {outcome: p}; rare ones are
    pooled.
    """
    assert set(counts) <= set(expected), "an outcome of probability zero was drawn"
    total = sum(counts.values())
    bins = []  # pairs of how many were drawn, and how many are expected
    rare = [0, 0.0]
    for outcome, probability in expected.items():
        drawn = counts.get(outcome, 0)
        if total * probability < 5:
            rare = [rare[0] + drawn, rare[1] + total * probability]
        else:
            bins.append((drawn, total * probability))
    if rare[1] > 1:
        bins.append(rare)
    statistic = sum((drawn - mean) ** 2 / mean for drawn, mean in bins)
    halves = torch.tensor([len(bins) - 1, statistic]) / 2
    return float(torch.special.gammaincc(*halves))


def sampled_p_value(target, prompt, length, draws, **options):
    """How well `draws` sampled answers follow the target's own distribution.

    length: how many tokens of an answer are looked at; an answer may be longer.
    """
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": length} | options
    torch.manual_seed(0)
    counts = collections.Counter()
    for _ in range(draws):
        output = target.generate(prompt, **options)
        counts[tuple(output[0, prompt.shape[1] :][:length].tolist())] += 1
    expected = enumerate_joint(target, prompt, length, options["top_k"])
    return chi_square_p_value(counts, expected)


class Table:
    """A target whose next token depends only on the newest one, so that thousands of
    sampled answers take seconds.

    vocab: how many tokens it has. options: of the answers, such as a temperature.
    """

    def __init__(self, vocab=5, **options):
        generator = torch.Generator().manual_seed(2)
        self.logits = 0.5 * torch.randn(vocab, vocab, generator=generator)
        self.drafted = torch.randn(vocab, vocab, generator=generator)
        self.target = make_llama(vocab=vocab, layers=1)  # only its shape matters
        given = {"do_sample": True, "top_k": 0, "max_new_tokens": 9} | options
        self.prompt = torch.tensor([[4, 2, 3]]) % vocab
        self.decoding = common.start(self.target, input_ids=self.prompt, **given)
        self.decoding.cache = common.GrowingCache(1)  # which stays empty
        self.rounds = []  # drafts, and the nodes that were accepted

    def steps(self, decoding):
        """A chain of tokens, each drawn from a table of other logits."""
        newest = decoding.ids[0, -1:]
        every = torch.arange(len(self.logits))
        while True:
            logits = self.drafted[newest[0]]
            newest, q_draft = common.pick(decoding, logits, every, [])
            yield newest, q_draft

    def chains(self, decoding, gamma=2):
        """Drafts of these chains, one for each round."""
        while not decoding.done:
            steps = itertools.islice(self.steps(decoding), gamma)
            yield common.chain(steps, decoding.ids)

    def verify(self, draft):
        fed = [int(self.decoding.ids[0, -1]), *draft.tokens.tolist()]
        path = self.decoding.commit(draft, self.logits[fed], torch.zeros(len(fed), 32))
        self.rounds.append((draft, path))

    def next_probs(self, tokens):
        newest = (*self.prompt[0].tolist(), *tokens)[-1]
        return self.decoding.process(self.logits[newest]).softmax(-1).tolist()

    def p_value(self, drafts, draws=1000, length=2):
        """How well the first tokens of `draws` answers follow the target.

        drafts: a function of a Decoding that returns the generator of its drafts.
        """
        decoding, start = self.decoding, self.prompt.shape[1]
        made = drafts(decoding)
        counts = collections.Counter()
        torch.manual_seed(0)
        for _ in range(draws):
            while decoding.ids.shape[1] < start + length:
                self.verify(next(made))
            counts[tuple(decoding.ids[0, start : start + length].tolist())] += 1
            decoding.ids, decoding.cached = self.prompt, start - 1
        return chi_square_p_value(counts, joint_of(self.next_probs, length))


def draft_of(tokens, parents, probs=None, **notes):
    return common.Draft(torch.tensor(tokens, dtype=torch.long), parents, probs, notes)


def random_tree(generator, nodes, vocab):
    """A Draft of `nodes` nodes with random parents; siblings hold different tokens."""
    parents, tokens, used = [], [], {}
    for node in range(nodes):
        parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
        taken = used.setdefault(parent, set())
        choices = torch.randperm(vocab, generator=generator).tolist()
        token = next(choice for choice in choices if choice not in taken)
        taken.add(token)
        parents.append(parent)
        tokens.append(token)
    return draft_of(tokens, parents)


def paths(draft):
    """Each node as the tokens from the root down to it."""
    found = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents):
        above = found[parent] if parent >= 0 else ()
        found.append((*above, token))
    return found
