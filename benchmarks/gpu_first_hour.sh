#!/usr/bin/env bash
# The first hour on a GPU, in one command: what is there, tests, kernels, decoding, PPO steps, faults; then the tables.
#
#     bash benchmarks/gpu_first_hour.sh [--dry] [--out FOLDER] [STEP ...]
#
# Each step has a time limit, and one that fails does not end the others. Tables go to benchmarks/results, dated, with
# the name of the GPU. --dry runs all code on a CPU with tiny models and writes to FOLDER: its figures mean nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
small=0.5b large=7b dry=0 out=benchmarks/results chosen=" "
shapes=(0.5b) tests=(-q --durations=10)
while [ $# -gt 0 ]; do
    case "$1" in
        --dry) dry=1 small=tiny large=tiny shapes=(tiny --steps 1) tests=(-q -k "border or counted or seen") ;;
        --out) out="$2" && shift ;;
        *) chosen="$chosen$1 " ;;
    esac
    shift
done
if [ "$dry" = 1 ]; then
    export CUDA_VISIBLE_DEVICES=
    [ "$out" != benchmarks/results ] || out="$(mktemp -d)"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

step() { # NAME SECONDS COMMAND...
    local name="$1" limit="$2" began=$SECONDS status=0
    shift 2
    [ "$chosen" = " " ] || [[ "$chosen" == *" $name "* ]] || return 0
    echo "== $name, $limit s at most"
    timeout --kill-after=30 "$limit" "$@" > "$work/$name.md" 2> "$work/$name.log" || status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$limit" "$status" $((SECONDS - began)) >> "$work/steps.tsv"
    tail -n 60 "$work/$name.md"
    [ "$status" = 0 ] || { echo "-- $name: status $status" && tail -n 15 "$work/$name.log"; }
}
probe() { step "$1" "$2" python benchmarks/gpu_probe.py "$3" --shape "$4" --json "$work/$1.json"; }
runs() { step "$1" "$2" python benchmarks/gpu_runs.py "$1" --shape "$3" --json "$work/$1.json"; }

probe environment 120 environment "$small"
step tests 900 python -m pytest tests/gpu "${tests[@]}"
probe sdpa 240 sdpa "$small"
runs start 600 "$small"
probe decode 300 decode "$small"
step step 600 python benchmarks/gpu.py --shape "${shapes[@]}"
# The arena of one size for all needs segments that grow (vLLM's sleep does not allow them; it is not used here).
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
runs large 900 "$large"
probe decode-large 300 decode "$large"
unset PYTORCH_CUDA_ALLOC_CONF
runs mfu 600 "$small"
runs faults 600 "$small"
runs ranks 400 "$small"
python benchmarks/gpu_probe.py collect "$work" "$out"
