"""Logits processors for grammar engines that follow the ids they are asked about.

An engine's own processor takes each call for the next token of one text. A token tree
asks about several texts in a round, so such a processor is refused by `speculate`.
These follow the ids: they go back to where two texts part, and read on from there. Copy
what you need; each class needs only its engine and transformers.

    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(schema)
    processor = XGrammar(grammar, ids["input_ids"].shape[1])
    target.generate(**ids, custom_generate=decode, logits_processor=[processor])

A processor serves one answer. lm-format-enforcer needs no such class: the function of
its build_transformers_prefix_allowed_tokens_fn depends only on the ids.

Licence: Apache-2.0.
"""

import os

from torch import Tensor
from transformers import LogitsProcessor


class XGrammar(LogitsProcessor):
    """Forbid what a grammar of xgrammar does not allow next.

    grammar: compiled.
    prompt_length: tokens of the prompt; the grammar holds for what follows them.
    """

    def __init__(self, grammar, prompt_length: int):
        import xgrammar

        self.engine = xgrammar
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self.prompt_length = prompt_length
        self.read: list[int] = []  # the tokens that the matcher has accepted

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (1, V) after input_ids (1, T); all -inf after a text that is wrong."""
        text = input_ids[0, self.prompt_length :].tolist()
        same = len(os.path.commonprefix([text, self.read]))
        self.matcher.rollback(len(self.read) - same)
        del self.read[same:]
        mask = self.engine.allocate_token_bitmask(1, scores.shape[-1])
        for token in text[same:]:
            if self.matcher.is_terminated():
                return scores.fill_(float("-inf"))
            # After a rollback, a rule whose max_tokens are used up ends in accept_token
            # only if a mask has been filled before (findings/xgrammar_max_tokens.sh).
            self.matcher.fill_next_token_bitmask(mask)
            if not self.matcher.accept_token(token):
                return scores.fill_(float("-inf"))
            self.read.append(token)
        if self.matcher.is_terminated():  # nothing follows, so nothing is forbidden
            return scores
        self.matcher.fill_next_token_bitmask(mask)
        mask = mask.to(scores.device)
        self.engine.apply_token_bitmask_inplace(scores, mask)
        return scores


class LLGuidance(LogitsProcessor):
    """Forbid what a grammar of llguidance does not allow next.

    matcher: an LLMatcher at the beginning of the grammar.
    prompt_length: tokens of the prompt; the grammar holds for what follows them.
    """

    def __init__(self, matcher, prompt_length: int):
        self.matcher = matcher
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (1, V) after input_ids (1, T); all -inf after a text that is wrong."""
        import llguidance.torch as engine

        # A copy reads the whole text: after an end token, rollback may take back the
        # token before it instead.
        matcher = self.matcher.deep_copy()
        text = input_ids[0, self.prompt_length :].tolist()
        if matcher.try_consume_tokens(text) < len(text):
            return scores.fill_(float("-inf"))
        mask = engine.allocate_token_bitmask(1, scores.shape[-1])
        engine.fill_next_token_bitmask(matcher, mask)
        engine.apply_token_bitmask_inplace(scores, mask.to(scores.device))
        return scores
