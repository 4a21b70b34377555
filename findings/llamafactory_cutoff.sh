#!/usr/bin/env bash
# Guess: of a conversation that is longer than cutoff_len, LLaMA-Factory learns the beginning: the text is
#   cut at the end.
# What happens: the turn that crosses the limit is cut twice, at the end of its question and at the end of
#   its answer, in proportion to their lengths. The question loses its end and the header of the
#   assistant, and the answer's tokens are learned right behind. With mask_history the same is done to
#   the oldest turn, so that a text begins with half a question and an answer to it.
# Why it matters: a drafter or a target learns to answer in the middle of a question. Most long
#   conversations have such a turn, and nothing is printed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.5.4 accelerate==1.11.0 datasets==4.0.0 peft==0.18.1 \
    trl==0.24.0 av==16.0.0 omegaconf==2.3.0 pillow numpy
  "$VENV"/bin/pip install -q --no-deps llamafactory==0.9.5
fi
cat > "$work/try.py" <<'EOF'
import importlib.metadata
import os
import sys
import types

os.environ["DISABLE_VERSION_CHECK"] = "1"  # packages for training that are not needed here
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

real, sys.stdout = sys.stdout, sys.stderr  # LLaMA-Factory prints, too
sys.modules["torchaudio"] = types.ModuleType("torchaudio")  # only for sounds; not built for this torch
from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments

symbols = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
inner = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
inner.decoder = decoders.ByteLevel()
inner.add_special_tokens(symbols[:4])
messages = []
for question, answer in (("a" * 30, "b" * 30), ("c" * 60, "d" * 60), ("e" * 20, "f" * 20)):
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read(cutoff, **settings):
    """The text and the learned part of the conversation."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    arguments = DataArguments(template="qwen", cutoff_len=cutoff, **settings)
    processor = SupervisedDatasetProcessor(
        template=get_template_and_fix_tokenizer(tokenizer, arguments), tokenizer=tokenizer, processor=None, data_args=arguments)
    example = {"_prompt": [messages[:-1]], "_response": [messages[-1:]], "_system": ["Be brief."], "_tools": [""],
               "_images": [None], "_videos": [None], "_audios": [None]}
    rows = processor.preprocess_dataset(example)
    ids, labels = rows["input_ids"][0], rows["labels"][0]
    return tokenizer.decode(ids), tokenizer.decode([label for label in labels if label >= 0])


whole, _ = read(4000)
sys.stdout = real
print(f"llamafactory {importlib.metadata.version('llamafactory')}, a conversation of {len(inner.encode(whole).ids)} tokens")
good = True
for cutoff, settings in ((120, {}), (190, {}), (190, {"mask_history": True}), (230, {"mask_history": True})):
    text, learned = read(cutoff, **settings)
    print(f"\ncutoff_len={cutoff} {settings or ''}: the beginning of the text: {whole.startswith(text)}, its end: {whole.endswith(text)}")
    print(text.replace("\n", "\\n"))
    print("learned:", learned.replace("\n", "\\n"))
    good &= not whole.startswith(text) and not whole.endswith(text)
    good &= bool(settings) or "cd" in text
sys.exit(0 if good else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
