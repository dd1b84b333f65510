"""Files that users write and may edit between a run and its resume: code, tools, templates, tasks."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from openppo.config.fields import Options, given_options, mask_credentials
from openppo.rollout.tasks import RunTask
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
"""Options that name such files, or have their names among other words."""


def user_files(config: Options, tasks: Sequence[RunTask] = ()) -> dict[str, Any]:
    """Content of the files of a run as its checkpoints keep it: ``hashes`` by flag and name, ``tasks`` by field.

    ``{"hashes": {"--reward_fn": {"reward.py": "9f86..."}}, "tasks": {"math": {"ratio": 0.5}}}``
    """
    options = given_options(config)
    hashes = {f"--{name}": _hashes(options[name]) for name in _OPTIONS if options.get(name)}
    for task in tasks:
        own = given_options(task.config)
        different = [name for name in _OPTIONS if own.get(name) and own[name] != options.get(name)]
        hashes |= {f"--{name} of task {task.name}": _hashes(own[name]) for name in different}
    return {"hashes": hashes, "tasks": _task_fields(options.get("tasks"))}


def edits(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Files that differ between two results of ``user_files``, and of the tasks each field with both values.

    What only one of them has is new or gone with an option, which is compared by itself.
    """
    changed = []
    for flag, hashes in now.get("hashes", {}).items():
        before = saved.get("hashes", {}).get(flag, {})
        changed += [
            f"{flag} {name}"
            for name, digest in hashes.items()
            if before.get(name, digest) != digest
        ]

    old, new = saved.get("tasks", {}), now.get("tasks", {})
    for name in dict.fromkeys([*old, *new]) if old and new else ():
        if name not in old or name not in new:
            changed.append(f"--tasks: task {name} is {'new' if name in new else 'gone'}")
            continue
        for field in dict.fromkeys([*old[name], *new[name]]):
            before, after = (fields[name].get(field, "(not given)") for fields in (old, new))
            if before != after:
                changed.append(f"--tasks: task {name}: {field} {before} -> {after}")
    return changed


def _hashes(value: str) -> dict[str, str]:
    """SHA-256 by name of the files that the value of an option stands for; none for addresses and objects."""
    file = Path(re.sub(r"(\.py):\w*$", r"\1", value)).expanduser()
    if not os.path.isfile(file):  # a command, which may be longer than a path
        files = _scripts_in(value)
    elif file.suffix in (".yaml", ".yml"):
        text = file.read_text(encoding="utf-8", errors="replace")
        classes = [
            file.with_name(f"{name}.py") for name in re.findall(r"class_name:\s*['\"]?(\w+)", text)
        ]
        files = [file, *(each for each in classes if each.is_file()), *_scripts_in(text)]
    else:
        files = [file]

    hashes = {}
    for each in files:
        for part in source_files(each) if each.suffix == ".py" else [each]:
            hashes[os.path.relpath(part, each.parent)] = hashlib.sha256(
                part.read_bytes()
            ).hexdigest()
    return hashes


def _scripts_in(text: str) -> list[Path]:
    """Programs among the words of a command or a YAML file."""
    words = re.findall(r"[^\s\"'\[\],;]+\.(?:py|sh)\b", text)
    return [Path(word) for word in words if Path(word).is_file()]


def _task_fields(file: str | None) -> dict[str, dict[str, Any]]:
    """Fields of each task of a file of ``--tasks`` by name, those of mappings in it as ``options.max_turns``."""
    if file is None:
        return {}
    rows = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["tasks"]
    return {row["name"]: json.loads(json.dumps(_flat(row), default=str)) for row in rows}


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            fields |= _flat(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = mask_credentials(value) if isinstance(value, str) else value
    return fields
