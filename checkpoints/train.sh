#!/usr/bin/env bash
# Make every drafter of this folder again, one after another:   bash checkpoints/train.sh OUT
#
# On a CPU as they were made, on the conversations in the repository: eight hours or so on one core. On a GPU on more
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
    first=("$out/conversations.jsonl") second=("${first[@]}") third=("${first[@]}")
    scale=${SCALE:-400}
else
    options=(--max-length 384 --features "$out/features" --dtype bfloat16 --bf16)
    first=(conversations/smollm2_self.jsonl.gz) second=(conversations/smollm2_more.jsonl.gz)
    third=("${second[@]}" "${first[@]}" conversations/smollm2_third.jsonl.gz)
    scale=${SCALE:-100}
fi

make() { # NAME STEPS OPTIONS...     trains $out/NAME on the files of the array data
    local folder=$out/$1 steps=$(($2 * scale / 100)) resume=()
    [ -f "$folder/done" ] && return
    [ -f "$folder/training_state.pt" ] && resume=(--resume)
    python train.py "${options[@]}" --data "${data[@]}" --out "$folder" --steps "$steps" "${@:3}" ${resume[@]+"${resume[@]}"}
    touch "$folder/done"
}

data=("${first[@]}")
make glide-first 2600 --method glide
make vanilla 2600 --method glide --no-cross-attention # ablation of glide-first, not shipped
make specdecpp-first 2000 --method specdecpp --layers '[0,-1]'
make falcon-young 600 --method falcon --fusion linear --distill-weight 1
make falcon-first 800 --method falcon --init "$out/falcon-young" --lr 1.5e-3
make ctc_drafter-first 1500 --method ctc_drafter
make medusa-first 1500 --method ctc_drafter --kind medusa # CTC-drafter's rival

data=("${second[@]}")
options+=(--lr 1.5e-3)
make glide-second 1000 --method glide --init "$out/glide-first" --gamma 2
make specdecpp-second 900 --method specdecpp --init "$out/specdecpp-first"
make falcon-second 550 --method falcon --init "$out/falcon-first"
make ctc_drafter-second 650 --method ctc_drafter --init "$out/ctc_drafter-first"
make medusa-second 650 --method ctc_drafter --init "$out/medusa-first"

data=("${third[@]}")
make glide 1850 --method glide --init "$out/glide-second"
make specdecpp-third 2600 --method specdecpp --init "$out/specdecpp-second"
make specdecpp 300 --method specdecpp --init "$out/specdecpp-third" --stage head --lr 1e-3
make falcon 3550 --method falcon --init "$out/falcon-second" --tree '[[0],[1],[2],[0,1],[0,0]]'
make ctc_drafter 3350 --method ctc_drafter --init "$out/ctc_drafter-second" --nodes 5 --symbols 6 --candidates 8
make medusa 3350 --method ctc_drafter --init "$out/medusa-second" --nodes 5
