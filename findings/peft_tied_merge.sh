#!/usr/bin/env bash
# Guess: a LoRA adapter on the head or the embedding of a model that ties the two, made with
#   ensure_weight_tying=True, can be merged like any other: the merged model is the trained one.
# What happens: both layers get the adapter, and merging adds each one's product to the weight that
#   they share, so twice. A warning says that merging can lead to complications, and to untie the
#   model first; but on an untied copy, made as it says, only the embedding gets the adapter (another
#   warning: no tied modules were found). With the head's weight cloned after the adapter is loaded,
#   merging is right.
# Why it matters: small draft models often have tied embeddings. The trained one is right, and so is
#   its adapter loaded back, but merged for an engine it drafts other tokens. Who does not set
#   ensure_weight_tying is warned that merging can go wrong without it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
fi
cat > "$work/try.py" <<'EOF'
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.simplefilter("always")
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, bos_token_id=1,
    eos_token_id=2, pad_token_id=0, tie_word_embeddings=True)).save_pretrained("tied")
text = torch.randint(3, 100, (8, 50), generator=torch.Generator().manual_seed(0))
# as the warning at the merge says
untied = AutoModelForCausalLM.from_pretrained("tied", tie_word_embeddings=False)
untied.lm_head.weight.data = untied.model.embed_tokens.weight.data.clone()
untied.save_pretrained("untied")


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(text).logits


def merged(model):
    """The model merged, saved and loaded back; whether a warning came."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.merge_and_unload().save_pretrained("merged")
    return AutoModelForCausalLM.from_pretrained("merged"), any(
        "complications" in str(w.message) for w in seen)


def cloned_head(model):
    """The tied model with its adapter, with a head of its own from here on."""
    head = model.get_base_model().lm_head.base_layer
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.get_base_model().config.tie_word_embeddings = False
    return model


def train(**settings):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("tied"), LoraConfig(
        r=4, lora_alpha=4, task_type="CAUSAL_LM", **settings))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(20):
        model(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("adapter")
    return model


settings = {
    "q_proj": {"target_modules": ["q_proj"]},
    "q_proj; modules_to_save: lm_head": {
        "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}}
for both in ["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]:
    settings[" ".join(["q_proj", *both])] = {
        "target_modules": ["q_proj", *both], "ensure_weight_tying": True}
print(f"peft {peft.__version__}, transformers {transformers.__version__}, a model with tied "
      "embeddings, LoRA with\nensure_weight_tying=True (but for q_proj alone). Share of 400 places "
      "where it drafts what the trained one does:\ntarget_modules | adapter loaded back | merged | merged into an untied copy "
      "| merged with the\nhead's weight cloned | how often the merged weight has the adapter's product")
right = True
for name, setting in settings.items():
    tied_too = len(setting["target_modules"]) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = train(**setting)
        trained = logits(model)
        back = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter")
                for base in ("tied", "untied", "tied")]
    if tied_too:
        head = model.get_base_model().lm_head
        product = head.get_delta_weight("default").detach().clone()
        old = head.base_layer.weight.detach().clone()
    whole, warned = merged(model)
    if tied_too:
        change = whole.lm_head.weight.detach() - old
        times = ((change * product).sum() / (product * product).sum()).item()
        assert (change - times * product).abs().max() < 1e-5
    loaded = logits(back[0])
    models = [whole, merged(back[1])[0]]
    if tied_too:
        models.append(merged(cloned_head(back[2]))[0])
    shares = [(other.argmax(-1) == trained.argmax(-1)).float().mean().item()
              for other in (loaded, *map(logits, models))]
    shown = [f"{share:.2f}" for share in shares] + ["-"] * (4 - len(shares))
    shown[1] += " (a warning)" * warned
    print(name, *shown, f"{times:.2f}" if tied_too else "-", sep=" | ")
    right &= warned == tied_too
    if tied_too:
        right &= abs(times - 2) < 0.01 and min(shares[0], shares[3]) > 0.99 > 0.9 > max(shares[1:3])
    else:
        right &= min(shares) > 0.99
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
