"""environment.json: what a run ran on."""

from __future__ import annotations

import json
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from openppo import __version__
from openppo.tracking import environment, save_environment
from openppo.types import SingleProcess


class Two(SingleProcess):
    """Two ranks that have the same to say."""

    world_size = 2

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]


def test_versions_are_those_of_this_python_and_there_is_a_device_for_each_rank(tmp_path: Path) -> None:
    save_environment(tmp_path / "logs", environment(Two()))
    found = json.loads((tmp_path / "logs" / "environment.json").read_text())
    assert found["openppo"] == __version__
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == version("torch")
    assert found["world_size"] == len(found["ranks"]) == 2
    assert all(rank["host"] == socket.gethostname() for rank in found["ranks"])
    assert all("CPU" in rank["device"] for rank in found["ranks"]) or torch.cuda.is_available()


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openppo.tracking.report.environment.PACKAGES", ("torch", "no-such-package"))
    assert list(environment(SingleProcess())["packages"]) == ["torch"]
