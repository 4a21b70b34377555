#!/usr/bin/env bash
# What a GPU is used for, in three commands that each end within MINUTES (9 by default):
#
#     bash results/tools/gpu.sh time OUT     # how fast the shipped drafters are
#     bash results/tools/gpu.sh train OUT    # new conversations, and drafters from them
#     bash results/tools/gpu.sh rows OUT     # how fast those are
#
# Run a command again until it says that all is done (it ends with 75 until then): what is
# done stays, and what was begun continues. But a run of bench.py that the time cuts short
# stays as it is, and its file says "interrupted": delete the file to run it anew. All is
# written to OUT. What is worth carrying away is in OUT/time, OUT/train and OUT/rows, each
# at most 8 files of 16 MB. The states of training, which are larger, are in OUT/drafters.
#
#     bash results/tools/gpu.sh time OUT --rehearse      # tiny, and without a GPU
set -euo pipefail
usage="usage: bash results/tools/gpu.sh time|train|rows OUT [--rehearse]"
stage=${1:?$usage}
out=${2:?$usage}
[[ $stage =~ ^(time|train|rows)$ ]] || { echo "$usage" >&2 && exit 2; }
mkdir -p "$out/$stage"
out=$(realpath "$out")
here=$out/$stage
cd "$(dirname "$0")/../.."

device=cuda counted=cuda rounds=20 writing=180 # seconds
known=(conversations/smollm2_*.jsonl.gz) more=
dtypes=(bfloat16 float16)                           # the first is also that of the rows
size=(--num-prompts 8 --max-new-tokens 64)
# From the shipped drafters to about 36 million token-steps each, 6400 in a step.
steps=(glide 1500 ctc_drafter 1100 falcon 2150 eagle 2550 medusa 2200 specdecpp-draft 2450)
if [ "${3:-}" = --rehearse ]; then
    device=cpu counted=pretend rounds=2 writing=40
    known=("$out/few.jsonl")
    more="--dtype float32 --max-length 64 --held-out 1 --batch-size 2 --steps 2"
    more+=" --eval $out/eval.jsonl"
    gzip -dc conversations/smollm2_third.jsonl.gz >"$out/all.jsonl"
    head -n 20 "$out/all.jsonl" >"$out/few.jsonl"
    tail -n 4 "$out/all.jsonl" >"$out/eval.jsonl"
    dtypes=(float32) # half precision is slow on a CPU
    size=(--num-prompts 1 --max-new-tokens 4)
fi
arms=(glide cape cape:cpu specdecpp falcon falcon:paper eagle ctc_drafter medusa)
others=(falcon:one_pass ctc_drafter+copies lookup prompt-lookup assisted)

end=$((SECONDS + 60 * ${MINUTES:-9} - 30)) # half a minute to save and to pack
within() { # SECONDS COMMAND...     stopped after so long, when it saves
    local left=$((end - SECONDS)) code=0
    if [ $left -lt 20 ]; then
        echo "gpu.sh: the time is up: run it again to continue" >&2
        exit 75
    fi
    timeout --kill-after 25 $((left < $1 ? left : $1)) "${@:2}" || code=$?
    [ $code = 0 ] || [ $code = 124 ] # the latter: it was stopped
}
bench() { # NAME SECONDS OPTIONS...
    [ -f "$here/$1.json" ] || within "$2" python bench.py --json "$here/$1.json" \
        --device $device "${size[@]}" "${@:3}"
}
learn() { # NAME STEPS
    if [ ! -f "$out/$1.done" ]; then
        within 3600 env DATA="${known[*]}" MORE="$more" FROM=checkpoints STEPS="$2" \
            bash checkpoints/train.sh "$out/drafters" "$1"
        [ $SECONDS -lt $end ] || exit 75
        touch "$out/$1.done"
    fi
    [ "$1" != specdecpp-draft ] || learn specdecpp 500 # the head
}
pack() { # the new drafters in float16 and their data, in parts of 16 MB
    rm -rf "$here"/* "$out/half"
    python - "$out/drafters" "$out/half" <<'END'
import shutil, sys
from pathlib import Path
from safetensors.torch import load_file, save_file

for path in Path(sys.argv[1]).glob("*/model.safetensors"):
    folder = Path(sys.argv[2]) / path.parent.name
    folder.mkdir(parents=True)
    for file in path.parent.glob("*.json*"):
        shutil.copy(file, folder)
    weights = load_file(path)
    halves = {k: w.half() if w.is_floating_point() else w for k, w in weights.items()}
    save_file(halves, folder / path.name)
END
    # SpecDec++'s draft model is also part of the drafter with a head.
    [ ! -d "$out/half/specdecpp" ] || rm -rf "$out/half/specdecpp-draft"
    [ ! -d "$out/half" ] || tar -C "$out/half" -c . | split -b 16000000 - "$here/drafters.tar."
    [ ! -f "$out/conversations.jsonl" ] ||
        gzip -c "$out/conversations.jsonl" | split -b 16000000 - "$here/conversations.jsonl.gz."
}

case $stage in
time)
    for dtype in "${dtypes[@]}"; do
        bench gpu_$dtype 240 --dtype $dtype --method "${arms[@]}" "${others[@]}"
        bench gpu_${dtype}_t1 150 --dtype $dtype --temperature 1 --method "${arms[@]}" "${others[@]}"
        [ -f "$here/gpu_${dtype}_cost.json" ] || within 60 python results/tools/costs.py \
            --device $device --dtype $dtype --json "$here/gpu_${dtype}_cost.json"
    done
    [ -f "$here/launches.json" ] || within 120 python results/tools/launches.py --num-prompts 1 \
        --device $counted --rounds $rounds --json "$here/launches.json"
    ;;
train)
    data=$out/conversations.jsonl
    if [ ! -f "$out/written" ]; then
        within $writing python train.py --make-data 60000 --out "$data" \
            --second-turns 0.5 --greedy 0.7 --dtype bfloat16 --device $device
        touch "$out/written"
    fi
    [ ! -s "$data" ] || known+=("$data")
    # All at once, because one alone leaves most of a GPU idle.
    code=0 running=()
    for ((i = 0; i < ${#steps[@]}; i += 2)); do
        learn "${steps[i]}" "${steps[i + 1]}" &
        running+=($!)
    done
    for pid in "${running[@]}"; do wait "$pid" || code=$?; done
    pack
    [ $code = 0 ] || exit $code
    ;;
rows)
    new=()
    for arm in "${arms[@]}"; do
        name=${arm%%:*}
        folder=$out/drafters/${name/cape/glide}
        [ ! -f "$folder/config.json" ] || new+=("$arm@$folder")
    done
    bench gpu_rows 270 --dtype ${dtypes[0]} --method "${new[@]}"
    bench gpu_rows_t1 240 --dtype ${dtypes[0]} --temperature 1 --method "${new[@]}"
    ;;
esac
echo "gpu.sh: all of $stage is done" >&2
