#!/usr/bin/env bash
# Guess: padding is not trained on. The Medusa heads of modelopt, trained with its own collator, have
#   a loss over the tokens of the text, however long the rows are made.
# What happens: the collator's labels are the pad tokens themselves where a row is padded (it pads
#   all rows to train_len), and Medusa's loss looks at labels alone, so that the heads learn to
#   write padding. EAGLE's and DFlash's losses leave it out by the attention mask.
# Why it matters: in rows of 53 tokens in 512, nine labels of ten are padding. The loss is theirs: it
#   falls towards 0 by what it learns there, says little about the drafts, and its gradient is
#   diluted by the share of padding, which differs from batch to batch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.14.1 accelerate==1.15.0 \
    datasets==5.2.0 jinja2 requests nvidia-modelopt==0.47.0
fi
cat > "$work/try.py" <<'EOP'
import sys
import warnings

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

warnings.filterwarnings("ignore")
real, sys.stdout = sys.stdout, sys.stderr  # modelopt prints, too
import modelopt
import modelopt.torch.speculative as mtsp
from modelopt.torch.utils.plugins.transformers_dataset import LanguageDataCollator

symbols = ["<pad>", "<s>", "</s>", "<mask>", "U", "A", *"abcdefghijklmnopqrstuvwxyz"]
inner = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, "<pad>"))
inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
    padding_side="right")
TEMPLATE = ("{% for m in messages %}{{ 'U' + m.content if m.role == 'user' else "
            "'A' + m.content }}{% endfor %}")
TEXT = 51  # letters of an answer
torch.manual_seed(0)
plain = LlamaForCausalLM(LlamaConfig(
    vocab_size=len(symbols), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3))


@torch.no_grad()
def rows(count, seed):
    """Messages whose answers the target itself drew, of letters."""
    torch.manual_seed(seed)
    ids = torch.tensor([[4, 5]]).repeat(count, 1)
    for _ in range(TEXT):
        logits = plain.lm_head(plain.model(ids).last_hidden_state[:, -1])[:, 6:]
        ids = torch.cat([ids, 6 + logits.softmax(-1).multinomial(1)], 1)
    return [{"messages": [{"role": "user", "content": ""},
                          {"role": "assistant", "content": "".join(symbols[i] for i in row[2:])}]}
            for row in ids.tolist()]


learn, test = rows(64, 1), rows(32, 2)


def train(length, steps):
    """The last loss, and how many of the first head's tokens are right in texts without padding."""
    model = LlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(3)
    mtsp.convert(model, [("medusa", {"medusa_num_heads": 1})])
    collate = LanguageDataCollator(
        tokenizer, train_len=length, chat_template=TEMPLATE, return_labels=True)
    optimizer = torch.optim.AdamW(model.medusa_heads.parameters(), lr=3e-3)
    for step in range(steps):
        given = collate([learn[i] for i in torch.randint(0, len(learn), (4,))])
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
    share = (given["labels"] != -100).sum().item() / (4 * (TEXT + 2))
    given = collate(test)
    ids = given["input_ids"][:, :TEXT + 2]
    with torch.no_grad():
        drafted = model(input_ids=ids).medusa_logits[0].argmax(-1)
    return loss.item(), share, (drafted[:, 2:-2] == ids[:, 4:]).float().mean().item()


print(f"modelopt {modelopt.__version__}, transformers {transformers.__version__}, Medusa, rows of "
      f"{TEXT + 2} tokens\nrows padded to | labels, per token of the text | loss before training | "
      "after 60 steps | tokens right", file=real)
seen = {}
for length in (TEXT + 2, 512):
    first, share, _ = train(length, 1)
    seen[length] = first, share, *train(length, 60)[::2]
    print(f"{length} | {share:.2f} | {first:.3f} | {seen[length][2]:.3f} | {seen[length][3]:.3f}",
          file=real)
right = seen[512][1] > 9 and seen[TEXT + 2][1] < 1 and seen[512][2] < 0.5 * seen[TEXT + 2][2]
right &= seen[512][3] < 0.5 * seen[TEXT + 2][3]
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
