"""Sources of a trainer's samples, and tasks. Names load on first use."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.sources.task_file import TaskFields as TaskFields, task_source as task_source

__getattr__, __dir__, __all__ = lazy_names(__name__)
