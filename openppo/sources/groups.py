"""The corridor: how every group of samples is played, in synchronous and asynchronous runs and in evaluations."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openppo.rollout.driver import EngineDriver, Leave
from openppo.rollout.players import Player, ResponsePlayer
from openppo.rollout.seeds import sample_seed
from openppo.sources.episodes import EngineUse, measure_episodes, warn_of_episodes
from openppo.tracking import Metrics, progress_bar
from openppo.types import Comm, EpisodeInput, Prompt, Sample, SamplingParams

_PASSES_TO_REQUEST = 3
"""Passes of the loop after which a player that waits for nothing else has sent its first request."""


@dataclass(frozen=True)
class GroupInput:
    """Input of a group: one sample for each of ``seeds``, all of the same prompt.

    ``number`` is the group's in the run. A sample that fails is played again with another seed, ``attempts`` times in
    all.
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    seeds: Sequence[int]
    env_seed: int
    attempts: int = 1
    needs_greedy: bool = False

    @property
    def n_samples(self) -> int:
        """Samples to be played, the greedy one included."""
        return len(self.seeds) + self.needs_greedy

    def episode(self, place: int, attempt: int) -> EpisodeInput:
        """Return the input of the sample at ``place``; its first attempt has the seed of ``seeds``."""
        seed = self.seeds[place]
        if attempt > 0:
            seed = sample_seed(seed, attempt)
        return EpisodeInput(self.prompt, seed, self.env_seed, group=self.number)


@dataclass(frozen=True)
class PlayedGroup:
    """Samples of a group: ``members`` in the order of its seeds, with stand-ins for those that failed.

    ``failed`` are the stand-ins of all failed attempts at members. ``greedy`` is the group's baseline, if its estimator
    needs one.
    """

    number: int
    members: Sequence[Sample]
    failed: Sequence[Sample] = ()
    greedy: Sample | None = None

    @property
    def samples(self) -> list[Sample]:
        """Members that can be trained on; none if the baseline failed, or fewer than two of several are left."""
        trained = [sample for sample in self.members if sample.is_trained]
        if len(trained) < min(2, len(self.members)):
            return []
        if self.greedy is None:
            return trained
        if not self.greedy.is_trained:
            return []
        return [replace(sample, greedy=self.greedy) for sample in trained]

    @property
    def failures(self) -> list[Sample]:
        """Stand-ins of all that failed, the baseline's last."""
        if self.greedy is None or self.greedy.is_trained:
            return list(self.failed)
        return [*self.failed, self.greedy]

    @property
    def error(self) -> str | None:
        """Reason of the last failure if nothing of the group can be trained on; None otherwise."""
        if self.samples:
            return None
        episode = self.failures[-1].episode
        assert episode is not None
        return episode.failure

    def measure(self, metrics: Metrics) -> None:
        """Add metrics of the episodes of all attempts at members."""
        ended_well = [sample for sample in self.members if sample.is_trained]
        measure_episodes([*self.failed, *ended_well], metrics)


@dataclass(eq=False)
class GroupPlayer:
    """Plays groups, as coroutines of the driver's loop, with the player of each prompt's task.

    ``players`` are the tasks' by name. ``n_ended`` counts ended samples.
    """

    players: dict[str, Player]
    driver: EngineDriver
    n_ended: int = 0
    _started: set[str] = field(default_factory=set)
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def plays_episodes(self) -> bool:
        """True if some samples are episodes of agents, not single responses."""
        return not all(isinstance(player, ResponsePlayer) for player in self.players.values())

    async def start(self) -> None:
        """Start the players that have not started."""
        async with self._starting:  # a worker and an evaluation may come at the same time
            for name, player in self.players.items():
                if name not in self._started:
                    await player.start()
                    self._started.add(name)

    async def play(self, groups: Sequence[GroupInput]) -> list[PlayedGroup]:
        """Play groups at the same time, then the greedy samples of those that need one."""
        played = await self._together([self._members(group) for group in groups])
        if not any(group.needs_greedy for group in groups):
            return played
        pairs = zip(groups, played, strict=True)
        return await self._together([self._with_greedy(group, members) for group, members in pairs])

    async def _together(
        self, work: Iterable[Coroutine[Any, Any, PlayedGroup]]
    ) -> list[PlayedGroup]:
        """Run coroutines whose first requests enter the engine together, as one batch."""
        with self.driver.hold():
            running = [asyncio.ensure_future(each) for each in work]
            for _ in range(_PASSES_TO_REQUEST):
                await asyncio.sleep(0)
        return await asyncio.gather(*running)

    async def _members(self, group: GroupInput) -> PlayedGroup:
        """Play the members of a group."""
        places = range(len(group.seeds))
        attempts = await asyncio.gather(*(self._attempts(group, place) for place in places))
        failed = [sample for tried in attempts for sample in tried if not sample.is_trained]
        return PlayedGroup(group.number, [tried[-1] for tried in attempts], failed)

    async def _with_greedy(self, group: GroupInput, played: PlayedGroup) -> PlayedGroup:
        """Add the baseline to a group that has samples."""
        if not played.samples:
            return played
        greedy_params = replace(group.params, temperature=0.0)
        attempts = await self._attempts(replace(group, params=greedy_params), place=0)
        return replace(played, greedy=attempts[-1])

    async def _attempts(self, group: GroupInput, place: int) -> list[Sample]:
        """Return the sample at ``place`` after the stand-ins of failed attempts."""
        player = self.players[group.prompt.task]
        tried: list[Sample] = []
        for attempt in range(group.attempts):
            tried.append(await player.play(group.episode(place, attempt), group.params))
            if tried[-1].is_trained:
                break
        self.n_ended += 1
        return tried

    def close(self) -> None:
        """End the players that have started, and the driver."""
        asyncio.run_coroutine_threadsafe(self._end(), self.driver.loop).result()
        self.driver.close()

    async def _end(self) -> None:
        for name in self._started:
            await self.players[name].end()


def play_together(
    player: GroupPlayer,
    groups: Sequence[GroupInput],
    comm: Comm,
    metrics: Metrics,
    leave: Leave = "abandon",
) -> list[PlayedGroup]:
    """Play this rank's groups until all have ended, with a bar of ended samples. Collective.

    ``Interrupted`` on all ranks upon a signal. ``leave`` is the fate of other requests of the driver.
    """
    driver = player.driver
    n_ended_before = player.n_ended
    n_samples = sum(group.n_samples for group in groups)
    use = EngineUse(driver)

    async def work() -> list[PlayedGroup]:
        await player.start()
        return await player.play(groups)

    with progress_bar(n_samples, "samples", enabled=comm.rank == 0) as bar:

        def show() -> None:
            bar.update(player.n_ended - n_ended_before - bar.done)

        played = driver.drive(work(), show, leave)

    for group in played:
        group.measure(metrics)
    if player.plays_episodes:
        use.measure(metrics)
    warn_of_episodes([sample for group in played for sample in group.members])
    return played
