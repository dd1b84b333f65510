"""Tools that a model may call: classes and functions of a user's file, or verl's YAML."""

from typing import Any


class BaseTool:
    """A tool (stub)."""


def load_tools(location: str) -> list[Any]:
    """Tools of a file (stub)."""
    raise NotImplementedError(location)
