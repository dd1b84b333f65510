"""Ways to run programs; tests marked slow run with --slow only."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fork_server import ENVIRONMENT, PYTHON_PATH, REPO, Launcher


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))


def save_tokenizer(
    folder: Path, tokens: Iterable[str], special: Iterable[str] = (), **more: str
) -> Any:
    """A tokenizer of one token per character without BOS: <pad>, <eos>, <unk>, more special ones, then ``tokens``."""
    first = ["<pad>", "<eos>", "<unk>", *special]
    core = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*first, *tokens])}, unk_token="<unk>")
    )
    core.add_special_tokens(first if special else [])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names, **more)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real models, tokenizers and data, which are no part of the repository."""
    folder = Path(os.environ.get("OPENPPO_ASSETS", REPO.parent / "shared" / "assets"))
    if not folder.is_dir():
        pytest.skip(f"no assets in {folder}; set OPENPPO_ASSETS")
    return folder


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """``launcher.run(["-m", "openppo.cli.train_ppo", ...], ranks=2)`` stands for ``subprocess.run``."""
    started = Launcher()
    yield started
    started.close()


@pytest.fixture(scope="session")
def launch(launcher: Launcher) -> Callable[..., str]:
    """``launch(ranks, "script.py" or "-m", ...)`` runs Python, under torchrun unless ``ranks`` is 0, until it ends.

    Returns its output. Fails with it if the exit status is not ``status``. ``real`` starts new processes.
    """

    def run(
        ranks: int, *words: object, cwd: Path | None = None, status: int = 0, real: bool = False
    ) -> str:
        try:
            done = launcher.run(words, ranks, cwd, real)
        except subprocess.TimeoutExpired as error:
            output = error.output.decode(errors="replace") if error.output else ""
            pytest.fail(f"{error.cmd}\ndid not end within {error.timeout} s. Its output:\n{output}")
        if done.returncode != status:
            pytest.fail(
                f"{done.args}\nended with status {done.returncode}. Its output:\n{done.stdout}"
            )
        return done.stdout

    return run


@pytest.fixture(scope="session")
def run(launcher: Launcher) -> Callable[..., str]:
    """``run("command line" or [words], folder, NAME=value)`` returns the output of a command that must succeed."""

    def run_in(command: str | list[str], cwd: Path, **env: str) -> str:
        words = shlex.split(command) if isinstance(command, str) else command
        if words[0] == sys.executable:
            done = launcher.run(words[1:], cwd=cwd, separate=True, **env)
        else:
            path = {"PATH": f"{launcher.programs()}:{os.environ['PATH']}"}
            environment = os.environ | ENVIRONMENT | path | env
            done = subprocess.run(
                words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
            )
        assert done.returncode == 0, (
            f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )
        return done.stdout

    return run_in


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as they are published, without a single warning."""
    folder, config = tmp_path_factory.mktemp("site"), REPO / "mkdocs.yml"
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        folder,
        "--config-file",
        config,
    ]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    return folder
