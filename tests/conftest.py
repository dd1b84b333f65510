"""Which tests may run beside each other under pytest-xdist (``-n 3 --dist loadgroup``)."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file run in one process, where they share what it made, unless it is marked ``independent``."""
    for item in items:
        if item.get_closest_marker("independent") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
