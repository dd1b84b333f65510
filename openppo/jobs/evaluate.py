"""The evaluate command: rewards of responses to held-out prompts, or of episodes of an agent."""

import sys
from typing import Any

from openppo.config import EvaluateConfig
from openppo.config.rewards import NO_REWARD
from openppo.datasets import seed_prompts
from openppo.datasets.vision import Vision
from openppo.experience.reward_names import RewardNames
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.jobs.prompts import PromptsJob, write_rows
from openppo.models.batching import MicroBatchSize
from openppo.rewards.build import ScorerSetup
from openppo.rewards.scoring import answer_text
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import PlayerParts, Players, ResponsePlayer
from openppo.sources.groups import GroupPlayer
from openppo.tracking.console import write_line
from openppo.trainer.evaluation.evaluator import Grading, evaluation_table
from openppo.trainer.evaluation.passing import PassWatch
from openppo.types import Prompt, Sample, StopCheck


class EvaluateJob(PromptsJob):
    """Generates responses to held-out prompts, scores them, and writes them if asked to."""

    def __init__(self, config: EvaluateConfig, source: Players | None = None) -> None:
        """Load everything; ``source`` plays episodes. ``ValueError`` names the flag to change."""
        self.agents = config.agents
        super().__init__(config, config.output_path, source)
        if source is not None and not (config.rewards.names() or source.gives_rewards):
            raise ValueError(config.agents.why_no_reward + NO_REWARD)
        setup = ScorerSetup(
            config.rewards,
            self.tokenizer,
            self.strategy,
            prompts=self.prompts,
            actor=config.pretrain,
            size=MicroBatchSize(config.micro_batch_size),
            loading=self.policy.loading,
            value_head_prefix=config.value_head_prefix,
            input_template=config.input_template,
            episodes=source is not None,
        )
        self.scorer = setup.build() if config.rewards.names() else None
        self._load_policy()
        driver = EngineDriver(self.policy.engine)
        player = ResponsePlayer(driver) if source is None else source.make(self._parts(driver))
        self.player = GroupPlayer({"": player}, driver)
        self.grading = Grading.of(self.comm, config.rewards, config)

    def fit(self) -> None:
        """Evaluate, and print the table of metrics."""
        metrics = self.evaluate()
        if self.strategy.is_main:
            lines = evaluation_table(metrics, [prompt.source for prompt in self.prompts])
            write_line("\n".join(lines), sys.stdout)

    def evaluate(self) -> dict[str, float]:
        """Generate, score and write, and return the metrics, the same on all ranks."""
        sampled = self._played(self.player, self.agents.eval_seed)
        responses = begin_scoring(self.scorer, sampled, StopCheck(), prefix="eval_")

        if self.output is not None:
            rows = [self._scored_row(sample, i) for i, sample in enumerate(responses)]
            write_rows(self.output, rows, self.comm)
        check_rewarded(responses, self.comm)
        RewardNames(self.grading.reward_weights, self.comm, self.grading.pass_on).check(responses)
        PassWatch(self.comm).look(self.grading, responses, is_last=True)
        return self.grading.measure(responses)

    def close(self) -> None:
        """End the player and leave the process group."""
        self.player.close()
        super().close()

    def _load_prompts(self, players: Players | None) -> list[Prompt]:
        prompts = super()._load_prompts(players) or seed_prompts(self.agents.eval_n_envs)
        if players is not None:
            players.check_prompts(prompts)
        return prompts

    def _parts(self, driver: EngineDriver) -> PlayerParts:
        """Return the parts of an agent's player; episodes end where the model's context does."""
        options = self.options
        longest = self.agents.episode_max_len or options.prompt_max_len + options.generate_max_len
        return PlayerParts(
            driver,
            self.policy.tokenizer,
            self.policy.eos_token_ids,
            comm=self.comm,
            longest=longest,
            context=self.policy.context,
            has_rewards=self.scorer is not None,
            vision=self._vision_of_agents(),
        )

    def _vision_of_agents(self) -> Vision | None:
        """Make the reader of agents' images; None where the model reads none."""
        return self._vision().for_agents(self.policy.config, f"--pretrain {self.options.pretrain}")

    def _scored_row(self, sample: Sample, number: int) -> dict[str, Any]:
        """Make the line of this rank's sample ``number``, with its rewards."""
        episode = sample.episode
        row = self._row(sample, number)
        row["rewards"] = sample.scores
        row["reward"] = sample.total_reward(self.grading.reward_weights)
        if sample.logged:
            row["extra"] = sample.logged
        if episode is not None:
            row["response"] = answer_text(sample, self.tokenizer)
            row["n_tokens"] = sample.n_actions
            row["ending"] = episode.ending.value
            row["turns"] = episode.n_turns
            row["messages"] = episode.messages
            row["error"] = episode.error
            row["output"] = episode.output
        if self.grading.pass_reward is not None:
            row["passed"] = self.grading.passes(sample)
        return row
