"""What every unit test leaves behind: nothing."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """A process group writes LOCAL_RANK, libraries write more; processes of later tests would take it for theirs."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
