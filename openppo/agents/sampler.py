"""Episodes of agents in place of single responses: what ``build_ppo_trainer(config, source=...)`` samples with."""

import asyncio
from collections.abc import Sequence
from itertools import groupby

from openppo import logger
from openppo.agents.driver import EngineDriver
from openppo.agents.episodes import Agent, Played, failed, play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup, Task
from openppo.config.agents import AgentConfig
from openppo.rollout.rollout import SamplerParts, rank_share, sample_seed
from openppo.tracking import Metrics, progress_bar
from openppo.types import Ending, Prompt, SamplingParams, Trajectory


class AgentSampler:
    """Plays episodes of ``agent``, all of this rank at the same time. Collective in every method."""

    def __init__(self, agent: Agent, options: AgentConfig, parser: str, parts: SamplerParts) -> None:
        self.agent, self.options, self.parts = agent, options, parts
        self.renderer = Renderer(parts.tokenizer, parser, parts.eos_token_ids)
        self.driver = EngineDriver(parts.engine, parts.any_rank, parts.stop)
        self._started = False

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n_samples: int,
        seed: int,
        first_group: int,
        metrics: Metrics,
        evaluation: bool = False,
    ) -> list[Trajectory]:
        """Unscored trajectories of this rank's share of ``prompts``, those of one prompt beside each other.

        Episodes that failed are left out, and with them groups of which fewer than two are left; an ``evaluation`` has
        all, with reward 0. ``Interrupted`` on all ranks upon a signal.
        """
        mine, first_group = rank_share(prompts, first_group, self.parts.comm)
        tasks = [
            (self._task(prompt, seed, first_group + i, sample, n_samples, evaluation), first_group + i)
            for i, prompt in enumerate(mine)
            for sample in range(n_samples)
        ]
        read, reused = self.parts.engine.read_tokens, self.parts.engine.reused_tokens
        ended: list[Task] = []
        with progress_bar(len(tasks), "episodes", enabled=self.parts.comm.rank == 0) as bar:
            # Each step is a sign of progress: episodes have a time limit of their own.
            played = self.driver.drive(self._play(tasks, params, ended), lambda: bar.update(len(ended) - bar.done))
        measure(played, metrics)
        if (read := self.parts.engine.read_tokens - read) > 0:
            metrics.add("agent/prefix_reuse", (self.parts.engine.reused_tokens - reused) / read)
        self._warn(played)
        groups = [group for _, group in tasks]
        return self._kept(list(zip(played, groups, strict=True)), n_samples, evaluation)

    def _task(self, prompt: Prompt, seed: int, group: int, sample: int, n_samples: int, evaluation: bool) -> Task:
        env_seed = self.options.eval_seed + group if evaluation else sample_seed(seed, group) % 2**31
        return Task(prompt, sample_seed(seed, group * n_samples + sample), env_seed)

    def close(self) -> None:
        """End the agent and its thread."""
        if self._started:
            asyncio.run_coroutine_threadsafe(self.agent.stop(), self.driver.loop).result()
        self.driver.close()

    async def _play(self, tasks: Sequence[tuple[Task, int]], params: SamplingParams, ended: list[Task]) -> list[Played]:
        """Play all tasks; those that have come to an end are put into ``ended``."""
        if not self._started:
            self._started = True
            await self.agent.start()
        parts = self.parts
        setup = SessionSetup(
            self.renderer,
            self.driver.generate,
            params,
            self.options,
            self.options.episode_max_len or parts.longest,
            parts.context,
            lambda: parts.engine.version,
        )

        async def one(task: Task, group: int) -> Played:
            played = await play(self.agent, task, setup, group, needs_reward=not parts.has_rewards)
            ended.append(task)
            return played

        return await asyncio.gather(*(one(task, group) for task, group in tasks))

    def _kept(self, played: Sequence[tuple[Played, int]], n_samples: int, evaluation: bool) -> list[Trajectory]:
        kept: list[Trajectory] = []
        for group, pairs in groupby(played, key=lambda pair: pair[1]):
            episodes = [each for each, _ in pairs]
            good = [each for each in episodes if each.episode.ending.is_trained]
            if evaluation:
                for each in episodes:
                    kept += each.trajectories if each in good else [failed(each, group)]
            elif len(good) >= min(2, n_samples):
                kept += [trajectory for each in good for trajectory in each.trajectories]
        return kept

    def _warn(self, played: Sequence[Played]) -> None:
        lost = [each.episode for each in played if not each.episode.ending.is_trained]
        if lost:
            how = f"{lost[0].ending.value}: {lost[0].error or lost[0].output or 'no message'}"
            logger.warning(
                "%d of %d episodes failed and are not trained on; the first: %s", len(lost), len(played), how
            )


_ALWAYS = ("tool_calls", "tool_errors", "malformed_calls", "bridged_turns", "rerendered_turns")
"""Counts that are logged where they are 0 too."""


def measure(played: Sequence[Played], metrics: Metrics) -> None:
    """Metrics of episodes: the share of each ending, and what their turns were like."""
    for each in played:
        for ending in Ending:
            metrics.add(f"agent/{ending.value}", each.episode.ending is ending)
        metrics.add("agent/turns", each.episode.n_turns)
        for turn in each.session.turns:
            metrics.add("agent/tokens_per_turn", len(turn.completion.token_ids))
        counts = dict.fromkeys(_ALWAYS, 0) | each.session.counts
        counts["tool_calls"] += sum(len(turn.tool_calls) for turn in each.session.turns)
        for name, value in {**counts, **each.session.metrics}.items():
            metrics.add(f"agent/{name}", value)
