"""Imports go down one staircase (the design's picture of it is ``STAIRCASE``)."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "openppo"

LEVEL_0 = {
    "config",
    "types",
    "endings",
    "media",
    "model_inputs",
    "sample",
    "user_code",
    "lazy",
    "overrides",
    "process_groups",
    "stopping",
    "processor_files",
    "weight_files",
}
STAIRCASE: dict[str, set[str]] = {
    **{name: set() for name in LEVEL_0},
    "model_inputs": {"media"},
    "sample": {"endings", "media"},
    "types": {"endings", "media", "model_inputs", "sample", "stopping"},
    **dict.fromkeys(("tracking", "models", "strategy", "datasets"), LEVEL_0),
    "rollout": LEVEL_0 | {"models", "tracking"},
    "rewards": LEVEL_0 | {"models", "tracking", "datasets", "strategy"},
    "agents": LEVEL_0 | {"tracking", "models", "strategy", "datasets", "rollout", "rewards"},
    "experience": LEVEL_0 | {"models", "tracking", "rollout", "rewards"},
    "sources": LEVEL_0
    | {"tracking", "strategy", "datasets", "rollout", "rewards", "experience", "agents"},
    "trainer": LEVEL_0
    | {
        "tracking",
        "models",
        "strategy",
        "datasets",
        "rollout",
        "rewards",
        "experience",
        "sources",
    },
}
STAIRCASE["build"] = set(STAIRCASE)
STAIRCASE["jobs"] = set(STAIRCASE)  # everything but cli
STAIRCASE["__init__"] = set(STAIRCASE)  # lazy public names of openppo itself; everything but cli
STAIRCASE["cli"] = set(STAIRCASE)
STAIRCASE["__main__"] = {"cli"}
UPWARDS = {("trainer/__init__.py", "openppo.build.ppo.build_ppo_trainer")}
"""The one exception: the trainer's package gives out its builder, which loads on first use."""
VLLM_HOME = {Path("rollout/vllm_engine.py"), Path("rollout/vllm_requests.py")}


def imported(node: ast.AST) -> list[str]:
    """Dotted names of everything that ``node`` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports have full names"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        return [str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


TREES = {
    file.relative_to(PACKAGE): ast.parse(file.read_text(encoding="utf-8"))
    for file in PACKAGE.rglob("*.py")
}
IMPORTS = [
    (path, name)
    for path, tree in TREES.items()
    for node in ast.walk(tree)
    for name in imported(node)
]
"""Every import of the package: file and dotted name."""


def owner(path: Path) -> str:
    """The step that a file stands on: the first folder, or the module's name."""
    return path.parts[0].removesuffix(".py")


def test_every_module_stands_on_a_step_and_imports_go_down():
    assert {owner(path) for path in TREES} <= set(STAIRCASE)
    of_all = ("openppo.__version__", "openppo.logger")
    ours = [
        (path, name)
        for path, name in IMPORTS
        if name.startswith("openppo.")
        and name not in of_all
        and (path.as_posix(), name) not in UPWARDS
    ]
    assert set(UPWARDS) <= {(path.as_posix(), name) for path, name in IMPORTS}
    steps = [(path, name, STAIRCASE[owner(path)] | {owner(path)}) for path, name in ours]
    assert [
        f"{path} imports {name}"
        for path, name, allowed in steps
        if name.split(".")[1] not in allowed
    ] == []
    assert [path for path, name in IMPORTS if name == "openppo"] == []


def test_imports_of_openppo_stand_at_the_top_of_files():
    nodes = [
        (path, node)
        for path, tree in TREES.items()
        if owner(path) != "cli"
        for node in ast.walk(tree)
    ]
    functions = [
        (path, node)
        for path, node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    inner = [
        (path, name)
        for path, function in functions
        for node in ast.walk(function)
        for name in imported(node)
    ]
    assert [f"{path} imports {name}" for path, name in inner if name.startswith("openppo")] == []


def test_config_needs_only_the_standard_library():
    names = [name.split(".") for path, name in IMPORTS if owner(path) == "config"]
    assert [
        n for n in names if n[0] not in sys.stdlib_module_names and n[:2] != ["openppo", "config"]
    ] == []


def test_only_the_vllm_engine_and_its_requests_import_vllm():
    assert {path for path, name in IMPORTS if name.split(".")[0] == "vllm"} == VLLM_HOME


def test_safetensors_are_written_with_the_usual_mode():
    writers = [
        path
        for path, name in IMPORTS
        if name.startswith("safetensors") and name.endswith("save_file")
    ]
    assert writers == [Path("weight_files.py")]
