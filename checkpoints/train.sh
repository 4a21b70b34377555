#!/usr/bin/env bash
# Make every drafter of this folder again, one after another:   bash checkpoints/train.sh OUT
#
# On a CPU as they were made, on the conversations in the repository: five and a half hours or so on one core. On a GPU on more
# data, which the target writes first (CONVERSATIONS, 60000 by default, some 20 million tokens), in SCALE percent of the
# steps (400 by default), each of eight times as many conversations.
# Run it again after an interruption: what is done stays, what was begun goes on.
set -euo pipefail
mkdir -p "${1:?usage: bash checkpoints/train.sh OUT}"
out=$(realpath "$1")
cd "$(dirname "$0")/.."

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    python train.py --make-data "${CONVERSATIONS:-60000}" --out "$out/conversations.jsonl" --dtype bfloat16 --data-batch 256
    options=(--dtype bfloat16 --batch-size 32 --save-every 200)
    first=$out/conversations.jsonl more=$first
    scale=${SCALE:-400}
else
    options=(--max-length 384 --features "$out/features" --dtype bfloat16 --bf16)
    first=conversations/smollm2_self.jsonl.gz more=conversations/smollm2_more.jsonl.gz
    scale=${SCALE:-100}
fi

make() { # NAME STEPS DATA OPTIONS...
    local folder=$out/$1 steps=$(($2 * scale / 100)) resume=()
    [ -f "$folder/done" ] && return
    [ -f "$folder/training_state.pt" ] && resume=(--resume)
    python train.py "${options[@]}" --data "$3" --out "$folder" --steps "$steps" "${@:4}" ${resume[@]+"${resume[@]}"}
    touch "$folder/done"
}

make glide-first 2600 "$first" --method glide
make glide 1000 "$more" --method glide --init "$out/glide-first" --lr 1.5e-3 --gamma 2
make vanilla 2600 "$first" --method glide --no-cross-attention # ablation of glide-first, not shipped
make specdecpp-first 2000 "$first" --method specdecpp --layers '[0,-1]'
make specdecpp-draft 900 "$more" --method specdecpp --init "$out/specdecpp-first" --lr 1.5e-3
make specdecpp 300 "$more" --method specdecpp --init "$out/specdecpp-draft" --stage head --lr 1e-3
make falcon-young 600 "$first" --method falcon --fusion linear --distill-weight 1
make falcon-first 800 "$first" --method falcon --init "$out/falcon-young" --distill-weight 1 --lr 1.5e-3
make falcon 550 "$more" --method falcon --init "$out/falcon-first" --distill-weight 1 --lr 1.5e-3
make ctc_drafter-first 1500 "$first" --method ctc_drafter
make ctc_drafter 650 "$more" --method ctc_drafter --init "$out/ctc_drafter-first" --lr 1.5e-3
make medusa-first 1500 "$first" --method ctc_drafter --kind medusa # CTC-drafter's rival
make medusa 650 "$more" --method ctc_drafter --init "$out/medusa-first" --lr 1.5e-3
