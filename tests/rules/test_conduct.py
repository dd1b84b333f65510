"""What ruff's rules on errors, prints, docstrings and code of others (pyproject.toml) cannot see."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LOADERS = {
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "AutoModel",
}
"""Classes whose ``from_pretrained`` would ask on stdin whether code may run, unless it is told."""
TORCH = ("torch", "load")
ANYWHERE = re.compile(
    r"(?<![\w.$}>])/(?:root|work)/\w|/(?:home|Users)/(?!me/|you/|somebody/)[\w.-]+/|/tmp/pytest-of-\w"
)
IN_RESULTS = re.compile(ANYWHERE.pattern + r"|(?<![\w.$}>])/(?:tmp|var/tmp|mnt|scratch)/\w")
"""What was measured names no folder of its machine; elsewhere a command may use such a one as an example."""
RESULTS = "benchmarks/results/"


def loose_words(script: str) -> list[str]:
    """Variables that the shell would split into words or expand: outside quotes, and not lists of our own flags."""
    own = {"launch", "shared", "SECONDS"}
    code = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in script.splitlines())
    code = re.sub(r"'[^']*'", "''", code)
    bare = re.sub(r'"(?:\$\((?:[^()]|\([^()]*\))*\)|[^"\\]|\\.)*"', '""', code)
    return [
        name for name in re.findall(r"\$\{?(\w+|@)", bare) if name not in own and not name.isdigit()
    ]


def test_every_loading_says_whether_code_of_others_may_run():
    found = []
    for file in (REPO / "openppo").rglob("*.py"):
        for call in (
            node
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.Call)
        ):
            loader, _, method = ast.unparse(call.func).rpartition(".")
            keywords = {
                keyword.arg for keyword in call.keywords
            }  # None: those of a dict, made by load_options
            told = {"trust_remote_code", None} if method == "from_pretrained" else {"weights_only"}
            loads = (
                loader.split(".")[-1] in LOADERS
                if method == "from_pretrained"
                else (loader, method) == TORCH
            )
            found += [f"{file}:{call.lineno}"] if loads and not told & keywords else []
    assert found == []


def test_scripts_quote_every_variable():
    scripts = [*(REPO / "examples").rglob("*.sh"), REPO / "tests" / "run.sh", REPO / ".ci" / "run"]
    assert len(scripts) > 10
    assert {
        script.name: words for script in scripts if (words := loose_words(script.read_text()))
    } == {}


def test_no_tracked_text_names_a_build_machine():
    if not (REPO / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True
    )
    found = []
    for name in [name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()]:
        pattern = IN_RESULTS if name.startswith(RESULTS) else ANYWHERE
        text = (REPO / name).read_bytes().decode("utf-8", errors="ignore")
        found += (
            [f"{name}: {match[0]}" for match in pattern.finditer(text)] if "\0" not in text else []
        )
    assert found == []
