"""Fields of rows -> examples in several processes, cached on disk by content.

The cache serves all ranks and later runs. ``datasets`` maps the rows and stores the examples, in its cache folder.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
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

from openppo.datasets.row_fields import RowFields

ROWS_AT_ONCE = 20_000
"""Rows of one file of the cache; progress is shown after each."""


def to_json(fields: RowFields) -> str:
    """Write ``fields`` for another process; ``ValueError`` if they would not arrive unchanged."""
    try:
        text = json.dumps(vars(fields))
        is_same = json.loads(text) == vars(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"holds values that are not JSON's ({error}): leave --dataset_num_proc out."
        ) from error
    if not is_same:
        raise ValueError("holds values that are not JSON's: leave --dataset_num_proc out.")
    return text


def tokenizing_content(tokenizer: PreTrainedTokenizerBase, options: Sequence[object]) -> str:
    """Digest of all that examples depend on besides their rows.

    These are the tokenizer's files, ``options``, versions and our code.
    """
    settings = [options, transformers.__version__, version("tokenizers")]
    digest = sha256(repr(settings).encode())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [*Path(folder).rglob("*"), *Path(__file__).parent.glob("*.py")]
        files = [path for path in paths if path.is_file()]
        for file in sorted(files, key=lambda file: file.name):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def tokenize(
    render: Callable[[RowFields], Any],
    fields: list[str],
    content: str,
    processes: int,
    show: Callable[[Any], Iterable[Any]],
) -> list[Any]:
    """Render each of ``fields`` to the attributes of an example, or to the message of a ``ValueError``.

    ``content`` stands for all that ``render`` depends on.
    """
    starts = range(0, len(fields), ROWS_AT_ONCE)
    parts = [fields[start : start + ROWS_AT_ONCE] for start in starts]
    examples: list[Any] = []
    for part in show(parts):
        texts = _kept(_Rendering(render), part, content, processes=processes)
        examples += map(json.loads, texts)
    return examples


@dataclass(frozen=True)
class _Rendering:
    """The function that ``datasets`` maps over fields as JSON texts."""

    render: Callable[[RowFields], Any]

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {"example": [self._rendered(text) for text in batch["fields"]]}

    def _rendered(self, text: str) -> str:
        return json.dumps(self._attributes(json.loads(text)))

    def _attributes(self, fields: dict[str, Any]) -> dict[str, Any] | str:
        """Attributes of the example, or why there is none."""
        try:
            attributes = dict(vars(self.render(RowFields(**fields))))
        except ValueError as error:
            return str(error)
        if attributes.pop("media", ()):
            return "the row has images, and --dataset_num_proc keeps texts: leave it out."
        return attributes


def _kept(rendering: _Rendering, fields: list[str], content: str, processes: int) -> list[str]:
    """Examples of the cache as JSON texts; made and written first if they are not there."""
    digest = sha256(json.dumps([content, fields]).encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "openppo_tokens" / digest
    disable_progress_bars()

    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            rows = Dataset.from_dict({"fields": fields})
            examples = rows.map(
                rendering,
                batched=True,
                remove_columns=["fields"],
                num_proc=processes if processes > 1 else None,
                new_fingerprint=digest[:32],
            )
            _write(examples, folder)

        return list(load_from_disk(str(folder))["example"])
    except OSError as error:
        remedy = "Choose another folder with HF_DATASETS_CACHE."
        raise ValueError(
            f"--dataset_num_proc: the cache {folder} cannot be used ({error}). {remedy}"
        ) from error


def _write(examples: Dataset, folder: Path) -> None:
    """Write ``folder`` whole or not at all."""
    with TemporaryDirectory(dir=folder.parent) as temporary:
        written = f"{temporary}/examples"
        examples.save_to_disk(written)
        try:
            os.rename(written, folder)
        except OSError:
            # Another run may have written the same examples in the meantime.
            if not folder.is_dir():
                raise
