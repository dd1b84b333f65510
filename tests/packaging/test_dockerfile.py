"""The Dockerfile's steps, without Docker: what it copies is there, and its pip steps work in a clean environment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name

from tests.packaging.conftest import REPO, build, names_in

DOCKERFILE = REPO / "Dockerfile"
IGNORED = (REPO / ".dockerignore").read_text().splitlines()


def instructions() -> list[tuple[str, str]]:
    """The keyword and the rest of each instruction, in one line each."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line)
    ]


def is_sent(path: str) -> bool:
    """True if Docker gets a path at the top of the repository; the last pattern that fits decides."""
    sent = True
    for pattern in IGNORED:
        if fnmatch(path, pattern.removeprefix("!")):
            sent = pattern.startswith("!")
    return sent


def copy(words: str, folder: Path) -> None:
    """Carry out a COPY instruction, from the repository to ``folder``."""
    *sources, target = words.split()
    for source in sources:
        assert is_sent(source), f"{source} is left out by .dockerignore"
        if (REPO / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPO / source, folder / target, ignore=ignored)
        else:
            shutil.copy(REPO / source, folder / target)


def test_the_image_gets_every_file_of_the_package(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    for word, words in instructions():
        if word == "COPY":
            copy(words, tmp_path / "image")
    assert names_in(build(tmp_path / "image", "wheel", tmp_path / "wheel")) == names_in(wheel)


def test_docker_is_sent_nothing_but_what_is_copied() -> None:
    """Data, checkpoints and keys that lie in a checkout stay out of the image and its cache."""
    copied = {
        name for word, words in instructions() if word == "COPY" for name in words.split()[:-1]
    }
    assert {path.name for path in REPO.iterdir() if is_sent(path.name)} == copied
    assert not is_sent("ckpt") and not is_sent(".env")
    assert "**/__pycache__" in IGNORED


def test_versions_stand_in_the_requirements_alone_and_the_user_is_not_root() -> None:
    steps = instructions()
    assert re.findall(r"[\w-]+==\d", str(steps)) == []
    assert ("ENV", "XDG_CACHE_HOME=/cache") in steps
    (image,) = [words for word, words in steps if word == "FROM"]
    python = re.fullmatch(r"python:(\d+\.\d+)-slim-\w+", image)
    assert python and f"Python :: {python[1]}" in (REPO / "setup.py").read_text()
    assert [words for word, words in steps if word == "USER"] == ["openppo"]
    after_user = [word for word, _ in steps[steps.index(("USER", "openppo")) :]]
    assert after_user == ["USER", "WORKDIR", "CMD"]


@pytest.mark.slow
def test_the_pip_steps_work_in_a_clean_environment(tmp_path: Path) -> None:
    """Everything is downloaded and, where there is no wheel, built, as in the image."""
    image = tmp_path / "image"
    image.mkdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = f"{tmp_path / 'venv' / 'bin'}:{environment['PATH']}"

    printed = ""
    for word, words in instructions():
        if word == "COPY":
            copy(words, image)
        if word == "CMD" or (word == "RUN" and "pip install" in words):
            command = words if word == "RUN" else shlex.join(yaml.safe_load(words))
            folder = image if word == "RUN" else tmp_path
            done = subprocess.run(
                ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            printed = done.stdout
    assert "train_ppo" in printed, "by the last step, which prints the commands"

    freeze = [tmp_path / "venv/bin/python", "-m", "pip", "freeze", "--all"]
    frozen = subprocess.run(freeze, env=environment, capture_output=True, text=True, check=True)
    lines = frozen.stdout.splitlines()
    assert f"openppo @ {image.as_uri()}" in lines
    versions = dict(line.partition("+")[0].split("==") for line in lines if "==" in line)
    installed = {canonicalize_name(name): version for name, version in versions.items()}
    pins = [line for line in (REPO / "requirements.txt").read_text().splitlines() if "==" in line]
    for name, version in (pin.split("==") for pin in pins):
        assert installed[canonicalize_name(name)] == version
    assert {"liger-kernel", "math-verify", "wandb"} <= installed.keys()
