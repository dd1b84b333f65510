# Sourced by the other scripts: an environment with the pinned requirements, made once.
# Inside a virtual environment (or conda) that one is used; otherwise .venv is made in the repository.
repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    [ -x "$repo/.venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$repo/.venv"
    . "$repo/.venv/bin/activate"
fi

# install FILE...: pip only when a requirements file, or the project, is not installed as it is now.
install() {
    local stamp want
    stamp="$(python -c 'import sys; print(sys.prefix)')/.openppo-$(basename "${!#}" .txt)"
    want="$(cd "$repo" && cat "$@" setup.py | cksum) $repo"
    [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
    echo "Installing $* (once; this takes a minute or two) ..."
    # torch first: other packages must find it, not fetch a build of their own choice.
    python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "$repo/requirements.txt")"
    for file in "$@"; do
        python -m pip install --quiet --disable-pip-version-check -r "$repo/$file"
    done
    python -m pip install --quiet --disable-pip-version-check --no-deps -e "$repo"
    echo "$want" > "$stamp"
}
