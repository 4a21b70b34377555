"""SpecDec++: a trained head ends the draft (Huang et al. 2024).

Paper: arXiv:2405.19715v1. A head on the draft model reads the
last hidden state e_i of draft token y_i. It predicts the
probability that the target accepts y_i, given that it accepted
y_1 to y_(i-1) (Eq. 3.1). The product of these is p^, the
probability that all are accepted. A round ends when 1 - p^
exceeds h. Theorem 3.1 motivates this (`stop_threshold`).

Algorithm 2 is `propose`, `until_stop` and common.verify;
Algorithm 1 is stop="fixed". Names that differ here: q is
`DraftModel`, e_i is `hidden` (while drafting e_(i-1)), p^ is
`all_accepted`, h is `threshold`, K is `gamma`, r is `keep`,
P_i is `accept_prob`, D is `head_depth` (in shapes, the
hidden size).

Deviations from the paper or its code:
    1. The draft model copies target layers and is distilled in
       stage "draft". The paper's is another LM (`draft_model`).
    2. Copied layers draft only frequent tokens (`draft_vocab`).
    3. Labels are greedy by default: P_i is 1 where both argmaxes
       agree, else 0. With `temperature=1` they are the paper's;
       use it for sampling.
    4. Y and Z are drawn anew in each training step.
    5. The head's D blocks are independent. The published code
       applies one D times.
    6. Drafting also ends after an end-of-sequence token, as
       in the published code.

Licence: Apache-2.0.
"""

import copy
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

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
    model: dict = option(dict, "the draft model: config, or name and shape (filled in by build)")
    layers: list[int] = option(lambda: [0, 1, -2, -1], "target layers that the draft model copies")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    draft_model: str = option("", "causal LM to draft with, instead of copied layers")
    stage: str = option("draft", "what to train: draft, then head")
    head_depth: int = option(3, "residual blocks of the head, D")
    w_rej: float = option(6.0, "weight of rejections in the head's loss; that of acceptances is 1")
    keep: float = option(0.15, "r, share of X in the sequence Z (0.15 in the published code)")
    temperature: float = option(0.0, "of the head's labels; 0: greedy")
    stop: str = option("head", "what ends a round: head, or fixed (gamma tokens)", decode=True)
    threshold: float = option(0.7, "h: end when P(a rejection) exceeds it", decode=True)
    max_draft: int = option(20, "stop head: at most this many tokens per round", decode=True)
    gamma: int = option(5, "stop fixed: tokens per round, K", decode=True)

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0)
        common.at_least(self, threshold=0, max_draft=0, gamma=0)
        if not self.w_rej > 0:
            raise common.UserError(f"w_rej {self.w_rej}: take a weight above 0")
        if not 0 <= self.keep < 1:
            raise common.UserError(f"keep {self.keep}: take a share from 0 to below 1")
        if self.draft_model and self.stage == "draft":
            raise common.UserError("a draft_model is not trained, only its head: take stage head")


VARIANTS = {
    **{f"K{k}": {"stop": "fixed", "gamma": k} for k in (2, 4, 6, 8, 10, 12, 14)},
    **{f"h{h}": {"stop": "head", "threshold": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)},
}


# -------------------------------------------------------------------------------- architecture


class AcceptanceHead(nn.Module):
    """f_theta: a ResNet of depth + 1 layers (4.1)."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits (...,) of states (..., D), Eq. 3.1."""
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0].float()


class Drafter(nn.Module, PyTorchModelHubMixin):
    """What is saved: the head and copied layers."""

    kv_layers = ()  # no keys and values of the target

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.body = None
        if not config.draft_model:
            if not config.model:
                raise common.UserError("no draft model in the config: is it of another method?")
            # No embedding: one token, and no special ids beyond it.
            special = ["pad_token_id", "bos_token_id", "eos_token_id"]
            tiny = dict.fromkeys(special) | {"vocab_size": 1}
            shape = AutoConfig.for_model(**config.model | tiny)
            self.body = AutoModel.from_config(shape, dtype=torch.float32)
            self.body.set_input_embeddings(nn.Identity())
            self.body.requires_grad_(config.stage == "draft")
        self.head = AcceptanceHead(config.model["hidden_size"], config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        self.register_buffer("vocab_ids", common.placeholder_ids(config.target, config.draft_vocab))


class DraftModel:
    """The draft model q, made from a Drafter or a causal LM.

    Copied layers use the target's embedding and LM head.
    """

    def __init__(self, source, target):
        if isinstance(source, Drafter) and source.body is None:
            name = source.config.draft_model
            source = load_draft_model(name, target.dtype, target.device)
        if isinstance(source, Drafter):
            self.body = source.body.eval()  # without dropout
            self.vocab_ids = source.vocab_ids  # (Vd,)
            self.embed = target.get_input_embeddings()
            head = common.draft_head(target, self.vocab_ids)
            self.lm_head = head.to(self.body.dtype)
            return
        size = common.target_shape(source)["vocab_size"]
        vocab = common.target_shape(target)["vocab_size"]
        if size != vocab:
            raise common.UserError(f"the draft model has {size} tokens, not {vocab}: take another")
        self.body = source.get_decoder()
        self.vocab_ids = torch.arange(vocab, device=target.device)
        self.embed = source.get_input_embeddings()
        self.lm_head = functools.partial(common.target_logits, source)

    def states(self, ids: Tensor, cache=None) -> Tensor:
        """States e (B, T, D) of ids (B, T)."""
        embeds = self.embed(ids).to(self.body.dtype)  # (B, T, D)
        cached = cache is not None
        return self.body(inputs_embeds=embeds, past_key_values=cache, use_cache=cached)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., Vd) of states (..., D)."""
        return self.lm_head(hidden).float()


@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, dtype, device):
    """The causal LM of Config.draft_model, in no checkpoint."""
    return common.load_target(name, dtype=dtype, device=str(device))[0]


def identity(draft_model) -> dict:
    """A causal LM's name (no path) and shape."""
    path = Path(draft_model.config.name_or_path)
    return {"name": path.name, **common.target_shape(draft_model)}


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training."""
    config.target = common.target_shape(target)
    if config.draft_model:
        draft_model = load_draft_model(config.draft_model, target.dtype, target.device)
        config.model = identity(draft_model)
        config.draft_vocab = 0
        DraftModel(draft_model, target)  # checks the vocabulary
        return Drafter(config)

    # 1. Make a model of as many layers as chosen.
    small = copy.deepcopy(target.config.get_text_config())
    depth = small.num_hidden_layers
    chosen = config.layers
    if not all(-depth <= layer < depth for layer in chosen):
        raise common.UserError(f"layers {chosen}: name some of the target's 0 to {depth - 1}")
    small.num_hidden_layers = len(chosen)
    if getattr(small, "layer_types", None):  # sliding or full attention
        small.layer_types = [small.layer_types[layer] for layer in chosen]
    config.model = small.to_diff_dict() | {"hidden_size": small.hidden_size}
    config.model.pop("dtype", None)

    # 2. Copy the weights around the layers, then the layers.
    drafter = Drafter(config)
    common.start_from(drafter, target, token_counts)
    ours = drafter.body.get_decoder()  # OPT wraps it
    theirs = target.get_decoder()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    name = "layers" if hasattr(ours, "layers") else "h"  # GPT-2
    for layer, place in zip(getattr(ours, name), chosen):
        source = getattr(theirs, name)[place]
        layer.load_state_dict(source.state_dict())
    return drafter


# -------------------------------------------------------------------------- training objective


def response_states(model: DraftModel, batch) -> tuple[Tensor, Tensor]:
    """States of the draft model and of the target, (M, D) each.

    They are those that predict the M tokens X_t of the answers.
    """
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T)
    states = model.states(batch.input_ids)
    return states[predicts], batch.hidden[predicts]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities; temperature 0 is one-hot."""
    if temperature == 0:
        best = logits.argmax(-1)  # (M,)
        return F.one_hot(best, logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


def draw(model: DraftModel, target, batch, to_draw: Tensor, temperature: float):
    """Draw Y_t after X_<t for the M answer tokens X_t (3.3).

    to_draw: (B, T) uniform numbers. Returns Y (M,), and
    accept_prob (M,), the min(1, p_target / q_draft) of Y_t.
    """
    uniform = to_draw[batch.loss_mask][:, None]  # (M, 1)
    ours, theirs = response_states(model, batch)  # (M, D) each
    drafted = []
    accept_prob = []
    parts = [x.split(256) for x in (ours, theirs, uniform)]
    for e, e_target, numbers in zip(*parts):  # saves memory
        logits = model.logits(e)
        q_draft = distribution(logits, temperature)  # (m, Vd)
        logits = common.target_logits(target, e_target)
        p_target = distribution(logits, temperature)  # (m, V)
        choice = common.sample(q_draft, numbers)  # (m, 1)
        token = model.vocab_ids[choice]  # (m, 1)
        ratio = p_target.gather(1, token) / q_draft.gather(1, choice)
        drafted.append(token[:, 0])
        accept_prob.append(ratio[:, 0].clamp(max=1))
    return torch.cat(drafted), torch.cat(accept_prob)


def mix(batch, drafted: Tensor, to_mix: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Z takes X_t with probability `keep`, else Y_t (3.3).

    Only these Y_t are judged:

        X        x1 x2 x3 x4
        Y        y1 y2 y3 y4   y3: drawn after x1 x2
        Z        y1 x2 y3 y4   e_3: state after y1 x2 y3
        judged   1  .  1  1

    drafted: (M,) all Y_t. to_mix: (B, T) uniform numbers.
    Returns Z (B, T) and judged (B, T), bool.
    """
    x = batch.input_ids  # (B, T)
    y = x.masked_scatter(batch.loss_mask, drafted)  # (B, T)
    judged = batch.loss_mask & (to_mix >= keep)
    return torch.where(judged, y, x), judged


@torch.no_grad()
def labelled(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """States e (J, D) and labels (J,) of judged tokens (3.3).

    A label assumes that all earlier tokens were accepted. So
    Y_t is drawn after X_<t, a prefix that the target wrote.
    The head reads e_t, the state after Z_<t and Y_t.
    """
    config = drafter.config
    model = DraftModel(drafter, target)
    # 1. Draw two uniform numbers per token, seeded per sequence.
    length = batch.input_ids.shape[1]
    numbers = []
    for seed in batch.seed.tolist():
        generator = torch.Generator().manual_seed(seed)
        numbers.append(torch.rand(length, 2, generator=generator))
    numbers = torch.stack(numbers).to(batch.input_ids.device)
    to_draw, to_mix = numbers.unbind(-1)  # (B, T)
    # 2. Draw Y after the text X, and label it.
    drafted, accept_prob = draw(model, target, batch, to_draw, config.temperature)
    # 3. Let the draft model read Z, as it reads its drafts.
    mixed, judged = mix(batch, drafted, to_mix, config.keep)
    hidden = model.states(mixed)[judged]  # (J, D)
    return hidden, accept_prob[judged[batch.loss_mask]]


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """Summed loss, and the weight to divide it by.

    Stage draft: cross-entropy with the target's distribution
    over the draft vocabulary; weight M.

    Stage head (3.3): -(P log s + w_rej (1 - P) log(1 - s)), where
    s is the head's sigmoid; weight P + w_rej (1 - P). The paper
    weights rejections because they are rare, and because the
    head may be over-confident. A w_rej above 1 biases the head:
    the loss is smallest at s = P / (P + w_rej (1 - P)). With
    w_rej = 6 and h = 0.7, a round ends once y_1 is judged if
    P < 0.72.
    """
    if drafter.config.stage == "draft":
        model = DraftModel(drafter, target)
        ours, theirs = response_states(model, batch)
        logits = model.logits(ours)  # (M, Vd)
        teacher = common.target_logits(target, theirs, model.vocab_ids)
        p_target = teacher.softmax(-1)  # (M, Vd)
        total = F.cross_entropy(logits, p_target, reduction="sum")
        return total, len(logits)
    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,)
    weight_acc = accept_prob  # w_acc is 1
    weight_rej = drafter.config.w_rej * (1 - accept_prob)
    accepted = weight_acc * F.logsigmoid(logits)
    rejected = weight_rej * F.logsigmoid(-logits)
    total = -(accepted + rejected).sum()
    return total, (weight_acc + weight_rej).sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft) over M places, and M."""
    model = DraftModel(drafter, target)
    ours, theirs = response_states(model, batch)
    q_draft = model.logits(ours).softmax(-1)  # (M, Vd)
    return common.overlap(target, theirs, q_draft, model.vocab_ids), len(q_draft)


# -------------------------------------------------------------------------------------- theory


def throughput(verification: float, discard: float, t_draft: float, t_target: float) -> float:
    """Tokens per second: 1 / latency (Eq. 2.3).

    T = t_draft N_draft + t_target N_target (Eq. 2.1). Each pass
    gives one token, so N_draft + N_target = N + N_discarded.
    Substitute N_draft (Eq. 2.2) and divide by N.

    verification: N_target / N. discard: N_discarded / N.
    t_draft, t_target: seconds of a pass.
    """
    latency = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return 1 / latency


def oracle(agrees: list[bool]) -> int:
    """N_target of the best stopping times, decoding greedily.

    Each round stops before the next disagreement. Lemma 2.1
    counts |S| + 1 rounds. There are only |S| if the answer's
    last token is in S, because no round follows it.

    agrees[i]: the draft model's argmax, after the answer's
        tokens before i, is token i.
    """
    return 1 + sum(not agree for agree in agrees[:-1])


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stop once R reaches this bound.

    R is the probability that at least one token drafted so far
    is rejected. If one is, continuing wastes at least
    c1 = t_draft. If none is, stopping costs at most c2 + Delta
    more than continuing, with c2 = t_target - t_draft and an
    unknown Delta. The condition is sufficient, not necessary. R
    is a true probability; h, for a biased head, is tuned (4.1,
    see `loss`).
    """
    return (c2 + delta) / (c1 + c2 + delta)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What is kept from round to round."""

    def __init__(self, drafter, target):
        self.model = DraftModel(drafter, target)
        depth = self.model.body.config.num_hidden_layers
        self.cache = common.DraftCache(depth)


def propose(drafter, decoding, memory: Memory):
    """Draft a chain after `decoding.ids`; the caller stops it.

    Yields (y_i (1,), q_draft (V,) that it was chosen from, e_(i-1)
    (D,) behind q_draft). Ends after an end-of-sequence token, or
    where the logits processors forbid all draft tokens.
    """
    model = memory.model
    ids = decoding.ids
    # 1. Cut the rows of rejected tokens. If y2 of y1 y2 y3 was
    # rejected, the row of y1 stays. If all were accepted, y3 is
    # fed now, with the bonus token: it has no row yet.
    new = memory.cache.rewind(ids)  # (1, n)
    while True:
        # 2. Feed the new tokens, draw the next one.
        memory.cache.record(new)
        states = model.states(new, memory.cache)
        hidden = states[:, -1]  # (1, D)
        logits = model.logits(hidden)  # (1, Vd)
        picked = decoding.pick(logits, model.vocab_ids, ids)
        if picked is None:
            return
        token, q_draft = picked
        yield token, q_draft, hidden[0]
        if int(token) in decoding.ends:
            return
        new = token[None]  # (1, 1)
        ids = torch.cat([ids, new], dim=1)


def until_stop(steps, head, threshold: float, chances: list):
    """The steps of a round until the head ends it (Algorithm 2).

    One pass gives e_(i-1) and q_i. First y_i is drawn, then
    y_(i-1) is judged. So the newest token is submitted unjudged.
    No judged token may be dropped. The judgement depends on it:
    if some were dropped, the kept draws would not follow q.
    Judging starts with e_1; the printed algorithm also takes
    e_0, which is of no draft token. The head predicts 0.9, 0.8,
    0.5; h = 0.6:

        drafted y_i          y1   y2   y3   y4
        p^ of those before   1    .9   .72  .36
        1 - p^               0    .1   .28  .64 > h

    head: maps e (D,) to a logit. chances: receives each p^.
    """
    all_accepted = 1.0  # p^
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        if i > 1:
            chance = head(hidden).sigmoid()  # of y_(i-1)
            all_accepted *= float(chance)
            chances.append(all_accepted)
        yield token, q_draft, hidden
        if 1 - all_accepted > threshold:
            return


def check_head(drafter, config: Config, draft_model) -> None:
    """Raise a UserError if draft model or head is missing or wrong."""
    if drafter is None and draft_model is None:
        raise common.UserError("nothing to draft with: pass drafter= or draft_model=")
    if config.stop == "fixed":
        return
    remedy = "train one (stage head), or take stop fixed"
    if drafter is None or drafter.config.stage == "draft":
        raise common.UserError(f"stop head, but no acceptance head has been trained: {remedy}")
    if draft_model is not None and drafter.config.model != identity(draft_model):
        own = drafter.config.draft_model or "its own layers"
        given = draft_model.config.name_or_path
        raise common.UserError(f"the head was trained on {own}, not on {given}: {remedy}")


@torch.no_grad()
def drafts(decoding, drafter: Drafter | None, config: Config, draft_model=None):
    """Yield one draft per round; the caller verifies it."""
    check_head(drafter, config, draft_model)
    source = drafter if draft_model is None else draft_model
    memory = Memory(source, decoding.target)
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    while not decoding.done:
        chances = []
        steps = propose(source, decoding, memory)
        steps = itertools.islice(steps, min(limit, decoding.room))
        if config.stop == "head":
            steps = until_stop(steps, drafter.head, config.threshold, chances)
        yield common.chain(steps, decoding.ids, chances=chances)


def generate(
    target,
    input_ids,
    drafter=None,
    config=None,
    draft_model=None,
    copies=0,
    stats=None,
    token_streamer=None,
    **given,
):
    """Lossless decoding, as a `custom_generate` of transformers.

    target.generate(..., custom_generate=specdecpp.generate, drafter=...)

    config: replaces the drafter's in fields with decode=True.
    draft_model: a causal LM to draft with. The drafter is then
        only the head; without a drafter, `stop` is "fixed".
    copies, stats, token_streamer: see `common.Decoding`.
    Returns prompt and new tokens (1, T').
    """
    common.check_config(config, Config)
    if drafter is not None:
        common.check_drafter(drafter, Drafter, target)
    if config is None:
        config = drafter.config if drafter is not None else Config(stop="fixed")
    decoding = common.Decoding(target, input_ids, copies, stats, token_streamer, **given)
    for draft in drafts(decoding, drafter, config, draft_model):
        decoding.verify(draft)
    return decoding.ids


if __name__ == "__main__":
    common.demo(generate, Drafter, "specdecpp")
