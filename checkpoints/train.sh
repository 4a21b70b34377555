#!/usr/bin/env bash
# Make every drafter of this folder again, one after another:   bash checkpoints/train.sh OUT
#
# On a CPU as they were made, on the conversations in the repository: four hours on one core, after nine minutes for the
# target's features. On a GPU on more data, which the target writes first (CONVERSATIONS, 60000 by default, some
# 20 million tokens), in SCALE percent of the steps (400 by default), each of eight times as many conversations.
# Run it again after an interruption: what is done stays, what was begun goes on.
set -euo pipefail
mkdir -p "${1:?usage: bash checkpoints/train.sh OUT}"
out=$(realpath "$1")
cd "$(dirname "$0")/.."

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    python train.py --make-data "${CONVERSATIONS:-60000}" --out "$out/conversations.jsonl" --dtype bfloat16 --data-batch 256
    options=(--data "$out/conversations.jsonl" --dtype bfloat16 --batch-size 32 --save-every 200)
    scale=${SCALE:-400}
else
    options=(--data conversations/smollm2_self.jsonl.gz --max-length 384 --features "$out/features" --dtype bfloat16 --bf16)
    scale=${SCALE:-100}
fi

make() { # NAME STEPS OPTIONS...
    local folder=$out/$1 steps=$(($2 * scale / 100)) resume=()
    [ -f "$folder/done" ] && return
    [ -f "$folder/training_state.pt" ] && resume=(--resume)
    python train.py "${options[@]}" --out "$folder" --steps "$steps" "${@:3}" ${resume[@]+"${resume[@]}"}
    touch "$folder/done"
}

make glide 2600 --method glide
make vanilla 2600 --method glide --no-cross-attention # GLIDE's ablation, not shipped
make specdecpp-draft 2000 --method specdecpp --layers '[0,-1]'
make specdecpp 500 --method specdecpp --init "$out/specdecpp-draft" --stage head --lr 1e-3
make falcon-young 600 --method falcon --fusion linear --distill-weight 1
make falcon 800 --method falcon --init "$out/falcon-young" --distill-weight 1 --lr 1.5e-3
make ctc_drafter 1500 --method ctc_drafter
make medusa 1500 --method ctc_drafter --kind medusa # CTC-drafter's rival
