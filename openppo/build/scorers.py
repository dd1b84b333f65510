"""Scorers of the tasks of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.build.check import Checked
from openppo.build.checks.rewards import trial_lines
from openppo.build.policy_inputs import blank_prompt
from openppo.build.roles import loading
from openppo.config.resolved import Resolved
from openppo.experience.forwards import forward_size
from openppo.rewards import Scorer
from openppo.rewards.build import ScorerSetup
from openppo.sources.task import Task
from openppo.strategy.comm import InferenceStrategy, collective
from openppo.tracking.console import log_lines
from openppo.trainer.run_data import RunData
from openppo.types import Prompt


@dataclass(frozen=True)
class ScorerBuilder:
    """Builder of the scorers of tasks, from the options of each. ``function`` replaces the file of ``--reward_fn``."""

    data: RunData
    tokenizer: PreTrainedTokenizerBase
    strategy: InferenceStrategy
    actor_config: PreTrainedConfig
    resolved: Resolved | None = None
    function: Callable[..., Any] | None = None

    @classmethod
    def of(cls, checked: Checked, run_data: RunData, resolved: Resolved) -> "ScorerBuilder":
        """Make the builder of a rank that trains."""
        return cls(
            run_data,
            checked.tokenizer,
            checked.strategy,
            actor_config=checked.actor_config,
            resolved=resolved,
            function=checked.objects.reward_fn,
        )

    def check(self) -> None:
        """Check sources of rewards without loading models, and log the rewards of a few rows.

        ``ValueError`` as of ``build``.
        """
        for task in self.data.tasks:
            with task.named():
                self._check(task)
        self.build_held_out()

    def build(self) -> list[Task]:
        """Return the tasks with their scorers; ``ValueError`` names the task and the flag at fault."""
        tasks: list[Task] = []
        for task in self.data.tasks:
            with task.named():
                scorer = self._setup(task).build() if task.is_scored else None
            tasks.append(replace(task, scorer=scorer))
        return tasks

    def build_held_out(self) -> Scorer | None:
        """Build the scorer of ``--eval_reward_fn``; None without it."""
        task = self.data.tasks[0]  # with several tasks the option is refused
        if task.config.evaluation.eval_reward_fn is None:
            return None
        setup = replace(
            self._setup(task),
            rewards=task.config.eval_rewards,
            prompts=self.data.held_out,
            function_flag="--eval_reward_fn",
        )
        return setup.build()

    def _check(self, task: Task) -> None:
        setup = self._setup(task)
        scorer = setup.check()
        if scorer is not None and task.players is None:  # whole episodes cannot be made up
            self._try_out(scorer, setup.prompts)

        models = {
            "--reward_pretrain": task.config.rewards.reward_pretrain,
            "--prm_pretrain": task.config.rewards.prm_pretrain,
        }
        for flag, model in models.items():
            if model is not None:
                logger.info("%s %s scores no row here: a dry run reads no weights", flag, model)

    def _try_out(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        """Log rewards of a few labels; raise ``ValueError`` on all ranks if a source fails."""
        comm = self.strategy.comm

        def lines() -> list[str]:
            return trial_lines(scorer, prompts, self.tokenizer) if comm.rank == 0 else []

        log_lines(collective(comm, lines, (ValueError, RuntimeError, OSError)))

    def _setup(self, task: Task) -> ScorerSetup:
        """Setup of the scorers of ``task``."""
        config = task.config
        shaping = config.shaping
        plays = task.players is not None

        stand_in = None
        if config.rewards.reward_pretrain is not None and self.strategy.comm.world_size > 1:
            stand_in = blank_prompt(
                config.model,
                self.tokenizer,
                self.actor_config,
                options=config.data,
                kinds=self.data.kinds,
                plays=plays,
            )
        return ScorerSetup(
            config.rewards,
            self.tokenizer,
            strategy=self.strategy,
            prompts=[*task.prompts, *task.held_out],
            actor=self.actor_config,
            size=forward_size(config, self.resolved or Resolved.of(config)),
            loading=loading(config),
            value_head_prefix=config.model.value_head_prefix,
            normalize=shaping.normalize_reward == "model",
            input_template=config.data.input_template,
            episodes=plays,
            function=self.function,
            stand_in=stand_in,
        )
