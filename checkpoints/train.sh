#!/usr/bin/env bash
# Make every drafter of this folder:   bash checkpoints/train.sh OUT [NAME...]
#
# On a CPU the conversations of the repository are the data. A drafter takes many hours on
# one core, and the target's features 22 GB in OUT. On a GPU the target writes more data
# first (CONVERSATIONS, 60000 by default), and a step has 32 conversations; so it has with
# DATA, files of conversations to take instead, named from the folder of the repository.
# STEPS are those of a drafter, 24500 by default, or give MINUTES. With FROM, a folder like
# this one, its drafters are trained further. MORE is added to the options of each command.
#
# Run it again after an interruption: what is done stays, what was begun continues.
set -euo pipefail
trap 'exit 143' TERM # once train.py, which gets the signal as well, has saved
mkdir -p "${1:?usage: bash checkpoints/train.sh OUT [NAME...]}"
out=$(realpath "$1")
wanted=" ${*:2} "
cd "$(dirname "$0")/.."

if [ -n "${DATA:-}" ]; then
    read -ra files <<<"$DATA"
    options=(--data "${files[@]}" --dtype bfloat16 --batch-size 32)
elif python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    python train.py --make-data "${CONVERSATIONS:-60000}" --out "$out/conversations.jsonl" \
        --second-turns 0.5 --greedy 0.7 --dtype bfloat16
    options=(--data "$out/conversations.jsonl" --dtype bfloat16 --batch-size 32)
else
    # the last 32 conversations of the last file are held out
    options=(--data conversations/smollm2_{new,wide,turns,more,self,third}.jsonl.gz)
    options+=(--features "$out/features" --dtype bfloat16)
fi

options+=(--eval conversations/answers.jsonl.gz) # the target's own, greedy

make() { # NAME OPTIONS...     trains $out/NAME
    local folder=$out/$1 start=() length=(--steps "${STEPS:-24500}")
    [ -z "${MINUTES:-}" ] || length=(--minutes "$MINUTES")
    [[ $wanted == "  " || $wanted == *" $1 "* ]] || return 0
    [ -z "${FROM:-}" ] || start=(--lr 1e-3 --init "$FROM/${1%-draft}")
    [ -f "$folder/training_state.pt" ] && start=(--resume) # says so if it is finished
    python train.py "${options[@]}" --out "$folder" "${length[@]}" \
        ${start[@]+"${start[@]}"} "${@:2}" ${MORE:-}
}

make glide --method glide --gamma 3 --kv-layer 18 --block-size 3
# FROM's SpecDec++ was saved in the stage head, which --init would keep.
make specdecpp-draft --method specdecpp --stage draft --layers '[0,-1]'
STEPS=500 make specdecpp --method specdecpp --stage head --lr 1e-3 \
    --init "$out/specdecpp-draft"
make falcon --method falcon
make eagle --method eagle
make ctc_drafter --method ctc_drafter --first-token 1
make medusa --method medusa
