"""Several tasks in one run, from a file or as programs. Names load on first use."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.tasks.source import TaskService as TaskService, task_source as task_source

__getattr__, __dir__, __all__ = lazy_names(__name__)
