#!/usr/bin/env bash
# Guess: SpecForge's EAGLE-3 loss is a mean over the tokens it trains on, so prompt tokens and
#   padding change nothing; and where two terms are mixed (the "lambda" LK loss), both are means
#   over the same tokens.
# What happens: the cross-entropy ("KL") term is divided by all positions of the batch, including
#   prompt and padding; the acceptance term by the trained positions alone.
# Why it matters: a batch padded to twice its length trains with half the gradient, and the ratio
#   of the two LK terms, which the loss sets with care, changes with the padding.
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
import torch.nn.functional as F
from specforge.algorithms.eagle3 import model as eagle3

V, T = 64, 48  # the target's vocabulary, positions of one row


torch.manual_seed(0)
t2d = torch.ones(V, dtype=torch.bool)
logits, target = torch.randn(1, T, V), 3 * torch.randn(1, T, V)
mask = torch.ones(1, T, 1, dtype=torch.int)
p, p_on_draft, _, inside = eagle3._compute_target_p_padded(target, t2d, mask, 1)
p, p_on_draft = p[:, :T], p_on_draft[:, :T]


def longer(x, count, value=0):
    return F.pad(x, (0, 0, 0, count), value=value)


print(f"specforge 0.2.0, EAGLE-3, one row of {T} trained tokens and positions that are masked out")
print("masked out | loss (gradient's norm): cross-entropy | LK alpha | LK lambda")
rows = []
for count in (0, T, 3 * T):
    row = []
    for kind in (None, "alpha", "lambda"):
        x = longer(logits, count).requires_grad_(True)
        _, loss = eagle3._compute_loss_and_acceptance_rate(
            logits=x, target_p=longer(p, count, 1 / V), target_p_on_draft=longer(p_on_draft, count),
            position_mask=longer(inside, count), lk_loss_type=kind, kl_scale=1.0, kl_decay=1.0)
        (gradient,) = torch.autograd.grad(loss, x)
        row.append((loss.item(), gradient.norm().item()))
    rows.append(row)
    print(f"{count:10} | " + " | ".join(f"{loss:.4f} ({norm:.5f})" for loss, norm in row))
entropy = [row[0] for row in rows]
right = abs(entropy[1][0] / entropy[0][0] - 0.5) < 1e-3 and abs(entropy[1][1] / entropy[0][1] - 0.5) < 1e-3
right &= abs(rows[2][1][0] / rows[0][1][0] - 1) < 1e-3 and rows[2][2][0] < 0.9 * rows[0][2][0]
sys.exit(0 if right else "the behaviour has changed")
EOF
cd "$work"
export TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1  # the kernels, on a CPU
"$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
