"""Rows of results: one JSON line each, written at once, so that a run that is cut leaves what it measured."""

import json
import os
import re
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DRY = os.environ.get("KIT_DRY") == "1"
"""Tiny models on a CPU: figures mean nothing."""
REPOSITORY = Path(__file__).resolve().parents[2]
OUT, WORK = (Path(os.environ.get(name, ".")).resolve() for name in ("KIT_OUT", "KIT_WORK"))
"""Where results go, and where models and runs lie meanwhile."""
BEGAN = float(os.environ.get("KIT_BEGAN", time.time()))
SECONDS_LEFT = float(os.environ.get("KIT_LIMIT", "300"))
"""The limit of this stage, when it starts."""

_FINDINGS = "environment.json"
PEAK_TFLOPS = 989.0
"""Dense products in bfloat16 of an H100 or H200, by its data sheet."""
_TB_S = {"H200": 4.8, "H100": 3.35}
"""Bandwidth of memory, by the data sheets."""


def emit(table: str, **row: Any) -> None:
    """Append a row to ``table`` of this stage, and print it."""
    place = {
        "stage": os.environ.get("KIT_STAGE", ""),
        "table": table,
        "at_s": round(time.time() - BEGAN, 1),
    }
    line = json.dumps(place | row, default=str)
    with open(OUT / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, flush=True)


def attempt(table: str, work: Callable[[], Any], **row: Any) -> Any:
    """What ``work`` returns; an exception is a row with its reason, and None."""
    try:
        return work()
    except Exception as error:
        calls = traceback.format_exc().strip().splitlines()[-7:-1]
        emit(
            table,
            **row,
            failed=f"{type(error).__name__}: {error}"[:600],
            where=" | ".join(calls)[-600:],
        )
        return None


def log(name: str, text: str, most: int = 12000) -> None:
    """Append the end of a log to the one file for all."""
    with open(OUT / "logs.txt", "a", encoding="utf-8") as file:
        file.write(f"\n===== {name}\n{text[-most:]}\n")


def keep_finding(name: str, value: Any) -> None:
    """A row of the environment, which later stages can look up."""
    emit("environment", what=name, value=value)
    (WORK / _FINDINGS).write_text(
        json.dumps(findings() | {name: value}, default=str), encoding="utf-8"
    )


def findings() -> Row:
    """All of the environment so far; an earlier call on the same machine counts too."""
    file = WORK / _FINDINGS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def bandwidths() -> dict[str, float]:
    """TB/s of this device's memory by name, where they are known: of a large copy, and nominal."""
    name = str(findings().get("device", ""))
    known = {
        "copy bandwidth": float(findings().get("copy, TB/s read and written", 0.0)),
        "nominal bandwidth": next((tb_s for part, tb_s in _TB_S.items() if part in name), 0.0),
    }
    return {name: tb_s for name, tb_s in known.items() if tb_s > 0}


def read_rows(file: Path) -> list[Row]:
    """The rows of a file of JSON lines; a last line that was cut is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_tables(states: dict[str, str]) -> None:
    """Write tables.md anew: how each stage went, then the rows of each table."""
    rows = read_rows(OUT / "results.jsonl")
    lines = ["# OpenPPO on a GPU", ""]
    if DRY:
        lines += ["A dry run on a CPU: its figures mean nothing.", ""]
    lines += [
        *_table([{"stage": stage, "how it went": state} for stage, state in states.items()]),
        "",
    ]
    for stage, table in dict.fromkeys((row["stage"], row["table"]) for row in rows):
        lines += [f"## {stage}: {table}", ""]
        chosen = [row for row in rows if (row["stage"], row["table"]) == (stage, table)]
        shown = [
            {name: row[name] for name in row if name not in ("stage", "table", "at_s")}
            for row in chosen
        ]
        if whole := [row for row in shown if "failed" not in row]:
            lines += [*_table(whole), ""]
        for row in (row for row in shown if "failed" in row):
            about = ", ".join(f"{name}: {value}" for name, value in row.items() if name != "failed")
            lines += [f"- FAILED ({about}): {' '.join(str(row['failed']).split())}", ""]
    unfinished = OUT / "tables.md.new"
    unfinished.write_text(without_places("\n".join(lines)), encoding="utf-8")
    unfinished.replace(OUT / "tables.md")


def _table(rows: list[Row]) -> list[str]:
    """Rows in Markdown, with a column for each name in any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for row in rows:
        lines.append(
            f"| {' | '.join(str(row.get(name, '-')).replace('|', '/') for name in names)} |"
        )
    return lines


def without_places(text: str) -> str:
    """``text`` without the names of this machine and its folders."""
    for place in (str(REPOSITORY), str(WORK), str(OUT), str(Path.home()), socket.gethostname()):
        if len(place) > 3:
            text = text.replace(place, "...")
    return re.sub(r"/(?:tmp|home|root|work|usr|opt|mnt|dev/shm)/[^\s'\"]*/", ".../", text)
