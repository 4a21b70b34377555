#!/usr/bin/env bash
# Guess: the AR (tokens per pass of the target) that modelopt's AcceptanceRateValidation reports is
#   the answer's tokens divided by the passes that it made for them, up to the end token, so that
#   drafts of 3 that are always right have an AR of 4.
# What happens: validate counts one pass more than it makes wherever accepted drafts complete the
#   answer. validate_online counts right, but does not look at the end token: it goes on behind it
#   until the number of tokens asked for is reached, and counts what is drafted there.
# Why it matters: the better the drafter and the shorter the answer, the more AR it loses, so that
#   differences between drafters shrink. The numbers of the two methods cannot be compared, and the
#   second one's depend on how well a drafter goes on where nobody will ask it to.
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
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
real, sys.stdout = sys.stdout, sys.stderr  # modelopt prints, too
import modelopt
import modelopt.torch.speculative as mtsp
from modelopt.torch.speculative.plugins.hf_eagle import HFARValidation

V, PROMPT, STEPS, END, TEXTS = 64, 6, 3, 2, 60
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 64}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=V, hidden_size=32, num_hidden_layers=2, initializer_range=0.3,
    max_position_embeddings=512, **HEADS)).eval()
mtsp.convert(model, [("eagle", {"eagle_use_torch_compile": False, "eagle_architecture_config": HEADS}
                      )])
passes = 0


class Tokens:
    """All that the validation wants of a tokenizer if it is given the ids."""
    chat_template, eos_token = "", "</s>"

    def convert_tokens_to_ids(self, token):
        return END


@torch.no_grad()
def write(ids, length):
    """The target's greedy answer."""
    for _ in range(length):
        ids = torch.cat([ids, model.lm_head(model.model(ids).last_hidden_state[:, -1:]).argmax(-1)], 1)
    return ids


def drafts_for(text, chance, seed=0):
    """A drafter that is right with a fixed chance, and else wrong, as the model's own method."""
    luck = torch.Generator().manual_seed(seed)

    def generate(ids, steps):
        global passes
        passes += 1
        right = torch.rand(1, steps, generator=luck) < chance
        following = text[:, ids.shape[1]:ids.shape[1] + 1 + steps]
        drafts = torch.where(right, following[:, 1:], (following[:, 1:] + 1) % V)
        return following[:, :1], drafts

    return generate


torch.manual_seed(1)
texts = write(torch.randint(3, V, (TEXTS, PROMPT)), 80).split(1)
validation = HFARValidation(model, Tokens())
print(f"modelopt {modelopt.__version__}, transformers {transformers.__version__}, AR, {STEPS} drafted "
      f"tokens, mean over {TEXTS} texts\n"
      "each draft is right with a chance of | tokens of an answer | validate | tokens per pass made",
      file=real)
right = True
for chance in (1.0, 0.8, 0.0):
    for length in (8, 32, 64):
        reported, made = [], []
        for seed, text in enumerate(texts):
            passes, model.pseudo_speculative_generate = 0, drafts_for(text, chance, seed)
            reported.append(validation.validate(
                length, input_ids=text[:, :PROMPT], ground_truth=text[:, :PROMPT + length],
                steps=STEPS)[1])
            made.append(length / passes)
        reported, made = (sum(x) / TEXTS for x in (reported, made))
        print(f"{chance} | {length:2} | {reported:.2f} | {made:.2f}", file=real)
        if chance == 1.0:
            right &= made == STEPS + 1 and abs(reported - length / (length / 4 + 1)) < 1e-6
        if chance == 0.8:
            right &= reported < made
        if chance == 0.0:
            right &= made == reported == 1.0

# An answer that ends after 5 tokens.
text = next(text for text in texts if text[0, PROMPT + 4] not in text[0, PROMPT:PROMPT + 4])
END = text[0, PROMPT + 4].item()
validation = HFARValidation(model, Tokens())
model.pseudo_speculative_generate = drafts_for(text, 1.0)
ids, ar = validation.validate_online(40, input_ids=text[:, :PROMPT], steps=STEPS)
print(f"validate_online, an answer whose token 5 is the end token, 40 asked for: "
      f"{ids.shape[1] - PROMPT} tokens counted, AR {ar:.2f}", file=real)
right &= ids.shape[1] == PROMPT + 40
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
