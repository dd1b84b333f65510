"""No tracked text says where on a build machine it was made."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

ANYWHERE = re.compile(
    r"(?<![\w.$}>])/(?:root|work)/\w"
    r"|/home/(?!me/|you/|somebody/)[\w.-]+/"
    r"|/Users/(?!me/|you/|somebody/)[\w.-]+/"
    r"|/tmp/pytest-of-\w"
)
IN_RESULTS = re.compile(ANYWHERE.pattern + r"|(?<![\w.$}>])/(?:tmp|var/tmp|mnt|scratch)/\w")
"""What was measured names no folder of its machine; elsewhere a command may use such a one as an example."""
RESULTS = "benchmarks/results/"


def machine_paths(root: Path, names: Iterable[str]) -> list[str]:
    """Lines of the files ``names`` under ``root`` that hold a path of the machine they were made on."""
    found = []
    for name in names:
        try:
            lines = (root / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # no text
            continue
        pattern = IN_RESULTS if name.startswith(RESULTS) else ANYWHERE
        found += [f"{name}:{i}: {match[0]}" for i, line in enumerate(lines, 1) if (match := pattern.search(line))]
    return found


def test_no_tracked_text_names_a_build_machine() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]
    assert len(names) > 100
    assert machine_paths(REPO, names) == []


def test_the_checker_catches_paths_of_a_machine(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    home, temporary = "/".join(["", "home", "alice", "x"]), "/".join(["", "tmp", "assets"])
    work = "/".join(["", "work", "models"])
    texts = {
        "a.md": f"python {home}\nactor {work}\n(see `{work}`)\n--assets {temporary}\n",
        f"{RESULTS}b.md": f"--assets {temporary}\n",
        "fine.md": "/home/you/x\nsrc/work/x\n$HOME/work/x\n<folder>/root/x\n/usr/bin/env\nhttps://a.org/work\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "image.png").write_bytes(b"\xff\xfe" + work.encode())
    found = machine_paths(tmp_path, [*texts, "image.png"])
    assert [line.rsplit(":", 1)[0] for line in found] == ["a.md:1", "a.md:2", "a.md:3", f"{RESULTS}b.md:1"]
