"""SpecDec++: a trained head decides when a draft is long enough.

Paper: Huang et al., 2024, arXiv:2405.19715v1.

A draft that ends too early costs forwards of the target, and one that goes on too long
costs passes of the draft model, because all tokens after a rejected one are discarded.
The best length differs from place to place, so it is decided while drafting. A small
head reads e_i, the last hidden state of the draft model once it has read the draft
token y_i, and predicts whether the target accepts y_i, given that it accepts y_1 to
y_(i-1) (Eq. 3.1). The product of these predictions, p^, is the probability that all are
accepted, and a round ends when 1 - p^ exceeds a threshold h:

    a pass of the draft model reads    x_t   y_1   y_2   y_3
    its last hidden state is           e_0   e_1   e_2   e_3
    from which is drawn                y_1   y_2   y_3   y_4
    and by which is judged                   y_1   y_2   y_3

Algorithm 2 is `propose` and `until_stop`, and Decoding.verify in common.py. With
stop="fixed" a round has gamma tokens, which is Algorithm 1.

Names that differ from the paper's: p is `target`, q is `DraftModel`, e_i is `hidden`,
p^ is `all_accepted`, h is `threshold`, K is `gamma`, r is `KEEP`, P_i is `accept_prob`;
D is `head_depth`, but the hidden size in shapes.

Deviations from the paper:
    1. The draft model consists of layers of the target, distilled in stage "draft",
       unless `draft_model` names another LM, as in the paper. The two layers that are
       shipped agree with the target less often than the paper's 7B model with its 70B
       one, and results/README.md tells what that leaves to the head.
    2. Copied layers draft frequent tokens only (`draft_vocab`).
    3. Labels are greedy by default, for greedy decoding: P_i is 1 where the likeliest
       tokens of both models are the same, else 0. With a `temperature` of 1 they are
       the paper's. A head is fit for decoding at the temperature of its labels.
    4. Y and Z are drawn anew in each training step.

Authors' code: its head applies one residual block D times; here there are D blocks, as
the paper's "(D+1)-layer ResNet" is understood. Followed here, but not in the paper: e_0
is not judged, r is 0.15, and a draft ends after an end-of-sequence token. Its benchmark
always samples.

Licence: Apache-2.0.
"""

import copy
import functools
import itertools
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
    stage: str = option("draft", "what to train: draft, then head")
    head_depth: int = option(3, "residual blocks of the head, D")
    w_rej: float = option(
        6.0, "weight of rejections in the head's loss; acceptances: 1"
    )
    temperature: float = option(0.0, "of the head's labels; 0: greedy")
    stop: str = option(
        "head", "what ends a round: head, or fixed (gamma tokens)", decode=True
    )
    threshold: float = option(0.7, "h: end when P(a rejection) exceeds it", decode=True)
    max_draft: int = option(20, "stop head: at most this many tokens", decode=True)
    gamma: int = option(5, "stop fixed: tokens per round, K", decode=True)

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0)
        common.at_least(self, threshold=0, max_draft=0, gamma=0)
        if not self.w_rej > 0:
            raise common.UserError(f"w_rej {self.w_rej}: take a weight above 0")
        if self.draft_model and self.stage == "draft":
            raise common.UserError(
                "a draft_model is not trained, only its head: take stage head"
            )


VARIANTS = {
    "K2": {"stop": "fixed", "gamma": 2},
    "K4": {"stop": "fixed", "gamma": 4},
}


# ---------------------------------------------------------------------- the draft model


class DraftModel(NamedTuple):
    """The draft model q, made by `copied_layers` or `causal_lm`."""

    decoder: nn.Module  # layers and final norm
    embed: nn.Module
    lm_head: Callable  # hidden states (..., D) to logits (..., Vd)
    vocab_ids: Tensor  # (Vd,) the tokens that the logits are of

    def hidden(self, ids: Tensor, cache=None) -> Tensor:
        """Last hidden states (B, T, D) of ids (B, T), after those of the cache."""
        embeds = self.embed(ids).to(self.decoder.dtype)  # (B, T, D)
        output = self.decoder(
            inputs_embeds=embeds, past_key_values=cache, use_cache=cache is not None
        )
        return output[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., Vd) of the next token, of hidden states (..., D)."""
        return self.lm_head(hidden).float()


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2405.19715",  # on the card of a drafter on the hub
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
                "no draft model in the config: is it of another method?"
            )
        self.body = None
        if not config.draft_model:
            # The layers get the target's embeddings and need no table of their own. So
            # the model is made for a vocabulary of one token, without special ones.
            special = ["pad_token_id", "bos_token_id", "eos_token_id"]
            tiny = dict.fromkeys(special) | {"vocab_size": 1}
            shape = AutoConfig.for_model(**config.model | tiny)
            self.body = AutoModel.from_config(shape, dtype=torch.float32)
            self.body.set_input_embeddings(nn.Identity())
            self.body.requires_grad_(config.stage == "draft")
        self.head = AcceptanceHead(config.model["hidden_size"], config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        common.add_vocab_ids(self, config.draft_vocab)


def copied_layers(drafter: Drafter, target) -> DraftModel:
    """A drafter's layers, between the target's embedding and some rows of its head."""
    decoder = drafter.body.eval()  # without dropout, in training, too
    embed = target.get_input_embeddings()
    lm_head = common.draft_head(target, drafter.vocab_ids).to(decoder.dtype)
    return DraftModel(decoder, embed, lm_head, drafter.vocab_ids)


def causal_lm(model, target) -> DraftModel:
    """Another language model of transformers, as in the paper.

    Raises UserError if its vocabulary is not the target's.
    """
    size, vocab = (common.target_shape(x)["vocab_size"] for x in (model, target))
    if size != vocab:
        raise common.UserError(
            f"the draft model has {size} tokens, not {vocab}: take another"
        )
    embed = model.get_input_embeddings()
    lm_head = functools.partial(common.target_logits, model)
    vocab_ids = torch.arange(vocab, device=target.device)
    return DraftModel(model.get_decoder(), embed, lm_head, vocab_ids)


def draft_model_of(drafter: Drafter, target) -> DraftModel:
    """The draft model that a drafter was built with."""
    name = drafter.config.draft_model
    if not name:
        return copied_layers(drafter, target)
    return causal_lm(load_draft_model(name, target.dtype, target.device), target)


@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, dtype, device):
    """The causal LM of Config.draft_model, which is not saved with the head."""
    return common.load_target(name, dtype=dtype, device=str(device))[0]


def identity(model) -> dict:
    """A causal LM's name, without its path, and its shape."""
    return {"name": Path(model.config.name_or_path).name, **common.target_shape(model)}


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with copied layers or with a head alone.

    token_counts: (V,) how often each token occurs in the responses.
    Raises UserError for layers that the target lacks or that cannot be copied, and for
    a `draft_model` that cannot be loaded or has another vocabulary.
    """
    config.target = common.target_shape(target)
    if config.draft_model:
        model = load_draft_model(config.draft_model, target.dtype, target.device)
        causal_lm(model, target)  # checks the vocabulary
        config.model = identity(model)
        config.draft_vocab = 0
        return Drafter(config)

    # The config of the target, with as many layers as are chosen.
    small = copy.deepcopy(target.config.get_text_config())
    if getattr(small, "hidden_size_per_layer_input", None):  # Gemma 3n, Gemma 4
        raise common.UserError(
            "the target's layers read an embedding of their own, which a copy lacks: "
            "name a draft_model"
        )
    depth = small.num_hidden_layers
    chosen = config.layers
    if not all(-depth <= layer < depth for layer in chosen):
        raise common.UserError(
            f"layers {chosen}: name some of the target's 0 to {depth - 1}"
        )
    small.num_hidden_layers = len(chosen)
    if getattr(small, "layer_types", None):  # sliding or full attention
        small.layer_types = [small.layer_types[layer] for layer in chosen]
    config.model = small.to_diff_dict() | {"hidden_size": small.hidden_size}
    config.model.pop("dtype", None)

    drafter = Drafter(config)
    common.start_from(drafter, target, token_counts)
    ours = drafter.body.get_decoder()  # OPT wraps it
    theirs = target.get_decoder()
    name = "layers" if hasattr(ours, "layers") else "h"  # GPT-2
    try:
        # First what is around the layers, such as the final norm, then each layer.
        ours.load_state_dict(theirs.state_dict(), strict=False)
        for layer, place in zip(getattr(ours, name), chosen):
            layer.load_state_dict(getattr(theirs, name)[place].state_dict())
    except RuntimeError as error:  # weights of other names (LoRA) or shapes (quantised)
        raise common.UserError(
            "the target's layers are adapted, quantised or offloaded and cannot be "
            "copied: merge the adapter, load the target without quantisation and "
            "without offloading, or name a draft_model"
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

KEEP = 0.15  # r, the share of X in Z (3.3); the value is that of the authors' code


def response_hidden(model: DraftModel, batch) -> tuple[Tensor, Tensor]:
    """Hidden states of the draft model and of the target, (M, D) each.

    They are those from which the M answer tokens X_t are predicted.
    """
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T): t predicts t + 1
    hidden = model.hidden(batch.input_ids)
    return hidden[predicts], batch.hidden[predicts]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities of logits (M, V) at a temperature; at 0 they are one-hot."""
    if temperature == 0:
        best = logits.argmax(-1)  # (M,)
        return F.one_hot(best, logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


def draw(model: DraftModel, target, batch, to_draw: Tensor, temperature: float):
    """Draw Y_t after X_1 to X_(t-1), for each of the M answer tokens X_t (3.3).

    to_draw: (B, T) uniform numbers, one for each place.
    Returns Y (M,), and accept_prob (M,), which is min(1, p_target / q_draft) of each.
    """
    uniform = to_draw[batch.loss_mask][:, None]  # (M, 1)
    ours, theirs = response_hidden(model, batch)  # (M, D) each
    drafted = []
    accept_prob = []
    parts = [x.split(256) for x in (ours, theirs, uniform)]  # saves memory
    for part, target_part, numbers in zip(*parts):
        q_draft = distribution(model.logits(part), temperature)  # (m, Vd)
        logits = common.target_logits(target, target_part)
        p_target = distribution(logits, temperature)  # (m, V)
        choice = common.sample(q_draft, numbers)  # (m, 1)
        token = model.vocab_ids[choice]  # (m, 1)
        ratio = p_target.gather(1, token) / q_draft.gather(1, choice)
        drafted.append(token[:, 0])
        accept_prob.append(ratio[:, 0].clamp(max=1))
    return torch.cat(drafted), torch.cat(accept_prob)


def mix(batch, drafted: Tensor, to_mix: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The sequences Z, which take X_t with probability `keep`, else Y_t (3.3).

    Only the Y_t in them are judged, here three of four:

        X        x1 x2 x3 x4
        Y        y1 y2 y3 y4     y3 was drawn after x1 x2
        Z        y1 x2 y3 y4     e_3 is the hidden state after y1 x2 y3
        judged   1  .  1  1

    drafted: (M,) all Y_t. to_mix: (B, T) uniform numbers, one for each place.
    Returns Z (B, T), and judged (B, T) bool.
    """
    x = batch.input_ids  # (B, T)
    y = x.masked_scatter(batch.loss_mask, drafted)  # (B, T)
    judged = batch.loss_mask & (to_mix >= keep)
    return torch.where(judged, y, x), judged


@torch.no_grad()
def labelled(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """What the head learns (3.3): hidden states e (J, D) and labels P (J,).

    J is the number of judged tokens in the batch.
    """
    model = draft_model_of(drafter, target)
    length = batch.input_ids.shape[1]
    numbers = []  # two uniform ones for each place of a sequence
    for seed in batch.seed.tolist():
        own = common.generator(seed)
        numbers.append(torch.rand(length, 2, generator=own, dtype=torch.float32))
    numbers = torch.stack(numbers).to(batch.input_ids.device)
    to_draw, to_mix = numbers.unbind(-1)  # (B, T)
    # A label assumes that all tokens before Y_t were accepted, so Y_t is drawn after a
    # text that the target wrote, X.
    temperature = drafter.config.temperature
    drafted, accept_prob = draw(model, target, batch, to_draw, temperature)
    # When decoding the head sees the states of drafts, so it learns from those of a
    # text that is mostly drafted, Z.
    mixed, judged = mix(batch, drafted, to_mix, KEEP)
    hidden = model.hidden(mixed)[judged]  # (J, D)
    return hidden, accept_prob[judged[batch.loss_mask]]


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The summed loss, and the weight to divide it by.

    Stage draft: cross-entropy of the draft model with the target's distribution over
    the draft vocabulary, summed over M tokens; the weight is M.

    Stage head: the weighted binary cross-entropy of 3.3 between the labels P and the
    head's predictions s, -(w_acc P log s + w_rej (1 - P) log(1 - s)) with w_acc = 1;
    the weight is the sum of w_acc P + w_rej (1 - P).
    """
    if drafter.config.stage == "draft":
        model = draft_model_of(drafter, target)
        ours, theirs = response_hidden(model, batch)
        logits = model.logits(ours)  # (M, Vd)
        teacher = common.target_logits(target, theirs, model.vocab_ids)
        p_target = teacher.softmax(-1)  # (M, Vd)
        total = F.cross_entropy(logits, p_target, reduction="sum")
        return total, len(logits)

    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,) whose sigmoid is s
    # Rejections weigh more because they are rare, and because Z is not what is drafted
    # when decoding, so that the head may be over-confident. But the weight biases s:
    # the loss is smallest at s = P / (P + w_rej (1 - P)), which is below P, so 1 - p^
    # is no probability and h = 0.7 no probability of a rejection. With w_rej = 6, a
    # head that has learned this predicts 1 - s > 0.7 of y_1, and so ends the round,
    # as soon as the target rejects y_1 with a probability 1 - P above 0.28.
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
    model = draft_model_of(drafter, target)
    ours, theirs = response_hidden(model, batch)
    q_draft = model.logits(ours).softmax(-1)  # (M, Vd)
    return common.overlap(target, theirs, q_draft, model.vocab_ids), len(q_draft)


# ----------------------------------------------------------------------------- decoding


def propose(model: DraftModel, decoding, cache: common.DraftCache):
    """Draft a chain after `decoding.ids`, until the caller stops.

    cache: the draft model's, of this answer.
    Yields y_i (1,), the q_draft (V,) that it was chosen from, and the hidden state
    e_(i-1) (D,) that q_draft was computed from. Ends after an end-of-sequence token,
    because no text follows it, and where the logits processors allow no draft token.
    """
    # The cache drops the rows of rejected tokens. If y_2 of y_1 y_2 y_3 was rejected,
    # the row of y_1 stays. If all were accepted, y_3 is fed now, with the bonus token,
    # because it has no row yet: nothing was drafted after it.
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
        if drafted[-1] in decoding.ends:
            return
        new = token[None]  # (1, 1); fed only if the caller wants another one


def until_stop(steps, head, threshold: float, chances: list):
    """Yield the steps of a round until the head ends it (Algorithm 2).

    steps: of `propose`.
    head: maps e (D,) to a logit.
    threshold: h.
    chances: a list to which each p^ is appended.

    If the head predicts 0.9, 0.8 and 0.5 for y_1, y_2 and y_3, and h = 0.6:

        pass i returns           q_1   e_1, q_2   e_2, q_3   e_3, q_4
        y_i is drawn             y_1   y_2        y_3        y_4
        p^, up to y_(i-1)        1     .9         .72        .36
        1 - p^                   0     .1         .28        .64 > h
    """
    all_accepted = 1.0  # p^
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        # `hidden` is e_(i-1), by which y_(i-1) is judged. The printed algorithm judges
        # by e_0 as well, but that is the state of a token of the text, not of a draft.
        if i > 1:
            all_accepted *= float(head(hidden).sigmoid())
            chances.append(all_accepted)
        # The head lags behind by one token: the pass that returns e_(i-1) also returns
        # q_i, so when y_(i-1) is judged, y_i costs no further pass. It is submitted
        # unjudged (as in the MDP of 3.1, where a stop draws one more token), so a round
        # that the head ends has two tokens or more, whatever h.
        yield token, q_draft, hidden
        # The judged token is submitted as well, even if it caused the end. A token that
        # is dropped because of a judgement on it would bias what is sampled: those that
        # survive such a filter no longer follow q, but verification assumes that they
        # do. (A greedy answer does not depend on q, so there it would only be useless.)
        if 1 - all_accepted > threshold:
            return


def check_head(drafter: Drafter | None, draft_model, config: Config) -> None:
    """Raise a UserError if draft model or head is missing, or if they do not fit."""
    if drafter is None and draft_model is None:
        raise common.UserError("nothing to draft with: pass a drafter or a draft_model")
    if config.stop == "fixed":
        return
    remedy = "train one (stage head), or take stop fixed"
    if drafter is None or drafter.config.stage == "draft":
        raise common.UserError(
            f"stop head, but no acceptance head has been trained: {remedy}"
        )
    if draft_model is not None and drafter.config.model != identity(draft_model):
        own = drafter.config.draft_model or "its own layers"
        given = draft_model.config.name_or_path
        raise common.UserError(
            f"the head was trained on {own}, not on {given}: {remedy}"
        )


@torch.no_grad()
def drafts(decoding, drafter: Drafter | None, draft_model=None, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

        speculate(specdecpp.drafts, drafter)                         # Algorithm 2
        speculate(specdecpp.drafts, drafter, stop="fixed", gamma=4)  # Algorithm 1
        speculate(specdecpp.drafts, None, small, gamma=4)            # any causal LM
        speculate(specdecpp.drafts, drafter, small)                  # with its head

    drafter: None drafts without a head, so a round has `gamma` tokens.
    draft_model: a causal LM with the target's vocabulary, which drafts in place of the
        drafter's own draft model.
    changes: other values for fields of the Config with decode=True, such as threshold.
    Raises UserError if there is nothing to draft with, or no head that was trained on
    the draft model, or if vocabularies differ.
    """
    config = Config(stop="fixed")
    if drafter is not None:
        common.check_drafter(drafter, Drafter, decoding.target)
        config = drafter.config
    config = common.changed(config, changes)
    check_head(drafter, draft_model, config)
    if draft_model is None:
        model = draft_model_of(drafter, decoding.target)
    else:
        model = causal_lm(draft_model, decoding.target)
    cache = common.DraftCache(model.decoder.config.num_hidden_layers)
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    while not decoding.done:
        chances = []  # filled while the chain below is drafted
        steps = propose(model, decoding, cache)
        steps = itertools.islice(steps, min(limit, decoding.room))
        if config.stop == "head":
            steps = until_stop(steps, drafter.head, config.threshold, chances)
        pairs = (step[:2] for step in steps)  # token and q_draft
        yield common.chain(pairs, decoding.ids, chances=chances)


# ------------------------------------------------------------------------------- theory


def throughput(
    verification: float, discard: float, t_draft: float, t_target: float
) -> float:
    """Tokens per second, 1 / latency (Eq. 2.3).

    verification: N_target / N. discard: N_discarded / N.
    t_draft, t_target: seconds of a pass and of a forward.
    """
    # An answer takes T = t_draft N_draft + t_target N_target (Eq. 2.1). Each pass and
    # each forward gives a token, so N_draft + N_target = N + N_discarded. With N_draft
    # from this, T is Eq. 2.2, and divided by N it is
    latency = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return 1 / latency


def oracle(agrees: list[bool]) -> int:
    """N_target of the best stopping times, decoding greedily (Lemma 2.1).

    agrees[i]: whether the draft model's likeliest token, after the answer's tokens
        before place i, is token i.
    """
    # Each round stops just before the next disagreement, and the target's own token
    # settles that. So there is a round for each place in S, the disagreements, and one
    # more, the last. The lemma's |S| + 1 is one too many if the answer's last token is
    # in S, because no round follows it.
    return 1 + sum(not agree for agree in agrees[:-1])


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stopping is cheaper once R reaches this bound.

    R is the probability that at least one token drafted so far is rejected.
    c1, c2: t_draft and t_target - t_draft.
    delta: a constant of the policy and of both models, which nobody knows.
    """
    # If a token is rejected, going on wastes at least a pass, c1. If none is, stopping
    # costs at most c2 + delta more than going on. At the bound R c1 = (1 - R)(c2 +
    # delta). With the paper's times, .0234 s and .112 s (4.2), it is .79 at delta = 0.
    #
    # The bound says why a threshold on R is the rule, and that it rises as passes get
    # cheaper. It is no value for h: delta is unknown, stopping may be cheaper at a
    # smaller R as well (the condition is sufficient, not necessary), and 1 - p^ is not
    # R, because the loss biases the head (see `loss`). So h is tuned (4.1).
    return (c2 + delta) / (c1 + c2 + delta)


if __name__ == "__main__":
    common.demo(Drafter, "specdecpp", drafts)
