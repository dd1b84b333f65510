"""Recipes: files of options that come with the package, one for each published algorithm."""

from __future__ import annotations

import difflib
from pathlib import Path

_FOLDER = Path(__file__).with_name("recipes")


def recipe_names() -> list[str]:
    """Return the names that ``--recipe`` takes."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the file of a recipe; ``ValueError`` names the nearest for an unknown one.

    >>> recipe_file("dapo").name
    'dapo.yaml'
    """
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
        raise ValueError(f"--recipe {name}: there is no such recipe; {hint}")
    return _FOLDER / f"{name}.yaml"
