#!/usr/bin/env bash
# Fetches what a bare GPU machine lacks (Python 3.12, x86-64) into benchmarks/gpu/wheels, which git ignores, in the
# versions of requirements.txt; some 22 MB. Runs where there is a network, never on that machine. Takes a minute.
#
#     bash benchmarks/gpu/wheels.sh
#
# DeepSpeed's wheel is built here, without compiled operators, by a Python that has torch (PYTHON, default: python3).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
wheels="$here/wheels"
pin() { sed -n "s/^\($1==[^ ]*\).*/\1/p" "$here/../../requirements.txt" "$here/../../requirements-dev.txt" | grep .; }
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
fetch() { # NAME==VERSION
    "$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" -d "$wheels" "$1"
}
rm -rf "$wheels"
mkdir -p "$wheels"
fetch "$(pin pydantic)"
# Exactly the core that this pydantic wants.
core="$("$python" - "$wheels" << 'PYTHON'
import pathlib
import re
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("pydantic-*.whl")
archive = zipfile.ZipFile(wheel)
(name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
print(re.search(r"^Requires-Dist: (pydantic-core==[\d.]+)", archive.read(name).decode(), re.MULTILINE)[1])
PYTHON
)"
for package in "$core" annotated-types typing-inspection "typing-extensions>=4.16" "$(pin datasets)" "dill<0.4.2" \
    "multiprocess<0.70.20" "$(pin tyro)" docstring-parser typeguard "$(pin peft)" hjson liger-kernel==0.8.5 trl==1.12.0 \
    "$(pin vaderSentiment)" "$(pin transformers)"; do
    fetch "$package"
done
DS_BUILD_OPS=0 CUDA_VISIBLE_DEVICES="" "$python" -m pip --disable-pip-version-check wheel -q --no-deps \
    --no-build-isolation -w "$wheels" "$(pin deepspeed)"
[ -n "$(find "$wheels" -name 'deepspeed-*-py3-none-any.whl')" ] || { echo "DeepSpeed's wheel is not pure" >&2 && exit 1; }
du -ch "$wheels"/*.whl
