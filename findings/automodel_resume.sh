#!/usr/bin/env bash
# Guess: an EAGLE-3 run of NeMo Automodel that stopped within an epoch goes on from its step
#   checkpoint (ckpt_every_steps, restore_from) with the rows that it has not seen yet.
# What happens: it begins the epoch again with the first row, but keeps its step count and stops at
#   the planned number of steps, without a warning. With several processes the order of an epoch is
#   the same, so that the rows in front of the checkpoint are seen twice and as many at the end of
#   the last epoch never. With one process the order is drawn anew, so that both are a matter of luck.
# Why it matters: drafters are often trained for one epoch. After a stop in the middle, one has seen
#   half of the data twice and the other half never, though its draft vocabulary was counted on all
#   of it. Only checkpoints at the end of an epoch go on as they should.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.18.0 datasets==5.2.0 torchao==0.18.0 \
    torchdata==0.11.0 jinja2 pillow requests
  "$VENV"/bin/pip install -q --no-deps nemo-automodel==0.7.0
fi
cat > "$work/try.py" <<'EOP'
import collections
import importlib.metadata
import json
import os
import sys

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROWS, VOCAB = 24, 64
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS = ROWS // WORLD  # of one epoch
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]


def prepare():
    """A tiny target, its tokenizer and the data: row i asks for the i-th word."""
    words = SPECIAL + [f"w{i}" for i in range(VOCAB - len(SPECIAL))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user> ' + m['content'] + ' <assistant> ' }}"
        "{% else %}{% generation %}{{ m['content'] + ' </s>' }}{% endgeneration %}{% endif %}{% endfor %}")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2)).save_pretrained("target")
    fast.save_pretrained("target")
    with open("train.jsonl", "w") as file:
        for i in range(ROWS):
            turns = [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w30 w31 w32 w33"}]
            file.write(json.dumps({"messages": turns}) + "\n")


if sys.argv[1] == "prepare":
    prepare()
    sys.exit(0)

import nemo_automodel.recipes.llm.train_eagle3 as recipe
from nemo_automodel.components.config.loader import ConfigNode


class Target:
    """Automodel's own loader asks for a GPU."""

    @staticmethod
    def from_pretrained(path, **_):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


recipe.NeMoAutoModelForCausalLM = Target


class Stopped(Exception):
    pass


class Recipe(recipe.TrainEagle3Recipe):
    """Notes the rows that it trains on; stops like a process that is killed."""

    def _forward_batch(self, batch, *more):
        if self.runtime.global_step == self.stop:
            raise Stopped
        self.rows += [int(ids[1]) - len(SPECIAL) for ids in batch["input_ids"]]
        return super()._forward_batch(batch, *more)


def run(out, epochs, stop=None, restore=None, **more):
    """The rows of a run and its last step."""
    trainer = Recipe(ConfigNode({
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "recipe_args": {
            "target_model_name_or_path": "target", "train_data_path": "train.jsonl", "output_dir": out,
            "seq_length": 16, "micro_batch_size": 1, "num_epochs": epochs, "ttt_steps": 2,
            "log_every_steps": 1000} | more,
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"enabled": True, "checkpoint_dir": out + "/checkpoints"}
        | ({"restore_from": restore} if restore else {})}))
    trainer.rows, trainer.stop = [], stop
    trainer.setup()
    try:
        trainer.run_train_validation_loop()
    except Stopped:
        pass
    return trainer.rows, trainer.runtime.global_step


def everyone(rows):
    """The rows of all processes."""
    if WORLD == 1:
        return list(rows)
    parts = [None] * WORLD
    torch.distributed.all_gather_object(parts, rows)
    return sum(parts, [])


if RANK == 0 and WORLD == 1:
    print(f"nemo-automodel {importlib.metadata.version('nemo-automodel')}, transformers {transformers.__version__}, "
          f"EAGLE-3, {ROWS} rows\nprocesses, epochs, checkpoint | steps | rows by how often they were trained on")
right = True
half = STEPS // 2
for epochs, kind, save in ((1, "never stopped", {}),
                           (1, "half of the epoch", {"ckpt_every_steps": half}),
                           (2, "half of the first", {"ckpt_every_steps": half}),
                           (2, "end of the first", {"save_checkpoint_every_epoch": True})):
    out = f"{kind} of {epochs}, {WORLD}".replace(" ", "-")
    if not save:
        rows, steps = run(out, epochs)
    else:
        at = STEPS if "save_checkpoint_every_epoch" in save else half
        rows, _ = run(out, epochs, stop=at, **save)
        more, steps = run(out, epochs, restore="LATEST", **save)
        rows += more
    times = collections.Counter(rows := everyone(rows))
    times = collections.Counter(times[i] for i in range(ROWS))
    right &= steps == epochs * STEPS and len(rows) == epochs * ROWS
    if kind in ("never stopped", "end of the first"):
        right &= times == {epochs: ROWS}
    elif WORLD == 1:
        right &= times[epochs] < ROWS and times[epochs - 1] > 0
    else:
        right &= times == {epochs - 1: ROWS // 2, epochs + 1: ROWS // 2} or (epochs == 2 and times[2] < ROWS)
    if RANK == 0:
        print(f"{WORLD}, {epochs}, {kind:17} | {steps:2} | "
              + ", ".join(f"{count} {n} times" for n, count in sorted(times.items())), flush=True)
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
"$VENV/bin/python" try.py prepare 2> log || { tail -n 3 log >&2; exit 1; }
"$VENV/bin/python" try.py run 2> log | grep '^nemo\|^processes\|^1, ' || { tail -n 3 log >&2; exit 1; }
"$VENV/bin/python" -m torch.distributed.run --nproc_per_node 2 --master_port "$MASTER_PORT" try.py run 2> log \
  | grep '^2, ' || { tail -n 3 log >&2; exit 1; }
