"""Renames as changes of observations: the recorded one gets new names, what is added leaves the one of now."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.golden.house.renames import Rename

SECTIONS = {
    "metric": ("metrics", "invariants"),
    "log": ("log",),
    "field": ("samples", "shown", "weights", "outputs", "invariants"),
    "file": ("files", "weights", "outputs", "invariants"),
}
Text = Callable[[str], str | None]


def with_new_names(observation: dict[str, Any], renames: Sequence[Rename]) -> dict[str, Any]:
    """A recorded observation with each ``old`` replaced by its ``new``, or left out without one."""
    for rename in renames:
        if rename.old is not None:
            observation = changed(observation, rename, new_name(rename))
    return observation


def without_added(observation: dict[str, Any], renames: Sequence[Rename]) -> dict[str, Any]:
    """An observation of now without what renames that have no ``old`` add."""
    for rename in renames:
        if rename.old is None:
            observation = changed(
                observation, rename, lambda text, new=rename.new: None if text == new else text
            )
    return observation


def new_name(rename: Rename) -> Text:
    """The function from a recorded text to that of now; None: it is gone."""
    old, new = rename.old or "", rename.new

    def name(text: str) -> str | None:
        if rename.kind == "log" and new is not None:
            return text.replace(old, new)
        return new if text == old else text

    return name


def changed(observation: dict[str, Any], rename: Rename, name: Text) -> dict[str, Any]:
    """The observation with ``name`` applied to keys and texts of the sections of this kind."""
    inside = SECTIONS[rename.kind]
    return {
        section: walked(value, name) if section in inside else value
        for section, value in observation.items()
    }


def walked(value: Any, name: Text) -> Any:
    """A copy with other keys of dictionaries and other texts in lists."""
    if isinstance(value, dict):
        named = [(name(key), walked(each, name)) for key, each in value.items()]
        return {key: each for key, each in named if key is not None}
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        texts = [name(each) for each in value]
        return [each for each in texts if each is not None]
    if isinstance(value, list):
        return [walked(each, name) for each in value]
    return value


def place_with_new_names(place: tuple[str, ...], renames: Sequence[Rename]) -> tuple[str, ...]:
    """A recorded path in the names of now."""
    for rename in renames:
        if rename.old is not None and place[0] in SECTIONS[rename.kind]:
            name = new_name(rename)
            place = (place[0], *(name(element) or element for element in place[1:]))
    return place
