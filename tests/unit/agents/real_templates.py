"""Chat templates of real models: those of TRL's wheel, which is downloaded, and those of the assets."""

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

_WHEEL, _FOLDER = "trl==1.12.0", "trl/chat_templates"


def trl_templates() -> dict[str, str]:
    """Templates by name, from the environment that benchmarks/peers/setup.sh makes, or from the package index."""
    found, problem = _found()
    if not found:
        pytest.skip(f"{_WHEEL} is neither in the peers' environment nor downloadable: {problem}")
    return found


@cache
def _found() -> tuple[dict[str, str], str]:
    """Templates, and why there are none; looked for once."""
    places = Path.home().glob(f".cache/openppo-benchmarks/trl/lib/*/site-packages/{_FOLDER}")
    if files := {file.stem: file.read_text() for place in places for file in place.glob("*.jinja")}:
        return files, ""
    with TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--retries",
            "1",
            "--timeout",
            "15",
            _WHEEL,
        ]
        done = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [
                    name
                    for name in archive.namelist()
                    if name.startswith(_FOLDER) and name.endswith(".jinja")
                ]
                return {Path(name).stem: archive.read(name).decode() for name in names}, ""
    return {}, done.stderr.strip()[-200:]


def render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, Any]], **more: Any
) -> str:
    """Text of a conversation as the library renders it."""
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more)
    )
