#!/usr/bin/env bash
# Guess: with do_sample, transformers' assisted decoding follows the target's distribution whether
#   the assistant has the target's tokenizer or another one (assistant_tokenizer=).
# What happens: with another tokenizer the very first token already follows another distribution;
#   a token of probability .004 can be drawn most of the time. How far it is off differs from
#   process to process, whatever the seeds, because get_vocab() of a tokenizer has a random order
#   in each. With one tokenizer it is right, and so are greedy answers with two.
# Why it matters: an assistant with another tokenizer is the way to draft for a model that has no
#   small sibling. At temperature 1 its answers are not the target's.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.23.0
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


def letters(names, merges=()):
    symbols = ["<pad>", "<s>", "</s>", *names, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, list(merges)))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
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
for name, other in (("the same letters and three merges", letters("abcdefghij", merges)),
                    ("the letters in another order", letters("jihgfedcba", merges))):
    ways["assistant with " + name] = {
        "assistant_model": random_model(other, 1), "tokenizer": one, "assistant_tokenizer": other}
prompt = one("abcabc", return_tensors="pt", add_special_tokens=False).input_ids
with torch.no_grad():
    exact = target(prompt).logits[0, -1].softmax(-1)
count = 60
print(f"transformers {transformers.__version__}, temperature 1, first token, {count} seeds")
ratios = []
for name, options in ways.items():
    greedy = [target.generate(prompt, do_sample=False, max_new_tokens=10, **o).tolist()
              for o in ({}, options)]
    drawn = torch.zeros_like(exact)
    for seed in range(count):
        torch.manual_seed(seed)
        drawn[target.generate(prompt, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                              max_new_tokens=2, **options)[0, prompt.shape[1]]] += 1
    often = count * exact >= 5
    value = ((drawn - count * exact) ** 2 / (count * exact))[often].sum().item()
    ratios.append(value / (often.sum().item() - 1))
    most = drawn.argmax().item()
    print(f"{name}: chi-square {value:.0f} at {often.sum() - 1} degrees of freedom; most often drawn "
          f"token {most}, {drawn[most] / count:.2f} (its probability {exact[most]:.3f}); "
          f"greedy equal: {greedy[0] == greedy[1]}")
right = max(ratios[:2]) < 3 and max(ratios[2:]) > 5
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
for process in 1 2 3 4; do  # in some, the order of the vocabularies does little harm
  if HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -u try.py 2> log; then exit 0; fi
done
tail -n 3 log >&2
exit 1
