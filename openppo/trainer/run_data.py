"""Data of a PPO run."""

from collections.abc import Sequence
from dataclasses import dataclass

from openppo.datasets import TokenExample
from openppo.sources.task import Task
from openppo.tracking.report.run_data import short_names
from openppo.types import Prompt


@dataclass(frozen=True)
class RunData:
    """Tasks of a run with their prompts, and its documents.

    There are no ``tasks`` if the caller's source makes the samples, and no ``documents`` without ``--pretrain_data``.
    ``longest`` is the most tokens that a prompt and its response, or an episode, can have; documents are cut there.
    ``fingerprints``, by flag, are of documents before the cut, so that a run may resume with another
    ``--generate_max_len``.
    """

    tasks: Sequence[Task]
    documents: list[TokenExample]
    fingerprints: dict[str, str]
    longest: int

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of all tasks."""
        return [prompt for task in self.tasks for prompt in task.prompts]

    @property
    def held_out(self) -> list[Prompt]:
        """Held-out prompts of all tasks; empty without ``--eval_data``."""
        return [prompt for task in self.tasks for prompt in task.held_out]

    @property
    def kinds(self) -> set[str]:
        """Kinds of media in prompts: image, video."""
        return {item.kind for prompt in [*self.prompts, *self.held_out] for item in prompt.media}

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rows by flag, where there are any; "held out" for all that is evaluated."""
        counts = {
            "--prompt_data": len(self.prompts),
            "--eval_data": len(self.held_out),
            "--pretrain_data": len(self.documents),
            "held out": len(self.held_out),
        }
        return {name: n for name, n in counts.items() if n > 0}

    @property
    def source_names(self) -> dict[str, str]:
        """Names in metrics of the sources of prompts that belong to no task."""
        return short_names(sorted({prompt.source for prompt in self.prompts if not prompt.task}))
