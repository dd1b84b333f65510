#!/usr/bin/env bash
# All tests, from a fresh clone: environment, style, types, unit, learning and distributed tests.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../examples/scripts/setup.sh"
cd "$repo"
install requirements.txt requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE # or each process would compile the package anew
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start processes of their own on few cores
export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$(python -c 'import sys; print(sys.prefix)')/torch_extensions}"
ruff check .
ruff format --check .
mypy
chosen=0 # arguments but for --slow, which is all tests and more
for argument in "$@"; do
    [ "$argument" = --slow ] || chosen=$((chosen + 1))
done
if [ "$chosen" -eq 0 ]; then
    bash tests/audit.sh
    python -m tests.rules.totals || echo "the package's totals cannot be printed" >&2 # they bound nothing
fi
xdist=(-n "${TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder --max-worker-restart=3) # many wait for ranks of their own
CUDA_VISIBLE_DEVICES="" python -m pytest "${xdist[@]}" "$@" # the CPU is what the tests are written for
if [ "$chosen" -eq 0 ]; then # by themselves: tests/processors/conftest.py says why
    torchvision="$(python -c 'import sys; print(sys.prefix)')/torchvision"
    if [ -d "$torchvision" ] || python -m pip install -q --no-deps --target "$torchvision" torchvision==0.28.0; then
        CUDA_VISIBLE_DEVICES="" PYTHONPATH="$torchvision${PYTHONPATH:+:$PYTHONPATH}" python -m pytest tests/processors
    else
        echo "no torchvision: tests/processors is skipped" >&2
    fi
fi
if [ "$chosen" -eq 0 ] && command -v nvidia-smi > /dev/null; then
    python -m pytest tests/gpu
fi
