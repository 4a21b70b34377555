"""SpecDec++: a trained head decides when to stop drafting (Huang et al., 2024, arXiv:2405.19715).

How much to draft before the target checks? Too little and the target runs often, too much and
drafts are thrown away. A small head on the draft model's last hidden state predicts whether each
drafted token will be accepted; the round ends when the predicted chance that one of them is refused
exceeds h.

Why a threshold (3.1): a state is the prefix and the tokens drafted so far, an action is stop or
continue; either way one more token is drafted. A token after a refusal costs c1 = t_draft, stopping
costs c2 = t_target - t_draft. If a token was refused already, continuing wastes at least c1 more;
if not, it saves at most c2 + Delta. So stopping is better once the chance of a refusal reaches (c2
+ Delta) / (c1 + c2 + Delta), Theorem 3.1.

    symbol            name here                    section/equation   function
    q, p              drafter, target              2                  propose, common.verify
    f_theta, D        AcceptanceHead, head_depth   3.2, 4.1           Drafter.forward
    e_i               hidden                       Eq. 3.1            propose
    h                 Config.threshold             Alg. 2             until_stop
    X, Y, Z, r        input_ids, drafted, mixed    3.3                labelled
    P_i; w_rej        accepted; Config.w_rej       3.3                loss
    S; N_discarded    agrees; discarded            Lemma 2.1; 2       oracle; replay

Deviations
    1. ours: the draft model is a few layers copied from the target and distilled (`stage="draft"`),
       between the target's own embedding and LM head; then the head is trained (`stage="head"`).
       `draft_model` takes any causal LM of the target's vocabulary, as the paper does; `base`
       another chain drafter, whose hidden state the head reads.
    2. ours: drafts come from the most frequent tokens only (`draft_vocab`); `causal_lm` drafts from
       all.
    3. upstream != paper: the D residual blocks have a weight each (upstream ties them to one).
    4. ours: labels are greedy by default, as decoding is: 1 where the two argmaxes agree. For
       sampling, train the head with the `temperature` and `top_p` of decoding.
    5. paper silent: a batch's loss is normalised by its total weight.
    6. ours: a disagreement at the last token of an answer costs no round; Lemma 2.1 counts one for
       it.
"""

import copy
import dataclasses
import functools
import itertools
import re
import sys
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, TopPLogitsWarper

import common


@dataclass
class Config:
    target: dict = field(
        default_factory=dict, metadata={"help": "shape of the target (filled in by train.py)"}
    )
    model: dict = field(
        default_factory=dict, metadata={"help": "architecture of the draft model (filled in too)"}
    )
    layers: list[int] = field(
        default_factory=lambda: [0, 1, -2, -1],
        metadata={"help": "layers of the target that the draft model starts from"},
    )
    draft_vocab: int = field(
        default=8192, metadata={"help": "draft only the most frequent tokens; 0: all of them"}
    )
    base: str = field(
        default="", metadata={"help": "put the head on this method's chain drafter instead"}
    )
    draft_model: str = field(
        default="", metadata={"help": "put the head on this causal LM instead"}
    )
    stage: str = field(default="draft", metadata={"help": "what to train: draft, then head"})
    head_depth: int = field(
        default=3, metadata={"help": "residual blocks of the acceptance head, D"}
    )
    w_rej: float = field(default=6.0, metadata={"help": "weight of refusals in the head's loss"})
    keep: float = field(
        default=0.15, metadata={"help": "r: share of the target's own tokens in the mixed sequence"}
    )
    temperature: float = field(
        default=0.0, metadata={"help": "of drafts and labels when training the head; 0: greedy"}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "of drafts and labels when training the head"}
    )
    stop: str = field(
        default="head", metadata={"help": "head, fixed, confidence or entropy", "decode": True}
    )
    threshold: float = field(
        default=0.7, metadata={"help": "stop head: h, most chance of a refusal", "decode": True}
    )
    gamma: int = field(
        default=5, metadata={"help": "stop fixed: tokens a round, K", "decode": True}
    )
    confidence: float = field(
        default=0.4, metadata={"help": "stop confidence: least probability", "decode": True}
    )
    entropy: float = field(
        default=1.5, metadata={"help": "stop entropy: most, in nats", "decode": True}
    )
    max_draft: int = field(
        default=20, metadata={"help": "most draft tokens a round, fixed excepted", "decode": True}
    )


VARIANTS = {
    "confidence": {"stop": "confidence"},
    "entropy": {"stop": "entropy"},  # and the grids of K and h of 4.1
    **{f"K{k}": {"stop": "fixed", "gamma": k} for k in (2, 4, 6, 8, 10, 12, 14)},
    **{f"h{h}": {"stop": "head", "threshold": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)},
}

# ------------------------------------------------------------------------------------- architecture


class AcceptanceHead(nn.Module):
    """f_theta: D residual SiLU blocks and a linear layer (4.1)."""

    def __init__(self, hidden: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0]  # (...,)


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The acceptance head and, unless `base` or `draft_model` drafts, a draft model: layers and
    final norm."""

    kv_layers: tuple = ()  # the draft model reads no cache of the target's

    def __init__(self, config: Config):
        super().__init__()
        if config.stage not in ("draft", "head"):
            raise ValueError(
                f"unknown stage {config.stage!r}; train with --stage draft, then --stage head "
                "--init DIR"
            )
        self.config, self.body = config, None
        if not config.base and not config.draft_model:
            bare = {
                "vocab_size": 1,
                "pad_token_id": None,
                "bos_token_id": None,
                "eos_token_id": None,
            }
            self.body = AutoModel.from_config(
                AutoConfig.for_model(**config.model | bare), dtype=torch.float32
            )
            self.body.set_input_embeddings(
                nn.Identity()
            )  # the target's embedding comes from outside
        self.head = AcceptanceHead(
            (config.model or config.target)["hidden_size"], config.head_depth
        )
        self.distils = self.body is not None and config.stage == "draft"
        (self.head if self.distils else self.body or nn.Identity()).requires_grad_(False)
        vocab = config.target["vocab_size"]
        self.register_buffer(
            "draft_ids", torch.arange(min(config.draft_vocab or vocab, vocab))
        )  # (Vd,)

    def forward(self, x: Tensor, lm_head: nn.Module | None = None, rows=..., cache=None):
        """A pass of the draft model, or, without `lm_head`, of the acceptance head.

        Args:
            x: (B, T, D) the target's embeddings of the input tokens; (..., D) hidden states for the
                acceptance head.
            lm_head: the target's LM head for the draft vocabulary, D -> Vd.
            rows: index into (B, T), the positions to score. cache: the draft model's own.
        Returns:
            (logits (..., Vd), hidden (..., D)); or f_theta(x) (...,), the logit of Eq. 3.1.
        """
        if lm_head is None:
            return self.head(x.to(self.head.out.weight.dtype))
        hidden = self.body(inputs_embeds=x, past_key_values=cache, use_cache=cache is not None)[0][
            rows
        ]
        return lm_head(hidden), hidden

    def causal_lm(self, target):
        """The draft model as an ordinary causal LM over the target's embedding and LM head, for
        `assistant_model=`."""
        if self.body is None:
            raise ValueError(
                "this checkpoint holds an acceptance head only; take one with a draft model of its "
                "own"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**self.config.model), dtype=target.dtype
            )
        body = copy.copy(
            self.body
        )  # the same layers, but an embedding that does not become part of this drafter
        body._modules = dict(self.body._modules)
        body.set_input_embeddings(target.get_input_embeddings())
        setattr(model, model.base_model_prefix, body)
        model.set_output_embeddings(target.get_output_embeddings())
        model.generation_config = copy.deepcopy(target.generation_config)
        return model.eval()


def same_vocabulary(draft_model, target):
    """The draft model, any causal LM; ValueError unless it has the target's vocabulary."""
    theirs, ours = (common.target_shape(model)["vocab_size"] for model in (draft_model, target))
    if theirs != ours:
        raise ValueError(
            f"the draft model has {theirs} tokens and the target {ours}; take one of the same "
            "vocabulary"
        )
    return draft_model


@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, target):
    """The causal LM of Config.draft_model, which a checkpoint names and does not hold."""
    return same_vocabulary(
        common.load_target(name, dtype=target.dtype, device=str(target.device))[0], target
    )


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from, its layers copied from the target; completes `config`.

    Args:
        token_counts: (V,) how often each token occurs in the training responses; the top ones can
            be drafted.
    Raises:
        ValueError: no such layers, layers of a kind that cannot be copied, a draft model of another
            vocabulary.
    """
    if config.draft_model:
        shape = common.target_shape(load_draft_model(config.draft_model, target))
        config.model, config.draft_vocab = {"hidden_size": shape["hidden_size"]}, 0
    if config.base or config.draft_model:
        return Drafter(config)
    theirs = copy.deepcopy(target.config.get_text_config())
    count = theirs.num_hidden_layers
    if not config.layers or not all(-count <= layer < count for layer in config.layers):
        raise ValueError(
            f"layers {config.layers}: name some of the target's, 0 to {count - 1} (-1 is the top "
            "one)"
        )
    config.layers, theirs.num_hidden_layers = (
        [layer % count for layer in config.layers],
        len(config.layers),
    )
    if getattr(theirs, "layer_types", None):
        theirs.layer_types = [theirs.layer_types[layer] for layer in config.layers]
    config.model = {key: value for key, value in theirs.to_diff_dict().items() if key != "dtype"}
    config.model["hidden_size"] = theirs.hidden_size
    drafter, weights = Drafter(config), target.base_model.state_dict()
    drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
    source = {
        name: re.sub(
            r"(?<=^layers\.)\d+|(?<=^h\.)\d+", lambda n: str(config.layers[int(n[0])]), name
        )
        for name in drafter.body.state_dict()
    }  # the name of each weight in the target; `h` in GPT-2
    if not set(source.values()) <= set(weights):
        raise ValueError(
            f"cannot copy layers of {type(target).__name__}; put the head on a --draft-model or a "
            "--base"
        )
    drafter.body.load_state_dict({name: weights[their_name] for name, their_name in source.items()})
    return drafter


# ------------------------------------------------------------------------------- training objective


def draft_pass(
    drafter: Drafter, target, batch, where: Tensor, base=None, base_drafter=None, mixed=None
):
    """(draft logits (M, Vd), hidden states (M, D)) at the M rows `where` (B, T), whichever model
    drafts.

    Args:
        base: module of another chain drafter: its training_logits, and a drafter that returns
            logits and hidden states.
        mixed: (B, T) tokens to read instead of batch.input_ids; their logits are not computed if
            that saves time.
    """
    config, ids = drafter.config, batch.input_ids if mixed is None else mixed
    if (
        base is not None
    ):  # what it reads of the target's cache belongs to batch.input_ids, verified, in either case
        ready, wanted = set(base_drafter.kv_layers) <= set(batch.kv), F.pad(where[:, :-1], (1, 0))
        kv = (
            batch.kv
            if ready
            else common.target_features(target, batch.input_ids, base_drafter.kv_layers)[1]
        )
        seen = []
        hook = base_drafter.register_forward_hook(lambda _module, _args, out: seen.append(out))
        base.training_logits(
            base_drafter, target, dataclasses.replace(batch, input_ids=ids, loss_mask=wanted, kv=kv)
        )
        hook.remove()
        return seen[0]
    if config.draft_model:
        draft_model = load_draft_model(config.draft_model, target)
        hidden = draft_model.base_model(ids)[0][where]
        return (common.target_logits(draft_model, hidden) if mixed is None else None), hidden
    embeds = target.get_input_embeddings()(ids).to(drafter.head.out.weight.dtype)
    lm_head = (
        common.draft_head(target, drafter.draft_ids).to(embeds.dtype)
        if mixed is None
        else nn.Identity()
    )
    return drafter(embeds, lm_head, where)


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities (M, V) of logits (M, V) under temperature and top-p; one-hot at temperature
    0."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (
        TopPLogitsWarper(top_p)(None, logits / temperature) if top_p < 1 else logits / temperature
    ).softmax(-1)


@torch.no_grad()
def labelled(
    drafter: Drafter, target, batch, base=None, base_drafter=None
) -> tuple[Tensor, Tensor]:
    """What the acceptance head reads, and what it should say (3.3).

    Each response token X_t gets a draft Y_t ~ q(. | X_<t) with the label min(1, p(Y_t) / q(Y_t)).
    Then the draft model reads Z, which takes X_t with probability r and Y_t otherwise; e_t is its
    hidden state at Z_t.

        X   x1 x2 x3 x4      Y   y1 y2 y3 y4      Z   y1 x2 y3 y4      labels at   1  .  3  4

    Returns:
        (e (M, D), labels (M,)) for the M positions where Z took Y.
    """
    config, ids, where = (
        drafter.config,
        batch.input_ids,
        F.pad(batch.loss_mask[:, 1:], (0, 1)),
    )  # row t - 1 predicts t
    noise = torch.stack(
        [
            torch.rand(ids.shape[1], 2, generator=torch.Generator().manual_seed(int(seed)))
            for seed in batch.seed
        ]
    ).to(ids.device)  # (B, T, 2)
    draft_ids = (drafter if base is None else base_drafter).draft_ids
    logits, _ = draft_pass(drafter, target, batch, where, base, base_drafter)
    drafted, accepted, tokens, labels = ids.clone(), noise.new_zeros(ids.shape), [], []
    parts = (
        x.split(256) for x in (logits.float(), batch.hidden[where], noise[:, :, 0][where])
    )  # spares memory
    for scores, features, uniform in zip(*parts):
        q_draft = distribution(scores, config.temperature, config.top_p)  # (m, Vd)
        p_target = distribution(
            common.target_logits(target, features), config.temperature, config.top_p
        )  # (m, V)
        below = q_draft.cumsum(-1)
        choice = (
            (below <= uniform[:, None] * below[:, -1:])
            .sum(-1, keepdim=True)
            .clamp(max=len(draft_ids) - 1)
        )
        of_q, of_p = q_draft.gather(1, choice)[:, 0], p_target.gather(1, draft_ids[choice])[:, 0]
        tokens.append(draft_ids[choice[:, 0]])
        labels.append(torch.where(of_p < of_q, of_p / of_q, 1.0))
    drafted[:, 1:][where[:, :-1]], accepted[:, 1:][where[:, :-1]] = (
        torch.cat(tokens),
        torch.cat(labels),
    )
    taken = batch.loss_mask & (noise[:, :, 1] >= config.keep)
    taken[:, -1] = False  # a base drafter only scores rows that have a next token
    mixed = torch.where(taken, drafted, ids)
    return draft_pass(drafter, target, batch, taken, base, base_drafter, mixed)[1], accepted[taken]


def loss(drafter: Drafter, target, batch, base=None, base_drafter=None) -> Tensor:
    """Stage draft: cross-entropy with the target's distribution. Stage head: weighted BCE (3.3).
    Summed over positions.

    Args:
        batch: common.Batch. base, base_drafter: with Config.base, that module and its trained
            drafter.
    """
    if drafter.distils:
        where = F.pad(batch.loss_mask[:, 1:], (0, 1))
        labels = common.target_logits(target, batch.hidden[where], drafter.draft_ids).softmax(
            -1
        )  # (M, Vd)
        return F.cross_entropy(
            draft_pass(drafter, target, batch, where)[0].float(), labels, reduction="sum"
        )
    hidden, accepted = labelled(drafter, target, batch, base, base_drafter)
    scores, refused = drafter(hidden).float(), drafter.config.w_rej * (1 - accepted)  # (M,)
    total = -(accepted * F.logsigmoid(scores) + refused * F.logsigmoid(-scores)).sum()
    return (
        total / (accepted + refused).sum().clamp(min=1e-6) * batch.loss_mask.sum()
    )  # train.py divides by that sum


def alpha(drafter: Drafter, target, batch, base=None, base_drafter=None) -> tuple[Tensor, int]:
    """Acceptance rate at temperature 1: sum over positions of sum_x min(p_target, q_draft), and
    their number."""
    where = F.pad(batch.loss_mask[:, 1:], (0, 1))
    logits, _ = draft_pass(drafter, target, batch, where, base, base_drafter)
    draft_ids = (drafter if base is None else base_drafter).draft_ids
    p_target = common.target_logits(target, batch.hidden[where]).softmax(-1)[:, draft_ids]
    return torch.minimum(p_target, logits.float().softmax(-1)).sum(), len(logits)


# ----------------------------------------------------------------------------------------- decoding


@dataclass
class Memory:
    """What the draft model keeps from round to round of one answer."""

    cache: common.DraftCache  # its own keys and values
    head: (
        nn.Module | None
    )  # the target's LM head for the draft vocabulary, D -> Vd; None: a causal LM has its own


def new_memory(drafter, target) -> Memory:
    """An empty memory, to begin an answer with: for a Drafter, or for any causal LM with the
    target's vocabulary."""
    if not hasattr(drafter, "draft_ids"):
        return Memory(
            common.DraftCache(common.target_shape(same_vocabulary(drafter, target))["num_layers"]),
            None,
        )
    return Memory(
        common.DraftCache(len(drafter.config.layers)), common.draft_head(target, drafter.draft_ids)
    )


def propose(
    drafter, target, input_ids: Tensor, cache, memory, logits_processor=None, do_sample=False
):
    """Draft a chain one token at a time; take as many as you want.

    Args:
        drafter: as for new_memory. input_ids: (1, P + 1) committed tokens. cache: the target's,
            which is not read.
        memory: from new_memory.
    Yields:
        (token y_i (1,), q_draft (V,) the processed distribution it comes from, hidden e_(i-1)
        (D,)).
    """
    ids, own = input_ids, memory.cache
    fed = own.rewind(input_ids)  # (1, n)
    while True:
        own.feed(fed)
        if memory.head is not None:
            logits, hidden = drafter(
                target.get_input_embeddings()(fed), memory.head, (slice(None), -1), own
            )  # (1, Vd)
            scores = logits.new_full(
                (1, drafter.config.target["vocab_size"]), float("-inf"), dtype=torch.float32
            )
            scores[:, drafter.draft_ids] = logits.float()
        else:
            logits, hidden = (x[:, -1] for x in common.forward(drafter, fed, own, logits_to_keep=1))
            scores = logits.float()
        q_draft = (logits_processor(ids, scores) if logits_processor else scores).softmax(-1)[
            0
        ]  # (V,)
        token = torch.multinomial(q_draft, 1) if do_sample else q_draft.argmax(keepdim=True)
        yield token, q_draft, hidden[0]
        fed = token[None]
        ids = torch.cat([ids, fed], dim=1)


def until_stop(steps, drafter, config: Config, room: int):
    """The steps of one round, at most `room` (Algorithm 2). The newest token is submitted unjudged:
    its e_i would cost another pass of the draft model."""
    accepted = 1.0  # predicted probability that all tokens but the newest are
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    for place, (token, q_draft, hidden) in enumerate(
        itertools.islice(steps, max(0, min(limit, room)))
    ):
        yield token, q_draft, hidden
        if config.stop == "head" and place:
            accepted *= float(drafter(hidden[None]).float().sigmoid())
        if (
            1 - accepted > config.threshold
            or config.stop == "confidence"
            and q_draft.max() < config.confidence
            or config.stop == "entropy"
            and -torch.xlogy(q_draft, q_draft).sum() > config.entropy
        ):
            return


@torch.no_grad()
def generate(
    target,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter=None,
    base=None,
    base_drafter=None,
    draft_model=None,
    stop=None,
    threshold=None,
    gamma=None,
    confidence=None,
    entropy=None,
    max_draft=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=specdecpp.generate, drafter=drafter)`: lossless
    decoding.

    Args:
        drafter: the head and, unless something else drafts, the draft model. Without it `stop` must
            need no head.
        base, base_drafter: module of another chain drafter, and its trained drafter, to draft with
            instead.
        draft_model: a causal LM to draft with instead; by default the one that the head was trained
            on.
        stop, threshold, gamma, confidence, entropy, max_draft: as in Config. stats: a common.Stats
            to fill.
    Returns:
        (1, T') prompt and new tokens.
    Raises:
        ValueError: an unknown stop, nothing to draft with, or a head that was not trained on what
            drafts.
    """
    given = {
        "stop": stop,
        "threshold": threshold,
        "gamma": gamma,
        "confidence": confidence,
        "entropy": entropy,
        "max_draft": max_draft,
    }
    config = drafter.config if drafter is not None else Config()
    config = dataclasses.replace(
        config, **{name: value for name, value in given.items() if value is not None}
    )
    if draft_model is None and base is None and config.draft_model:
        draft_model = load_draft_model(config.draft_model, target)
    source = base_drafter if base is not None else drafter if draft_model is None else draft_model
    if getattr(source, "body", source) is None:
        raise ValueError(
            "nothing to draft with: pass draft_model=, or base= and base_drafter= (a module, a "
            "drafter)"
        )
    if config.stop not in ("head", "fixed", "confidence", "entropy"):
        raise ValueError(f"unknown stop {config.stop!r}; take head, fixed, confidence or entropy")
    fits = (bool(config.base), bool(config.draft_model)) == (
        base is not None,
        draft_model is not None,
    )
    if config.stop == "head" and (drafter is None or drafter.distils or not fits):
        raise ValueError(
            "no acceptance head was trained on this draft model: train one (--stage head, with "
            "--base or "
            "--draft-model if that drafts), or take --stop fixed, confidence or entropy"
        )
    stats, do_sample, chains = (
        stats or common.Stats(),
        generation_config.do_sample,
        base or sys.modules[__name__],
    )
    cache, _ = common.prefill(target, input_ids, generation_config, model_kwargs, stats)
    memory, done = chains.new_memory(source, target), False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = (
                generation_config.max_length - input_ids.shape[1] - 1
            )  # the bonus token takes one place
            steps = chains.propose(
                source, target, input_ids, cache, memory, logits_processor, do_sample
            )
            draft = common.chain(until_stop(steps, drafter, config, room), input_ids)
        verified = common.verify(
            target, input_ids, draft, cache, logits_processor, do_sample, stats
        )
        input_ids, done = common.commit(
            input_ids, verified.tokens, stopping_criteria, stats, token_streamer
        )
    return input_ids


# ------------------------------------------------------------------------------------------- theory


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stop once the chance of a refusal reaches this; c1 = t_draft, c2 = t_target -
    t_draft."""
    return (c2 + delta) / (c1 + c2 + delta)


def oracle(agrees: list[bool]) -> int:
    """N_target of the best greedy stopping in hindsight, with N_discarded = 0 (Lemma 2.1): |S| + 1.

    Args:
        agrees: for each token of the answer, whether the draft model's argmax after the tokens
            before it is that token.
    """
    return 1 + sum(not agree for agree in agrees[:-1])


if __name__ == "__main__":
    common.demo(generate, Drafter, "specdecpp")
