"""SpecDec++: a trained head decides when a draft is long enough.

Paper: Huang et al., 2024, arXiv:2405.19715v1.

A draft that ends too early costs forwards of the target. One that ends too late costs
passes of the draft model, because all tokens after a rejected one are discarded. The
best length differs from place to place, so it is decided while drafting. A small head
reads e_i, the last hidden state of the draft model after it has read the draft token
y_i, and predicts whether the target accepts y_i, given that it accepts y_1 to y_(i-1)
(Eq. 3.1). The product p^ of these predictions estimates the probability that all are
accepted, and a round ends when 1 - p^ exceeds a threshold h (Algorithm 2):

    a pass of the draft model reads    root  y_1   y_2   y_3
    its last hidden state is           e_0   e_1   e_2   e_3
    y drawn from it                    y_1   y_2   y_3   y_4
    y judged by it                           y_1   y_2   y_3

y_i is judged by e_i, one pass after it was drawn, so the last token of a draft is
submitted unjudged. With stop="fixed" a round has gamma tokens (Algorithm 1).

Names that differ from the paper's: p is `target`, q is `DraftModel`, e_i is `hidden`,
p^ is `p_hat`, h is `threshold`, K is `gamma`, P_i is `accept_prob`, r / 100 is `KEEP`,
D is `head_depth`. In shapes D is the hidden size, of the draft model or of the target.

Deviations and what the authors' code does: at the end of this file.
Licence: Apache-2.0.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import common
from common import option


# The defaults of head_depth, w_rej and threshold are those of 4.3, of max_draft 4.1's.
@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
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
    max_draft: int = option(20, "with stop=head: at most this many tokens", decode=True)
    gamma: int = option(
        5, "with stop=fixed: tokens a round, K (the paper: 2 to 14)", decode=True
    )
    # The draft model: see the last part of this file.
    stage: str = option("draft", "what to train: draft, then head (with --init DRAFT)")
    layers: list[int] = option(
        lambda: [0, 1, -2, -1], "target layers that the draft model copies, each once"
    )
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    draft_model: str = option(
        "", "causal LM that drafts instead: an id, or a folder with its tokenizer"
    )
    model: dict = option(
        dict, "config of the layers, or sizes of the LM (filled in by build)"
    )

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0)
        common.at_least(self, w_rej=0, threshold=0, max_draft=0, gamma=0)
        ints = isinstance(self.layers, list) and {type(x) for x in self.layers} == {int}
        finite = math.isfinite(self.w_rej + self.temperature)
        common.refuse(
            (not ints, f"layers {self.layers}: take a list of ints, such as [0,-1]"),
            (self.w_rej == 0, "w_rej 0: take a weight above 0"),
            (not finite, "w_rej and temperature: take finite numbers"),
        )


VARIANTS = {  # named settings for bench.py, as in --method specdecpp:K2
    "K2": {"stop": "fixed", "gamma": 2},
    "K4": {"stop": "fixed", "gamma": 4},
}


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
# (B,) for each sequence, new in each step. The paper's i is t here. `drafter` has the
# head and the draft model, which `draft_model` returns as `model`: model.hidden gives
# last hidden states (B, T, D), and model.logits of these logits (..., Vd) of the tokens
# model.vocab_ids.

KEEP = 0.15  # the share of X in Z (see `mix`), r / 100; the authors' code's value


@torch.no_grad()
def labelled(drafter, target, batch) -> tuple[Tensor, Tensor]:
    """What the head learns (3.3): hidden states e_t (J, D) and labels P_t (J,).

    J is the number of judged tokens in the batch.
    """
    model = draft_model(drafter, target)
    # Two numbers in [0, 1) for each place, one to draw Y_t and one to mix Z.
    size = batch.input_ids.shape[1], 2
    generators = [common.generator(seed) for seed in batch.seed.tolist()]
    rows = [torch.rand(size, generator=g, dtype=torch.float32) for g in generators]
    uniform = torch.stack(rows).to(batch.input_ids.device)  # (B, T, 2)
    for_y, for_z = uniform.unbind(-1)  # (B, T) each
    # 1. X is the text of the batch, which the target wrote.
    # 2. A label P_t assumes that all tokens before Y_t were accepted, so Y_t is drawn
    #    and labelled after X_1 to X_(t-1).
    temperature = drafter.config.temperature
    drafted, accept_prob = draw_labels(model, target, batch, for_y, temperature)
    # 3. The head learns from hidden states at draft tokens, and X holds hardly any (a
    #    sparse signal, as section 1 says). So one pass reads Z, of which most is Y.
    mixed, judged = mix(batch, drafted, for_z, KEEP)
    # 4. Thus e_t is read after Z_1 to Z_(t-1) and Y_t, though P_t was computed after
    #    X_1 to X_(t-1). The loss in 3.3 does the same.
    hidden = model.hidden(mixed)[judged]  # (J, D)
    among = judged[batch.loss_mask]  # (M,) bool, which Y_t are judged
    return hidden, accept_prob[among]


def draw_labels(model, target, batch, uniform: Tensor, temperature: float):
    """Draw Y_t after X_1 to X_(t-1), for each of the M answer tokens X_t (3.3).

    uniform: (B, T) numbers in [0, 1), one for each place.
    temperature: of both models; at 0, Y_t is the draft model's likeliest token.
    Returns Y (M,), and accept_prob (M,), which is min(1, p_target / q_draft) of each;
    at temperature 0 it is 1 where Y_t is also the target's likeliest token, else 0.
    """
    uniform = uniform[batch.loss_mask][:, None]  # (M, 1)
    ours, theirs = response_hidden(model, batch)  # (M, D) each
    drafted = []
    accept_prob = []
    # In parts of m <= 256 places, because M x V logits would take much memory.
    parts = [x.split(256) for x in (ours, theirs, uniform)]
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


def response_hidden(model, batch) -> tuple[Tensor, Tensor]:
    """Hidden states of draft model and target that predict the M tokens X_t, (M, D)."""
    top = getattr(model.decoder, "layers", [nn.Identity()])[-1]
    with common.only_at(batch.predicts, top):  # saves time, changes nothing
        ours = model.hidden(batch.input_ids)[batch.predicts]
    return ours, batch.hidden[batch.predicts]


def loss(drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The summed loss, and the weight to divide it by.

    Stage head: the weighted binary cross-entropy of 3.3 between the labels P and the
    head's predictions s, -(w_acc P log s + w_rej (1 - P) log(1 - s)) with w_acc = 1.
    The weight is the sum of w_acc P + w_rej (1 - P).

    Stage draft (ours): cross-entropy between the target's distribution, renormalised
    over the draft vocabulary, and the draft model's, summed over M tokens; the weight
    is M.
    """
    if drafter.config.stage == "draft":
        model = draft_model(drafter, target)
        ours, _ = response_hidden(model, batch)
        logits = model.logits(ours)  # (M, Vd)
        teacher = common.teacher(target, batch, model.vocab_ids, batch.predicts)
        # -sum_x p(x) log q(x) = logsumexp(logits) - sum_x p(x) logit_x
        cross_entropy = logits.logsumexp(-1) - teacher.expected_logit(ours)  # (M,)
        return cross_entropy.sum(), len(logits)

    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,) whose sigmoid is s
    # The paper weighs rejections more because they are rare, and because the head is
    # trained on Z but judges real drafts, which may make it over-confident. The weight
    # biases s, so h is a number to tune and not a probability: the loss is smallest at
    # s = P / (P + w_rej (1 - P)), which is less than P if w_rej > 1. For w_rej = 6 and
    # P = .72 that is s = .3, so a round ends as soon as P(y_1 is rejected) > .28
    # although h = .7. So a larger w_rej makes drafts shorter, and a larger h makes them
    # longer. (Heads with w_rej = 1, 3 or 6 are equally fast here once h is
    # tuned for each, see results/log.md.)
    weight_acc = accept_prob
    weight_rej = drafter.config.w_rej * (1 - accept_prob)
    accepted = weight_acc * F.logsigmoid(logits)
    rejected = weight_rej * F.logsigmoid(-logits)
    total = -(accepted + rejected).sum()
    return total, (weight_acc + weight_rej).sum()


def acceptance(drafter, target, batch) -> tuple[Tensor, int]:
    """The draft model's acceptance rate at temperature 1, summed over M places, and M.

    At each place of the batch's text it is sum_x min(p_target, q_draft). It stays the
    same while the head is trained.
    """
    model = draft_model(drafter, target)
    ours, theirs = response_hidden(model, batch)
    total = torch.zeros((), device=ours.device)
    for part, target_part in zip(ours.split(256), theirs.split(256)):  # saves memory
        q_draft = model.logits(part).softmax(-1)  # (m, Vd), m <= 256
        total += common.overlap(target, target_part, q_draft, model.vocab_ids)
    return total, len(ours)


# ----------------------------------------------------------------------------- decoding

# Algorithm 2 is `until_stop` and `propose`, and then Decoding.verify of common.py.


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
    p_hat = 1.0
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        # `hidden` is e_(i-1), by which y_(i-1) is judged. e_0 judges nothing: Eq. 3.1
        # has an e_i for draft tokens only. (The printed Algorithm 2 has a slip: it also
        # multiplies by a prediction when i = 1, for which it has computed no e_0.)
        if i > 1:
            p_hat *= float(head(hidden).sigmoid())
        # The pass that returned e_(i-1) also returned q_i, so when y_(i-1) is judged,
        # y_i costs no further pass. It is submitted unjudged (as in the MDP of 3.1,
        # where a stop draws one more token), so a round has two tokens or more.
        yield token, q_draft, p_hat
        # The judged token is submitted as well, even if it caused the end. To drop it
        # because of the judgement would bias what is sampled: tokens that survive such
        # a filter no longer follow q, but verification assumes that they do. (In greedy
        # decoding it would be safe, but would gain little: its pass has been made.)
        if 1 - p_hat > threshold:
            return


def propose(model, decoding, cache: common.DraftCache):
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


@torch.no_grad()
def drafts(decoding, drafter, **changes):
    """Yield one draft per round; the caller verifies it before it asks for the next.

    For target.generate(**inputs, custom_generate=...), with speculate of common.py:

        speculate(specdecpp.drafts, drafter)                         # Algorithm 2
        speculate(specdecpp.drafts, drafter, stop="fixed", gamma=4)  # Algorithm 1
        speculate(specdecpp.drafts, specdecpp.wrap(lm, target))      # any causal LM
        speculate(specdecpp.drafts, specdecpp.wrap(lm, target, drafter))

    changes: other values for fields of the Config with decode=True. threshold and
        max_draft matter only with stop="head", and gamma only with stop="fixed".
    Raises UserError if the draft model cannot be used, or if stop is "head" and no head
    has been trained.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    # There is no warning if the head's labels have another temperature: the text still
    # follows the target, but the head judges less well (see results/log.md).
    if config.stop == "head" and config.stage == "draft":
        raise common.UserError(
            "stop head, but no acceptance head has been trained: train one (stage "
            "head), or take stop fixed"
        )
    model = draft_model(drafter, decoding.target)
    if model.context and decoding.generation_config.max_length > model.context:
        raise common.UserError(
            f"the draft model reads {model.context} tokens at most: set a lower "
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
            p_hats = [p_hat for *_, p_hat in steps[1:]]
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
    probability that at least one of y_1 to y_k is rejected; a stop also draws y_(k+1).
    c1, c2: t_draft and t_target - t_draft.
    delta: depends on the policy, the prompt, both models, c1 and c2; it is not known.
    """
    # How we read the bound, without its proof in appendix D: if a token is rejected,
    # continuing wastes at least a pass, c1. If none is, stopping costs at most c2 +
    # delta more than continuing. At the bound R c1 = (1 - R)(c2 + delta). With the
    # paper's times, .0234 s and .112 s (4.2), it is .79 at delta = 0.
    #
    # Do not use it as h: delta is unknown, stopping may be cheaper at a smaller R as
    # well (the condition is sufficient, not necessary), and 1 - p^ is not R, because
    # the loss biases the head (see `loss`). So h is tuned (4.1).
    return (c2 + delta) / (c1 + c2 + delta)


# ---------------------------------------------------------------------- the draft model

# The paper takes the draft model as given (3.1). Here it is either a causal LM with the
# target's vocabulary, or some layers of the target, copied and then distilled.


class DraftModel(NamedTuple):
    """The draft model q."""

    decoder: nn.Module  # layers and final norm
    embed: nn.Module | None  # the target's, for copied layers; an LM has its own
    lm_head: Callable  # hidden states (..., D) to logits (..., Vd)
    vocab_ids: Tensor  # (Vd,) the ids that the logits belong to
    context: int | None  # how many tokens an LM can read

    def hidden(self, ids: Tensor, cache=None) -> Tensor:
        """Last hidden states (B, T, D) of ids (B, T), after those of the cache."""
        fed = {"input_ids": ids}
        if self.embed is not None:
            fed = {"inputs_embeds": self.embed(ids).to(self.decoder.dtype)}
        cached = cache is not None
        return self.decoder(**fed, **{common.CACHE: cache}, use_cache=cached)[0]

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
    """What is trained and saved: the head, and the layers of a copied draft model."""

    kv_layers = ()  # no keys and values of the target are read

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        width = config.model["hidden_size"]  # of the draft model
        # The draft model: copied layers, or a causal LM (see `wrap`).
        self.body = None if config.draft_model else new_layers(config)
        self.lm = None
        self.head = AcceptanceHead(width, config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        common.add_vocab_ids(self, config.draft_vocab)  # of copied layers


def draft_model(drafter: Drafter, target) -> DraftModel:
    """The draft model of a drafter; an LM that its config names is loaded once."""
    if drafter.body is not None:
        decoder = drafter.body.eval()  # drafting has no dropout, so training has none
        # These logits lack the target's soft cap, and also its bias, unless the head
        # can only be called. The layers learn with the same logits.
        lm_head = common.draft_head(target, drafter.vocab_ids).to(decoder.dtype)
        embed = target.get_input_embeddings()
        return DraftModel(decoder, embed, lm_head, drafter.vocab_ids, None)
    if drafter.lm is None:
        wrap(load_lm(drafter.config.draft_model, target), target, drafter)
    return drafter.lm()


def load_lm(name: str, target):
    """A causal LM, in the target's dtype and on its device."""
    return common.load_target(name, dtype=target.dtype, device=str(target.device))[0]


def wrap(lm, target, drafter: Drafter | None = None) -> Drafter:
    """A drafter that drafts with a causal LM (4.1).

    drafter: one whose head was trained on this LM; it is what is returned. None: a new
        one without a trained head, so that a round has `gamma` tokens.
    Raises UserError if the LM cannot draft for the target, or the head was trained on
    another draft model.
    """
    model, width = whole_lm(lm, target)
    name = lm.config.name_or_path or "an LM in memory"
    if drafter is None:
        shape = common.target_shape(target)
        config = Config(shape, stop="fixed", draft_model=name, draft_vocab=0)
        config.model = {"hidden_size": width}
        drafter = Drafter(config).to(target.device, target.dtype).eval()
    if drafter.body is not None or drafter.config.model["hidden_size"] != width:
        raise common.UserError(
            f"the head was not trained on {name}: train one on it (stage head), or "
            "wrap the LM without a drafter"
        )
    # In a function, because as a module it would become a part of the drafter, to be
    # saved, converted and copied with it.
    drafter.lm = lambda: model
    return drafter


@torch.no_grad()
def whole_lm(lm, target) -> tuple[DraftModel, int]:
    """A causal LM as the draft model, and its hidden size.

    Raises UserError unless its logits follow from its last hidden states and a rejected
    token can be undone in its cache, which is tried here. Of its vocabulary only the
    size is compared: make sure that it has the target's tokenizer.
    """
    size, vocab = (x.config.get_text_config().vocab_size for x in (lm, target))
    there, here = lm.device, target.device
    other = "choose another draft model"
    common.refuse(
        (size != vocab, f"the draft model has {size} tokens, not {vocab}: {other}"),
        (there != here, f"the draft model is on {there}: move it to {here}"),
    )
    reason = "its logits do not follow from its last hidden states or from its cache"
    try:
        decoder = lm.get_decoder()
        lm_head = functools.partial(common.target_logits, lm)
        context = getattr(decoder.config, "max_position_embeddings", None)
        vocab_ids = torch.arange(vocab, device=here)
        model = DraftModel(decoder, None, lm_head, vocab_ids, context)
        # Draft 3 and 4 after 1 and 2, let them be rejected, and read 3 and 1.
        ids = torch.tensor([[1, 2, 3, 4, 3, 1]], device=here)
        cache = common.DraftCache(decoder.config.num_hidden_layers)
        model.hidden(ids[:, :4], cache)
        cache.cut(2)
        hidden = model.hidden(ids[:, 4:], cache)  # (1, 2, D)
        # The LM itself should say the same, but for rounding in bfloat16.
        logits = lm(ids[:, [0, 1, 4, 5]])[0][:, 2:].float()
        apart = (model.logits(hidden) - logits).abs().max()
        right = apart < 0.05 * logits.abs().max()
    except Exception as error:  # whatever the LM raises, it cannot be used
        right, reason = False, common.one_line(error)
    if not right:
        name = type(lm).__name__
        raise common.UserError(f"{name} cannot draft ({reason}): eval() it, or {other}")
    return model, hidden.shape[-1]


def new_layers(config: Config) -> nn.Module:
    """Layers and final norm, which are fed with embeddings."""
    # They get the target's embeddings. So the model is made for a vocabulary of one
    # token, which is then each of the special ones.
    tokens = {"vocab_size": 1}
    for name, value in config.model.items():
        if name.endswith("_token_id") and value is not None:
            tokens[name] = 0
    shape = AutoConfig.for_model(**config.model | tokens)
    body = AutoModel.from_config(shape, dtype=torch.float32)
    body.set_input_embeddings(nn.Identity())
    return body.requires_grad_(config.stage == "draft")


def cut_config(whole, layers: list[int]) -> dict:
    """The config of a model with some layers of another; `whole` is the other's."""
    model = whole.to_diff_dict()
    for name, value in whole.to_dict().items():
        # An entry for each layer: its kind, in SmolLM3 also whether it rotates.
        if isinstance(value, list) and len(value) == whole.num_hidden_layers:
            model[name] = [value[layer] for layer in layers]
    if each := model.get("per_layer_config"):  # {layer: what is different there}
        pairs = enumerate(each.get(str(layer)) for layer in layers)
        model["per_layer_config"] = {str(i): own for i, own in pairs if own}
    depth = whole.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    model[depth] = len(layers)  # GPT-2 calls it n_layer
    model["hidden_size"] = whole.hidden_size  # for the head; GPT-2 calls it n_embd
    model.pop("dtype", None)  # that of the training, and later that of the target
    return model


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, with copied layers or with a head alone.

    token_counts: (V,) how often each token occurs in the responses.
    Raises UserError for layers that the target lacks or that cannot be copied, and for
    a `draft_model` that cannot be loaded or used.
    """
    common.check_states(target)
    sizes = {"target": common.target_shape(target)}
    given = config.draft_model and config.stage == "draft"
    common.refuse(
        (given, "a draft_model is not trained, only its head: use --stage head")
    )
    if config.draft_model:
        lm = load_lm(config.draft_model, target)
        sizes |= {"model": {"hidden_size": whole_lm(lm, target)[1]}, "draft_vocab": 0}
        return wrap(lm, target, Drafter(dataclasses.replace(config, **sizes)))

    whole = target.config.get_text_config()
    depth = whole.num_hidden_layers
    if not all(-depth <= layer < depth for layer in config.layers):
        raise common.UserError(
            f"layers {config.layers}: name some of the target's 0 to {depth - 1}"
        )
    # Each is copied once: if there are three, 1 and -2 are the same.
    layers = list(dict.fromkeys(layer % depth for layer in config.layers))
    try:
        sizes["model"] = cut_config(whole, layers)
        drafter = Drafter(dataclasses.replace(config, **sizes)).to(target.device)
        ours, theirs = drafter.body.get_decoder(), target.get_decoder()  # OPT wraps it
        key = "layers" if hasattr(ours, "layers") else "h"  # GPT-2
        weights = theirs.state_dict()
        outside = {n: w for n, w in weights.items() if not n.startswith(f"{key}.")}
        # The final norm, and learned positions; ours has no embedding of tokens.
        ours.load_state_dict(outside, strict=False)
        # A layer that scales by its index, an option of GPT-2, does so by the new one.
        for layer, index in zip(getattr(ours, key), layers):
            layer.load_state_dict(getattr(theirs, key)[index].state_dict())
        # Try them: some of Gemma's read embeddings of their own.
        draft_model(drafter, target).hidden(drafter.vocab_ids[None, :2])
    except Exception as error:  # weights of other names (LoRA) or shapes, for example
        raise common.UserError(
            "the target's layers are adapted, quantised, offloaded or of a kind that "
            f"cannot be copied ({common.one_line(error)}): merge the adapter, load the "
            "target without quantisation and without offloading, or name a draft_model"
        ) from error
    common.start_from(drafter, target, token_counts)
    return drafter


if __name__ == "__main__":
    common.demo(Drafter, "specdecpp", drafts)


# ------------------------------------------------------------ deviations from the paper

# 1. In the paper the draft model is given (3.1). By default it consists here of layers
#    of the target, which first learn the target's distributions (stage "draft"). The
#    two that are shipped, 0 and 29, agree with the target at 62% of the places of its
#    greedy answers, the paper's pair at about 84% (2.1: with the best stopping times
#    N_target / N is .164, and N_target is one more than the disagreements). What the
#    head gains with them, and what limits it, is in results/log.md ("Stop
#    rules of SpecDec++").
# 2. Copied layers draft frequent tokens only (`draft_vocab`).
# 3. Labels are greedy by default: P_t is 1 where the likeliest tokens of both models
#    are the same, else 0. With a `temperature` of 1 they are the paper's, if the target
#    also wrote the texts at that temperature. Decode as the labels were made: at their
#    temperature, without other logits processors. (The authors' labels are of the plain
#    softmax, but their texts and answers are sampled with the checkpoint's settings.)
# 4. Y and Z are drawn anew in each training step.
# 5. A draft has at most 20 tokens. 4.1 stops a round when the tokens exceed 20, which
#    could also mean 21; the authors' code drafts 20.

# -------------------------------------------------------------------- the authors' code

# Its head applies one residual block D times, so it has as many weights for D = 3 as
# for D = 1. Here there are D blocks, which is how we read the paper's "(D+1)-layer
# ResNet". Its head has two outputs and a softmax, ours one logit and a sigmoid (Eq.
# 3.1). Their code draws Y and Z once, before the training, and it does not have the
# slip of Algorithm 2 (i = 1).
#
# Three things are taken from it, because sections 1 to 6 do not state them (the
# appendices were not read): r is 15%, the loss is divided by the sum of its weights,
# and a draft ends after an end-of-sequence token.
#
# In the last rounds of an answer their code drafts beyond the maximum length, and what
# is rejected there counts as discarded. Ours stops where the answer must end.
#
# In the paper's Table 1 the two rows are exchanged.
