#!/usr/bin/env bash
# Guess: an EAGLE-3 drafter of NeMo Automodel that was trained with aux_layer_ids of one's own says
#   so in its exported config (eagle_aux_hidden_state_layer_ids), where vLLM looks for it, as DFlash
#   drafters of the same package say which layers they read. Or its command for vLLM passes them on.
# What happens: the exported config and the command for vLLM are the same whatever the layers were,
#   and there is no warning. An engine then takes its own default, other layers of the same width.
# Why it matters: the drafter is served on states that it has never seen. Answers stay right; only
#   the acceptance is gone, and the accuracy of the validation does not show it. (A config without
#   the field is right for the default of the training, which is the engines' own.)
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
import glob
import importlib.metadata
import json
import sys

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import nemo_automodel.recipes.llm.train_eagle3 as recipe
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.speculative import serve_vllm
from nemo_automodel.components.speculative.eagle.target import HFEagle3TargetModel

VOCAB, ROWS, WORDS, LAYERS = 64, 8, 16, 8
DEFAULT, OWN = [1, LAYERS // 2 - 1, LAYERS - 4], [0, 4, 7]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<assistant>"]

# A tiny target, its tokenizer and some answers, each 20 times an epoch.
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
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2)).save_pretrained("target")
fast.save_pretrained("target")
lines = ""
for i in range(ROWS):
    answer = " ".join(f"w{x}" for x in torch.randint(ROWS, VOCAB - len(SPECIAL), (WORDS,)).tolist())
    turns = [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": answer}]
    lines += json.dumps({"messages": turns}) + "\n"
open("train.jsonl", "w").write(20 * lines)
open("val.jsonl", "w").write(lines)


class Target:
    """Automodel's own loader asks for a GPU."""

    @staticmethod
    def from_pretrained(path, **_):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


recipe.NeMoAutoModelForCausalLM = Target


def train(out, layers):
    """Config, command for vLLM, and accuracy and simulated accept length with either layers."""
    trainer = recipe.TrainEagle3Recipe(ConfigNode({
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "recipe_args": {
            "target_model_name_or_path": "target", "train_data_path": "train.jsonl", "val_data_path": "val.jsonl",
            "output_dir": out, "seq_length": 24, "micro_batch_size": 8, "num_epochs": 6, "ttt_steps": 3,
            "log_every_steps": 1000} | ({"aux_layer_ids": layers} if layers else {}),
        "optimizer": {"lr": 5e-3},
        "checkpoint": {"enabled": True, "checkpoint_dir": out + "/checkpoints"}}))
    trainer.setup()
    trainer.run_train_validation_loop()
    seen = []
    for read in (DEFAULT, OWN):
        trainer.target_wrapper.aux_layer_ids = read
        _, accuracy, accepted = trainer._run_eval()
        seen.append((accuracy.item(), accepted))
    (folder,) = glob.glob(out + "/checkpoints/epoch_*")
    draft, config = serve_vllm.resolve_draft_artifacts(folder)
    config = json.load(open(draft + "/config.json"))
    argv = serve_vllm.build_vllm_argv(serve_vllm._parse_args(
        ["--target", "target", "--draft", folder, "--num-speculative-tokens", "3"]))
    return config, " ".join(argv[1:]).replace(folder, "DRAFT"), seen


plain, own = train("plain", None), train("own", OWN)
named = [key for key in own[0] if "aux" in key or "layer_ids" in key or key == "eagle_config"]
print(f"nemo-automodel {importlib.metadata.version('nemo-automodel')}, transformers {transformers.__version__}, "
      f"EAGLE-3, a target with {LAYERS} layers\n"
      f"trained on layers | accuracy (accept length) if it reads {DEFAULT} | {OWN}")
for layers, (_, _, seen) in ((DEFAULT, plain), (OWN, own)):
    print(f"{layers!s:17} | " + " | ".join(f"{accuracy:.3f} ({accepted:.2f})" for accuracy, accepted in seen))
print(f"exported configs equal: {plain[0] == own[0]}; commands for vLLM equal: {plain[1] == own[1]}; "
      f"fields that name layers: {named}\n{own[1]}")
right = plain[0] == own[0] and plain[1] == own[1] and not named
right &= plain[2][0][0] > 1.15 * plain[2][1][0] and own[2][1][0] > 1.15 * own[2][0][0]
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
"$VENV/bin/python" try.py > out 2> log || { tail -n 3 log >&2; exit 1; }
sed -n '/^nemo-automodel/,$p' out
