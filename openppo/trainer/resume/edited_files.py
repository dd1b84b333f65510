"""Users' files that may change before a resume: code, tools, templates, tasks."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from openppo.config.fields import Options, given_options, mask_credentials, names_file
from openppo.sources.task import Task
from openppo.user_code import source_files

_OPTIONS = (
    "reward_fn",
    "remote_rm_url",
    "eval_reward_fn",
    "agent",
    "agent_command",
    "environment",
    "tools",
    "dataset_class",
    "chat_template",
    "task_ratios",
)
"""Options that name such files, alone or among other words."""
_ALGORITHM = ("policy_loss_type", "advantage_estimator", "kl_controller", "prompt_order")
"""Options with a name of ours, or path.py:name of a user's own."""


def user_files(config: Options, tasks: Sequence[Task] = ()) -> dict[str, Any]:
    """Return ``hashes`` of a run's files by flag and name, and its ``tasks`` by field, for a checkpoint.

    ``{"hashes": {"--reward_fn": {"reward.py": "9f86..."}}, "tasks": {"math": {"ratio": 0.5}}}``
    """
    options = given_options(config)
    names = [name for name in _OPTIONS if options.get(name)]
    names += [name for name in _ALGORITHM if names_file(options.get(name) or "")]
    hashes = {f"--{name}": _hashes(options[name]) for name in names}
    for task in tasks:
        task_options = given_options(task.config)
        for name in _OPTIONS:
            value = task_options.get(name)
            if value and value != options.get(name):
                hashes[f"--{name} of task {task.name}"] = _hashes(value)
    return {"hashes": hashes, "tasks": _task_fields(options.get("tasks"))}


def edits(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the files that differ between two results of ``user_files``, and tasks with each changed field.

    Options that only one of them has are new or gone; options are compared elsewhere.
    """
    hashes = _edited_hashes(saved.get("hashes", {}), current.get("hashes", {}))
    return hashes + _edited_tasks(saved.get("tasks", {}), current.get("tasks", {}))


def _edited_hashes(
    saved: Mapping[str, Mapping[str, str]], current: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Flag and name of each file with another hash."""
    edited = []
    for flag, hashes in current.items():
        before = saved.get(flag, {})
        for name, digest in hashes.items():
            if before.get(name, digest) != digest:
                edited.append(f"{flag} {name}")
    return edited


def _edited_tasks(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Tasks that are new or gone, and changed fields with both values.

    There are none if only one run has tasks.
    """
    if not old or not new:
        return []
    edited = []
    for name in dict.fromkeys([*old, *new]):
        if name not in old or name not in new:
            edited.append(f"--tasks: task {name} is {'new' if name in new else 'gone'}")
            continue
        for field in dict.fromkeys([*old[name], *new[name]]):
            before = old[name].get(field, "(not given)")
            after = new[name].get(field, "(not given)")
            if before != after:
                edited.append(f"--tasks: task {name}: {field} {before} -> {after}")
    return edited


def _hashes(value: str) -> dict[str, str]:
    """SHA-256 by name of the files that an option's value names; none for addresses and objects."""
    hashes = {}
    for file in _files(value):
        sources = source_files(file) if file.suffix == ".py" else [file]
        for source in sources:
            name = os.path.relpath(source, file.parent)
            hashes[name] = hashlib.sha256(source.read_bytes()).hexdigest()
    return hashes


def _files(value: str) -> list[Path]:
    """A file, with a YAML file its class and scripts; or the scripts of a command."""
    file = Path(re.sub(r"(\.py):\w*$", r"\1", value)).expanduser()
    if not os.path.isfile(file):  # a command, which may be longer than a path
        return _scripts_in(value)
    if file.suffix not in (".yaml", ".yml"):
        return [file]

    text = file.read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"class_name:\s*['\"]?(\w+)", text)
    modules = [file.with_name(f"{name}.py") for name in names]
    return [file, *(module for module in modules if module.is_file()), *_scripts_in(text)]


def _scripts_in(text: str) -> list[Path]:
    """Existing scripts among the words of a command or a YAML file."""
    words = re.findall(r"[^\s\"'\[\],;]+\.(?:py|sh)\b", text)
    return [Path(word) for word in words if Path(word).is_file()]


def _task_fields(file: str | None) -> dict[str, dict[str, Any]]:
    """Fields by task in a file of ``--tasks``; nested ones are named like ``options.max_turns``."""
    if file is None:
        return {}
    rows = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["tasks"]
    return {row["name"]: json.loads(json.dumps(_flat(row), default=str)) for row in rows}


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, and mask credentials."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            fields |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            fields[f"{prefix}{name}"] = mask_credentials(value)
        else:
            fields[f"{prefix}{name}"] = value
    return fields
