"""grammars.py with the real engines: legal texts, and greedy ones as without
drafts.
"""

import re

import pytest
import torch
from chat import letters
from test_data import CHATML
from tiny import make_drafts, make_llama

import common
from support import cli
from support.interop import grammars

pytestmark = pytest.mark.slow
FORM = r"\[[abc]+(,[abc]+)*\]"  # what answers look like
SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each byte."""
    return letters(SPECIAL, SPECIAL[1], CHATML)


@pytest.fixture(scope="module")
def target(tokenizer):
    target = make_llama(vocab=len(tokenizer), layers=2, seed=1)
    target.generation_config.eos_token_id = 1
    return target


def xgrammar(tokenizer, length):
    engine = pytest.importorskip("xgrammar")
    size = len(tokenizer)
    info = engine.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    grammar = engine.GrammarCompiler(info).compile_regex(FORM)
    return {"logits_processor": [grammars.XGrammar(grammar, length)]}


def llguidance(tokenizer, length):
    engine = pytest.importorskip("llguidance")
    hf = pytest.importorskip("llguidance.hf")
    grammar = engine.LLMatcher.grammar_from_regex(FORM)
    matcher = engine.LLMatcher(hf.from_tokenizer(tokenizer), grammar)
    return {"logits_processor": [grammars.LLGuidance(matcher, length)]}


def lm_format_enforcer(tokenizer, length):
    engine = pytest.importorskip("lmformatenforcer")
    core = pytest.importorskip("lmformatenforcer.tokenenforcer")
    words = [(n, tokenizer.decode([n]), False) for n in range(2, len(tokenizer))]
    decode = tokenizer.decode
    data = core.TokenEnforcerTokenizerData(words, decode, [1], False, len(tokenizer))
    enforcer = core.TokenEnforcer(data, engine.RegexParser(FORM))

    def allowed(_, ids):
        return enforcer.get_allowed_tokens(ids.tolist()).allowed_tokens

    return {"prefix_allowed_tokens_fn": allowed}


@pytest.mark.parametrize("engine", [xgrammar, llguidance, lm_format_enforcer])
@pytest.mark.parametrize("name", cli.METHODS)
def test_texts_are_those_of_the_grammar(tokenizer, target, engine, name):
    ids = tokenizer("list: ", return_tensors="pt")["input_ids"]
    decode = common.speculate(make_drafts(name, target)[0])

    def answer(**how):
        more = engine(tokenizer, ids.shape[1])
        options = {"max_new_tokens": 24, "pad_token_id": 0, **more, **how}
        return tokenizer.decode(target.generate(ids, **options)[0, ids.shape[1] :])

    plain = answer(do_sample=False)
    assert plain.startswith("[")
    assert answer(do_sample=False, custom_generate=decode) == plain
    whole = 0
    for seed in range(6):
        torch.manual_seed(seed)
        said = answer(do_sample=True, top_k=0, custom_generate=decode)
        text, end, after = said.partition(SPECIAL[1])
        assert not after
        whole += bool(end)
        # A text that was cut is the beginning of one.
        assert (
            re.fullmatch(FORM, text if end else text.rstrip("],") + "]")
            or len(text) < 2
        )
    assert whole, "no text was ended"


def test_a_rule_of_xgrammar_ends_when_its_tokens_are_used_up():
    """Also if other texts were asked about in between, as in a token tree."""
    engine = pytest.importorskip("xgrammar")
    tokens = ["<eos>", *"</>think abc;0123456789"]
    info = engine.TokenizerInfo(tokens, stop_token_ids=[0])
    grammar = engine.GrammarCompiler(info).compile_grammar(
        'root ::= "<think>" thought ("</think>" | ";") [0-9]+\n'
        "thought[max_tokens=8] ::= [^]*\n"
    )
    for seed in range(10):
        table = torch.randn(
            len(tokens), len(tokens), generator=torch.Generator().manual_seed(seed)
        )
        table[:, 0] = -9.0  # an answer that does not end
        processor = grammars.XGrammar(grammar, 1)
        ids = torch.zeros(1, 1, dtype=torch.long)
        while ids.shape[1] < 30:
            scores = processor(ids, table[ids[0, -1]][None].clone())
            for token in scores[0].topk(3).indices:  # siblings
                if scores[0, token].isfinite():
                    other = torch.cat([ids, token.view(1, 1)], dim=1)
                    processor(other, table[token][None].clone())
            ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
        text = "".join(tokens[n] for n in ids[0, 1:])
        assert re.fullmatch(r"<think>.{0,8}(</think>|;)[0-9]*", text), text
