"""Callbacks get back their own state, whatever others there are now."""

import logging
from typing import Any

import pytest

from openppo.trainer.callbacks import Callback, restore_callbacks


class First(Callback):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Second(First):
    """Another one."""


SAVED = [{"class": name, "state": {"number": i}} for i, name in enumerate(["First", "Second", "First"])]


@pytest.mark.parametrize(
    ("classes", "numbers"),
    [
        ([First, Second, First], [0, 1, 2]),
        ([Second, First, First], [1, 0, 2]),
        ([Second], [1]),
        ([Callback, First], [None, 0]),
        ([First, First, First], [0, 2, None]),
        ([], []),
    ],
)
def test_a_callback_goes_on_from_the_state_of_its_class_and_differences_are_said(
    classes: list[type], numbers: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [each() for each in classes]
    with caplog.at_level(logging.WARNING, "openppo"):
        same = restore_callbacks(callbacks, SAVED)
    states = [getattr(callback, "state", None) for callback in callbacks]
    assert [None if state is None else state["number"] for state in states] == numbers
    assert same is (classes == [First, Second, First])
    assert ("callbacks were First, Second, First and are" in caplog.text) is not same
