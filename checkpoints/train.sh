#!/usr/bin/env bash
# Make every drafter of this folder:   bash checkpoints/train.sh OUT [NAME...]
#
# One cosine schedule a drafter over all conversations. On a CPU those of the repository: 3.3
# million tokens to learn, 24500 steps of 4 conversations, so 20 million token-steps, or 6 million
# anchors of CTC-drafter and Medusa, which learn at 64 places a conversation. On a GPU the target
# writes more data first (CONVERSATIONS, 60000 by default), and a step has 32 conversations.
# SCALE is in percent of the steps: 100 on a CPU, 50 on a GPU by default.
#
# A drafter takes many hours on one CPU core, and the target's features 10 GB in OUT. Run it again
# after an interruption: what is done stays, what was begun goes on.
set -euo pipefail
mkdir -p "${1:?usage: bash checkpoints/train.sh OUT [NAME...]}"
out=$(realpath "$1")
wanted=" ${*:2} "
cd "$(dirname "$0")/.."

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    python train.py --make-data "${CONVERSATIONS:-60000}" --out "$out/conversations.jsonl" \
        --second-turns 0.5 --greedy 0.7 --dtype bfloat16 --data-batch 256
    options=(--data "$out/conversations.jsonl" --dtype bfloat16 --batch-size 32)
    scale=${SCALE:-50}
else
    # the last 32 conversations of the last file are held out
    options=(--data conversations/smollm2_{wide,turns,more,self,third}.jsonl.gz)
    options+=(--features "$out/features" --dtype bfloat16 --bf16 --batch-size 4)
    scale=${SCALE:-100}
fi

make() { # NAME STEPS OPTIONS...     trains $out/NAME
    local folder=$out/$1 steps=$(($2 * scale / 100)) resume=()
    [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
    [ -f "$folder/done" ] && return
    [ -f "$folder/training_state.pt" ] && resume=(--resume)
    python train.py "${options[@]}" --out "$folder" --steps "$steps" "${@:3}" ${resume[@]+"${resume[@]}"}
    touch "$folder/done"
}

make glide 24500 --method glide --gamma 2 --kv-layer 18 --block-size 3
make vanilla 24500 --method glide --no-cross-attention # ablation of glide, not shipped
make specdecpp-draft 24500 --method specdecpp --layers '[0,-1]'
make specdecpp 3000 --method specdecpp --init "$out/specdecpp-draft" --stage head --lr 1e-3
make falcon 24500 --method falcon --fusion linear --distill-weight 1 --num-layers 2 \
    --tree '[[0],[1],[2],[0,1],[0,0],[1,0]]'
make ctc_drafter 24500 --method ctc_drafter --nodes 5 --symbols 6 --candidates 8 \
    --cut-labels --first-token 1
make medusa 24500 --method ctc_drafter --kind medusa --nodes 5 --transform none # CTC-drafter's rival
