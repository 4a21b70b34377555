#!/usr/bin/env bash
# Guess: TRL's GKD loss is a mean over the tokens that it compares, whoever wrote them: the data,
#   the student (lmbda) or the teacher (seq_kd).
# What happens: for generated answers it is their sum, divided by the number of answer tokens in the
#   data set's batch, although these answers were replaced. The same generated tokens give a loss
#   and a gradient ten times as large if the data's own answers are ten times shorter.
# Why it matters: on-policy distillation is how draft models are fitted to their target. Its steps
#   then depend on texts that are not trained on: with short or empty reference answers the learning
#   rate is in effect many times the one given, and with lmbda between 0 and 1 the two kinds of
#   steps get different weights.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.23.0 datasets==5.2.0 trl==1.16.0
fi
cat > "$work/try.py" <<'EOF'
import sys
import warnings

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

warnings.filterwarnings("ignore")
from trl.experimental.gkd import GKDConfig, GKDTrainer

symbols = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzUA"]
inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, []))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ 'U' + m['content'] + 'A' if m['role'] == 'user' else "
    "m['content'] + '</s>' }}{% endfor %}")


def random_model(seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(symbols), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3, bos_token_id=1,
        eos_token_id=2, pad_token_id=0))
    with torch.no_grad():
        model.lm_head.weight[:3] = -model.lm_head.weight[:3].abs()
    return model


def step(length, **settings):
    """Loss and gradient norm of one step, and the tokens that were compared.

    length: of the data's answers.
    """
    torch.manual_seed(0)
    rows = [{"messages": [{"role": "user", "content": "hello"},
                          {"role": "assistant", "content": "x" * length}]}] * 4
    args = GKDConfig(
        output_dir="out", per_device_train_batch_size=4, max_steps=1,
        learning_rate=0.0, logging_steps=1, seed=0,
        beta=0.5, temperature=1.0, max_new_tokens=20, max_length=512, max_grad_norm=1e9,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, **settings)
    trainer = GKDTrainer(random_model(0), random_model(1), args=args, processing_class=tokenizer,
                         train_dataset=Dataset.from_list(rows))
    compared, means = [], []
    loss_of = trainer.generalized_jsd_loss

    def look(**given):
        compared.append((given["labels"] != -100).sum().item())
        means.append(loss_of(**given | {"num_items_in_batch": None}).item())
        return loss_of(**given)

    trainer.generalized_jsd_loss = look
    trainer.train()
    log = next(x for x in trainer.state.log_history if "loss" in x)
    mean = sum(n * m for n, m in zip(compared, means)) / sum(compared)
    return log["loss"], log["grad_norm"], sum(compared), mean


real, sys.stdout = sys.stdout, sys.stderr  # the trainer prints, too
print(f"trl {trl.__version__}, transformers {transformers.__version__}, GKD, one step of 4 rows\n"
      "answers by | tokens of an answer in the data | loss (gradient's norm) | tokens compared, "
      "their mean loss", file=real)
seen = {}
for name, settings in {"data": {"lmbda": 0.0}, "student": {"lmbda": 1.0},
                       "teacher": {"lmbda": 0.0, "seq_kd": True}}.items():
    for length in (5, 50):
        loss, norm, count, mean = seen[name, length] = step(length, **settings)
        print(f"{name:7} | {length + 1:2} | {loss:.3f} ({norm:.3f}) | {count}, {mean:.3f}",
              file=real)
right = all(abs(seen["data", n][0] / seen["data", n][3] - 1) < 0.01 for n in (5, 50))
for name in ("student", "teacher"):
    short, long = seen[name, 5], seen[name, 50]
    right &= short[2:] == long[2:] and abs(short[0] / long[0] - 51 / 6) < 0.1
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
