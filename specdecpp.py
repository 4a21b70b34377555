"""SpecDec++: a trained head decides when to stop drafting (Huang et al. 2024).

Paper: arXiv:2405.19715v1. SpecDec++ adds an acceptance head to the draft
model. From the last hidden state e_i of draft token y_i, the head predicts the
probability that the target accepts y_i, given that it accepted y_1 to y_(i-1)
(Eq. 3.1). The product of these is p^, the probability that all are accepted.
A round ends when 1 - p^ exceeds h.

Why a threshold (section 3.1): let R be the probability that at least one token
drafted so far is rejected. If one is, continuing wastes at least c1 = t_draft.
If none is, stopping costs at most c2 + Delta more than continuing, where c2 =
t_target - t_draft and Delta is an unknown constant that depends on policy,
prompt, models and costs. So stopping is better once
R >= (c2 + Delta) / (c1 + c2 + Delta).

In practice h is tuned (section 4.1). Rejections weigh w_rej > 1 in the loss,
because most draft tokens are accepted (section 3.3). That biases the head: if
the true probability is P, the loss is smallest at P / (P + w_rej (1 - P)).
With w_rej = 6 and h = 0.7, a round stops once y_1 is judged if P < 0.72.

Algorithm 2 is `propose`, `until_stop` and common.verify; Algorithm 1 is
stop="fixed". Names that differ from the paper's: q is `DraftModel`, e_i is
`hidden` (in `propose` and `until_stop` e_(i-1)), p^ is `all_accepted`, h is
`threshold`, K is `gamma`, r is `keep` (0.15, as in the published code), P_i is
`accept_prob`, D is `head_depth`.

Deviations from the paper and its code:
    1. The draft model is a copy of some target layers, distilled in stage
       "draft" (shipped: the first and the last); the paper's is another causal
       LM (`draft_model`).
    2. The copied layers draft only frequent tokens (`draft_vocab`).
    3. Labels are greedy by default: P_i is 1 where both argmaxes agree, else
       0. With `temperature=1` they are the paper's; use it for sampling.
    4. Y and Z are drawn anew in each training step.
    5. The head's D blocks are independent; the published code applies one D
       times.
    6. Drafting also ends after an end-of-sequence token.

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
from transformers import AutoConfig, AutoModel, PreTrainedModel

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
    keep: float = option(0.15, "r, share of X in the mixed sequence Z, below 1")
    temperature: float = option(0.0, "of the head's labels; 0: greedy")
    stop: str = option("head", "what ends a round: head, or fixed (gamma tokens)", decode=True)
    threshold: float = option(0.7, "h: end when P(a rejection) exceeds it", decode=True)
    max_draft: int = option(20, "stop head: at most this many tokens per round", decode=True)
    gamma: int = option(5, "stop fixed: tokens per round, K", decode=True)

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0, max_draft=0, gamma=0)
        if not self.w_rej > 0:
            raise common.Mistake(f"w_rej {self.w_rej}: take a weight above 0")
        if not 0 <= self.keep < 1:
            raise common.Mistake(f"keep {self.keep}: take a share from 0 to below 1")
        if self.draft_model and self.stage == "draft":
            raise common.Mistake("a draft_model is not trained, only its head: take stage head")


VARIANTS = {
    **{f"K{k}": {"stop": "fixed", "gamma": k} for k in (2, 4, 6, 8, 10, 12, 14)},
    **{f"h{h}": {"stop": "head", "threshold": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)},
}


# -------------------------------------------------------------------------------- architecture


class AcceptanceHead(nn.Module):
    """f_theta: `depth` residual SiLU blocks and a linear layer (section 4.1)."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Acceptance logits (...,) from states e_i (..., D) (Eq. 3.1)."""
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0].float()


class Drafter(nn.Module, PyTorchModelHubMixin):
    """What is trained and saved: the head and, if copied, the draft model."""

    kv_layers: tuple = ()  # nothing is read from the target's cache

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.body = None
        if not config.draft_model:
            if not config.model:
                raise common.Mistake(
                    "the config names no draft model: is this a specdecpp drafter?"
                )
            # The embedding is replaced below. Special ids would lie outside it.
            no_tokens = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])
            settings = config.model | no_tokens | {"vocab_size": 1}
            shape = AutoConfig.for_model(**settings)
            self.body = AutoModel.from_config(shape, dtype=torch.float32)
            self.body.set_input_embeddings(nn.Identity())  # the target's is used
            self.body.requires_grad_(config.stage == "draft")
        self.head = AcceptanceHead(config.model["hidden_size"], config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        self.register_buffer("draft_ids", common.placeholder_ids(config.target, config.draft_vocab))

    def train(self, mode: bool = True):
        """As in any module, but without dropout in the copied layers (GPT-2, OPT)."""
        super().train(mode)
        if self.body is not None:
            self.body.eval()
        return self


class DraftModel:
    """The draft model q, ready to draft: copied layers, or another causal LM.

    The copied layers use the target's embedding and rows of its LM head.

    Args: source: a Drafter, or a causal LM with the target's vocabulary.
    Raises: Mistake: the vocabularies differ.
    """

    def __init__(self, source, target):
        if isinstance(source, Drafter) and source.config.draft_model:
            source = load_draft_model(source.config.draft_model, target.dtype, target.device)
        if isinstance(source, Drafter):
            self.body = source.body
            self.num_layers = len(source.config.layers)
            self.draft_ids = source.draft_ids  # (Vd,)
            self.embed = target.get_input_embeddings()
            self.lm_head = common.draft_head(target, source.draft_ids).to(self.body.dtype)
        else:
            shape = common.target_shape(source)
            vocab = common.target_shape(target)["vocab_size"]
            if shape["vocab_size"] != vocab:
                raise common.Mistake(
                    f"the draft model has {shape['vocab_size']} tokens and the target {vocab}: "
                    "take one of the same vocabulary"
                )
            self.body = source.get_decoder()
            self.num_layers = shape["num_layers"]
            self.draft_ids = torch.arange(vocab, device=target.device)
            self.embed = source.get_input_embeddings()
            self.lm_head = functools.partial(common.target_logits, source)

    def states(self, ids: Tensor, cache=None) -> Tensor:
        """Hidden states e (B, T, D) of tokens (B, T) that follow `cache`."""
        embeds = self.embed(ids).to(self.body.dtype)  # (B, T, D)
        cached = cache is not None
        return self.body(inputs_embeds=embeds, past_key_values=cache, use_cache=cached)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits (..., Vd) of hidden states (..., D)."""
        return self.lm_head(hidden).float()


@functools.lru_cache(maxsize=1)
def load_draft_model(name: str, dtype, device):
    """The causal LM Config.draft_model; a checkpoint does not hold its weights."""
    return common.load_target(name, dtype=dtype, device=str(device))[0]


def identity(draft_model) -> dict:
    """What identifies a causal LM: its name, without the folder, and its shape."""
    name = Path(draft_model.config.name_or_path).name
    return {"name": name, **common.target_shape(draft_model)}


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """A drafter before training, in stage draft or, with a draft_model, stage head.

    Args: token_counts: (V,) how often each token occurs in the responses.
    Raises: Mistake: layers cannot be copied, or the vocabularies differ.
    """
    config.target = common.target_shape(target)
    if config.draft_model:
        draft_model = load_draft_model(config.draft_model, target.dtype, target.device)
        config.model = identity(draft_model)
        config.draft_vocab = 0
        drafter = Drafter(config)
        DraftModel(drafter, target)  # checks the vocabulary
        return drafter

    # 1. The target's configuration, cut down to the chosen layers.
    small = copy.deepcopy(target.config.get_text_config())
    depth = small.num_hidden_layers
    if not config.layers or not all(-depth <= layer < depth for layer in config.layers):
        raise common.Mistake(f"layers {config.layers}: name some of the target's 0 to {depth - 1}")
    layers = [layer % depth for layer in config.layers]
    small.num_hidden_layers = len(layers)
    if getattr(small, "layer_types", None):  # sliding or full attention
        small.layer_types = [small.layer_types[layer] for layer in layers]
    config.model = small.to_diff_dict() | {"hidden_size": small.hidden_size}
    config.model.pop("dtype", None)

    # 2. Layer i of the draft model starts as layer layers[i] of the target.
    drafter = Drafter(config)
    common.start_from(drafter, target, token_counts)  # fills drafter.draft_ids
    theirs = target.get_decoder().state_dict()
    ours = {}
    for name in drafter.body.get_decoder().state_dict():  # OPT wraps its decoder
        parts = name.split(".")
        if parts[0] in ("layers", "h"):  # "h" in GPT-2
            parts[1] = str(layers[int(parts[1])])
        ours[name] = theirs.get(".".join(parts))
    if any(weight is None for weight in ours.values()):
        raise common.Mistake("cannot copy layers of this target: name a draft_model")
    drafter.body.get_decoder().load_state_dict(ours)
    return drafter


# -------------------------------------------------------------------------- training objective


def response_states(model: DraftModel, batch) -> tuple[Tensor, Tensor]:
    """States (M, D) of both models where the next token is to be predicted."""
    predicts = F.pad(batch.loss_mask[:, 1:], (0, 1))  # (B, T)
    return model.states(batch.input_ids)[predicts], batch.hidden[predicts]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities (M, V) of logits (M, V); one-hot at temperature 0."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return (logits / temperature).softmax(-1)


def uniforms(batch) -> tuple[Tensor, Tensor]:
    """Two uniform numbers (B, T) for each token: to draw Y_t, and to mix.

    They depend only on t and on the sequence's seed, new in each training step.
    """
    numbers = []
    for seed in batch.seed.tolist():
        generator = torch.Generator().manual_seed(seed)
        numbers.append(torch.rand(batch.input_ids.shape[1], 2, generator=generator))
    return torch.stack(numbers).to(batch.input_ids.device).unbind(-1)


def draw(model: DraftModel, target, batch, to_draw: Tensor, temperature: float):
    """Draw a token Y_t after X_<t for each of the M response tokens X_t (section 3.3).

    Args: to_draw: (B, T) uniform numbers.
    Returns: Y (M,) and accept_prob (M,), the min(1, p_target / q_draft) of Y.
    """
    uniform = to_draw[batch.loss_mask][:, None]  # (M, 1)
    ours, theirs = response_states(model, batch)  # (M, D) each
    tokens = []
    accept_prob = []
    parts = zip(ours.split(256), theirs.split(256), uniform.split(256))  # to save memory
    for e, theirs_part, numbers in parts:
        q_draft = distribution(model.logits(e), temperature)  # (m, Vd)
        p_target = distribution(common.target_logits(target, theirs_part), temperature)  # (m, V)
        choice = common.sample(q_draft, numbers)  # (m, 1)
        token = model.draft_ids[choice]  # (m, 1)
        ratio = p_target.gather(1, token) / q_draft.gather(1, choice)
        tokens.append(token[:, 0])
        accept_prob.append(ratio[:, 0].clamp(max=1))
    return torch.cat(tokens), torch.cat(accept_prob)


def mix(batch, drafted: Tensor, to_mix: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The sequence Z (section 3.3): X_t with probability `keep`, else a judged Y_t.

        X        x1 x2 x3 x4
        Y        y1 y2 y3 y4      y3 was drawn after x1 x2
        Z        y1 x2 y3 y4      e_3 is the state after y1 x2 y3
        judged   1  .  1  1

    Args: drafted: (M,) the Y_t of all response tokens. to_mix: (B, T).
    Returns: Z (B, T), and where it took Y_t, (B, T) bool.
    """
    judged = batch.loss_mask & (to_mix >= keep)
    y = batch.input_ids.masked_scatter(batch.loss_mask, drafted)  # (B, T)
    return torch.where(judged, y, batch.input_ids), judged


@torch.no_grad()
def labelled(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the head for the J judged tokens (section 3.3).

    Y_t is drawn after X_<t, because its label assumes that all earlier tokens
    were accepted. One pass over Z then gives the states of all J tokens.

    Returns: states e (J, D) of the Y_t in Z, and accept_prob (J,).
    """
    config = drafter.config
    model = DraftModel(drafter, target)
    to_draw, to_mix = uniforms(batch)
    # 1. Draw Y after the true text X, and compare both models there.
    drafted, accept_prob = draw(model, target, batch, to_draw, config.temperature)  # (M,) each
    # 2. Let the draft model read Z, as it reads its own drafts in decoding.
    mixed, judged = mix(batch, drafted, to_mix, config.keep)  # (B, T) each
    hidden = model.states(mixed)[judged]  # (J, D)
    return hidden, accept_prob[judged[batch.loss_mask]]


def loss(drafter: Drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The summed loss and the weight to divide it by.

    Stage draft: cross-entropy with the target's distribution, renormalised
    over the draft vocabulary; divided by M. Stage head: weighted binary
    cross-entropy -(P log s + w_rej (1 - P) log(1 - s)), where s is the head's
    sigmoid (section 3.3); divided by the sum of the weights.
    """
    if drafter.config.stage == "draft":
        model = DraftModel(drafter, target)
        ours, theirs = response_states(model, batch)
        logits = model.logits(ours)  # (M, Vd)
        teacher = common.target_logits(target, theirs, model.draft_ids)
        total = F.cross_entropy(logits, teacher.softmax(-1), reduction="sum")
        return total, len(logits)
    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,)
    weight_acc = accept_prob  # w_acc is 1
    weight_rej = drafter.config.w_rej * (1 - accept_prob)
    total = -(weight_acc * F.logsigmoid(logits) + weight_rej * F.logsigmoid(-logits)).sum()
    return total, (weight_acc + weight_rej).sum()


def acceptance(drafter: Drafter, target, batch) -> tuple[Tensor, int]:
    """sum_x min(p_target, q_draft), summed over M positions, and M."""
    model = DraftModel(drafter, target)
    ours, theirs = response_states(model, batch)
    q_draft = model.logits(ours).softmax(-1)  # (M, Vd)
    return common.overlap(target, theirs, q_draft, model.draft_ids), len(q_draft)


# -------------------------------------------------------------------------------------- theory


def throughput(verification: float, discard: float, t_draft: float, t_target: float) -> float:
    """Tokens per second: 1 / latency, with the latency of Eq. 2.3.

    Each target pass yields one token of its own and each draft pass one that
    is kept or discarded, so N_draft + N_target = N + N_discarded. Substitute
    it into T = t_draft N_draft + t_target N_target (Eq. 2.1) and divide by N.

    Args: verification: N_target / N. discard: N_discarded / N. t_draft,
    t_target: seconds of a pass.
    """
    latency = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return 1 / latency


def oracle(agrees: list[bool]) -> int:
    """N_target in greedy decoding with the best stopping times (Lemma 2.1).

    Each round stops before the next disagreement. That takes |S| + 1 rounds, as
    the lemma says, but |S| if the last token is in S: its round is the last.

    Args: agrees[i]: True if the draft model's argmax is token i of the answer.
    """
    return 1 + sum(not agree for agree in agrees[:-1])


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """The bound of Theorem 3.1: stop once R reaches it.

    R is the probability that at least one drafted token is rejected. The
    condition is sufficient, not necessary. It is not h, which applies to the
    output of a biased head.

    Args: c1: t_draft. c2: t_target - t_draft. delta: Delta, unknown; 0 drops it.
    """
    return (c2 + delta) / (c1 + c2 + delta)


# ------------------------------------------------------------------------------------ decoding


class Memory:
    """What the draft model keeps between the rounds of one answer."""

    def __init__(self, drafter, target):
        self.model = DraftModel(drafter, target)
        self.cache = common.DraftCache(self.model.num_layers)  # its own keys and values


def propose(drafter, decoding, memory: Memory):
    """Yield draft tokens that follow `decoding.ids`, as many as the caller takes.

    Args: drafter: unused here; every chain method has the same `propose`.
    Yields: (token y_i (1,), the processed q_draft (V,) it was chosen from, the
    state e_(i-1) (D,) behind q_draft). Ends after an end-of-sequence token, or
    where the logits processors allow no token that can be drafted.
    """
    ids = decoding.ids
    # Cut the rows of rejected tokens. If y2 of y1 y2 y3 was rejected, the row
    # of y1 stays, and only the bonus token is fed. If all were accepted, y3,
    # which was never fed, and the bonus token are fed.
    new = memory.cache.rewind(ids)  # (1, n)
    while True:
        memory.cache.record(new)
        hidden = memory.model.states(new, memory.cache)[:, -1]  # (1, D)
        picked = decoding.pick(memory.model.logits(hidden), memory.model.draft_ids, ids)
        if picked is None:
            return
        token, q_draft = picked
        yield token, q_draft, hidden[0]
        if int(token) in decoding.ends:
            return
        new = token[None]  # (1, 1)
        ids = torch.cat([ids, new], dim=1)


def until_stop(steps, head, threshold: float, chances: list):
    """The steps of one round until the head ends it (Algorithm 2).

    The pass that gives e_(i-1) also gives q_i, so y_i costs no pass of its own
    and is drawn before y_(i-1) is judged. A judged token must not be dropped:
    the judgement depends on it, so its distribution would no longer be q. The
    newest token is not judged; it has cost no pass, so it is submitted too. The
    state before y1 is the root's, which is no draft token, so judging starts
    with e_1. (Algorithm 2 as printed begins with f(e_0), but computes no e_0.)
    The head predicts 0.9, 0.8, 0.5 for y1, y2, y3; h = 0.6:

        drafted y_i               y1   y2   y3   y4
        p^ of the tokens before   1    .9   .72  .36
        stop, 1 - p^ > h?         0    .1   .28  .64 yes: submit y1 to y4

    Args: steps: of `propose`. head: a function of e (D,) that returns a logit;
    its sigmoid is the probability of acceptance. chances: a list that receives
    p^, a float, after each judged token.
    """
    all_accepted = 1.0  # p^
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        if i > 1:
            all_accepted *= float(head(hidden).sigmoid())  # hidden is e_(i-1)
            chances.append(all_accepted)
        yield token, q_draft, hidden
        if 1 - all_accepted > threshold:
            return


def check_head(drafter, config: Config, draft_model) -> None:
    """Raise a Mistake if nothing can draft, or the head is of another model."""
    if drafter is None and draft_model is None:
        raise common.Mistake("nothing to draft with: pass drafter= or draft_model=")
    if draft_model is not None and not isinstance(draft_model, PreTrainedModel):
        kind = type(draft_model).__name__
        raise common.Mistake(f"draft_model is a {kind}: pass a causal LM, load_target(NAME)[0]")
    if config.stop == "fixed":
        return
    remedy = "train one (stage head), or take stop fixed"
    if drafter is None or drafter.config.stage == "draft":
        raise common.Mistake(f"stop head, but no acceptance head has been trained: {remedy}")
    if draft_model is not None and drafter.config.model != identity(draft_model):
        own = drafter.config.draft_model or "its own layers"
        given = draft_model.config.name_or_path or "this draft model"
        raise common.Mistake(f"the head was trained on {own}, not on {given}: {remedy}")


@torch.no_grad()
def drafts(decoding, drafter: Drafter | None, config: Config, draft_model=None):
    """Yield one draft per round, which the caller verifies before the next.

    Args: draft_model: a causal LM to draft with, instead of the drafter's.
    """
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
    """`target.generate(..., custom_generate=specdecpp.generate, drafter=...)`.

    Lossless. `config` replaces the drafter's Config in all fields with
    decode=True: start from `dataclasses.replace(drafter.config, ...)`. `draft_model`,
    a causal LM, drafts instead of the drafter's own model; the drafter then
    supplies only the head. Without a drafter the default is stop="fixed". The
    arguments after it are those of `common.Decoding`.
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
