"""Imports go down one staircase (the design's picture of it is ``STAIRCASE``)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "openppo"

LEVEL_0 = {"config", "types", "user_code", "lazy"}
STAIRCASE: dict[str, set[str]] = {
    "config": set(),
    "types": set(),
    "user_code": set(),
    "lazy": set(),
    "tracking": LEVEL_0,
    "models": LEVEL_0,
    "strategy": LEVEL_0,
    "datasets": LEVEL_0,
    "rollout": LEVEL_0 | {"models", "tracking"},
    "rewards": LEVEL_0 | {"models", "tracking", "datasets", "strategy"},
    "experience": LEVEL_0 | {"models", "tracking", "rollout"},
    "trainer": LEVEL_0 | {"tracking", "models", "strategy", "datasets", "rollout", "rewards", "experience"},
}
STAIRCASE["__init__"] = set(STAIRCASE)  # lazy public names of openppo itself; everything but cli
STAIRCASE["cli"] = set(STAIRCASE)
STAIRCASE["__main__"] = {"cli"}
VLLM_HOME = Path("rollout/vllm_engine.py")


def imported(node: ast.AST, path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything that ``node`` imports in file ``path`` (relative to the package)."""
    if isinstance(node, ast.Import):
        return [(node.lineno, alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            package = ["openppo", *path.parent.parts]
            origin = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        return [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [(node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant)]
    return []


def imports_of(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Every import under the package: file relative to ``root``, line, dotted name."""
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for line, name in imported(node, path):
                yield path, line, name


def owner(path: Path) -> str:
    """The step that a file stands on: the first folder, or the module's name."""
    return path.parts[0].removesuffix(".py")


def climbing_imports(root: Path) -> list[str]:
    """Imports of openppo that do not go down the staircase."""
    found = []
    for path, line, name in imports_of(root):
        parts = name.split(".")
        if parts[0] != "openppo" or name == "openppo.__version__":
            continue
        step, target = owner(path), parts[1] if len(parts) > 1 else "openppo"
        allowed = STAIRCASE.get(step, set()) | ({step} if step in STAIRCASE else set())
        if target not in allowed:
            found.append(f"{path}:{line} ({step}) may not import {name}")
    return found


def inner_imports(root: Path) -> list[str]:
    """Imports of openppo inside functions, except in cli and in the lazy ``__getattr__`` of an ``__init__``."""
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or owner(path) == "cli":
                continue
            if path.name == "__init__.py" and function.name == "__getattr__":
                continue
            for node in ast.walk(function):
                for line, name in imported(node, path):
                    if name.split(".")[0] == "openppo":
                        found.append(f"{path}:{line} imports {name} inside {function.name}")
    return found


def strangers_in_config(root: Path) -> list[str]:
    """Imports of the config from outside the standard library."""
    names = [name.split(".") for path, _, name in imports_of(root) if owner(path) == "config"]
    return [".".join(n) for n in names if n[0] not in sys.stdlib_module_names and n[:2] != ["openppo", "config"]]


def vllm_outside_its_engine(root: Path) -> list[str]:
    """Files other than the vLLM engine that import vllm."""
    return [str(path) for path, _, name in imports_of(root) if name.split(".")[0] == "vllm" and path != VLLM_HOME]


def test_imports_only_go_down_the_staircase() -> None:
    assert climbing_imports(PACKAGE) == []


def test_imports_of_openppo_stand_at_the_top_of_files() -> None:
    assert inner_imports(PACKAGE) == []


def test_config_needs_only_the_standard_library() -> None:
    assert strangers_in_config(PACKAGE) == []


def test_only_the_vllm_engine_imports_vllm() -> None:
    assert vllm_outside_its_engine(PACKAGE) == []


def test_every_module_stands_on_a_step() -> None:
    assert {owner(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")} <= set(STAIRCASE)


UPWARDS = {
    "models/a.py": "from openppo.strategy import comm",
    "models/b.py": "import openppo.tracking.metrics",
    "models/c.py": "def f():\n    from ..trainer.ppo import x",
    "experience/d.py": "from openppo import rewards",
    "tracking/e.py": "import importlib\nimportlib.import_module('openppo.models')",
    "trainer/f.py": "from openppo.cli.train_ppo import main",
    "datasets/g.py": "import openppo",
    "datasets/h.py": "from openppo import PPOTrainer",
    "newcomer/i.py": "from openppo.newcomer import j",
    "types.py": "from . import tracking",
    "__init__.py": "from openppo.cli import train_ppo",
}
FINE = {
    "models/m.py": "from openppo.types import B\nfrom .b import c\nfrom . import d\nimport torch",
    "trainer/n.py": "from openppo import __version__\nfrom openppo.rollout.x import y",
    "cli/o.py": "def main():\n    from openppo.trainer import PPOTrainer",
    "strategy/__init__.py": "def __getattr__(name):\n    from openppo.strategy import x",
    "rollout/vllm_engine.py": "from vllm import LLM",
}
INSIDE = {
    "models/p.py": "class A:\n    def f(self):\n        from openppo.types import B",
    "models/__init__.py": "def load():\n    from .a import A",
}
STRANGERS = {"config/ppo.py": "import dataclasses\nimport torch\nfrom openppo.config.shared import A"}
VLLM = {"rollout/engine.py": "def f():\n    import vllm.sampling_params"}


def test_each_checker_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    for path, text in (UPWARDS | FINE | INSIDE | STRANGERS | VLLM).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert {line.split(":")[0] for line in climbing_imports(tmp_path)} == {*UPWARDS}
    assert {line.split(":")[0] for line in inner_imports(tmp_path)} == {*INSIDE, "models/c.py"}
    assert strangers_in_config(tmp_path) == ["torch"]
    assert vllm_outside_its_engine(tmp_path) == [*VLLM]
