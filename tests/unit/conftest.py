"""What every unit test leaves behind: nothing."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A process group writes LOCAL_RANK, libraries write more; processes of later tests would take it for theirs."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def linear_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's ZeRO-3 replaces it for good, with one that saves its input also where the weight is frozen."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
