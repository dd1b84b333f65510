"""Sampling of an agent's episodes in place of single responses."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from openppo import logger
from openppo.agents.episodes import Agent, Played, failed, play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup, Task
from openppo.config.agents import AgentConfig
from openppo.rollout.engine_sampler import rank_share
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import SampleFailed, SamplerParts
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics, progress_bar
from openppo.types import Ending, Prompt, SamplingParams, Trajectory


class AgentSampler:
    """Plays episodes of ``agent``, all of this rank at the same time. Collective in every method."""

    def __init__(
        self, agent: Agent, options: AgentConfig, parser: str, parts: SamplerParts
    ) -> None:
        self.agent = agent
        self.options = options
        self.parts = parts
        self.renderer = Renderer(parts.tokenizer, parser, parts.eos_token_ids, vision=parts.vision)
        self.driver = parts.own_driver()
        self._started = self._has_told_of_both = False

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """Unscored trajectories of this rank's share of prompts, those of one prompt beside each other.

        Episodes that failed are noted and left out, and with them groups of which fewer than two are left; an
        evaluation keeps them, at reward 0. ``Interrupted`` on all ranks upon a signal.
        """
        mine, first_group = rank_share(asked.prompts, asked.first_group, self.parts.comm)
        tasks, metrics = list[Task](), asked.metrics
        for group, prompt in enumerate(mine, first_group):
            env_seed = (
                self.options.eval_seed + group
                if asked.evaluation
                else sample_seed(asked.seed, group) % 2**31
            )
            first = group * asked.n_samples
            seeds = [sample_seed(asked.seed, first + sample) for sample in range(asked.n_samples)]
            tasks += [Task(prompt, each, env_seed, group=group) for each in seeds]
        engine, ended = self.parts.engine, list[Task]()
        read = engine.read_tokens
        reused = engine.reused_tokens
        waited = self.driver.waited
        with progress_bar(len(tasks), "episodes", enabled=self.parts.comm.rank == 0) as bar:
            # Each step is a sign of progress: episodes have a time limit of their own.
            work = self._play_all(tasks, asked.params, ended)
            played = self.driver.drive(
                work, lambda: bar.update(len(ended) - bar.done), self.parts.leave
            )
        measure(played, metrics)
        metrics.add("time/engine_idle_s", self.driver.waited - waited)
        if (read := engine.read_tokens - read) > 0:
            metrics.add("agent/prefix_reuse", (engine.reused_tokens - reused) / read)
        self._warn(played)
        if asked.evaluation:
            kept = [
                each.trajectories if each.episode.ending.is_trained else [failed(each)]
                for each in played
            ]
        else:
            good = [each for each in played if each.episode.ending.is_trained]
            sizes = Counter(each.session.task.group for each in good)
            kept = [
                each.trajectories
                for each in good
                if sizes[each.session.task.group] >= min(2, asked.n_samples)
            ]
            for each in played:
                if not each.episode.ending.is_trained:
                    asked.note_failed(failed(each))
        return list(chain.from_iterable(kept))

    def close(self) -> None:
        """End the agent and its thread."""
        asyncio.run_coroutine_threadsafe(self.end(), self.driver.loop).result()
        self.driver.close()

    async def start(self) -> None:
        """Start the agent, once."""
        if not self._started:
            await self.agent.start()
            self._started = True

    async def end(self) -> None:
        """End the agent."""
        if self._started:
            await self.agent.stop()

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Metrics,
    ) -> list[Trajectory]:
        """The parts of one episode; ``SampleFailed`` if it is not trained on."""
        played = await self._play(Task(prompt, seed, env_seed, group=group), self._setup(params))
        measure([played], metrics)
        if not played.episode.ending.is_trained:
            raise SampleFailed(played.episode.failure, failed(played))
        return played.trajectories

    async def _play_all(
        self, tasks: Sequence[Task], params: SamplingParams, ended: list[Task]
    ) -> list[Played]:
        """Play all tasks; those that have come to an end are put into ``ended``."""
        await self.start()
        setup = self._setup(params)

        async def one(task: Task) -> Played:
            played = await self._play(task, setup)
            ended.append(task)
            return played

        return await asyncio.gather(*map(one, tasks))

    async def _play(self, task: Task, setup: SessionSetup) -> Played:
        played = await play(self.agent, task, setup, needs_reward=not self.parts.has_rewards)
        self._tell_of_both(played)
        return played

    def _tell_of_both(self, played: Played) -> None:
        """Warn once, on one rank, that rewards of tools are added to those of other sources."""
        are_added = played.episode.tool_rewards and played.session.counts["rewarded_turns"] > 0
        if (
            not (are_added and self.parts.has_rewards)
            or self._has_told_of_both
            or self.parts.comm.rank > 0
        ):
            return
        self._has_told_of_both = True
        logger.warning(
            "rewards of tools (%s) are added to those of reward functions and other sources: both count. With "
            "--tool_rewards none functions only see them, as tool_rewards.",
            ", ".join(played.episode.tool_rewards),
        )

    def _setup(self, params: SamplingParams) -> SessionSetup:
        limits = (
            self.options,
            self.options.episode_max_len or self.parts.longest,
            self.parts.context,
        )
        return SessionSetup(
            self.renderer, self.driver.generate, params, *limits, lambda: self.driver.stood
        )

    def _warn(self, played: Sequence[Played]) -> None:
        if differ := [
            each.episode.error for each in played if each.session.counts["rerender_mismatch"]
        ]:
            how = "are rendered otherwise than they were recorded; the first"
            logger.warning(
                "%d of %d conversations %s: %s", len(differ), len(played), how, differ[0]
            )
        lost = [each.episode for each in played if not each.episode.ending.is_trained]
        if lost:
            what = "%d of %d episodes failed and are not trained on; the first: %s"
            logger.warning(what, len(lost), len(played), lost[0].failure)


_ALWAYS = ("tool_calls", "tool_errors", "malformed_calls", "bridged_turns", "rerendered_turns")
"""Counts that are logged even if 0."""


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
        for name, rewards in each.episode.tool_rewards.items():
            metrics.add(f"agent/tool_rewards/{name}", sum(rewards))
