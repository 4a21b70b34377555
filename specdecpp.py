"""SpecDec++: a trained head decides when a draft is long enough.

Paper: Huang et al., 2024, arXiv:2405.19715v1, whose section numbers are used here.

A draft that ends too early costs forwards of the target. One that ends too late costs
passes of the draft model, because all tokens after a rejected one are discarded. The
best length differs from place to place, so it is decided while drafting. A small head
reads e_i, the last hidden state of the draft model after it has read the draft token
y_i, and predicts how likely the target is to accept y_i, given that it accepts y_1 to
y_(i-1) (Eq. 3.1). The product p^ of these predictions estimates the probability that
all are accepted, and the draft ends when 1 - p^ exceeds a threshold h (Algorithm 2).
With h = .6:

    a pass of the draft model reads    root  y_1   y_2   y_3
    its last hidden state is           e_0   e_1   e_2   e_3
    y drafted from it                  y_1   y_2   y_3   y_4
    y judged by it                           y_1   y_2   y_3
    the head predicts                        .9    .8    .5
    p^                                 1     .9    .72   .36
    1 - p^                             0     .1    .28   .64 > h

The head judges y_i one pass after y_i was drafted, because e_i exists only then. That
pass also drafts y_(i+1), so the last token of a draft is submitted unjudged. With
stop="fixed" a draft has gamma tokens (Algorithm 1).

Names: p is `target`, q is `model`, e_i is `hidden`, p^ is `p_hat` (the product of the
head's predictions P^_i), h is `threshold`, K is `gamma`, P_i is `accept_prob`, r / 100
is `KEEP`. The paper's D, the number of residual blocks, is `head_depth`. In shapes, D
is the hidden size of the target and E that of the draft model. Training code writes t
for the paper's i.

Deviations from the paper and what the authors' code does: at the end.
Licence: Apache-2.0.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import common
from common import option


@dataclass
class Config:
    target: dict = option(dict, "shape of the target (filled in by build)")
    head_depth: int = option(3, "residual blocks of the head (the paper's D: 0 to 4)")
    w_rej: float = option(
        6.0, "weight of rejections in the head's loss (the paper: 1, 3, 6 or 12)"
    )
    temperature: float = option(
        0.0, "temperature of the head's labels; 0: greedy, 1: sampled from q (3.3)"
    )
    stop: str = option(
        "head", "what ends a draft: head, or fixed (gamma tokens)", decode=True
    )
    threshold: float = option(
        0.7,
        "h: end when 1 - p^ exceeds it; at 1 or above, never (the paper: .1 to .9)",
        decode=True,
    )
    max_draft: int = option(20, "with stop=head: at most this many tokens", decode=True)
    gamma: int = option(
        5, "with stop=fixed: draft tokens a round, K (paper: 2 to 14)", decode=True
    )
    # See "the draft model" below.
    stage: str = option("draft", "what to train: draft, then head (with --init DRAFT)")
    layers: list[int] = option(
        lambda: [0, -1], "target layers that the draft model copies, each once"
    )
    intermediate_size: int = option(1536, "feed-forward width of the copied layers")
    draft_vocab: int = option(8192, "draft only this many frequent tokens; 0: all")
    draft_model: str = option(
        "", "causal LM that drafts instead: an id, or a folder with its tokenizer"
    )
    width: int = option(0, "hidden size of a draft_model (filled in by build)")

    def __post_init__(self):
        common.one_of(self, stage=("draft", "head"), stop=("head", "fixed"))
        common.at_least(self, draft_vocab=0, head_depth=0, temperature=0)
        common.at_least(self, w_rej=0, threshold=0, max_draft=0, gamma=0)
        common.at_least(self, intermediate_size=1, width=0)
        ints = isinstance(self.layers, list) and {type(x) for x in self.layers} == {int}
        finite = math.isfinite(self.w_rej + self.temperature)
        other_width = self.width > 0 and not self.draft_model
        common.refuse(
            (not ints, f"layers {self.layers}: take a list of ints, such as [0,-1]"),
            (self.w_rej == 0, "w_rej 0: take a weight above 0"),
            (not finite, "w_rej and temperature: take finite numbers"),
            (other_width, "width is that of a draft_model: leave it at 0"),
        )
        if depth := self.target.get("num_layers"):
            wrong = not all(-depth <= layer < depth for layer in self.layers)
            message = f"layers {self.layers}: choose from {-depth} to {depth - 1}"
            common.refuse((wrong, message))
            # Each layer once: of 3 layers, 1 and -2 are the same.
            self.layers = list(dict.fromkeys(layer % depth for layer in self.layers))


# ------------------------------------------------------------- the head, and its use


class AcceptanceHead(nn.Module):
    """f_theta, a ResNet of depth + 1 layers with SiLU (3.2, 4.1)."""

    def __init__(self, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """A logit for each hidden state e_i (..., E).

        Its sigmoid predicts P(y_i is accepted | y_1 to y_(i-1) are) (Eq. 3.1).
        """
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0].float()


def until_stop(steps, head, threshold: float):
    """End a draft when the head expects a rejection (Algorithm 2).

    steps: what `propose` (see decoding) yields: (y_i, q_draft, e_(i-1)), i = 1, 2, ...
    head: maps e (E,) to a logit, whose sigmoid is the prediction for y_i at e_i.
    threshold: h.
    Yields (y_i, q_draft, p^), where p^ is the product of the predictions for y_1 to
    y_(i-1), as a float; the first is 1. y_i is the last if 1 - p^ exceeds h, and then
    no further step is asked for. For an example see the top of this file.
    """
    p_hat = 1.0
    for i, (token, q_draft, hidden) in enumerate(steps, start=1):
        # `hidden` is e_(i-1), which judges y_(i-1). e_0, the root's state, judges no
        # draft token. (The printed Algorithm 2 updates p^ at i = 1 as well, with an e_0
        # that it never computes.)
        if i > 1:
            p_hat *= float(head(hidden).sigmoid())
        # y_i costs no further pass, and is submitted unjudged, as in the MDP of 3.1,
        # where a stop drafts one more token. A draft that the head ends therefore has
        # two tokens or more.
        yield token, q_draft, p_hat
        # y_(i-1) is submitted even if its own judgement ends the draft. If it were
        # dropped for that, the tokens left would no longer follow q, as verification
        # assumes.
        if 1 - p_hat > threshold:
            return


# ------------------------------------------------------------------- training objective

# The paper takes the draft model q as given (3.1). `model_of` returns it. It has:
#
#     hidden(ids, cache)    last hidden states (B, T, E) of ids (B, T), after those of
#                           the cache, if there is one
#     logits(hidden)        logits (..., Vd) of the next token, from each hidden state
#     vocab_ids             (Vd,) the ids that the logits belong to
#     num_layers            how many layers the cache has

# `batch` is a common.Batch: input_ids (B, T); loss_mask (B, T), which is True at the M
# answer tokens X_t; and the target's last hidden states, batch.hidden (B, T, D).
# batch.predicts (B, T) marks the places whose next token is an X_t.

KEEP = 0.15  # the share of X in Z (see `mix`), r / 100; the authors' code's value


@torch.no_grad()
def labelled(drafter, target, batch) -> tuple[Tensor, Tensor]:
    """What the head learns (3.3): hidden states e_t (J, E) and labels P_t (J,).

    J is the number of judged tokens in the batch.
    """
    model = model_of(drafter, target)
    # 1. X is the text of the batch; in the paper the target wrote it.
    # 2. Y_t is drafted after X_1 to X_(t-1), which stand for accepted tokens. Its label
    #    P_t is therefore conditional, as Eq. 3.1 asks.
    temperature = drafter.config.temperature
    drafted, accept_prob = draw_labels(model, target, batch, temperature)
    # 3. The exact e_t would follow X_1 to X_(t-1) and Y_t, which takes a pass for each
    #    t. Instead, one pass reads Z, a mixture of X and Y. (Section 1: with few draft
    #    tokens in the text "the training signal is sparse".)
    uniform = torch.rand_like(batch.loss_mask, dtype=torch.float32)
    mixed, judged = mix(batch, drafted, uniform, KEEP)
    # 4. So e_t follows Z_1 to Z_(t-1) and Y_t, but P_t was computed after X_1 to
    #    X_(t-1). The loss of 3.3 has the same mismatch.
    hidden = model.hidden(mixed)[judged]  # (J, E)
    return hidden, accept_prob[judged[batch.loss_mask]]


def draw_labels(model, target, batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Draft Y_t after X_1 to X_(t-1), for each of the M answer tokens X_t (3.3).

    temperature: of both models. Y_t is sampled; at 0 it is the draft model's likeliest
        token.
    Returns Y (M,), and accept_prob (M,), which is min(1, p_target / q_draft) of each;
    at temperature 0 it is 1 where Y_t is also the target's likeliest token, else 0.
    """
    ours, theirs = response_hidden(model, batch)  # (M, E), (M, D)
    q_logits = model.logits(ours)  # (M, Vd)
    p_logits = common.target_logits(target, theirs)  # (M, V)
    if temperature == 0:
        drafted = model.vocab_ids[q_logits.argmax(-1)]
        return drafted, (drafted == p_logits.argmax(-1)).float()
    q_draft = (q_logits / temperature).softmax(-1)
    p_target = (p_logits / temperature).softmax(-1)
    choice = common.sample(q_draft)  # (M, 1)
    drafted = model.vocab_ids[choice]
    accept_prob = p_target.gather(1, drafted) / q_draft.gather(1, choice)
    return drafted[:, 0], accept_prob[:, 0].clamp(max=1)


def mix(batch, drafted: Tensor, uniform: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The sequences Z, which take X_t with probability `keep`, else Y_t (3.3).

    Only the Y_t in them are judged, here three of four:

        X        x1 x2 x3 x4
        Y        y1 y2 y3 y4     y3 was drafted after x1 x2
        Z        y1 x2 y3 y4     e_3 is the hidden state after y1 x2 y3
        judged   1  .  1  1

    drafted: (M,) all Y_t.
    uniform: (B, T) numbers in [0, 1), one for each place; one below `keep` keeps X_t.
    Returns Z (B, T), and judged (B, T) bool.
    """
    judged = batch.loss_mask & (uniform >= keep)
    chosen = drafted[judged[batch.loss_mask]]  # (J,)
    return batch.input_ids.masked_scatter(judged, chosen), judged


def response_hidden(model, batch) -> tuple[Tensor, Tensor]:
    """States of draft model (M, E) and target (M, D) that predict the M tokens X_t."""
    ours = model.hidden(batch.input_ids)[batch.predicts]
    return ours, batch.hidden[batch.predicts]


def loss(drafter, target, batch) -> tuple[Tensor, Tensor | int]:
    """The summed loss, and the weight to divide it by.

    Stage head: the weighted binary cross-entropy of 3.3 between the labels P and the
    head's predictions P^, -(w_acc P log P^ + w_rej (1 - P) log(1 - P^)) with w_acc = 1.
    The weight is the sum of w_acc P + w_rej (1 - P). Stage draft: `distil_loss`.
    """
    if drafter.config.stage == "draft":
        return distil_loss(drafter, target, batch)
    hidden, accept_prob = labelled(drafter, target, batch)
    logits = drafter.head(hidden)  # (J,)
    # The paper weighs rejections more because they are rare, and because the head may
    # be over-confident: it is trained on Z and used on real drafts (3.3).
    #
    # The rest is ours. The weight shifts the best prediction: where labels have the
    # mean P, the loss is smallest at P / (P + w_rej (1 - P)). For w_rej = 6 and P = .72
    # that is .3, so with h = .7 a draft ends after y_2 if P < .72. A larger w_rej makes
    # drafts shorter, and a larger h makes them longer: tune h anew for each w_rej.
    accept = accept_prob  # w_acc P
    reject = drafter.config.w_rej * (1 - accept_prob)  # w_rej (1 - P)
    # log(1 - sigmoid(x)) is logsigmoid(-x).
    total = -(accept * F.logsigmoid(logits) + reject * F.logsigmoid(-logits)).sum()
    return total, (accept + reject).sum()


# ----------------------------------------------------------------------------- decoding

# Algorithm 2 is `propose` and `until_stop`, and then Decoding.verify of common.py.

VARIANTS = {  # named settings for bench.py, as in --method specdecpp:K2
    "K2": {"stop": "fixed", "gamma": 2},
    "K4": {"stop": "fixed", "gamma": 4},
}


def propose(model, decoding, cache: common.DraftCache):
    """Draft a chain after `decoding.ids`, until the caller stops.

    cache: the draft model's, of this answer.
    Yields y_i (1,), the q_draft (V,) that it was chosen from, and the hidden state
    e_(i-1) (E,) that q_draft was computed from. Ends after an end-of-sequence token,
    and where the logits processors allow no draft token.
    """
    # `rewind` drops the rows of rejected tokens, and returns the ids that the draft
    # model has not read: at first the prompt, later the bonus token, and after a fully
    # accepted draft also its last token, which was submitted without having been read.
    new = cache.rewind(decoding.ids)  # (1, n)
    drafted = []
    while True:
        cache.record(new)
        hidden = model.hidden(new, cache)[:, -1]  # (1, E), e_(i-1)
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


@common.windowed
@torch.no_grad()
def drafts(decoding, drafter, **changes):
    """Yield one draft per round. Verify each draft before you ask for the next one.

    For target.generate(**inputs, custom_generate=...), with speculate of common.py:

        speculate(specdecpp.drafts, drafter)                         # Algorithm 2
        speculate(specdecpp.drafts, drafter, stop="fixed", gamma=4)  # Algorithm 1
        speculate(specdecpp.drafts, specdecpp.wrap(lm, target))      # any causal LM

    changes: other values for fields of the Config with decode=True. threshold and
        max_draft matter only with stop="head", and gamma only with stop="fixed".
    Raises UserError, at the first draft, for a wrong change or drafter, for a draft
    model that cannot be used, and for stop="head" without a trained head; later, if the
    text outgrows the draft model's context.
    """
    common.check_drafter(drafter, Drafter, decoding.target)
    config = common.changed(drafter.config, changes)
    if config.stop == "head" and config.stage == "draft":
        raise common.UserError(
            "stop head, but no acceptance head has been trained: train one (stage "
            "head), or use stop=fixed"
        )
    model = model_of(drafter, decoding.target)
    limit = config.gamma if config.stop == "fixed" else config.max_draft
    cache = common.DraftCache(model.num_layers)
    while not decoding.done:
        steps = propose(model, decoding, cache)
        steps = itertools.islice(steps, min(limit, decoding.max_depth))
        p_hats = []  # p^ after y_1 to y_(N-1), for the replay page and stop_rules.py
        if config.stop == "head":
            steps = list(until_stop(steps, drafter.head, config.threshold))
            p_hats = [p_hat for *_, p_hat in steps[1:]]
        pairs = (step[:2] for step in steps)  # token and q_draft
        yield common.chain(pairs, decoding.ids, chances=p_hats)


# ---------------------------------------------------------------------- the draft model

# By default it is some layers of the target, copied and then distilled. It may also be
# any causal LM with the target's vocabulary, and `drafter.lm` any object with the
# members that are listed under "training objective".


def distil_loss(drafter, target, batch) -> tuple[Tensor, int]:
    """The loss of stage draft (ours), summed over the M answer tokens, and M.

    The cross-entropy between the target's distribution, renormalised over the draft
    vocabulary, and the draft model's.
    """
    model = model_of(drafter, target)
    ours, theirs = response_hidden(model, batch)
    logits = model.logits(ours)  # (M, Vd)
    p_target = common.target_logits(target, theirs, model.vocab_ids).softmax(-1)
    return F.cross_entropy(logits, p_target, reduction="sum"), len(logits)


def acceptance(drafter, target, batch) -> tuple[Tensor, int]:
    """The draft model's acceptance rate at temperature 1, summed over M places, and M.

    At each place of the batch's text it is sum_x min(p_target, q_draft). It stays the
    same while the head is trained.
    """
    model = model_of(drafter, target)
    ours, theirs = response_hidden(model, batch)
    q_draft = model.logits(ours).softmax(-1)  # (M, Vd)
    return common.overlap(target, theirs, q_draft, model.vocab_ids), len(ours)


class CopiedLayers:
    """The drafter's layers, between the target's embedding and its LM head."""

    def __init__(self, drafter, target):
        self.drafter = drafter
        self.target = target
        self.vocab_ids = drafter.vocab_ids
        self.num_layers = len(drafter.layers)
        # Without soft cap and bias, as the layers were trained with it.
        lm_head = common.draft_head(target, drafter.vocab_ids)
        self.lm_head = lm_head.to(drafter.norm.weight.dtype)

    def hidden(self, ids: Tensor, cache=None) -> Tensor:
        read = 0 if cache is None else cache.get_seq_length()  # P_own
        n = ids.shape[1]
        embeds = self.target.get_input_embeddings()(ids)
        x = embeds.to(self.drafter.norm.weight.dtype)  # (B, n, D)
        positions = torch.arange(read, read + n, device=x.device)[None]
        tables = common.rotary(self.target, positions, -1)  # of the target's top layer
        head_dim = self.drafter.config.target["head_dim"]
        tables = common.whole_rotary(tables, head_dim, x.dtype)
        mask = None  # causal if no rows are cached; a single token sees every row
        if read > 0 and n > 1:
            mask = torch.ones(n, read + n, dtype=torch.bool, device=x.device)
            mask = mask.tril(read)[None, None]  # (1, 1, n, P_own + n)
        for layer in self.drafter.layers:
            x = layer(x, mask, None, cache, position_embeddings=tables)
        return self.drafter.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()


class CausalLM:
    """A causal LM with the target's vocabulary (4.1).

    Only the sizes of the vocabularies are compared: the tokenizer must be the target's.
    Raises UserError if it cannot draft for the target, or if a text is longer than its
    context.
    """

    def __init__(self, lm, target):
        config = lm.config.get_text_config()
        size, vocab = config.vocab_size, target.config.get_text_config().vocab_size
        wrong = f"the draft model has {size} tokens, not {vocab}: choose another one"
        elsewhere = f"the draft model is on {lm.device}: move it to {target.device}"
        common.refuse((size != vocab, wrong), (lm.device != target.device, elsewhere))
        try:  # as with a target, rejected tokens must be removable from its cache
            common.check_target(lm)
        except common.UserError as error:
            name = type(lm).__name__
            raise common.UserError(f"as a draft model {name}: {error}") from None
        self.lm = lm
        self.vocab_ids = torch.arange(vocab, device=target.device)
        self.num_layers = config.num_hidden_layers
        self.context = getattr(config, "max_position_embeddings", None)
        self.width = config.hidden_size  # E

    def hidden(self, ids: Tensor, cache=None) -> Tensor:
        length = ids.shape[1] + (0 if cache is None else cache.get_seq_length())
        if self.context and length > self.context:
            raise common.UserError(
                f"the draft model reads {self.context} tokens at most: set a lower "
                "window, max_new_tokens or --max-length, or choose another draft model"
            )
        return common.last_hidden(self.lm, ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return common.target_logits(self.lm, hidden)

    def __deepcopy__(self, memo):  # a copied drafter drafts with the same LM
        return self


class Drafter(
    nn.Module,
    PyTorchModelHubMixin,
    paper_url="https://arxiv.org/abs/2405.19715v1",  # shown on a drafter's model card
    license="apache-2.0",
    tags=["speculative-decoding", "specdecpp"],
):
    """What is trained and saved: the head, and the copied layers of a draft model."""

    kv_layers = ()  # no keys and values of the target are read

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        shape = config.target
        width = config.width or shape["hidden_size"]
        self.lm = None  # a CausalLM, which is not a module and not saved
        if not config.draft_model:
            llama = common.llama_config(shape, config.intermediate_size)
            count = len(config.layers)
            layers = [LlamaDecoderLayer(llama, index) for index in range(count)]
            self.layers = nn.ModuleList(layers)
            self.norm = nn.RMSNorm(width, eps=1e-5)
        self.requires_grad_(config.stage == "draft")
        self.head = AcceptanceHead(width, config.head_depth)
        self.head.requires_grad_(config.stage == "head")
        common.add_vocab_ids(self, config.draft_vocab)  # only copied layers use them


def model_of(drafter: Drafter, target):
    """The draft model of a drafter; an LM that its config names is loaded once."""
    if drafter.lm is None and drafter.config.draft_model:
        drafter.lm = CausalLM(load_lm(drafter.config.draft_model, target), target)
    return drafter.lm or CopiedLayers(drafter, target)


def load_lm(name: str, target):
    """A causal LM, in the target's dtype and on its device."""
    return common.load_target(name, dtype=target.dtype, device=str(target.device))[0]


def wrap(lm, target, config: Config | None = None) -> Drafter:
    """A drafter that drafts with a causal LM, and whose head is untrained.

    config: the head's; None: no head is used, and a draft has `gamma` tokens. (If a
        head has been trained on this LM, load that drafter and set its `lm` to
        CausalLM(lm, target).)
    """
    model = CausalLM(lm, target)
    config = config or Config(stop="fixed")
    # A name keeps Drafter from making layers, now and when it is loaded again.
    name = config.draft_model or lm.config.name_or_path or "an LM in memory"
    sizes = {"target": common.target_shape(target), "width": model.width}
    changes = sizes | {"draft_model": name, "draft_vocab": 0}
    drafter = Drafter(dataclasses.replace(config, **changes))
    drafter.lm = model
    return drafter.to(target.device, target.dtype).eval()


def build(config: Config, target, token_counts: Tensor) -> Drafter:
    """An untrained drafter, with copied layers or with only a head.

    Weights are copied where their names and shapes agree with Llama's.

    token_counts: (V,) how often each token occurs in the responses.
    Raises UserError for layers that the target does not have, and for a `draft_model`
    that cannot be loaded or used.
    """
    untrained = "a draft_model is not trained, only its head: use --stage head"
    common.refuse((config.draft_model and config.stage == "draft", untrained))
    if config.draft_model:
        return wrap(load_lm(config.draft_model, target), target, config)
    drafter = Drafter(dataclasses.replace(config, target=common.target_shape(target)))
    theirs = common.target_layers(target)  # some targets have no `layers`
    copied = [theirs[layer] for layer in drafter.config.layers] if theirs else []
    common.start_from(drafter, target, token_counts, zip(drafter.layers, copied))
    return drafter


# ------------------------------------------------------------------------------- theory


def throughput(
    verification: float, discard: float, t_draft: float, t_target: float
) -> float:
    """Tokens per second, 1 / latency (Eq. 2.3).

    verification: N_target / N. discard: N_discarded / N.
    t_draft, t_target: seconds of a pass and of a forward.
    """
    # An answer takes t_draft N_draft + t_target N_target (Eq. 2.1). Each pass and each
    # forward supplies one token, so N_draft = N + N_discarded - N_target (one more if
    # the end of the answer was drafted). This gives Eq. 2.2, and divided by N:
    latency = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return 1 / latency


def oracle(agrees: list[bool]) -> int:
    """N_target of the best stopping times, decoding greedily (Lemma 2.1).

    agrees[i]: whether the draft model's likeliest token, after the answer's tokens
        before place i, is token i. The answer has at least one token.
    """
    # Each draft ends just before the next disagreement, and the forward that verifies
    # it supplies the token there. That is one round for each place in S, the set of
    # disagreements, and one for the rest of the answer. If the last token is in S,
    # nothing is left after it, and N_target is |S|, not the lemma's |S| + 1. Where the
    # first token or two neighbours are in S, the best draft is empty, which Algorithm 2
    # never submits.
    return 1 + sum(not agree for agree in agrees[:-1])


def stop_threshold(c1: float, c2: float, delta: float = 0.0) -> float:
    """The bound of Theorem 3.1 on P(at least one of y_1 to y_k is rejected | prefix).

    At or above it, stopping has the smaller expected total cost, for time-homogeneous
    policies with a bounded draft length. A stop drafts y_(k+1) before it submits.
    c1, c2: t_draft and t_target - t_draft.
    delta: depends on the policy, the prompt, both models, c1 and c2; it is not known.
    """
    # How we read the bound on this probability, R, without its proof in appendix D: if
    # a token is rejected, continuing wastes at least a pass, c1. If none is, stopping
    # costs at most c2 + delta more than continuing. At the bound R c1 = (1 - R)(c2 +
    # delta). With the paper's times, .0234 s and .112 s (4.2), it is .79 at delta = 0.
    #
    # Do not use it as h: delta is unknown, stopping may be cheaper below it as well
    # (the condition is sufficient, not necessary), and 1 - p^ does not estimate R well,
    # because the loss biases the head (see `loss`). h is tuned, as in the paper (4.1).
    return (c2 + delta) / (c1 + c2 + delta)


if __name__ == "__main__":
    common.demo(Drafter, "specdecpp", drafts)


# --------------------------------- deviations from the paper, and the authors' code
#
# Deviations from v1 (without its appendices), and choices where it is silent:
#  1. The paper's draft model is given (3.1). By default it is made here, from layers of
#     the target that first learn the target's distributions (stage "draft"). Next to
#     so small a model the head is not "negligible" (3.2): it has about 8% of the
#     weights that a pass reads.
#  2. Copied layers draft and learn frequent tokens only (`draft_vocab`), without the
#     target's soft cap and bias.
#  3. Labels are greedy by default; with a `temperature` of 1 they are the paper's.
#     Decode at that temperature, without top-p. The texts are those given for training;
#     the paper's are the target's, one for each prompt.
#  4. Y and Z are sampled anew in each training step.
#  5. A draft has at most `max_draft` = 20 tokens. In 4.1 it stops when their number
#     "exceeds 20", that is, at the 21st.
#  6. It ends after an end-of-sequence token, and where the answer must end.
#  7. The "(D+1)-layer ResNet" (4.1) is `head_depth` different blocks and one logit.
#  8. The loss is divided by the sum of its weights, as in the authors' code.
#  9. e_i is the state after the final norm; the paper does not say which it takes.
# 10. The draft model sees a window of a long text (common.windowed).
# 11. D = 3, w_rej = 6 and h = .7 are the paper's choice for its models (4.3). r is not
#     in its main text; 15 is the value of the authors' code.
#
# Where the authors' code differs (both were run with the same random weights):
#  - The head applies one block `head_depth` times, and has two outputs and a softmax.
#  - Y and Z are sampled once, before the training. Labels use the plain softmax,
#    but texts and answers are sampled with the checkpoint's settings.
#  - In the last rounds of an answer it drafts beyond the maximum length.
#  - It does not have the slip of the printed Algorithm 2 (see `until_stop`).
