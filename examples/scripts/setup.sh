# Sourced by the other scripts: an environment with the pinned requirements, made once.
# An active virtual environment (or conda environment other than base) is used; else .venv is made in the repository.
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

if [ -z "${VIRTUAL_ENV:-}" ] && { [ -z "${CONDA_PREFIX:-}" ] || [ "${CONDA_DEFAULT_ENV:-}" = base ]; }; then
    if ! "$repo/.venv/bin/python" --version > /dev/null 2>&1; then
        python="${PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
        if ! "${python:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2
            exit 1
        fi
        "$python" -m venv --clear "$repo/.venv"
    fi
    . "$repo/.venv/bin/activate"
fi

# install FILE...: pip only when a requirements file, or the project, is not installed as it is now.
install() {
    local stamp want pip=(python -m pip install --quiet --disable-pip-version-check)
    stamp="$(python -c 'import sys; print(sys.prefix)')/.openppo-$(basename "${!#}" .txt)"
    want="$(cd "$repo" && cat "$@" setup.py | cksum) $repo"
    [ "$(cat "$stamp" 2> /dev/null)" = "$want" ] && return
    python -m pip --version > /dev/null 2>&1 || python -m ensurepip > /dev/null # environments of uv have none
    echo "Installing $* (once; a minute or two, longer where pip takes the CUDA build of PyTorch) ..."
    "${pip[@]}" "$(grep '^torch==' "$repo/requirements.txt")" # first, or others fetch a build of their own choice
    for file in "$@"; do
        "${pip[@]}" -r "$repo/$file"
    done
    "${pip[@]}" --no-deps -e "$repo"
    echo "$want" > "$stamp"
}
