"""The sources of rewards of a run, or of each of its tasks."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openppo.experience.maker import forward_size
from openppo.rewards import Scorer
from openppo.rewards.build import ScorerSetup
from openppo.rewards.scoring import TaskScorer
from openppo.rollout.tasks import RunTask, TaskMaker
from openppo.strategy.comm import InferenceStrategy
from openppo.trainer.data import PPOData, loading


@dataclass(frozen=True)
class TaskRewards:
    """What the sources of rewards are made of."""

    tasks: TaskMaker
    tokenizer: PreTrainedTokenizerBase
    strategy: InferenceStrategy
    data: PPOData

    def check(self) -> None:
        """``ValueError`` for what ``build`` would find wrong before it loads a model."""
        for task in self.tasks.tasks:
            with task.named():
                self._setup(task).check()

    def build(self) -> Scorer | None:
        """Scorer of all sources; None without any. ``ValueError`` names the flag of whatever cannot work."""
        scorers: dict[str, Scorer | None] = {}
        for task in self.tasks.tasks:
            with task.named():
                scorers[task.name] = self._setup(task).build() if task.has_rewards else None
        if not any(scorers.values()) or not self.tasks.are_named:
            return next(iter(scorers.values()))
        return TaskScorer(scorers)

    def _setup(self, task: RunTask) -> ScorerSetup:
        config, prompts = task.config, [*self.data.prompts, *self.data.held_out]
        shaping = config.shaping
        return ScorerSetup(
            config.rewards,
            self.tokenizer,
            comm=self.strategy.comm,
            device=self.strategy.device,
            prepare_frozen=self.strategy.prepare_frozen,
            prompts=[prompt for prompt in prompts if prompt.task == task.name],
            actor=config.model.pretrain,
            size=forward_size(config),
            loading=loading(config),
            value_head_prefix=config.model.value_head_prefix,
            normalize=shaping.normalize_reward and shaping.reward_normalizer == "model",
            input_template=config.data.input_template,
            episodes=task.maker is not None,
        )
