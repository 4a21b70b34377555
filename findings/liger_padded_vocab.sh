#!/usr/bin/env bash
# Guess: Liger's fused distillation loss takes a teacher whose vocabulary is padded (its head has
#   rows more than the student's) and gives the tokens that the student lacks no probability: a
#   student that equals the teacher has loss 0.
# What happens: the student's missing logits are taken to be 0. That is much or little, by how high
#   its other logits are, although a constant added to all logits changes no distribution. Where
#   they lie below 0, the tokens that do not exist get nearly all the probability.
# Why it matters: small and large models of one family often differ in padding alone, and are just
#   the ones paired as draft model and target. The student is then taught to raise all its logits
#   rather than to write what the target writes, and its loss says nothing about acceptance. (If its
#   logits are far above 0, as many models' are, nothing is seen of it.)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${VENV:-}" ]; then
  VENV=$work/venv
  python3 -m venv "$VENV"
  "$VENV"/bin/pip install -q torch==2.13.0
  "$VENV"/bin/pip install -q --no-deps liger-kernel==0.8.5
fi
cat > "$work/try.py" <<'EOP'
import sys
from importlib.metadata import version

import torch
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

V, MORE, H, N = 64, 16, 32, 200  # the student's vocabulary, the teacher's padding, states, tokens
torch.manual_seed(0)
states, head = torch.randn(N, H), torch.randn(V, H) / 4
labels = torch.zeros(N, dtype=torch.long)
print(f"liger-kernel {version('liger-kernel')}, student and teacher are the same but for {MORE} tokens "
      "that the teacher never gives\nadded to all logits | loss (gradient's norm), padded teacher: "
      "forward KL | JSD | teacher not padded: forward KL | JSD")
right = True
for shift in (20.0, 0.0, -5.0, -20.0):
    cells = []
    for more in (MORE, 0):
        for beta in (0.0, 0.5):
            loss_of = LigerFusedLinearJSDLoss(
                weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
            student = states.clone().requires_grad_(True)
            bias = torch.full((V,), shift)
            loss = loss_of(
                student, head.clone(), states, torch.cat([head, torch.zeros(more, H)]), labels,
                bias, torch.cat([bias, torch.full((more,), shift - 50)]))
            loss.backward()
            cells.append((loss.item(), student.grad.norm().item()))
    print(f"{shift:5.0f} | " + " | ".join(f"{loss:.4f} ({norm:.4f})" for loss, norm in cells))
    right &= all(abs(loss) < 1e-4 for loss, _ in cells[2:])
    right &= cells[0][0] < 1e-4 if shift > 0 else cells[0][0] > 0.05
sys.exit(0 if right else "the behaviour has changed")
EOP
cd "$work"
OMP_NUM_THREADS=1 "$VENV/bin/python" try.py 2> log || { tail -n 3 log >&2; exit 1; }
