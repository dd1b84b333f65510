"""Writes docs/tested.md: what was run where, from the first lines of each table in benchmarks/results.

    python benchmarks/tested.py

A table begins with its title and the lines ``- Device: ...`` and ``- Versions: ...``; a line ``- What: ...`` replaces
the title, where that says too little.
"""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "tested.md"
HEAD = """# What was run where

After this page you know on which devices and with which versions OpenPPO's tests and benchmarks have run. `python
benchmarks/tested.py` writes it from the tables in `benchmarks/results`.

Tested with Python 3.11 and 3.12, torch {torch} and transformers {transformers}. `bash tests/run.sh` runs all tests on
CPUs with the versions of `requirements.txt`; `bash tests/lowest.sh` runs those of models, rollouts and trainer with
exactly the lowest that `setup.py` declares. With older transformers GPT-2 does not share prompts, and there is no
Gemma 4.

Not run anywhere yet: several GPUs (nccl; gloo stands in for it on CPUs), the package flash-attn, vLLM on GPUs,
`--adam_offload`, `--load_in_4bit` and
`--deterministic` on GPUs.

| when | what | device | versions |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page as it should be."""
    rows = [row(file) for file in sorted(RESULTS.glob("*.md"), reverse=True)]
    head = HEAD.format(
        torch=f"{lowest('torch')} and {pinned('torch')}",
        transformers=f"{lowest('transformers')} to {pinned('transformers')}",
    )
    return head + "\n".join(rows) + "\n"


def row(file: Path) -> str:
    """The row of one table."""
    title, *lines = file.read_text(encoding="utf-8").splitlines()[:8]
    head = {
        match[1]: match[2]
        for line in lines
        if (match := re.match(r"- (Device|Versions|What): (.+)", line))
    }
    what = head.get("What", re.sub(r", [\d-]+$", "", title.removeprefix("# ")))
    link = f"[{file.name[:10]}](../benchmarks/results/{file.name})"
    return f"| {link} | {what} | {head['Device']} | {head['Versions']} |"


def lowest(package: str) -> str:
    """The lowest version that setup.py declares."""
    declared = re.findall(
        rf'"{package}>=([\d.]+)"', (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    )
    return declared[0]


def pinned(package: str) -> str:
    """The version in requirements.txt, without its last part."""
    pins = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    return re.findall(rf"^{package}==(\d+\.\d+)", pins, flags=re.MULTILINE)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
