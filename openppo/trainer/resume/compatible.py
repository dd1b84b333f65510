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
from openppo.config.commands import training_rules
from openppo.trainer.resume.edited_files import edits

_PARTS, _PART = (
    256,
    1 << 14,
)  # so many parts of so many bytes, evenly spread, stand for a file of weights


def check_compatible(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare ``kind``, ``options`` and ``contents`` of a checkpoint with this run's, and log what may differ.

    ``contents`` are fingerprints by flag of what options name, and by role of models given in Python: a folder that has
    moved is the same, another one under an old name is not. Raises ``ValueError`` naming every option that contradicts
    the checkpoint in ``path``.
    """
    if saved["kind"] != now["kind"]:
        raise ValueError(
            f"--load_checkpoint: {path} is a checkpoint of train_{saved['kind']}, not of train_{now['kind']}: give "
            f"another --ckpt_path. {_start_from_weights(path, saved)}"
        )
    rules, differ = training_rules(), _differences(saved["options"], now["options"])
    said = {name: f"--{name} was {old}, is {new}" for name, (old, new) in differ.items()}
    must_match = [
        name
        for name in differ
        if rules[name].resume == "must match" and f"--{name}" not in now["contents"]
    ]
    wrong = [said[name] for name in must_match]
    for flag, fingerprint in now["contents"].items():  # where a model or data lies may differ
        before, data = saved["contents"].get(flag), flag.removeprefix("--")
        not_read = (
            before is None and data not in differ and flag.startswith("--")
        )  # as --ptx_coef was 0
        if before == fingerprint or not_read:
            continue
        causes = [said[name] for name in differ if name == data or data in rules[name].rows_of]
        wrong += causes or [
            f"{flag} {now['options'].get(data, '(given in Python)')} has other contents"
        ]
    own = [
        name
        for name in saved["contents"]
        if not name.startswith("--") and name not in now["contents"]
    ]
    wrong += [f"{name} was given in Python, and is not" for name in own]
    if wrong:
        raise ValueError(
            f"--load_checkpoint: this run contradicts its checkpoint {path}: {'; '.join(dict.fromkeys(wrong))}. "
            f"Restore these options, or choose another --ckpt_path. {_start_from_weights(path, saved)}"
        )
    if allowed := [
        f"--{name} {old} -> {new}"
        for name, (old, new) in differ.items()
        if name != "load_checkpoint"
    ]:
        logger.info(
            "options that differ from the checkpoint's, in force from now on: %s",
            ", ".join(allowed),
        )
    if edited := edits(saved.get("user_files", {}), now.get("user_files", {})):
        logger.info(
            "files edited since the checkpoint, in force from now on: %s", ", ".join(edited)
        )


def _start_from_weights(path: Path, saved: Mapping[str, Any]) -> str:
    """How a new run, which resumes nothing, continues with the weights of a checkpoint."""
    merge = (
        " --merge" if saved["options"].get("lora_rank") else ""
    )  # into a base model for new adapters
    return (
        f"A new run continues with its weights: openppo export {shlex.quote(str(path))} FOLDER{merge}, then "
        "--pretrain FOLDER."
    )


def measured_otherwise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The options that make scores of evaluations under ``now`` no match for those under ``saved``.

    They differ, or a file that they name was edited.
    """
    files = edits(saved.get("user_files", {}), now.get("user_files", {}))
    changed = _differences(saved["options"], now["options"]).keys() | {
        text.split()[0][2:] for text in files
    }
    return [name for name, rules in training_rules().items() if rules.measures and name in changed]


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Old and new value of each option that has changed."""
    old, new = (json.loads(json.dumps(options)) for options in (saved, now))  # tuples become lists
    return {
        name: (old[name], value)
        for name, value in new.items()
        if name in old and old[name] != value
    }


def model_fingerprint(name: str) -> str:
    """Of a local folder its config, and names, sizes and parts of its weights; of a hub name the commit."""
    folder, digest = Path(name), hashlib.sha256()
    if not folder.is_dir():
        with suppress(HFValidationError):  # no name of the hub either: loading it says so
            if isinstance(cached := try_to_load_from_cache(name, "config.json"), str):
                return f"{name}@{Path(cached).parent.name}"  # its folder is named after the commit
        return name
    for file in sorted(folder.glob("*")):
        if file.name in ("config.json", "adapter_config.json") or file.suffix in (
            ".safetensors",
            ".bin",
        ):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                for part in range(_PARTS):
                    opened.seek(max(part * _PART, part * (size - _PART) // (_PARTS - 1)))
                    digest.update(opened.read(_PART))
    return digest.hexdigest()


def examples_fingerprint(examples: Iterable[object]) -> str:
    """Of everything that they hold, in their order: plain values and dataclasses of them."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr(example).encode())
        for item in getattr(example, "media", ()):
            digest.update(str(item.key).encode())
    return digest.hexdigest()
