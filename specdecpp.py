"""SpecDec++: a trained head decides when to stop drafting (Huang et al., 2024, arXiv:2405.19715).

How much to draft before the target checks? Too little and the target runs often, too much and
drafts are thrown away. A small head on the draft model's last hidden state predicts whether each
token will be accepted; the round ends when the predicted chance of a refusal exceeds h.

Why a threshold (3.1): a state is the prefix and the tokens drafted so far, an action is stop or
continue; either way one more token is drafted. A discarded token (the refused one and all after it)
costs c1 = t_draft, stopping costs c2 = t_target - t_draft. If a token was refused already,
continuing wastes at least c1 more; if not, it saves at most c2 + Delta. So stopping is better once
the chance of a refusal reaches (c2 + Delta) / (c1 + c2 + Delta), Theorem 3.1.

That is the true chance. The head's sigmoid is low on purpose: w_rej > 1 makes mistakes on refused
tokens dearer, so it nears P / (P + w_rej (1 - P)), P being the true chance of acceptance. With
w_rej = 6 and h = 0.7 a round stops, after one judged token, at P = 0.72, a true chance of refusal
of 0.28. `true_probability` adds log w_rej to the logits: h bounds 1 minus the product of the P's.

    symbol                 name here                        section/equation  function
    q, p                   drafter, target                  2                 propose, common.verify
    x_prefix, Y_i          input_ids, token                 2, 3.1            propose
    K                      Config.gamma (stop fixed)        2                 generate
    k + 1, n, y'           count, len(path), committed[-1]  3.1, Alg. 1       common.verify
    r_i ~ Unif[0, 1]       torch.rand(())                   Alg. 1            common._draw
    f_theta, D             AcceptanceHead, head_depth       3.2, 4.1          Drafter.accept_logit
    e_i                    hidden                           Eq. 3.1           propose, draft_states
    p^, h, pi(s_k) = stop  all_accepted, threshold, return  3.2, Alg. 2       until_stop
    X, Y, Z, r             input_ids, drafted, mixed, keep  3.3               labelled
    P_i, w_acc, w_rej      accept_prob, 1, w_rej            3.3, 4.1          labelled, loss
    c1, c2, Delta          c1, c2, delta                    3.1, Thm. 3.1     stop_threshold
    S                      the False ones of agrees         Lemma 2.1         oracle
    t_draft, t_target, T   the same, seconds                Eq. 2.1           support/stopping.py
    N, N_draft             tokens, n_draft                  2, Eq. 2.1        support/stopping.py
    N_target, N_discarded  n_target, n_discarded            2, Eq. 2.2        support/stopping.py

Deviations ("upstream" is the authors' published code)
    1. ours: the draft model is a few layers copied from the target and distilled (`stage="draft"`);
       then the head is trained (`stage="head"`). The paper takes another causal LM: `draft_model`.
    2. ours: only the most frequent tokens are drafted (`draft_vocab`); by `causal_lm`, all are.
    3. upstream != paper: the D residual blocks have a weight each (upstream ties them to one).
    4. ours: labels are greedy by default, as decoding is: 1 where the two argmaxes agree. For
       sampling, train the head with the `temperature` and `top_p` of decoding, and decode with
       `top_k=0`. The responses are half greedy, half of temperature 0.8, whatever the labels are.
    5. paper silent: a batch's loss is normalised by its total weight. Y and Z are drawn anew at
       each step (upstream: once, before training). Drafting ends after end-of-sequence, as there.
    6. ours: disagreeing with an answer's last token costs no round; Lemma 2.1 counts one.
    7. ours: learning rate 2e-3 (shipped: later 1.5e-3, head 1e-3), batches of 4; upstream 5e-5, 32.
    8. ours: rivals of the head, `stop="confidence"` (cited in section 5) and `stop="entropy"`.
    9. ours, off by default: `true_probability`; `head_sees="confidence"`, which shows the head
       log q(Y_t) too, for e_t comes after Y_t and hardly says how likely Y_t was; `copies`; `base`.
"""

import copy
import dataclasses
import functools
import itertools
import math
import sys

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, TopPLogitsWarper

import common
from common import option


@dataclasses.dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in)")
    model: dict = option(dict, "of the draft model (filled in)")
    layers: list[int] = option(lambda: [0, 1, -2, -1], "target layers to start from")
    draft_vocab: int = option(8192, "most frequent tokens only; 0: all")
    base: str = option("", "put the head on this method's chain drafter")
    draft_model: str = option("", "put the head on this causal LM")
    stage: str = option("draft", "what to train: draft, then head")
    head_depth: int = option(3, "residual blocks of the head, D")
    head_sees: str = option("hidden", "hidden, or confidence: q(Y) too")
    w_rej: float = option(6.0, "weight of refusals in the head's loss, above 0")
    keep: float = option(0.15, "r: share of X in the mixed sequence Z")
    temperature: float = option(0.0, "of the head's labels; 0: greedy")
    top_p: float = option(1.0, "of the head's labels")
    stop: str = option("head", "head, fixed, confidence or entropy", True)
    threshold: float = option(0.7, "stop head: h, most chance of a refusal", True)
    true_probability: bool = option(False, "stop head: undo w_rej before h is asked", True)
    gamma: int = option(5, "stop fixed: tokens a round, K", True)
    confidence: float = option(0.4, "stop confidence: least q of a likeliest token", True)
    entropy: float = option(1.5, "stop entropy: most of q, in nats", True)
    max_draft: int = option(20, "most draft tokens a round, fixed excepted", True)
    copies: int = option(0, "tokens copied from the context a round; 0: the paper's method", True)


VARIANTS = {
    "copies": {"copies": 16},
    "confidence": {"stop": "confidence"},
    "entropy": {"stop": "entropy"},  # and 4.1's grids, of K and of h
    **{f"K{k}": {"stop": "fixed", "gamma": k} for k in (2, 4, 6, 8, 10, 12, 14)},
    **{f"h{h}": {"stop": "head", "threshold": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)},
}

# ------------------------------------------------------------------------------------- architecture


class AcceptanceHead(nn.Module):
    """f_theta: D residual SiLU blocks and a linear layer (4.1)."""

    def __init__(self, width: int, depth: int, sees_log_q: bool = False):
        super().__init__()
        self.log_q = nn.Parameter(torch.zeros(width)) if sees_log_q else None  # see accept_logit
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0]  # (...,)


class Drafter(nn.Module, PyTorchModelHubMixin):
    """The acceptance head; unless something else drafts, layers and final norm of a draft model."""

    kv_layers: tuple = ()  # the draft model reads no cache of the target's

    def __init__(self, config: Config):
        super().__init__()
        if config.stage not in ("draft", "head"):
            raise ValueError(f"unknown stage {config.stage!r}; draft, then head with --init DIR")
        if config.head_sees not in ("hidden", "confidence"):
            raise ValueError(f"unknown head_sees {config.head_sees!r}; take hidden or confidence")
        self.config = config
        self.body = None
        if not config.base and not config.draft_model:
            no_tokens = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])
            shape = AutoConfig.for_model(**config.model | no_tokens | {"vocab_size": 1})
            self.body = AutoModel.from_config(shape, dtype=torch.float32)
            self.body.set_input_embeddings(nn.Identity())  # the target's comes from outside
            self.body.requires_grad_(config.stage == "draft")
        width = (config.model or config.target)["hidden_size"]
        self.head = AcceptanceHead(width, config.head_depth, config.head_sees == "confidence")
        self.distils = self.body is not None and config.stage == "draft"
        self.head.requires_grad_(not self.distils)
        vocab = config.target["vocab_size"]
        wanted = config.draft_vocab or vocab
        self.register_buffer("draft_ids", torch.arange(min(wanted, vocab)))  # (Vd,)

    def forward(self, embeds: Tensor, rows, lm_head, cache=None) -> tuple[Tensor, Tensor]:
        """Logits (M, Vd), hidden states e (M, D) of M `rows` of (B, T), after embeds (B, T, D)."""
        cached = cache is not None
        hidden = self.body(inputs_embeds=embeds, past_key_values=cache, use_cache=cached)[0][rows]
        return lm_head(hidden).float(), hidden

    def accept_logit(self, hidden: Tensor, of_q: Tensor) -> Tensor:
        """f_theta (...,), whose sigmoid predicts, low by w_rej, that Y_t is accepted (Eq. 3.1).

        Args: hidden: (..., D) e_t, the hidden state at Y_t. of_q: (...,) q_draft(Y_t), which only
            a head with `head_sees="confidence"` looks at.
        """
        x = hidden.to(self.head.out.weight.dtype)  # (..., D)
        if self.head.log_q is not None:
            log_q = of_q.to(x.dtype).clamp(min=1e-9).log()  # (...,)
            x = x + log_q[..., None] * self.head.log_q  # (..., D)
        return self.head(x)

    def causal_lm(self, target):
        """The draft model as an ordinary causal LM (for `assistant_model=`) of the same weights."""
        if self.body is None:
            raise ValueError("an acceptance head only; take a checkpoint with its own draft model")
        config = AutoConfig.for_model(**self.config.model)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
        shared = {id(part): part for part in self.body.children()}  # not copied
        body = copy.deepcopy(self.body, shared)  # has an embedding of its own, unlike this drafter
        body.set_input_embeddings(target.get_input_embeddings())
        setattr(model, model.base_model_prefix, body)
        model.set_output_embeddings(target.get_output_embeddings())
        model.generation_config = copy.deepcopy(target.generation_config)
        return model.eval()


@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, dtype, device):
    """The causal LM of Config.draft_model, which a checkpoint names and does not hold."""
    return common.load_target(name, dtype=dtype, device=str(device))[0]


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter to start training from, its layers copied from the target; completes `config`.

    Args: token_counts: (V,) how often each token occurs in the training responses.
    Raises: ValueError: no such layers, or of a kind that cannot be copied; another vocabulary.
    """
    if config.draft_model:
        draft_model = load_draft_model(config.draft_model, target.dtype, target.device)
        new_memory(draft_model, target)  # or a ValueError, if its vocabulary is another
        config.model = {"hidden_size": common.target_shape(draft_model)["hidden_size"]}
        config.draft_vocab = 0
    if config.base or config.draft_model:
        return Drafter(config)
    small = copy.deepcopy(target.config.get_text_config())
    count = small.num_hidden_layers
    if not config.layers or not all(-count <= layer < count for layer in config.layers):
        raise ValueError(f"layers {config.layers}: name some of the target's, 0 to {count - 1}")
    config.layers = [layer % count for layer in config.layers]
    small.num_hidden_layers = len(config.layers)
    if getattr(small, "layer_types", None):
        small.layer_types = [small.layer_types[layer] for layer in config.layers]
    config.model = {key: value for key, value in small.to_diff_dict().items() if key != "dtype"}
    config.model["hidden_size"] = small.hidden_size

    drafter = Drafter(config)
    drafter.draft_ids.copy_(token_counts.topk(len(drafter.draft_ids)).indices.sort().values)
    weights = target.get_decoder().state_dict()
    copied = {}
    for name in drafter.body.get_decoder().state_dict():
        parts = name.split(".")
        if parts[0] in ("layers", "h"):  # `h` in GPT-2; ours number i is made of layers[i]
            parts[1] = str(config.layers[int(parts[1])])
        copied[name] = weights.get(".".join(parts))
    if any(weight is None for weight in copied.values()):
        raise ValueError("cannot copy layers of this target; take a --draft-model or a --base")
    drafter.body.get_decoder().load_state_dict(copied)
    return drafter


# ------------------------------------------------------------------------------- training objective


def draft_states(drafter, target, batch, input_ids, rows, base=None, base_drafter=None) -> Tensor:
    """Hidden states (M, D) of whichever model drafts, reading input_ids (B, T), at rows (B, T)."""
    if base is not None:
        scored = F.pad(rows[:, :-1], (1, 0))  # (B, T) it looks at the row before each of these
        # what it reads of the target's cache stays that of batch.input_ids, the verified text
        mixed_batch = dataclasses.replace(batch, input_ids=input_ids, loss_mask=scored)
        return base.training_logits(base_drafter, target, mixed_batch)[2]
    if drafter.config.draft_model:
        draft_model = load_draft_model(drafter.config.draft_model, target.dtype, target.device)
        return draft_model.get_decoder()(input_ids, use_cache=False)[0][rows]
    embeds = target.get_input_embeddings()(input_ids).to(drafter.head.out.weight.dtype)  # (B, T, D)
    return drafter.body(inputs_embeds=embeds, use_cache=False)[0][rows]


def draft_logits(drafter: Drafter, target, batch, base=None, base_drafter=None) -> Tensor:
    """Logits (M, Vd) of whichever model drafts, for the M response tokens X_t, after X_<t."""
    if base is not None:
        return base.training_logits(base_drafter, target, batch)[0].float()
    rows = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T) row t - 1 predicts token t
    hidden = draft_states(drafter, target, batch, batch.input_ids, rows)  # (M, D)
    if drafter.config.draft_model:
        draft_model = load_draft_model(drafter.config.draft_model, target.dtype, target.device)
        return common.target_logits(draft_model, hidden)
    return common.draft_head(target, drafter.draft_ids).to(hidden.dtype)(hidden).float()


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities (M, V) of logits (M, V) under temperature and top-p; one-hot if greedy."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = logits / temperature
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return logits.softmax(-1)


@torch.no_grad()
def labelled(drafter: Drafter, target, batch, base=None, base_drafter=None) -> tuple:
    """What the acceptance head reads, and what it should say (3.3).

    Each response token X_t gets a draft Y_t ~ q(. | X_<t) with the label P_t = min(1, p / q) of
    Y_t. Then the draft model reads Z, which takes X_t with probability r and Y_t otherwise; e_t is
    its hidden state at Z_t. Of a place's two numbers (torch.rand(T, 2) of its seed) the first
    picks Y_t, where it falls in the running sum of q (common.sample); below r the second picks X_t.

        X   x1 x2 x3 x4      Y   y1 y2 y3 y4      Z   y1 x2 y3 y4      labels at   1  .  3  4

    M counts the response tokens, J the judged ones of them, where Z took Y. What belongs to token t
    is in row t - 1 of to_draw, which predicts it, and in row t of to_mix and loss_mask.

    Returns: (e (J, D), q_draft(Y) (J,), accept_prob (J,)).
    """
    config = drafter.config
    draft_ids = (drafter if base is None else base_drafter).draft_ids  # (Vd,)
    seeds = [torch.Generator().manual_seed(int(seed)) for seed in batch.seed]
    noise = [torch.rand(batch.input_ids.shape[1], 2, generator=seed) for seed in seeds]
    to_draw, to_mix = torch.stack(noise).to(batch.input_ids.device).unbind(-1)  # each (B, T)

    rows = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T) row t - 1 predicts token t
    logits = draft_logits(drafter, target, batch, base, base_drafter)  # (M, Vd)
    parts = zip(logits.split(256), batch.hidden[rows].split(256), to_draw[rows].split(256))
    tokens = []
    of_q = []
    accept_prob = []
    for scores, features, uniform in parts:  # a part at a time spares memory
        target_scores = common.target_logits(target, features)  # (m, V)
        q_draft = distribution(scores, config.temperature, config.top_p)  # (m, Vd)
        p_target = distribution(target_scores, config.temperature, config.top_p)  # (m, V)
        choice = common.sample(q_draft, uniform[:, None])  # (m, 1)
        token = draft_ids[choice]  # (m, 1)
        ratio = p_target.gather(1, token) / q_draft.gather(1, choice)  # (m, 1)
        shown = q_draft if config.temperature else scores.softmax(-1)  # as `propose` gives it
        tokens.append(token[:, 0])
        of_q.append(shown.gather(1, choice)[:, 0])
        accept_prob.append(ratio[:, 0].nan_to_num(1).clamp(max=1))  # 0 / 0 by rounding only

    drafted = batch.input_ids.clone()  # (B, T) Y in the response, X elsewhere
    drafted[batch.loss_mask] = torch.cat(tokens)
    taken = batch.loss_mask & (to_mix >= config.keep)  # (B, T)
    taken[:, -1] = False  # a base drafter scores no row without a next token
    mixed = torch.where(taken, drafted, batch.input_ids)  # (B, T) Z
    hidden = draft_states(drafter, target, batch, mixed, taken, base, base_drafter)  # (J, D)
    judged = taken[batch.loss_mask]  # (M,) bool, J of them True
    return hidden, torch.cat(of_q)[judged], torch.cat(accept_prob)[judged]


def loss(drafter: Drafter, target, batch, base=None, base_drafter=None) -> Tensor:
    """Stage draft: cross-entropy with the target's distribution; stage head: weighted BCE (3.3).

    Args: batch: common.Batch. base, base_drafter: with Config.base, that module and its drafter.
    Returns: its mean times the number of tokens that batch.loss_mask counts, as train.py wants it.
    """
    if drafter.distils:
        rows = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T) row t - 1 predicts token t
        teacher = common.target_logits(target, batch.hidden[rows], drafter.draft_ids)  # (M, Vd)
        logits = draft_logits(drafter, target, batch)  # (M, Vd)
        return F.cross_entropy(logits, teacher.softmax(-1), reduction="sum")
    hidden, of_q, accept_prob = labelled(drafter, target, batch, base, base_drafter)
    logit = drafter.accept_logit(hidden, of_q).float()  # (J,)
    weight_rej = drafter.config.w_rej * (1 - accept_prob)  # (J,) and w_acc is 1
    total = -(accept_prob * F.logsigmoid(logit) + weight_rej * F.logsigmoid(-logit)).sum()
    return total / (accept_prob + weight_rej).sum().clamp(min=1e-6) * batch.loss_mask.sum()


def alpha(drafter: Drafter, target, batch, base=None, base_drafter=None) -> tuple[Tensor, int]:
    """Acceptance rate at temperature 1: (the sum over M positions of sum_x min(p, q), M)."""
    draft_ids = (drafter if base is None else base_drafter).draft_ids
    rows = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T) row t - 1 predicts token t
    q_draft = draft_logits(drafter, target, batch, base, base_drafter).softmax(-1)  # (M, Vd)
    p_target = common.target_logits(target, batch.hidden[rows]).softmax(-1)[:, draft_ids]  # (M, Vd)
    return torch.minimum(p_target, q_draft).sum(), len(q_draft)


# ----------------------------------------------------------------------------------------- decoding


@dataclasses.dataclass
class Memory:
    """What the draft model keeps from round to round of one answer."""

    cache: common.DraftCache  # its own keys and values
    head: nn.Module | None  # the target's LM head, D -> Vd; None: a causal LM has its own


def new_memory(drafter, target) -> Memory:
    """An empty memory: for a Drafter, or for any causal LM with the target's vocabulary."""
    if hasattr(drafter, "draft_ids"):
        head = common.draft_head(target, drafter.draft_ids)
        return Memory(common.DraftCache(len(drafter.config.layers)), head)
    theirs = common.target_shape(drafter)
    ours = common.target_shape(target)["vocab_size"]
    if theirs["vocab_size"] != ours:
        tokens = f"{theirs['vocab_size']} tokens and the target {ours}"
        raise ValueError(f"the draft model has {tokens}; take one of the same vocabulary")
    return Memory(common.DraftCache(theirs["num_layers"]), None)


def propose(drafter, target, input_ids, cache, memory, logits_processor=None, do_sample=False):
    """Draft a chain one token at a time; take as many as you want.

    Args: drafter, memory: of new_memory. input_ids: (1, T) tokens to draft after. cache: not read.
    Yields:
        (token y_i (1,), the processed q_draft (V,) it comes from, hidden state e_(i-1) (D,)). The
        chain ends early where the processors forbid every token that can be drafted.
    """
    fed = memory.cache.rewind(input_ids)  # (1, n)
    while True:
        memory.cache.feed(fed)
        if memory.head is None:
            logits, states = common.forward(drafter, fed, memory.cache, logits_to_keep=1)
            hidden = states[:, -1]  # (1, D) of (1, n, D)
            scores = logits[:, -1].float()  # (1, V) of (1, 1, V)
        else:
            embeds = target.get_input_embeddings()(fed)  # (1, n, D)
            logits, hidden = drafter(embeds, (slice(None), -1), memory.head, memory.cache)
            scores = logits.new_full((1, drafter.config.target["vocab_size"]), float("-inf"))
            scores[:, drafter.draft_ids] = logits  # (1, V)
        if logits_processor:
            scores = logits_processor(input_ids, scores)
            if not scores.max() > float("-inf"):  # nothing is allowed, or that normalised: NaN
                return
        q_draft = scores.softmax(-1)[0]  # (V,)
        token = common.sample(q_draft) if do_sample else q_draft.argmax(keepdim=True)
        yield token, q_draft, hidden[0]
        fed = token[None]  # (1, 1)
        input_ids = torch.cat([input_ids, fed], dim=1)


def until_stop(steps, drafter, config: Config, most: int, chances: list):
    """The steps of one round, at most `most`, until the rule of Config.stop ends it (Algorithm 2).

    The head leaves the newest token unjudged: its e_i would cost another pass of the draft model.
    Confidence and entropy look at the newest token's distribution, and submit it in any case. The
    head says 0.9, 0.8, 0.5, ... of y1, y2, y3, ...; h = 0.6:

        drafted                   y1   y2   y3   y4
        p^, all before accepted   1    .9   .72  .36
        stop, 1 - p^ > h?         0    .1   .28  .64 yes: y1 to y4 are submitted

    Args: steps: each (token (1,), q_draft (V,), hidden state of the token before (D,)).
        chances: a list to fill with p^ of y1, of y1 and y2, ..., as it gets known.
    """
    all_accepted = 1.0  # p^, the predicted chance that all tokens but the newest are accepted
    of_q = None  # (1,) q_draft(y_(i-1))
    bias = math.log(config.w_rej) if config.true_probability else 0.0
    for token, q_draft, hidden in itertools.islice(steps, most):
        yield token, q_draft, hidden
        if config.stop == "confidence" and q_draft.max() < config.confidence:
            return
        if config.stop == "entropy" and -torch.xlogy(q_draft, q_draft).sum() > config.entropy:
            return
        if config.stop == "head" and of_q is not None:
            logit = drafter.accept_logit(hidden[None], of_q).float() + bias  # (1,)
            all_accepted *= float(logit.sigmoid())
            chances.append(all_accepted)
            if 1 - all_accepted > config.threshold:
                return
        of_q = q_draft[token]


def until_end(steps, ends: set[int]):
    """The steps up to an end-of-sequence token, itself included: none after it can be emitted."""
    for step in steps:
        yield step
        if int(step[0]) in ends:
            return


def check(config: Config, drafter, model, base, draft_model) -> None:
    """ValueError for an unknown stop, nothing to draft with, or a head for something else."""
    if model is None or getattr(model, "body", model) is None:
        raise ValueError("nothing to draft with: pass draft_model=, or base= and base_drafter=")
    if config.stop not in ("head", "fixed", "confidence", "entropy"):
        raise ValueError(f"unknown stop {config.stop!r}; take head, fixed, confidence or entropy")
    fits = bool(base) == bool(config.base) and bool(draft_model) == bool(config.draft_model)
    if fits and draft_model:
        fits = common.target_shape(draft_model)["hidden_size"] == config.model["hidden_size"]
    if config.stop == "head" and (drafter is None or drafter.distils or not fits):
        remedy = "train one (--stage head, with --base or --draft-model), or take another --stop"
        raise ValueError(f"no acceptance head was trained on this draft model: {remedy}")


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
    true_probability=None,
    gamma=None,
    confidence=None,
    entropy=None,
    max_draft=None,
    copies=None,
    stats=None,
    token_streamer=None,
    **model_kwargs,
) -> Tensor:
    """`target.generate(**enc, custom_generate=specdecpp.generate, drafter=drafter)`: lossless.

    Args:
        drafter: the head and, unless something else drafts, the draft model; None without a head.
        base, base_drafter: another chain drafter's module and its trained drafter, to draft with.
        draft_model: a causal LM to draft with; by default the one that the head was trained on.
        stop to copies: the fields of Config, by default the drafter's. stats: to be filled.
        token_streamer: a streamer of transformers (which does not hand `streamer` on).
    Returns: (1, T') prompt and new tokens. Raises: ValueError: see check.
    """
    given = {"stop": stop, "threshold": threshold, "true_probability": true_probability}
    given |= {"gamma": gamma, "confidence": confidence, "entropy": entropy}
    given |= {"max_draft": max_draft, "copies": copies}
    given = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(Config() if drafter is None else drafter.config, **given)
    if draft_model is None and base is None and config.draft_model:
        draft_model = load_draft_model(config.draft_model, target.dtype, target.device)
    model = base_drafter if base else (draft_model or drafter)
    check(config, drafter, model, base, draft_model)
    base = base or sys.modules[__name__]
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    ends = generation_config.eos_token_id  # one, several or None
    ends = {ends} if isinstance(ends, int) else set(ends or [])

    stats = stats or common.Stats()
    do_sample = generation_config.do_sample
    cache, _ = common.prefill(
        target, input_ids, generation_config, model_kwargs, stats, token_streamer
    )
    memory = base.new_memory(model, target)
    lookup = common.Lookup(config.copies)
    done = False
    while not done:
        with stats.timer("draft" if memory.cache.fed is not None else "prefill"):
            room = generation_config.max_length - input_ids.shape[1] - 1  # one place is the bonus's
            most = min(limit, room)
            steps = base.propose(
                model, target, input_ids, cache, memory, logits_processor, do_sample
            )
            chances = []
            chosen = until_stop(until_end(steps, ends), drafter, config, most, chances)
            draft = common.chain(chosen, input_ids)
            ruled = len(draft.tokens) < most or (config.stop == "fixed" and most == limit)
            stopped = config.stop if ruled else "limit"
            if ends.intersection(draft.tokens[-1:].tolist()):
                stopped = "end of sequence"
            stats.note(chances=chances, stopped=stopped)
            draft = lookup.merge(draft, input_ids, room)
        verdict = common.verify(target, input_ids, draft, cache, logits_processor, do_sample, stats)
        tokens = verdict.tokens  # (1, A + 1)
        input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)
    return input_ids


# ------------------------------------------------------------------------------------------- theory


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stop once the true chance of a refusal reaches this.

    c1 = t_draft, c2 = t_target - t_draft, delta bounds what the rounds after this one may save. The
    result may stand for h with `true_probability` only, or where w_rej is 1.
    """
    return (c2 + delta) / (c1 + c2 + delta)


def oracle(agrees: list[bool]) -> int:
    """N_target of the best greedy stopping: |S| + 1 (Lemma 2.1), 1 less if S holds the last token.

    `agrees` tells of each token of the answer whether the draft model's argmax there is that one.
    In hindsight, so that N_discarded = 0: a round more than disagreements before the last token.
    """
    return 1 + sum(not agree for agree in agrees[:-1])


if __name__ == "__main__":
    common.demo(generate, Drafter, "specdecpp")
