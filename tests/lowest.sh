#!/usr/bin/env bash
# Tests with exactly the lowest versions that setup.py declares: models, rollout, trainer, PPO steps in bfloat16, and
# steps that are skipped.
#
#     bash tests/lowest.sh [FOLDER]
#
# FOLDER (default: .lowest, which git ignores) gets the environment, which is kept: some gigabytes with PyTorch for CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="${1:-.lowest}"
python3 -m venv "$folder"
python="$folder/bin/python"

lowest="$("$python" - << 'EOF'
import re

required = open("setup.py").read().split("install_requires=[")[1].split("]")[0]
print(*(f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', required)), sep="\n")
EOF
)"
echo "$lowest" > "$folder/lowest.txt"
# Without the file of pip's options: it may hold other versions back. DeepSpeed is built, and its setup imports torch.
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip install --quiet "setuptools<81" wheel "$(grep '^torch==' "$folder/lowest.txt")"
"$python" -m pip install --quiet --no-build-isolation -r "$folder/lowest.txt" gymnasium pytest
"$python" -m pip check

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
"$python" -m pytest tests/unit/models tests/unit/rollout tests/unit/trainer tests/unit/build
"$python" -m pytest tests/distributed/test_export.py -k averaged
"$python" -m pytest tests/distributed/test_not_finite.py
