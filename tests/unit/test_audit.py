"""The dependency audit of tests/run.sh: it fails when something is found, and says so when it cannot look."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

AUDIT = Path(__file__).resolve().parents[1] / "audit.sh"


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, bytes]]]:
    """The address of a service, and its answers by path; 404 for others, as of mirrors."""
    answers: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b""))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/pypi", answers
    server.shutdown()
    thread.join()
    server.server_close()


def audit(service: str, folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Run it with a pip-audit that ends with ``code``."""
    (folder / "pip_audit").mkdir()
    (folder / "pip_audit" / "__init__.py").touch()
    (folder / "pip_audit" / "__main__.py").write_text(f"import sys\nprint(*sys.argv[1:])\nsys.exit({code})\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "ADVISORIES": service, "PYTHONPATH": str(folder), "PATH": path}
    return subprocess.run(["bash", str(AUDIT)], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("code", [0, 1])
def test_what_pip_audit_says_is_how_it_ends(code: int, service: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    url, answers = service
    answers["/pypi/pip/25.0/json"] = b'{"vulnerabilities": []}'
    ended = audit(url, tmp_path, code)
    assert ended.returncode == code
    assert "--local" in ended.stdout


@pytest.mark.parametrize("answer", [None, b"{}", b"<html>", "nobody"])
def test_without_advisories_it_says_in_one_line_that_it_did_not_look(
    answer: bytes | str | None, service: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    url, answers = service
    if isinstance(answer, bytes):
        answers["/pypi/pip/25.0/json"] = answer
    ended = audit("http://127.0.0.1:9" if answer == "nobody" else url, tmp_path, code=1)
    assert ended.returncode == 0
    (line,) = ended.stdout.splitlines()
    assert line.startswith("dependency audit skipped: http://127.0.0.1")
    assert "gives no advisories" in line


@pytest.mark.parametrize(
    ("arguments", "audited"),
    [([], True), (["--slow"], True), (["tests/unit"], False), (["--slow", "tests/unit"], False)],
)
def test_all_tests_include_the_audit_and_a_choice_does_not(arguments: list[str], audited: bool, tmp_path: Path) -> None:
    for name in ("tests", "examples/scripts", "bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(AUDIT.with_name("run.sh"), tmp_path / "tests")
    (tmp_path / "tests" / "audit.sh").write_text("echo audited\n")
    (tmp_path / "examples" / "scripts" / "setup.sh").write_text(f"repo={tmp_path}\ninstall() {{ :; }}\n")
    for name in ("ruff", "mypy", "python"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$0 $*"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    command = ["bash", str(tmp_path / "tests" / "run.sh"), *arguments]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert ("audited" in output) == audited
    assert " ".join(["--no-loadscope-reorder", *arguments]) in output  # pytest gets them all
