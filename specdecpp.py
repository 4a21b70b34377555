"""SpecDec++: a trained head decides when a draft is long enough.

Paper: Huang et al., 2024, arXiv:2405.19715v1.

A draft that ends too early costs forwards of the target, and one that goes on too long
costs passes of the draft model, because all tokens after a rejected one are discarded.
The best length differs from place to place, so it is decided while drafting. A small
head reads e_i, the last hidden state of the draft model once it has read the draft
token y_i, and predicts whether the target accepts y_i, given that it accepts y_1 to
y_(i-1) (Eq. 3.1). The product p^ of these predictions estimates the probability that
all are accepted (biased by w_rej, see `loss`), and a round ends when 1 - p^ exceeds a
threshold h:

    a pass of the draft model reads    root  y_1   y_2   y_3
    its last hidden state is           e_0   e_1   e_2   e_3
    y drawn from it                    y_1   y_2   y_3   y_4
    y judged by it                           y_1   y_2   y_3

y_i is judged by e_i, one pass after it was drawn, so the last token of a draft is
submitted unjudged. Algorithm 2 is `propose` and `until_stop`, and Decoding.verify in
common.py. With stop="fixed" a round has gamma tokens, which is Algorithm 1.

In training, each Y_t is drafted and labelled after the target's own text X_1 to
X_(t-1), because the label assumes that all tokens before it were accepted. But its
hidden state e_t is read after Z_1 to Z_(t-1) and Y_t itself. Most of the Z are Y,
because drafts are what the head will judge (3.3, `labelled`).

Names that differ from the paper's: p is `target`, q is `DraftModel`, e_i is `hidden`,
p^ is `all_accepted`, h is `threshold`, K is `gamma`, r is `KEEP`, P_i is `accept_prob`,
D is `head_depth`. In shapes D is the hidden size, of the draft model or of the target.

Deviations from the paper:
    1. The paper takes the draft model as given (3.1). Here it consists of layers of the
       target, distilled in stage "draft", unless `draft_model` names another LM. The
       two layers that are shipped (0 and 29; the default is four) agree with the target
       at 59% of the places, the paper's pair at 84% (1 - .164, 2.1). What the head
       gains with them, and what limits it, is in results/README.md ("Stop rules").
    2. Copied layers draft frequent tokens only (`draft_vocab`).
    3. Labels are greedy by default: P_i is 1 where the likeliest tokens of both models
       are the same, else 0. With a `temperature` of 1 they are the paper's, if the
       target wrote the texts at that temperature, too. Decode as the labels were made:
       at their temperature, without other logits processors.
    4. Y and Z are drawn anew in each training step; the authors' code draws them once.

Authors' code: its head applies one residual block D times; here there are D blocks,
which is how we read the paper's "(D+1)-layer ResNet". It has two outputs and a softmax,
ours one logit and a sigmoid (Eq. 3.1). Three things are taken from it, because sections
1 to 6 do not state them (the appendices were not read): r is 0.15, the loss is divided
by the sum of its weights, and a draft ends after an end-of-sequence token. The
benchmark commands in its README use --do_sample.

Licence: Apache-2.0.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import common
from common import option


# head_depth, w_rej and threshold are by default as recommended in 4.3, max_draft as in
# 4.1. The minimum of two tokens follows from the rule (`until_stop`).
@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    layers: list[int] = option(
        lambda: [0, 1, -2, -1], "target layers that the draft model copies"
    )
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    draft_model: str = option("", "causal LM to draft with, instead of copied layers")
    model: dict = option(
        dict, "config of the layers, or identity of the LM (filled in by build)"
    )
    stage: str = option("draft", "what to train: draft, then head (with --init DRAFT)")
    head_depth: int = option(3, "residual blocks of the head (the paper's D)")
    w_rej: float = option(6.0, "weight of rejections in the head's loss, w_acc being 1")
    temperature: float = option(
        0.0, "temperature of the head's labels, not of decoding; 0: greedy"
    )
    stop: str = option(
        "head", "what ends a round: head, or fixed (gamma tokens)", decode=True
    )
    threshold: float = option(
        0.7, "h: end when 1 - p^ exceeds it; at 1 or above, never", decode=True
    )
    max_draft: int = option(20, "with stop=head: at most so many tokens", decode=True)
    gamma: int = option(
        5, "with stop=fixed: tokens a round, K (the paper: 2 to 14)", decode=True
    )

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0)
        common.at_least(self, w_rej=0, threshold=0, max_draft=0, gamma=0)
        if not all(type(layer) is int for layer in self.layers):
            raise common.UserError(f"layers {self.layers}: take a list of ints")
        if not 0 < self.w_rej < math.inf:  # at_least has checked the type
            raise common.UserError(f"w_rej {self.w_rej}: take a finite weight above 0")
        if self.draft_model and self.stage == "draft":
            raise common.UserError(
                "a draft_model is not trained, only its head: use --stage head"
            )


VARIANTS = {  # named settings for bench.py, as in --method specdecpp:K2
    "K2": {"stop": "fixed", "gamma": 2},
    "K4": {"stop": "fixed", "gamma": 4},
}


# ---------------------------------------------------------------------- the draft model


class DraftModel(NamedTuple):
    """The draft model q, made by `copied_layers` or `causal_lm`."""

    decoder: nn.Module  # layers and final norm
    embed: nn.Module
    # Hidden states (..., D) to logits (..., Vd); that of copied layers leaves out the
    # target's bias and soft cap, because they learn without.
    lm_head: Callable
    vocab_ids: Tensor  # (Vd,) the ids that the logits belong to

    def hidden(self, ids: Tensor, cache=None) -> Tensor:
        """Last hidden states (B, T, D) of ids (B, T), after those of the cache."""
        embeds = self.embed(ids).to(self.decoder.dtype)  # (B, T, D)
        output = self.decoder(
            inputs_embeds=embeds, past_key_values=cache, use_cache=cache is not None
        )
        return output[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., Vd) of the token after each hidden state (..., D)."""
        return self.lm_head(hidden).float()


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2405.19715",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "specdecpp"],
):
    """What is trained and saved: the copied layers, if any, and the head."""

    kv_layers = ()  # no keys and values of the target are read

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        if not config.model:
            raise common.UserError(
                "the config has no draft model: make the drafter with specdecpp.build, "
                "or was this config.json saved by another method?"
            )
        self.body = None
        if not config.draft_model:
            # The layers get the target's embeddings and need no table of their own. So
            # the model is made for a vocabulary of one token, without special ones.
            special = ["pad_token_id", "bos_token_id", "eos_token_id"]
            no_vocab = dict.fromkeys(special) | {"vocab_size": 1}
            shape = AutoConfig.for_model(**config.model | no_vocab)
            self.body = AutoModel.from_config(shape, dtype=torch.float32)
            self.body.set_input_embeddings(nn.Identity())
            self.body.requires_grad_(config.stage == "draft")
        self.head = AcceptanceHead(config.model["hidden_size"], config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        common.add_vocab_ids(self, config.draft_vocab)  # unused beside a causal LM


def copied_layers(drafter: Drafter, target) -> DraftModel:
    """A drafter's layers, between the target's embedding and rows of its LM head."""
    decoder = drafter.body.eval()  # drafting has no dropout, so training has none here
    embed = target.get_input_embeddings()
    lm_head = common.draft_head(target, drafter.vocab_ids).to(decoder.dtype)
    return DraftModel(decoder, embed, lm_head, drafter.vocab_ids)


def small_config(target, layers: list[int]) -> dict:
    """The config of the target, with as many layers as are to be copied.

    Raises UserError for layers that the target lacks, or that cannot be copied.
    """
    config = copy.deepcopy(target.config.get_text_config())
    if getattr(config, "hidden_size_per_layer_input", None):  # Gemma 3n, Gemma 4
        raise common.UserError(
            "the target's layers read an embedding of their own, which a copy lacks: "
            "name a draft_model"
        )
    depth = config.num_hidden_layers
    if not layers or not all(-depth <= layer < depth for layer in layers):
        raise common.UserError(
            f"layers {layers}: name some of the target's 0 to {depth - 1}"
        )
    config.num_hidden_layers = len(layers)
    # Whether a layer slides, and in SmolLM3 whether it rotates.
    for name in ("layer_types", "no_rope_layers"):
        if each := getattr(config, name, None):
            setattr(config, name, [each[layer] for layer in layers])
    model = config.to_diff_dict()
    # The head needs the width by one name (GPT-2 calls it n_embd).
    model["hidden_size"] = config.hidden_size
    # The copy has the dtype of its training, and later that of the target.
    model.pop("dtype", None)
    return model


def causal_lm(lm, target) -> DraftModel:
    """A draft model made of a causal LM of transformers (4.1).

    Raises UserError if its cache cannot undo a rejected token, if it is on another
    device, or if its vocabulary differs in size from the target's, padding included.
    Only the size is checked: make sure that both models use the same tokenizer.
    """
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention", "chunked_attention"}
    uncached = "past_key_values" not in inspect.signature(lm.forward).parameters
    size, vocab = (x.config.get_text_config().vocab_size for x in (lm, target))
    other = "choose another draft model"
    move = f"move it to {target.device}"
    common.refuse(
        (kinds or uncached, f"{type(lm).__name__} cannot undo a token: {other}"),
        (size != vocab, f"the draft model has {size} tokens, not {vocab}: {other}"),
        (lm.device != target.device, f"the draft model is on {lm.device}: {move}"),
    )
    embed = lm.get_input_embeddings()
    lm_head = functools.partial(common.target_logits, lm)
    vocab_ids = torch.arange(vocab, device=target.device)
    return DraftModel(lm.get_decoder(), embed, lm_head, vocab_ids)


# Cached, because `loss` needs it in every step and a Drafter does not contain it.
@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, dtype, device):
    """The causal LM of Config.draft_model."""
    return common.load_target(name, dtype=dtype, device=str(device))[0]


def named_model(config: Config, target):
    """The causal LM that a config names; None for copied layers."""
    name = config.draft_model
    return load_draft_model(name, target.dtype, target.device) if name else None


def draft_model_of(drafter: Drafter | None, lm, target) -> DraftModel:
    """The draft model: the causal LM, or if `lm` is None a drafter's copied layers."""
    return copied_layers(drafter, target) if lm is None else causal_lm(lm, target)


def identity(lm) -> dict:
    """A causal LM's shape and the last part of its path."""
    # The same weights in a folder of another name count as another model, and other
    # weights of the same shape in a folder of the same name do not.
    return {"name": Path(lm.config.name_or_path).name, **common.target_shape(lm)}


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with copied layers or with a head alone.

    token_counts: (V,) how often each token occurs in the responses.
    Raises UserError for layers that the target lacks or that cannot be copied, and for
    a `draft_model` that cannot be loaded or used.
    """
    config = dataclasses.replace(config, target=common.target_shape(target))
    lm = named_model(config, target)
    if lm is not None:
        causal_lm(lm, target)  # can it be used?
        return Drafter(dataclasses.replace(config, model=identity(lm), draft_vocab=0))

    shape = small_config(target, config.layers)
    drafter = Drafter(dataclasses.replace(config, model=shape))
    common.start_from(drafter, target, token_counts)
    ours = drafter.body.get_decoder()  # OPT wraps it
    theirs = target.get_decoder()
    key = "layers" if hasattr(ours, "layers") else "h"  # GPT-2
    common.refuse(
        (not hasattr(ours, key), "the target has no list of layers: name a draft_model")
    )
    weights = theirs.state_dict()
    outside = {n: w for n, w in weights.items() if not n.startswith(f"{key}.")}
    try:
        # The final norm, and learned positions; ours has no embedding of tokens.
        ours.load_state_dict(outside, strict=False)
        for layer, index in zip(getattr(ours, key), config.layers):
            layer.load_state_dict(getattr(theirs, key)[index].state_dict())
    except RuntimeError as error:  # weights of other names (LoRA) or shapes (quantised)
        raise common.UserError(
            "the target's layers are adapted, quantised or offloaded and cannot be "
            "copied, or their kinds differ by place (mixture of experts): merge the "
            "adapter, load the target without quantisation and without offloading, or "
            "name a draft_model"
        ) from error
    return drafter


# ----------------------------------------------------------------------------- the head


class AcceptanceHead(nn.Module):
    """f_theta, a ResNet of depth + 1 layers with SiLU (3.2, 4.1)."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """A logit for each hidden state e_i (..., D).

        Its sigmoid is the predicted probability that y_i is accepted (Eq. 3.1).
        """
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0].float()


# ------------------------------------------------------------------- training objective

# `batch` is a common.Batch: input_ids (B, T); loss_mask (B, T), which is True at the M
# answer tokens X_t; the target's last hidden states, batch.hidden (B, T, D); and a seed
# (B,) for each sequence, new in each step.

KEEP = 0.15  # r, the share of X in Z (3.3); the value is that of the authors' code


@torch.no_grad()
def labelled(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """What the head learns (3.3): hidden states e_t (J, D) and labels P_t (J,).

    J is the number of judged tokens in the batch.
    """
    model = draft_model_of(drafter, named_model(drafter.config, target), target)
    # Two numbers in [0, 1) for each place, one to draw Y_t and one to mix Z.
    size = batch.input_ids.shape[1], 2
    uniform = []
    for seed in batch.seed.tolist():
        numbers = common.generator(seed)
        uniform.append(torch.rand(size, generator=numbers, dtype=torch.float32))
    uniform = torch.stack(uniform).to(batch.input_ids.device)  # (B, T, 2)
    for_y, for_z = uniform.unbind(-1)  # (B, T) each
    # 1. X is the text of the batch, which the target wrote.
    # 2. A label P_t assumes that all tokens before Y_t were accepted, so Y_t is drawn
    #    and labelled after X_1 to X_(t-1).
    temperature = drafter.config.temperature
    drafted, accept_prob = draw_labels(model, target, batch, for_y, temperature)
    # 3. When decoding the head sees the states of drafts, so it learns from those of a
    #    text that is mostly drafted, Z.
    mixed, judged = mix(batch, drafted, for_z, KEEP)
    # 4. So e_t is read after Z_1 to Z_(t-1) and Y_t.
    hidden = model.hidden(mixed)[judged]  # (J, D)
    among = judged[batch.loss_mask]  # (M,) bool, which Y_t are judged
    return hidden, accept_prob[among]


def draw_labels(model: DraftModel, target, batch, uniform: Tensor, temperature: float):
    """Draw Y_t after X_1 to X_(t-1), for each of the M answer tokens X_t (3.3).

    uniform: (B, T) numbers in [0, 1), one for each place.
    temperature: of both models; at 0, Y_t is the draft model's likeliest token.
    Returns Y (M,), and accept_prob (M,), which is min(1, p_target / q_draft) of each;
    at temperature 0 it is 1 where Y_t is the target's likeliest token, too, else 0.
    """
    uniform = uniform[batch.loss_mask][:, None]  # (M, 1)
    ours, theirs = response_hidden(model, batch)  # (M, D) each
    drafted = []
    accept_prob = []
    parts = [x.split(256) for x in (ours, theirs, uniform)]  # saves memory
    for part, target_part, number in zip(*parts):
        q_logits = model.logits(part)  # (m, Vd)
        p_logits = common.target_logits(target, target_part)  # (m, V)
        if temperature == 0:
            token = model.vocab_ids[q_logits.argmax(-1, keepdim=True)]  # (m, 1)
            label = (token == p_logits.argmax(-1, keepdim=True)).float()
        else:
            q_draft = (q_logits / temperature).softmax(-1)
            p_target = (p_logits / temperature).softmax(-1)
            choice = common.sample(q_draft, number)  # (m, 1)
            token = model.vocab_ids[choice]
            label = (p_target.gather(1, token) / q_draft.gather(1, choice)).clamp(max=1)
        drafted.append(token[:, 0])
        accept_prob.append(label[:, 0])
    return torch.cat(drafted), torch.cat(accept_prob)


def mix(batch, drafted: Tensor, uniform: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The sequences Z, which take X_t with probability `keep`, else Y_t (3.3).

    Only the Y_t in them are judged, here three of four:

        X        x1 x2 x3 x4
        Y        y1 y2 y3 y4     y3 was drawn after x1 x2
        Z        y1 x2 y3 y4     e_3 is the hidden state after y1 x2 y3
        judged   1  .  1  1

    drafted: (M,) all Y_t.
    uniform: (B, T) numbers in [0, 1), one for each place; one below `keep` keeps X_t.
    Returns Z (B, T), and judged (B, T) bool.
    """
    x = batch.input_ids  # (B, T)
    y = x.masked_scatter(batch.loss_mask, drafted)  # (B, T)
    judged = batch.loss_mask & (uniform >= keep)
    return torch.where(judged, y, x), judged


def response_hidden(model: DraftModel, batch) -> tuple[Tensor, Tensor]:
    """Hidden states of draft model and target that predict the M tokens X_t, (M, D)."""
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T): t predicts t + 1
    ours = model.hidden(batch.input_ids)
    return ours[predicts], batch.hidden[predicts]


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The summed loss, and the weight to divide it by.

    Stage draft (ours): cross-entropy between the target's distribution, renormalised
    over the draft vocabulary, and the draft model's, summed over M tokens; the weight
    is M.

    Stage head: the weighted binary cross-entropy of 3.3 between the labels P and the
    head's predictions s, -(w_acc P log s + w_rej (1 - P) log(1 - s)) with w_acc = 1.
    The weight is the sum of w_acc P + w_rej (1 - P).
    """
    if drafter.config.stage == "draft":
        model = copied_layers(drafter, target)
        ours, theirs = response_hidden(model, batch)
        logits = model.logits(ours)  # (M, Vd)
        teacher = common.target_logits(target, theirs, model.vocab_ids)
        p_target = teacher.softmax(-1)  # (M, Vd)
        total = F.cross_entropy(logits, p_target, reduction="sum")
        return total, len(logits)

    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,) whose sigmoid is s
    # The paper weighs rejections more because they are rare, and because the head is
    # trained on Z but judges real drafts, which may make it over-confident. (The
    # shipped draft model is rejected 30 to 41% of the time, and heads with w_rej = 1, 3
    # or 6 are equally fast once h is tuned for each, see checkpoints/README.md.) The
    # weight biases s, so h is a number to tune and not a probability: the loss is
    # smallest at s = P / (P + w_rej (1 - P)) < P. For w_rej = 6 and P = .72 that is
    # s = .3, so the round ends as soon as P(y_1 is rejected) > .28 although h = .7.
    weight_acc = accept_prob
    weight_rej = drafter.config.w_rej * (1 - accept_prob)
    accepted = weight_acc * F.logsigmoid(logits)
    rejected = weight_rej * F.logsigmoid(-logits)
    total = -(accepted + rejected).sum()
    return total, (weight_acc + weight_rej).sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """The acceptance rate at temperature 1, summed over M places, and M.

    At each place of the batch's text it is sum_x min(p_target, q_draft).
    """
    # This is about the draft model: while the head is trained it stays the same.
    model = draft_model_of(drafter, named_model(drafter.config, target), target)
    ours, theirs = response_hidden(model, batch)
    total = torch.zeros((), device=ours.device)
    for part, target_part in zip(ours.split(256), theirs.split(256)):  # saves memory
        q_draft = model.logits(part).softmax(-1)  # (m, Vd)
        total += common.overlap(target, target_part, q_draft, model.vocab_ids)
    return total, len(ours)


# ----------------------------------------------------------------------------- decoding


def propose(model: DraftModel, decoding, cache: common.DraftCache):
    """Draft a chain after `decoding.ids`, until the caller stops.

    cache: the draft model's, of this answer.
    Yields y_i (1,), the q_draft (V,) that it was chosen from, and the hidden state
    e_(i-1) (D,) that q_draft was computed from. Ends after an end-of-sequence token,
    and where the logits processors allow no draft token.
    """
    # `rewind` drops the rows of rejected tokens, and returns the ids that the draft
    # model has not read: at first the prompt, later the bonus token, and after a fully
    # accepted draft also its last token, which was submitted without having been read.
    new = cache.rewind(decoding.ids)  # (1, n)
    drafted = []
    while True:
        cache.record(new)
        hidden = model.hidden(new, cache)[:, -1]  # (1, D), e_(i-1)
        logits = model.logits(hidden)[0]  # (Vd,)
        picked = common.pick(decoding, logits, model.vocab_ids, drafted)
        if picked is None:
            return
        token, q_draft = picked
        yield token, q_draft, hidden[0]
        drafted.append(int(token))
        if drafted[-1] in decoding.eos_ids:  # no text follows it
            return
        new = token[None]  # (1, 1); fed only if the caller wants another one


def until_stop(steps, head, threshold: float):
    """End a round when the head expects a rejection (Algorithm 2).

    steps: what `propose` yields, (y_i, q_draft, e_(i-1)) for i = 1, 2, ...
    head: maps e (D,) to a logit, whose sigmoid is the prediction for y_i at e_i.
    threshold: h.
    Yields (y_i, q_draft, p^), where p^ is the product of the predictions for y_1 to
    y_(i-1), as a float; the first is 1. y_i is the last if 1 - p^ exceeds h, and then
    no further step is asked for.

    If the head predicts 0.9, 0.8 and 0.5 for y_1, y_2 and y_3, and h = 0.6:

        pass i returns       e_0, q_1   e_1, q_2   e_2, q_3   e_3, q_4
        y_i is drawn         y_1        y_2        y_3        y_4
        p^, up to y_(i-1)    1          .9         .72        .36
        1 - p^               0          .1         .28        .64 > h
    """
    all_accepted = 1.0  # p^
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        # `hidden` is e_(i-1), by which y_(i-1) is judged. e_0 judges nothing: Eq. 3.1
        # has an e_i for draft tokens only, and the product of 3.2 begins with e_1. (The
        # printed Algorithm 2 has a slip: at i = 1, too, it multiplies by the prediction
        # at e_(i-1), but it has computed no e_0. The authors' code skips i = 1.)
        if i > 1:
            all_accepted *= float(head(hidden).sigmoid())
        # The head lags behind by one token: the pass that returns e_(i-1) also returns
        # q_i, so when y_(i-1) is judged, y_i costs no further pass. It is submitted
        # unjudged (as in the MDP of 3.1, where a stop draws one more token), so a round
        # that the head ends has two tokens or more, whatever h.
        yield token, q_draft, all_accepted
        # The judged token is submitted as well, even if it caused the end. A token that
        # is dropped because of a judgement on it would bias what is sampled: those that
        # survive such a filter no longer follow q, but verification assumes that they
        # do. (A greedy answer does not depend on q. There, dropping the token would be
        # safe but would gain nothing.)
        if 1 - all_accepted > threshold:
            return


def check_fit(drafter: Drafter | None, lm, config: Config) -> None:
    """Raise a UserError if the head that is to end rounds is missing or does not fit.

    lm: the causal LM that drafts; None for copied layers.
    """
    if config.stop == "fixed":
        return
    remedy = "train one (stage head), or take stop fixed"
    if drafter is None or drafter.config.stage == "draft":
        raise common.UserError(
            f"stop head, but no acceptance head has been trained: {remedy}"
        )
    if lm is not None and drafter.config.model != identity(lm):
        own = drafter.config.draft_model or "its own layers"
        given = lm.config.name_or_path
        raise common.UserError(
            f"the head was trained on {own}, not on {given}: {remedy}"
        )


@torch.no_grad()
def drafts(decoding, drafter: Drafter | None, draft_model=None, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    For target.generate(**inputs, custom_generate=...), with speculate of common.py:

        speculate(specdecpp.drafts, drafter)                         # Algorithm 2
        speculate(specdecpp.drafts, drafter, stop="fixed", gamma=4)  # Algorithm 1
        speculate(specdecpp.drafts, None, small, gamma=4)            # any causal LM
        speculate(specdecpp.drafts, drafter, small)   # small, and a head trained on it

    drafter: None drafts without a head, so a round has `gamma` tokens.
    draft_model: a causal LM with the target's vocabulary, which drafts in place of the
        drafter's own draft model.
    changes: other values for fields of the Config with decode=True. threshold and
        max_draft count with stop="head" alone, and gamma with stop="fixed".
    Raises UserError if there is nothing to draft with, if the draft model cannot be
    used, or if stop is "head" and no head was trained on it.
    """
    config = Config(stop="fixed")
    if drafter is not None:
        common.check_drafter(drafter, Drafter, decoding.target)
        config = drafter.config
    config = common.changed(config, changes)
    lm = named_model(config, decoding.target) if draft_model is None else draft_model
    if drafter is None and lm is None:
        raise common.UserError("nothing to draft with: pass a drafter or a draft_model")
    model = draft_model_of(drafter, lm, decoding.target)
    # There is no warning if the head's labels have another temperature: the text still
    # follows the target, but the head judges less well (see checkpoints/README.md).
    check_fit(drafter, lm, config)
    context = getattr(model.decoder.config, "max_position_embeddings", None)
    if lm is not None and context and decoding.generation_config.max_length > context:
        raise common.UserError(
            f"the draft model reads {context} tokens at most: set a lower "
            "max_new_tokens, or choose another draft model"
        )
    cache = common.DraftCache(model.decoder.config.num_hidden_layers)
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    while not decoding.done:
        steps = propose(model, decoding, cache)
        steps = itertools.islice(steps, min(limit, decoding.room))
        p_hats = []  # for display: p^ after y_1, after y_2, ...; not after the last
        if config.stop == "head":
            steps = list(until_stop(steps, drafter.head, config.threshold))
            p_hats = [all_accepted for *_, all_accepted in steps[1:]]
        pairs = (step[:2] for step in steps)  # token and q_draft
        yield common.chain(pairs, decoding.ids, chances=p_hats)


# ------------------------------------------------------------------------------- theory


def throughput(
    verification: float, discard: float, t_draft: float, t_target: float
) -> float:
    """Tokens per second, 1 / latency (Eq. 2.3).

    verification: N_target / N. discard: N_discarded / N.
    t_draft, t_target: seconds of a pass and of a forward.
    """
    # An answer takes T = t_draft N_draft + t_target N_target (Eq. 2.1). Each pass and
    # each forward gives a token, so N_draft + N_target = N + N_discarded. (The last
    # forward gives none where the end of the answer was drafted.) With N_draft from
    # this, T is Eq. 2.2, and divided by N it is
    latency = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return 1 / latency


def oracle(agrees: list[bool]) -> int:
    """N_target of the best stopping times, decoding greedily (Lemma 2.1).

    agrees[i]: whether the draft model's likeliest token, after the answer's tokens
        before place i, is token i. The answer has at least one token.
    """
    # Each round stops just before the next disagreement, and the target's own token
    # settles that. So there is a round for each place in S, the disagreements, and one
    # more, the last. The lemma's |S| + 1 is one too many if the answer's last token is
    # in S, because no round follows it. Between two disagreements in a row the best
    # round drafts nothing, which Algorithm 2 cannot do.
    return 1 + sum(not agree for agree in agrees[:-1])


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """Theorem 3.1: once R reaches this bound, stopping has the smaller expected cost.

    It holds for time-homogeneous policies with a bounded draft length. R is the
    probability that at least one of y_1 to y_k is rejected; a stop draws y_(k+1), too.
    c1, c2: t_draft and t_target - t_draft.
    delta: depends on the policy, the prompt, both models, c1 and c2; it is not known.
    """
    # This is how we read the bound, without its proof in appendix D: if a token is
    # rejected, going on wastes at least a pass, c1. If none is, stopping costs at most
    # c2 + delta more than going on. At the bound R c1 = (1 - R)(c2 + delta). With the
    # paper's times, .0234 s and .112 s (4.2), it is .79 at delta = 0.
    #
    # The bound says why a threshold on R is the rule, and at a fixed delta it rises as
    # passes get cheaper. Do not use it as h: delta is unknown, stopping may be cheaper
    # at a smaller R as well (the condition is sufficient, not necessary), and 1 - p^ is
    # not R, because the loss biases the head (see `loss`). So h is tuned (4.1).
    return (c2 + delta) / (c1 + c2 + delta)


if __name__ == "__main__":
    common.demo(Drafter, "specdecpp", drafts)
