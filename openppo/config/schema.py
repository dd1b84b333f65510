"""JSON schemas of the files that ``--config`` reads, for editors: ``python -m openppo.config.schema FOLDER``.

The folder gets ``COMMAND.schema.json`` for each training command.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

from openppo.config import TrainPPOConfig, TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.config.fields import SPELLINGS, Options, is_group, rules_of
from openppo.config.foreign import VALUES

COMMANDS: dict[str, type[Options]] = {
    "train_ppo": TrainPPOConfig,
    "train_sft": TrainSFTConfig,
    "train_rm": TrainRMConfig,
    "train_prm": TrainPRMConfig,
}

_ALSO: dict[str, dict[str, Any]] = {
    "use_wandb": {"const": True},
    "chat_template_kwargs": {"type": "object"},
}
"""Forms that ``--config`` takes for a single option."""

_TYPES: dict[Any, list[str]] = {
    bool: ["boolean"],
    int: ["integer"],
    float: ["number"],
    str: ["string", "number"],  # a number is read as its text
    types.NoneType: ["null"],
}

Schema = dict[str, Any]


def write_schemas(folder: Path) -> list[Path]:
    """Write the schema of each training command to ``folder``; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for command in COMMANDS:
        file = folder / f"{command}.schema.json"
        text = json.dumps(schema_of(command), indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")
        files.append(file)
    return files


def schema_of(command: str) -> Schema:
    """Return the schema of a command's options, in draft 7, which editors know best."""
    options = _options(COMMANDS[command])
    for spelling, name in SPELLINGS.items():
        if name in options:
            options[spelling] = options[name] | {"description": f"The same as {name}."}

    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"Options of openppo {command}",
        "type": "object",
        "properties": options,
        "additionalProperties": False,
    }


def _options(group: type[Options]) -> dict[str, Schema]:
    """Return the schema of each option of a command, or of a group of its options."""
    schemas: dict[str, Schema] = {}
    hints = typing.get_type_hints(group)
    texts = docstrings(group)
    for declared in dataclasses.fields(group):
        hint = hints[declared.name]
        if is_group(hint):
            schemas |= _options(hint)
        else:
            schemas[declared.name] = {"description": texts[declared.name]}
            if declared.default is not dataclasses.MISSING:
                schemas[declared.name]["default"] = declared.default
            schemas[declared.name] |= _values(declared, hint)
    return schemas


def _values(declared: dataclasses.Field, hint: Any) -> Schema:
    """Return the schema of an option's values."""
    bound = rules_of(declared).bound
    limit = {} if bound is None else dict(bound.schema)
    forms = _forms(hint, limit)
    if declared.name in _ALSO:
        forms.append(_ALSO[declared.name])
    if declared.name in VALUES:
        forms.append(
            {"enum": list(VALUES[declared.name]), "description": "Other libraries' names."}
        )
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _forms(hint: Any, limit: Schema) -> list[Schema]:
    """Return schemas of which a value of type ``hint`` fits one.

    ``limit`` holds for a value, or for each value of a tuple.
    """
    kind = typing.get_origin(hint)
    inner = typing.get_args(hint)

    if kind in (typing.Union, types.UnionType):
        if all(member in _TYPES for member in inner):
            names = [name for member in inner for name in _TYPES[member]]
            return [{"type": names, **limit}]
        return [form for member in inner for form in _forms(member, limit)]

    if kind is Literal:
        choices: list[object] = list(inner)
        if "on" in inner:
            choices += [True, False]  # YAML 1.1 reads on and off so
        return [{"enum": choices, **limit}]

    if kind is tuple and inner[1:] == (...,):
        (item,) = _forms(inner[0], limit)
        return [item, {"type": "array", "items": item}]
    if kind is tuple:
        items = [form for member in inner for form in _forms(member, limit)]
        return [{"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}]

    names = _TYPES[hint]
    return [{"type": names[0] if len(names) == 1 else names, **limit}]


def docstrings(group: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(group.__bases__):
        if dataclasses.is_dataclass(base):
            texts |= docstrings(base)

    node = _classes(group.__module__)[group.__name__]
    for field, text in itertools.pairwise(node.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the source of the classes of a module, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m openppo.config.schema FOLDER")
    for written in write_schemas(Path(sys.argv[1])):
        sys.stdout.write(f"{written}\n")
