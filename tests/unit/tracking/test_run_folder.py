"""Files that a run leaves in its folder."""

import json
import platform
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

from openppo import __version__
from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.tracking import cut_logs, environment, run_folder, save_run, set_aside_logs
from openppo.types import FinishReason
from tests.ranks import on_ranks


def test_config_yaml_reads_back_in_order_with_tuples_as_lists(tmp_path):
    options = flat_dict(
        from_options(TrainPPOConfig, pretrain="\u00fcbung", reward_fn="r.py", prompt_data="p.jsonl")
    )
    given = options | {"path": Path("a/b"), "color": FinishReason.STOP, "rate": 1e-6, "b": 5e-05}
    save_run(tmp_path / "new" / "run", given, {})
    read = yaml.safe_load((tmp_path / "new" / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert list(read) == list(given)
    assert [read[name] for name in ("path", "color", "rate", "b")] == [
        "a/b",
        FinishReason.STOP.value,
        1e-6,
        5e-05,
    ]
    assert (read["adam_betas"], read["top_k"], read["pretrain"]) == (
        [0.9, 0.95],
        None,
        "\u00fcbung",
    )
    assert all(
        read[name] == (list(value) if isinstance(value, tuple) else value)
        for name, value in options.items()
    )


def test_environment_names_versions_and_the_device_of_each_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "PACKAGES", ("torch", "no-such-package"))
    save_run(tmp_path / "logs", {}, on_ranks(2, environment)[0])
    found = json.loads((tmp_path / "logs" / "environment.json").read_text())
    assert (found["openppo"], found["python"]) == (__version__, platform.python_version())
    assert found["packages"] == {"torch": version("torch")}
    assert found["world_size"] == len(found["ranks"]) == 2
    assert all(rank["host"] == socket.gethostname() for rank in found["ranks"])
    assert all("CPU" in rank["device"] for rank in found["ranks"]) or torch.cuda.is_available()


def test_a_second_run_in_the_same_folder_keeps_the_logs_of_the_first(tmp_path):
    logs = tmp_path / "logs"
    for run in ("first", "second", "third"):
        set_aside_logs(logs)
        save_run(logs, {"save_path": "."}, {})
        (logs / "metrics.jsonl").write_text(run)
    kept = {folder.name: (folder / "metrics.jsonl").read_text() for folder in tmp_path.iterdir()}
    assert kept == {"logs": "third", "logs.1": "first", "logs.2": "second"}


LINES = "".join(f'{{"step": {step}, "response": "\u2028, \x85, \x0b"}}\n' for step in (1, 2, 2))
OWN = "".join(f"{line}\n" for line in ('{"note": "mine"}', "no JSON", '{"step": "two"}', "[1]", ""))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (LINES + '{"step": 3}\n{"step": 1, "cut', LINES),
        (OWN + LINES + '{"step": 13}\n', OWN + LINES),
        ("", ""),
    ],
)
def test_logs_of_a_resumed_run_end_at_its_checkpoint(tmp_path, text, kept):
    """Whatever characters their texts have that end a line elsewhere."""
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "config.yaml").write_text("a: 1")
    cut_logs(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "metrics.jsonl"]
