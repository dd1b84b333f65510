"""Check that a run matches the checkpoint it resumes from."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from openppo import logger
from openppo.config.train_supervised import training_rules
from openppo.trainer.resume.edited_files import edits

_N_PARTS = 256
"""Parts of a file of weights that its fingerprint reads, evenly spread."""
_PART_BYTES = 1 << 14

Changes = dict[str, tuple[Any, Any]]
"""Old and new value of options that have changed, by name."""


def check_compatible(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare a checkpoint with this run, and log the differences that are allowed.

    ``saved`` and ``current`` have a ``kind``, ``options`` and ``contents``: fingerprints by flag of what options name,
    and by role of models given in Python. A folder that has moved is the same, another one under an old name is not.
    Raises ``ValueError`` naming every option that contradicts the checkpoint in ``path``.
    """
    if saved["kind"] != current["kind"]:
        raise ValueError(
            f"--load_checkpoint: {path} is a checkpoint of train_{saved['kind']}, not of train_{current['kind']}: give "
            f"another --ckpt_path. {_start_from_weights(path, saved)}"
        )

    changes = _changes(saved["options"], current["options"])
    wrong = _wrong_options(changes, current) + _wrong_contents(changes, saved, current)
    if wrong:
        raise ValueError(
            f"--load_checkpoint: this run contradicts its checkpoint {path}: {'; '.join(dict.fromkeys(wrong))}. "
            f"Restore these options, or choose another --ckpt_path. {_start_from_weights(path, saved)}"
        )

    allowed = [
        f"--{name} {old} -> {new}"
        for name, (old, new) in changes.items()
        if name != "load_checkpoint"
    ]
    if allowed:
        logger.info(
            "options that differ from the checkpoint's, in force from now on: %s",
            ", ".join(allowed),
        )
    edited = edits(saved.get("user_files", {}), current.get("user_files", {}))
    if edited:
        logger.info(
            "files edited since the checkpoint, in force from now on: %s", ", ".join(edited)
        )


def _wrong_options(changes: Changes, current: Mapping[str, Any]) -> list[str]:
    """Describe changed options that must match, except those whose contents are compared."""
    rules = training_rules()
    return [
        _describe(name, change)
        for name, change in changes.items()
        if rules[name].resume == "must match" and f"--{name}" not in current["contents"]
    ]


def _wrong_contents(
    changes: Changes, saved: Mapping[str, Any], current: Mapping[str, Any]
) -> list[str]:
    """Describe models and data with other contents, wherever they lie."""
    rules = training_rules()
    wrong: list[str] = []
    for flag, fingerprint in current["contents"].items():
        option = flag.removeprefix("--")
        before = saved["contents"].get(flag)
        # as with --ptx_coef 0
        was_not_read = before is None and option not in changes and flag.startswith("--")
        if before == fingerprint or was_not_read:
            continue
        causes = [
            _describe(name, change)
            for name, change in changes.items()
            if name == option or option in rules[name].rows_of
        ]
        if causes:
            wrong += causes
        else:
            place = current["options"].get(option, "(given in Python)")
            wrong.append(f"{flag} {place} has other contents")

    for role in saved["contents"]:
        if not role.startswith("--") and role not in current["contents"]:
            wrong.append(f"{role} was given in Python, and is not")
    return wrong


def _describe(name: str, change: tuple[Any, Any]) -> str:
    old, new = change
    return f"--{name} was {old}, is {new}"


def _start_from_weights(path: Path, saved: Mapping[str, Any]) -> str:
    """Tell how a new run starts from the weights of a checkpoint."""
    # adapters are merged into a base model for new ones
    merge = " --merge" if saved["options"].get("lora_rank") else ""
    return (
        f"A new run continues with its weights: openppo export {shlex.quote(str(path))} FOLDER{merge}, then "
        "--pretrain FOLDER."
    )


def measured_otherwise(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the options for which evaluations under ``current`` and ``saved`` cannot be compared.

    They differ, or a file that they name was edited.
    """
    files = edits(saved.get("user_files", {}), current.get("user_files", {}))
    edited_options = {text.split()[0].removeprefix("--") for text in files}
    changed = _changes(saved["options"], current["options"]).keys() | edited_options
    return [name for name, rules in training_rules().items() if rules.measures and name in changed]


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Changes:
    """Find the options that both have, with different values."""
    old = json.loads(json.dumps(saved))  # tuples become lists
    new = json.loads(json.dumps(current))
    return {
        name: (old[name], value)
        for name, value in new.items()
        if name in old and old[name] != value
    }


def model_fingerprint(name: str) -> str:
    """Return a digest of a local folder, or the name and commit of a model on the hub.

    The digest covers its config, and names, sizes and parts of its weights.
    """
    folder = Path(name)
    if not folder.is_dir():
        return _hub_fingerprint(name)

    digest = hashlib.sha256()
    for file in sorted(folder.glob("*")):
        is_config = file.name in ("config.json", "adapter_config.json")
        if not is_config and file.suffix not in (".safetensors", ".bin"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for part in range(_N_PARTS):
                evenly_spread = part * (size - _PART_BYTES) // (_N_PARTS - 1)
                opened.seek(max(part * _PART_BYTES, evenly_spread))
                digest.update(opened.read(_PART_BYTES))
    return digest.hexdigest()


def _hub_fingerprint(name: str) -> str:
    """Name and commit of a model in the hub's cache, else its name."""
    with suppress(HFValidationError):  # no name of the hub either: loading it says so
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            commit = Path(cached).parent.name
            return f"{name}@{commit}"
    return name


def examples_fingerprint(examples: Iterable[object]) -> str:
    """Digest all fields of ``examples`` in their order: plain values and dataclasses of them."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
        for item in getattr(example, "media", ()):
            digest.update(str(item.key).encode())
    return digest.hexdigest()
