#!/usr/bin/env bash
# Guess: the acceptance rate that SpecForge reports for an EAGLE-3 drafter with a smaller draft
#   vocabulary is the mean of sum min(p, q) over all tokens of the answers; a token that the
#   drafter cannot propose lowers it.
# What happens: positions whose likeliest target token is outside the draft vocabulary are left
#   out of the mean, although the accuracy that is logged with it counts them as wrong.
# Why it matters: what is left out is exactly where drafts fail, so the rate hardly says what a
#   smaller draft vocabulary costs. It must not be used to choose the vocabulary, nor be compared
#   with rates of other drafters.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0 transformers==5.15.0 datasets==5.0.1 psutil
  "$VENV/bin/python" -c 'import triton' 2> "$work/log" || "$VENV"/bin/pip install -q triton==3.9.0
  "$VENV"/bin/pip install -q --no-deps specforge==0.2.0
fi
cat > "$work/try.py" <<'EOF'
import sys

import torch
from specforge.algorithms.eagle3 import model as eagle3

V, T = 64, 48  # the target's vocabulary, positions of one row


torch.manual_seed(0)
target = 3 * torch.randn(1, T, V)
mask = torch.ones(1, T, 1, dtype=torch.int)  # every token belongs to the answer
print("specforge 0.2.0, EAGLE-3; the drafter is perfect: it has the target's own logits")
print("draft vocabulary | reported acceptance | sum min(p, q) over all tokens | accuracy's mean")
reported, true = [], []
for size in (64, 32, 16, 8):
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[:size] = True
    logits = target[..., :size].clone()
    p, p_on_draft, ids, inside = eagle3._compute_target_p_padded(target, t2d, mask, 1)
    rate, _ = eagle3._compute_loss_and_acceptance_rate(
        logits=logits, target_p=p[:, :T], target_p_on_draft=p_on_draft[:, :T],
        position_mask=inside, lk_loss_type=None, kl_scale=1.0, kl_decay=1.0)
    overlap = torch.minimum(target.softmax(-1)[..., :size], logits.softmax(-1)).sum(-1)
    correct = eagle3._compute_metric_acc(logits, ids[:, :T], mask, torch.zeros(V, dtype=torch.long))
    reported.append(rate.item())
    true.append(overlap.mean().item())
    print(f"{size:16} | {reported[-1]:19.3f} | {true[-1]:29.3f} | {correct.item():.3f}")
right = abs(reported[0] - 1) < 1e-3 and all(r - t > 0.15 for r, t in zip(reported[1:], true[1:]))
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
export TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1  # the kernels, on a CPU
"$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
