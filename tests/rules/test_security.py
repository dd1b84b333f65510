"""Nothing that we load may run code, and no shell reads what a user wrote."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("openppo", "examples", "benchmarks")

FORBIDDEN = {
    *("eval", "exec", "compile", "os.system", "os.popen", "input", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "joblib.load"),
    *("tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput"),
}
NEEDED = {"torch.load": "weights_only=True"}
"""Keyword that a call must have."""
LOADERS = {"AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer", "AutoModel"}
"""Classes whose ``from_pretrained`` would ask on stdin whether code may run, unless it is told."""


def dangers(root: Path) -> list[str]:
    """Calls that may run code that somebody else wrote."""
    return [
        f"{file.relative_to(root)}:{call.lineno} {found}"
        for folder in FOLDERS
        for file in sorted((root / folder).rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        for found in _faults(call, folder)
    ]


def _faults(call: ast.Call, folder: str) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in FORBIDDEN:
        yield name
    if keywords.get("shell", "False") != "False":
        yield f"{name} with shell"
    if name in NEEDED and NEEDED[name] not in {f"{key}={value}" for key, value in keywords.items()}:
        yield f"{name} without {NEEDED[name]}"
    loader, _, method = name.rpartition(".")
    told = {"trust_remote_code", None} & keywords.keys()  # None: keywords of a dict, made by load_options
    if folder == "openppo" and method == "from_pretrained" and loader.split(".")[-1] in LOADERS and not told:
        yield f"{name} without trust_remote_code"


def loose_words(script: str) -> list[str]:
    """Variables that the shell would split into words or expand: outside quotes, and not lists of our own flags."""
    own = {"launch", "shared", "SECONDS"}
    code = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in script.splitlines())
    code = re.sub(r"'[^']*'", "''", code)
    bare = re.sub(r'"(?:\$\((?:[^()]|\([^()]*\))*\)|[^"\\]|\\.)*"', '""', code)
    return [name for name in re.findall(r"\$\{?(\w+|@)", bare) if name not in own and not name.isdigit()]


def test_nothing_is_loaded_or_run_that_could_be_somebody_elses_code() -> None:
    assert dangers(REPO) == []


def test_scripts_quote_every_variable() -> None:
    scripts = [*(REPO / "examples").rglob("*.sh"), REPO / "tests" / "run.sh", REPO / ".ci" / "run"]
    assert len(scripts) > 10
    assert {script.name: words for script in scripts if (words := loose_words(script.read_text()))} == {}
