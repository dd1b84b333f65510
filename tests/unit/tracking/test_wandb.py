"""A real run of Weights & Biases, offline, read back from its file."""

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from openppo.config import TrackingConfig
from openppo.tracking import Histogram, Trackers, WandbTracker

wandb = pytest.importorskip("wandb", reason="needs the package wandb (pip install wandb)")

KEY = "0123456789abcdef" * 2 + "fedcba98"  # 40 characters, as real ones have


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, no settings and no network of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    (tmp_path / "home").mkdir()


def tracker_in(folder: Path, resumes: bool = False, **options: Any) -> WandbTracker:
    """A tracker of an offline run."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    tracking = TrackingConfig(**{"use_wandb": "True", **options})
    return WandbTracker(folder / "logs", tracking, {"seed": 7}, resumes)


def records_of(folder: Path) -> list[Any]:
    """What the files of all offline runs below hold, in the order of their beginning."""
    from wandb.proto import wandb_internal_pb2

    def read(file: Path) -> list[Any]:
        while True:  # W&B's service writes the end of the file when it comes to it
            records = [
                wandb_internal_pb2.Record.FromString(data)
                for data in leveldb_log(file.read_bytes())
            ]
            if records and records[-1].HasField("exit"):
                return records
            time.sleep(0.1)

    files = sorted(
        (folder / "logs" / "wandb").glob("offline-run-*/*.wandb"),
        key=lambda file: file.stat().st_ctime,
    )
    return [record for file in files for record in read(file)]


def leveldb_log(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format (its doc/log_format.md), after W&B's header of 7 bytes."""
    place, data = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield data
            data = b""


def history_of(folder: Path) -> list[dict[str, Any]]:
    """What was logged, line by line."""
    lines = [record.history.item for record in records_of(folder) if record.HasField("history")]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in line}
        for line in lines
    ]


def test_an_offline_run_holds_what_was_logged(tmp_path, monkeypatch):
    for name, value in (("PROJECT", "p"), ("RUN_GROUP", "g"), ("ENTITY", "us")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    tracker = tracker_in(tmp_path / "ppo")
    tracker.log(1, {"reward": 0.5, "time/step_s": 2.0})
    tracker.log_histograms(1, {"reward": Histogram([0.0, 1.0, 2.0], [2, 1], 2.5, 3.0)})
    tracker.log_samples(
        1, [{"prompt": "2 + 2 =", "response": "4", "reward": 1.0, "label": 4, "ids": [1, 2]}]
    )
    tracker.close()
    first, second, third = history_of(tmp_path / "ppo")
    assert (first["global_step"], first["reward"], first["time/step_s"]) == (1, 0.5, 2.0)
    assert second["histograms/reward._type"] == "histogram"
    assert (second["histograms/reward.values"], second["histograms/reward.bins"]) == (
        [2, 1],
        [0.0, 1.0, 2.0],
    )
    table = tmp_path / "ppo" / "logs" / "wandb" / "latest-run" / "files" / third["samples.path"]
    columns = ["step", "prompt", "response", "reward", "label"]
    assert json.loads(table.read_text()) == {
        "columns": columns,
        "data": [[1, "2 + 2 =", "4", 1.0, 4]],
    }
    (run,) = [record.run for record in records_of(tmp_path / "ppo") if record.HasField("run")]
    assert (run.project, run.run_group, run.entity, run.display_name) == ("p", "g", "us", "ppo")
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "7"


def test_a_resumed_run_has_the_id_of_the_first_and_its_step_as_axis(tmp_path):
    for resumes, steps in ((False, (1, 2, 3)), (True, (3, 4))):
        with suppress(RuntimeError), Trackers([tracker_in(tmp_path, resumes)]) as trackers:
            for step in steps:
                trackers.log(step, {"reward": float(step)})
            if not resumes:
                raise RuntimeError("planted")
    exits = [record.exit.exit_code for record in records_of(tmp_path) if record.HasField("exit")]
    assert exits == [1, 0], "a run that fails is a failed one there too"
    assert [line["global_step"] for line in history_of(tmp_path)] == [1, 2, 3, 3, 4]
    runs = [record.run for record in records_of(tmp_path) if record.HasField("run")]
    assert (len(runs), len({run.run_id for run in runs})) == (2, 1)
    metrics = [record.metric for record in records_of(tmp_path) if record.HasField("metric")]
    assert ("*", "global_step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
    tracker_in(tmp_path).close()  # not resumed: another run
    assert (
        len({record.run.run_id for record in records_of(tmp_path) if record.HasField("run")}) == 2
    )


URL = "http://user:swordfish@host:5000/r?key=swordfish"


@pytest.mark.parametrize(
    ("secret", "words", "shown", "options"),
    [
        (
            KEY,
            ["--use_wandb", KEY, f"-u={KEY}"],
            ["--use_wandb", "***", "-u=***"],
            {"use_wandb": KEY},
        ),
        (
            "swordfish",
            ["--remote_rm_url", URL],
            ["--remote_rm_url", "http://***@host:5000/r?***"],
            {},
        ),
    ],
)
def test_secrets_of_the_command_line_are_in_no_file(
    tmp_path, monkeypatch, secret, words, shown, options
):
    monkeypatch.setattr(sys, "argv", [sys.argv[0], *words])
    tracker_in(tmp_path, **options).close()
    assert sys.argv[1:] == words
    arguments = [
        list(r.environment.args) for r in records_of(tmp_path) if r.HasField("environment")
    ]
    assert shown in arguments
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 4
    assert [file for file in files if secret.encode() in file.read_bytes()] == []


def test_without_a_key_an_online_run_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    import wandb

    wandb.teardown()  # which has read the variables of earlier tests
    with pytest.raises(ValueError, match="^--use_wandb cannot start a run .*WANDB_MODE=offline"):
        tracker_in(tmp_path)
