"""Public names that load on first use, and old names of modules, kept for one release."""

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MOVED = {
    "openppo.cli.shell": "openppo.cli",
    "openppo.cli.shell.commands": "openppo.__main__",
    "openppo.config.supervised": "openppo.config.data",
    "openppo.config.tracking": "openppo.config.run",
    "openppo.datasets.preference": "openppo.datasets.examples",
    "openppo.datasets.prompts": "openppo.datasets.examples",
    "openppo.datasets.sft": "openppo.datasets.examples",
    "openppo.experience.collate": "openppo.experience.replay_buffer",
    "openppo.experience.kl_controller": "openppo.experience.token_rewards",
    "openppo.experience.score_shaping": "openppo.experience.token_rewards",
    "openppo.models.classifier": "openppo.models.scalar_head",
    "openppo.models.lora": "openppo.models",
    "openppo.models.masked": "openppo.models.log_probs",
    "openppo.models.policy_losses": "openppo.models.loss",
    "openppo.models.rollout_correction": "openppo.models.loss",
    "openppo.rewards.process": "openppo.rewards.model",
    "openppo.rewards.rendering": "openppo.rewards.model",
    "openppo.rewards.steps": "openppo.rewards.scoring",
    "openppo.rollout.rewards": "openppo.rewards",
    "openppo.strategy.engine": "openppo.strategy",
    "openppo.strategy.heartbeats": "openppo.strategy.fault_report",
    "openppo.tracking.profiler": "openppo.tracking.phase",
    "openppo.tracking.timers": "openppo.tracking.phase",
    "openppo.trainer.ppo_trainer": "openppo.trainer.ppo",
}
"""Old name of a module, or of a package with its modules -> new name."""


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` from the imports in the package's ``if TYPE_CHECKING:``."""
    module = sys.modules[package]
    imports = [n for n in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes())) if isinstance(n, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names if alias.asname}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(module)[name] = getattr(import_module(str(homes[name])), name)
        return value

    return load, lambda: sorted(vars(module) | homes), sorted(homes)


class MovedModules(MetaPathFinder, Loader):
    """Imports modules by the old names of ``MOVED``."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, last = name.rpartition(".")
        new = MOVED.get(name) or (f"{MOVED[parent]}.{last}" if parent in MOVED else None)
        if new is None:
            return None
        warnings.warn(f"{name} is now {new}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self, origin=new)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__name__] = import_module(str(module.__spec__.origin))
