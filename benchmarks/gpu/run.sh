#!/usr/bin/env bash
# OpenPPO on a bare GPU machine in 15 minutes, the most valuable facts first; docs/gpus.md says more.
#
#     bash benchmarks/gpu/run.sh [--dry] [--budget SECONDS] [--out FOLDER] [--work FOLDER] [--transformers pinned|machine]
#                                [STAGE ...]
#
# FOLDER (default: $OUT, else build/gpu) gets results.jsonl, a line for each fact at once, tables.md, metrics.jsonl and
# logs.txt. What wheels.sh fetched, for Python 3.12, is unpacked and found before the machine's packages; nothing is installed.
# --dry: tiny models on a CPU, to show that everything runs; its figures mean nothing.
set -uo pipefail
KIT_BEGAN="$(date +%s)"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
python="${PYTHON:-python3}"
out="${OUT:-$repository/build/gpu}"
work="${TMPDIR:-/tmp}/openppo-gpu"
budget=480 transformers=pinned dry=0 stages=()
while [ $# -gt 0 ]; do
    case "$1" in
        --dry) dry=1 ;;
        --budget) budget="$2" && shift ;;
        --out) out="$2" && shift ;;
        --work) work="$2" && shift ;;
        --transformers) transformers="$2" && shift ;;
        --help | -h) sed -n '2,10s/^# \{0,1\}//p' "$0" && exit ;;
        *) stages+=("$1") ;;
    esac
    shift
done
mkdir -p "$out" "$work/logs" "$work/tmp" || exit 1
say() { echo "[gpu $(($(date +%s) - KIT_BEGAN)) s] $*" | tee -a "$out/logs.txt"; }
quietly() { timeout 150 "$python" -c "$1" 2>> "$out/logs.txt"; }

packages="$work/packages-$transformers"
export KIT_BEGAN KIT_OUT="$out" KIT_WORK="$work" KIT_DRY="$dry"
export PYTHONPATH="$repository:$packages${PYTHONPATH:+:$PYTHONPATH}"
if [ ! -d "$packages" ]; then
    mkdir -p "$packages"
    if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
        for wheel in "$here"/wheels/*.whl; do
            [ -f "$wheel" ] && "$python" -m zipfile -e "$wheel" "$packages"
        done
    fi
    if [ "$transformers" = machine ] || { [ -d "$packages/transformers" ] && ! quietly "from transformers import LlamaForCausalLM"; }; then
        rm -rf "$packages"/transformers "$packages"/transformers-*.dist-info
    fi
    [ -d "$packages/transformers" ] && say "transformers as pinned" || say "transformers as the machine has it"
fi
# Nothing may look for a network or another folder; sockets are of this machine.
ip link set lo up 2> /dev/null
quietly "import socket; socket.gethostbyname('localhost')" || echo "127.0.0.1 localhost" >> /etc/hosts
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}" NCCL_IB_DISABLE=1
export HF_HUB_OFFLINE=1 HF_HOME="$work/hf" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
export TRITON_CACHE_DIR="$work/triton" TORCHINDUCTOR_CACHE_DIR="$work/inductor" TMPDIR="$work/tmp"
if [ "$dry" = 1 ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
else
    export PATH="$PATH:/usr/local/cuda/bin"
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,power.limit --format=csv,noheader 2>&1 | tee -a "$out/logs.txt"
    # The first import reads gigabytes from the disk; nothing after it should wait for that.
    quietly "import torch; torch.zeros(1, device='cuda').item()" || { say "torch finds no GPU: --dry runs on a CPU" && exit 1; }
    # OpenPPO lets segments of memory grow; some virtual machines refuse that.
    if ! PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True quietly "import torch; torch.zeros(1 << 28, device='cuda').add_(1).sum().item()"; then
        say "expandable_segments:True fails here: left off"
        export PYTORCH_CUDA_ALLOC_CONF=backend:native
    fi
fi
say "set up"
cd "$repository" && exec "$python" -u -m benchmarks.gpu.plan --budget "$budget" "${stages[@]+"${stages[@]}"}"
