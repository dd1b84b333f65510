"""Sampling of an agent's episodes, in place of single responses."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from openppo import logger
from openppo.agents.episodes import Agent, Played, play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup, Task
from openppo.config.agents import AgentConfig
from openppo.rollout.engine_sampler import rank_share
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import SampleFailed, SamplerParts
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics, progress_bar
from openppo.types import Ending, Prompt, Sample, SamplingParams


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
        self._started = False
        self._has_warned_of_both = False

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Unscored samples of this rank's share of prompts, those of one prompt beside each other.

        Failed episodes are noted and left out, and with them groups that have fewer than two others; an evaluation
        keeps them, at reward 0. ``Interrupted`` on all ranks upon a signal.
        """
        engine = self.parts.engine
        read_before = engine.read_tokens
        reused_before = engine.reused_tokens
        waited_before = self.driver.waited
        played = self._drive(self._tasks(request), request.params)

        metrics = request.metrics
        measure(played, metrics)
        metrics.add("time/engine_idle_s", self.driver.waited - waited_before)
        n_read = engine.read_tokens - read_before
        if n_read > 0:
            metrics.add("agent/prefix_reuse", (engine.reused_tokens - reused_before) / n_read)
        self._warn(played)

        samples = [each.sample for each in played]
        if request.evaluation:
            return samples

        sizes = Counter(sample.group for sample in samples if sample.is_trained)
        kept: list[Sample] = []
        for sample in samples:
            if not sample.is_trained:
                request.note_failed(sample)
            elif sizes[sample.group] >= min(2, request.n_samples):
                kept.append(sample)
        return kept

    def _tasks(self, request: SampleRequest) -> list[Task]:
        """Tasks of this rank's share of prompts: each prompt is a group of ``n_samples``."""
        prompts, first_group = rank_share(request.prompts, request.first_group, self.parts.comm)
        tasks: list[Task] = []
        for group, prompt in enumerate(prompts, first_group):
            env_seed = sample_seed(request.seed, group) % 2**31
            if request.evaluation:
                env_seed = self.options.eval_seed + group

            first = group * request.n_samples
            for number in range(first, first + request.n_samples):
                seed = sample_seed(request.seed, number)
                tasks.append(Task(prompt, seed, env_seed, group=group))
        return tasks

    def _drive(self, tasks: Sequence[Task], params: SamplingParams) -> list[Played]:
        """Drive the engine until all tasks are played, with a bar of ended episodes."""
        ended: list[Task] = []
        with progress_bar(len(tasks), "episodes", enabled=self.parts.comm.rank == 0) as bar:
            # Each step is a sign of progress: episodes have a time limit of their own.
            work = self._play_all(tasks, params, ended)
            return self.driver.drive(
                work, lambda: bar.update(len(ended) - bar.done), self.parts.leave
            )

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
    ) -> Sample:
        """Play one episode and return its sample; ``SampleFailed`` if it is not trained on."""
        task = Task(prompt, seed, env_seed, group=group)
        played = await self._play(task, self._setup(params))
        measure([played], metrics)
        if not played.sample.is_trained:
            raise SampleFailed(played.episode.failure, played.sample)
        return played.sample

    async def _play_all(
        self, tasks: Sequence[Task], params: SamplingParams, ended: list[Task]
    ) -> list[Played]:
        """Play all tasks, and add each to ``ended`` when it has ended."""
        await self.start()
        setup = self._setup(params)

        async def play_one(task: Task) -> Played:
            played = await self._play(task, setup)
            ended.append(task)
            return played

        return await asyncio.gather(*map(play_one, tasks))

    async def _play(self, task: Task, setup: SessionSetup) -> Played:
        played = await play(self.agent, task, setup, needs_reward=not self.parts.has_rewards)
        self._warn_of_both(played)
        return played

    def _warn_of_both(self, played: Played) -> None:
        """Warn once, on one rank, that rewards of tools are added to those of other sources."""
        if self._has_warned_of_both or not self.parts.has_rewards or self.parts.comm.rank > 0:
            return
        if not played.episode.tool_rewards or played.session.counts["rewarded_turns"] == 0:
            return

        self._has_warned_of_both = True
        logger.warning(
            "rewards of tools (%s) are added to those of reward functions and other sources: both count. With "
            "--tool_rewards none functions only see them, as tool_rewards.",
            ", ".join(played.episode.tool_rewards),
        )

    def _setup(self, params: SamplingParams) -> SessionSetup:
        return SessionSetup(
            self.renderer,
            self.driver.generate,
            params,
            options=self.options,
            longest=self.options.episode_max_len or self.parts.longest,
            context=self.parts.context,
            stood=lambda: self.driver.stood,
        )

    def _warn(self, played: Sequence[Played]) -> None:
        """Warn of conversations with other tokens than their rendering, and of failed episodes."""
        differing = [each for each in played if each.session.counts["rerender_mismatch"]]
        if differing:
            logger.warning(
                "%d of %d conversations are rendered otherwise than they were recorded; the first: %s",
                len(differing),
                len(played),
                differing[0].episode.error,
            )

        lost = [each for each in played if not each.sample.is_trained]
        if lost:
            logger.warning(
                "%d of %d episodes failed and are not trained on; the first: %s",
                len(lost),
                len(played),
                lost[0].episode.failure,
            )


_ALWAYS = ("tool_calls", "tool_errors", "malformed_calls", "bridged_turns", "rerendered_turns")
"""Counts that are logged even if 0."""


def measure(played: Sequence[Played], metrics: Metrics) -> None:
    """Add metrics of episodes: the fraction of each ending, and numbers of their turns."""
    for each in played:
        episode = each.episode
        session = each.session
        for ending in Ending:
            metrics.add(f"agent/{ending.value}", episode.ending is ending)
        metrics.add("agent/turns", episode.n_turns)
        for turn in session.turns:
            metrics.add("agent/tokens_per_turn", len(turn.completion.token_ids))

        counts = dict.fromkeys(_ALWAYS, 0) | session.counts
        counts["tool_calls"] += sum(len(turn.tool_calls) for turn in session.turns)
        for name, value in {**counts, **session.metrics}.items():
            metrics.add(f"agent/{name}", value)
        for name, rewards in episode.tool_rewards.items():
            metrics.add(f"agent/tool_rewards/{name}", sum(rewards))
