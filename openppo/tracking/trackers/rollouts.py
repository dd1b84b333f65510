"""All samples of a run as JSON lines: a series of files for each split and rank, rotated by size."""

import json
from pathlib import Path
from typing import Any

from openppo.tracking.console import logger
from openppo.tracking.report.run_data import ROLLOUTS
from openppo.tracking.run_folder import LOG_STEP, numbered
from openppo.tracking.trackers.local import json_form
from openppo.tracking.trackers.tracker import Tracker


class RolloutTracker(Tracker):
    """Appends rows of one ``rank`` to its newest file, and begins another one when that has ``most_bytes``."""

    name = "--dump_rollouts"

    def __init__(self, folder: Path, rank: int, most_bytes: float) -> None:
        self._folder = folder
        self._rank = f"{rank:05d}"
        self._most_bytes = most_bytes

    def log_rollouts(self, step: int, split: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        pattern = ROLLOUTS.format(split=split, rank=self._rank)
        files = sorted(self._folder.glob(pattern))
        if not files or files[-1].stat().st_size >= self._most_bytes:
            files.append(self._folder / pattern.replace("*", f"{len(files):05d}"))

        lines = []
        for row in rows:
            line = json_form({"step": step, "split": split, **row})
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        self._folder.mkdir(parents=True, exist_ok=True)  # it may have been removed
        with open(files[-1], "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(lines))


def prepare_rollouts(folder: Path, resume_step: int | None) -> None:
    """Make ``folder``; cut its rows after ``resume_step``, or without one set the files of an earlier run aside."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob(ROLLOUTS.format(split="*", rank="*")))
    if resume_step is not None:
        for series in {file.name.rpartition("-")[0] for file in files}:
            _cut([file for file in files if file.name.startswith(f"{series}-")], resume_step)
    elif files:
        aside = numbered(folder)
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
        logger.info("--dump_rollouts: rollouts of an earlier run are kept in %s", aside)


def _cut(series: list[Path], step: int) -> None:
    """Cut files of one rank and split after ``step``; the unfinished last line of a killed process goes too."""
    for file in reversed(series):
        kept = 0
        with file.open("rb+") as lines:
            for line in lines:
                match = LOG_STEP.match(line)
                if match is None or int(match[1]) > step or not line.endswith(b"\n"):
                    break
                kept += len(line)
            lines.truncate(kept)
        if kept > 0:
            return  # files before it hold earlier steps
        file.unlink()
