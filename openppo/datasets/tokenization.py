"""Fields of rows -> examples in several processes, kept on disk by content: once for all ranks, and for later runs.

``datasets`` maps and stores them, in its cache folder.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import transformers
from datasets import Dataset, disable_progress_bars, load_from_disk
from transformers import PreTrainedTokenizerBase

from openppo.datasets.row_formats import RowFields

ROWS_AT_ONCE = 20_000
"""Rows of one file of the cache; a sign of progress follows each."""


def to_json(fields: RowFields) -> str:
    """``fields`` for another process; ``ValueError`` if they would not arrive unchanged."""
    try:
        text, same = json.dumps(vars(fields)), None
        same = json.loads(text) == vars(fields)
    except (TypeError, ValueError, RecursionError) as error:
        same = error
    if same is not True:
        raise ValueError(
            f"holds values that are not JSON's{f' ({same})' * bool(same)}: leave --dataset_num_proc out."
        )
    return text


def tokenizing_content(tokenizer: PreTrainedTokenizerBase, *options: object) -> str:
    """What examples depend on besides their rows: the tokenizer's files, ``options``, versions and our code."""
    digest = sha256(repr([options, transformers.__version__, version("tokenizers")]).encode())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = [*Path(folder).rglob("*"), *Path(__file__).parent.glob("*.py")]
        for file in sorted((file for file in files if file.is_file()), key=lambda file: file.name):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def tokenize(
    render: Callable[[RowFields], Any],
    fields: list[str],
    content: str,
    processes: int,
    show: Callable[[Any], Iterable[Any]],
) -> list[Any]:
    """The attributes of what ``render`` makes of each of ``fields``, or the message of its ``ValueError``.

    ``content`` stands for all that ``render`` depends on.
    """
    parts = [fields[start : start + ROWS_AT_ONCE] for start in range(0, len(fields), ROWS_AT_ONCE)]
    return [
        json.loads(text)
        for part in show(parts)
        for text in _kept(_Rendering(render), part, content, processes=processes)
    ]


@dataclass(frozen=True)
class _Rendering:
    """What ``datasets`` maps."""

    render: Callable[[RowFields], Any]

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {"example": [json.dumps(self._made(json.loads(text))) for text in batch["fields"]]}

    def _made(self, fields: dict[str, Any]) -> Any:
        try:
            made = dict(vars(self.render(RowFields(**fields))))
            if made.pop("media", ()):
                return "the row has images, and --dataset_num_proc keeps texts: leave it out."
            return made
        except ValueError as error:
            return str(error)


def _kept(rendering: _Rendering, fields: list[str], content: str, processes: int) -> list[str]:
    """From the cache; else made, and written there whole or not at all."""
    digest = sha256(json.dumps([content, fields]).encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "openppo_tokens" / digest
    disable_progress_bars()
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            options: dict[str, Any] = {
                "num_proc": processes if processes > 1 else None,
                "new_fingerprint": digest[:32],
            }
            rows = Dataset.from_dict({"fields": fields})
            made = rows.map(rendering, batched=True, remove_columns=["fields"], **options)
            with TemporaryDirectory(dir=folder.parent) as temporary:
                made.save_to_disk(f"{temporary}/made")
                try:
                    os.rename(f"{temporary}/made", folder)
                except OSError:
                    if not folder.is_dir():  # of another run, which has made the same
                        raise
        return list(load_from_disk(str(folder))["example"])
    except OSError as error:
        remedy = "Choose another folder with HF_DATASETS_CACHE."
        raise ValueError(
            f"--dataset_num_proc: the cache {folder} cannot be used ({error}). {remedy}"
        ) from error
