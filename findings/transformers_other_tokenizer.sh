#!/usr/bin/env bash
# Guess: with do_sample, transformers' assisted decoding follows the target's distribution,
#   whether the assistant has the target's tokenizer or another one (assistant_tokenizer=).
# What happens: if the assistant's tokenizer has tokens that the target's lacks, the very first
#   token already follows another distribution: one of probability .004 can be drawn in most of
#   the calls. The draft's probabilities are given to the wrong tokens, in the order in which
#   get_vocab() lists them, which is another one in every process. With a get_vocab() in order
#   of the ids, the distribution is right. Greedy answers are right in any case.
# Why it matters: an assistant with another tokenizer is the way to draft for a model that has
#   no small sibling. At temperature 1 its answers are not the target's.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.24.0
fi
cat > "$work/try.py" <<'EOF'
import sys
import warnings

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


class InOrder(PreTrainedTokenizerFast):
    """The control: get_vocab() lists the tokens in order of their ids."""

    def get_vocab(self):
        return dict(sorted(super().get_vocab().items(), key=lambda item: item[1]))


def letters(names, merges=(), kind=PreTrainedTokenizerFast):
    symbols = ["<pad>", "<s>", "</s>", *names, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, list(merges)))
    inner.decoder = decoders.Fuse()
    return kind(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def random_model(tokenizer, seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, bos_token_id=1,
        eos_token_id=2, pad_token_id=0)).eval()
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0
    return model


one = letters("abcdefghij")
merges = [("a", "b"), ("c", "d"), ("e", "f")]
target = random_model(one, 0)
ways = {"without an assistant": {}, "assistant with the same tokenizer": {
    "assistant_model": random_model(one, 1)}}
for name, names in (("three more tokens", "abcdefghij"),
                    ("three more, other ids", "jihgfedcba")):
    for order, kind in (("", PreTrainedTokenizerFast), (", get_vocab() in order", InOrder)):
        other = letters(names, merges, kind)
        ways[f"assistant with {name}{order}"] = {
            "assistant_model": random_model(other, 1), "tokenizer": one, "assistant_tokenizer": other}
prompt = one("abcabc", return_tensors="pt", add_special_tokens=False).input_ids
with torch.no_grad():
    exact = target(prompt).logits[0, -1].softmax(-1)
count = 60
print(f"transformers {transformers.__version__}, temperature 1, first token, {count} seeds")
ratios = {}
for name, options in ways.items():
    greedy = [target.generate(prompt, do_sample=False, max_new_tokens=10, **o).tolist()
              for o in ({}, options)]
    drawn = torch.zeros_like(exact)
    for seed in range(count):
        torch.manual_seed(seed)
        drawn[target.generate(prompt, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                              max_new_tokens=2, **options)[0, prompt.shape[1]]] += 1
    often = count * exact >= 5
    drawn_often = torch.cat([drawn[often], drawn[~often].sum()[None]])  # the rare ones together
    expected = count * torch.cat([exact[often], exact[~often].sum()[None]])
    value = ((drawn_often - expected) ** 2 / expected).sum().item()
    ratios[name] = value / (len(expected) - 1)
    most = drawn.argmax().item()
    print(f"{name}: chi-square {value:.0f} at {len(expected) - 1} degrees of freedom; most often "
          f"drawn: token {most}, {drawn[most] / count:.2f} (its probability {exact[most]:.3f}); "
          f"greedy equal: {greedy[0] == greedy[1]}")
wrong = [ratio for name, ratio in ratios.items() if "three more" in name and "in order" not in name]
others = [ratio for ratio in ratios.values() if ratio not in wrong]
right = max(others) < 4 and max(wrong) > 10
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
for process in 1 2 3 4; do  # in a few, the order of get_vocab() does little harm
  if HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -u try.py 2> log; then exit 0; fi
done
tail -n 3 log >&2
exit 1
