#!/usr/bin/env bash
# Guess: apply_chat_template(return_assistant_tokens_mask=True) marks the assistant's tokens among
#   those that it returns, whichever end of the conversation was cut off.
# What happens: with truncation_side="left", a row in which the first assistant turn begins before
#   the cut has an empty mask, although later turns of the assistant are there in full. Truncation at
#   the right and padding are handled.
# Why it matters: this mask says what a draft model is trained on. Cutting at the left, which keeps
#   the last turns, leaves nothing to train on in the long conversations, without a warning.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q transformers==5.23.0 jinja2
fi
cat > "$work/try.py" <<'EOF'
import sys

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
tokenizer.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[U]' + m['content'] + '[A]' }}"
    "{% else %}{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{% endif %}"
    "{% endfor %}")
roles = ("user", "assistant")
talk = [{"role": roles[i % 2], "content": text} for i, text in enumerate(
    ["hi", "hello you", "how are you", "fine", "and now", "we go home"])]


def marked(side, length, padding_side="right"):
    """The text that is kept, and the assistant's share of it by the mask."""
    tokenizer.truncation_side, tokenizer.padding_side = side, padding_side
    row = tokenizer.apply_chat_template(
        [talk, talk[:1]], return_dict=True, return_assistant_tokens_mask=True, padding=True,
        truncation=length is not None, max_length=length)
    ids, mask = row["input_ids"][0], row["assistant_masks"][0]
    return tokenizer.decode(ids), tokenizer.decode([i for i, m in zip(ids, mask) if m])


print(f"transformers {transformers.__version__}: the text that is kept -> what is marked in it")
seen = {}
for side, length in (("right", None), ("right", 40), ("left", 60), ("left", 50), ("left", 40)):
    kept, mark = seen[side, length] = marked(side, length)
    print(f"{'whole' if length is None else f'{length} tokens, cut at the {side}'}: {kept} -> "
          f"{mark or '(nothing)'}")
whole = "hello you</s>fine</s>we go home</s>"
right = seen["right", None][1] == marked("right", None, "left")[1] == whole
right &= seen["right", 40][1].startswith("hello you</s>fine")
right &= all("fine</s>" in seen["left", n][0] and seen["left", n][1] == "" for n in (50, 40))
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
