#!/usr/bin/env bash
# Guess: with answer_only_loss=True modelopt trains a drafter on the tokens of the answers alone,
#   whichever drafter it is: EAGLE-3, DFlash or Medusa.
# What happens: the option puts -100 into the labels of all other tokens, but the EAGLE model does
#   not look at labels. It looks for a loss_mask, which the collator does not give, and takes the
#   attention mask instead. Its loss, gradient and accuracies are those of all tokens, prompts
#   included, to the last digit as without the option. DFlash and Medusa do as they are told.
# Why it matters: prompts are most of the tokens in many data sets, and are text that the target
#   would not write. The drafter is fitted to them, and its accuracies are mostly theirs. A drafter
#   with the option cannot be told from one without it.
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
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U' + m.content + 'A' }}"
    "{% else %}{% generation %}{{ m.content + 'U' }}{% endgeneration %}{% endif %}{% endfor %}")
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 64}


def drafter(kind):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(symbols), hidden_size=32, num_hidden_layers=6, initializer_range=0.3,
        max_position_embeddings=512, **HEADS))
    settings = {
        "eagle": {"eagle_architecture_config": HEADS | {
            "use_aux_hidden_state": True, "use_last_layernorm": True, "has_lm_head": True},
            "eagle_use_torch_compile": False},
        "dflash": {"dflash_architecture_config": HEADS | {"num_hidden_layers": 2},
                   "dflash_block_size": 4, "dflash_mask_token_id": 3,
                   "dflash_use_torch_compile": False},
        "medusa": {"medusa_num_heads": 2}}[kind]
    mtsp.convert(model, [(kind, settings)])
    return model.train()


def batch(kind, answers_only):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        padding_side="right")
    collate = LanguageDataCollator(
        tokenizer, train_len=64, chat_template=TEMPLATE, answer_only_loss=answers_only,
        shift_labels=kind != "dflash", return_labels=True)
    return collate([{"messages": [
        {"role": "user", "content": "thequickbrownfoxjumpsoverthelazydog"},
        {"role": "assistant", "content": "yesindeeditdoes"}]}])


print(f"modelopt {modelopt.__version__}, transformers {transformers.__version__}, one row with a "
      "prompt of 37 tokens and an answer of 16\n"
      "drafter | answer_only_loss | labels that are not -100 | loss (gradient's norm)", file=real)
seen = {}
for kind in ("eagle", "dflash", "medusa"):
    for only in (False, True):
        model, given = drafter(kind), batch(kind, only)
        torch.manual_seed(1)  # DFlash draws its anchors
        loss = model(**given).loss
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).sqrt()
        count = (given["labels"] != -100).sum().item()
        seen[kind, only] = loss.item(), norm.item()
        print(f"{kind:6} | {only!s:5} | {count:2} | {loss.item():.4f} ({norm.item():.4f})", file=real)
# What the EAGLE model does if it is given the mask by hand.
model, given = drafter("eagle"), batch("eagle", True)
given["loss_mask"] = given["assistant_masks"]
loss = model(**given).loss
print(f"eagle, with the collator's assistant_masks as loss_mask: {loss.item():.4f}", file=real)
right = seen["eagle", True] == seen["eagle", False] and loss.item() != seen["eagle", True][0]
right &= all(seen[kind, True] != seen[kind, False] for kind in ("dflash", "medusa"))
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
