"""Data of a supervised command: which rows are loaded, and how several sources are mixed."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, interleave_datasets

from openppo.config import DeepSpeedConfig, SupervisedConfig, TrainSFTConfig
from openppo.datasets import ShowRows, SourceRow
from openppo.tracking.phase import current
from openppo.trainer.supervised.build import load_train_and_eval
from openppo.types import SingleProcess


@pytest.fixture
def sources(tmp_path: Path) -> str:
    """Two files of 40 and 20 rows, named with a comma between."""
    rows = {"a": [{"text": f"a{i}"} for i in range(40)], "b": [{"text": f"b{i}"} for i in range(20)]}
    for name in rows:
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
    return f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"


def loaded(dataset: str, seed: int = 42, **options: Any) -> tuple[list[str], list[str]]:
    def texts(rows: list[SourceRow], *, flag: str, show: ShowRows) -> tuple[list[str], int]:
        return [row.row["text"] for row in show(rows)], 0

    config = TrainSFTConfig(SupervisedConfig("model", dataset, **options), deepspeed=DeepSpeedConfig(seed=seed))
    return load_train_and_eval(config, SingleProcess(), texts)


def test_without_shares_all_rows_of_all_sources_are_read(sources: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[None] = []
    monkeypatch.setattr(current, "on_progress", lambda: seen.append(None))
    train, held_out = loaded(sources, max_samples=30)
    assert train == [f"a{i}" for i in range(30)] + [f"b{i}" for i in range(20)]
    assert held_out == []
    assert len(seen) == 50, "the watchdog ends a rank without progress"


def test_with_shares_sources_are_mixed_by_the_seed_and_held_out_data_are_not(sources: str) -> None:
    train, held_out = loaded(sources, seed=3, dataset_probs="3,1", eval_dataset=sources)
    sets = [Dataset.from_dict({"text": [f"{name}{i}" for i in range(n)]}) for name, n in (("a", 40), ("b", 20))]
    assert train == interleave_datasets(sets, probabilities=[0.75, 0.25], seed=3)["text"][:]
    assert len(held_out) == 60


def test_a_loader_of_the_users_own_reads_every_source(sources: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rows(source):\n    return [{'text': source.rpartition('/')[2]}] * 2\n")
    train, held_out = loaded(sources, dataset_class=f"{tmp_path}/mine.py:rows", eval_dataset="elsewhere")
    assert train == ["a.jsonl"] * 2 + ["b.jsonl"] * 2
    assert held_out == ["elsewhere"] * 2
