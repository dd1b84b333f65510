"""Metrics of agents' episodes and of the engine that they use, and warnings about them."""

from collections.abc import Sequence

from openppo import logger
from openppo.rollout.driver import EngineDriver
from openppo.tracking import Metrics
from openppo.types import Ending, Sample


def measure_episodes(samples: Sequence[Sample], metrics: Metrics) -> None:
    """Add metrics of agents' episodes: the fraction of each ending, and numbers of their turns."""
    for sample in samples:
        episode = sample.episode
        if episode is None or not episode.counts:  # a single response
            continue

        for ending in Ending:
            metrics.add(f"agent/{ending.value}", episode.ending is ending)
        metrics.add("agent/turns", episode.n_turns)
        for n_tokens in episode.turn_tokens:
            metrics.add("agent/tokens_per_turn", n_tokens)
        for name, value in episode.counts.items():
            metrics.add(f"agent/{name}", value)
        for name, rewards in episode.tool_rewards.items():
            metrics.add(f"agent/tool_rewards/{name}", sum(rewards))


def warn_of_episodes(samples: Sequence[Sample]) -> None:
    """Warn of conversations with other tokens than their rendering, and of failed samples."""
    differing = [
        sample.episode
        for sample in samples
        if sample.episode is not None and sample.episode.counts.get("rerender_mismatch")
    ]
    if differing:
        logger.warning(
            "%d of %d conversations are rendered otherwise than they were recorded; the first: %s",
            len(differing),
            len(samples),
            differing[0].error,
        )

    failed = [
        sample.episode for sample in samples if sample.episode is not None and not sample.is_trained
    ]
    if failed:
        logger.warning(
            "%d of %d episodes failed and are not trained on; the first: %s",
            len(failed),
            len(samples),
            failed[0].failure,
        )


class EngineUse:
    """Use of an engine by episodes, from the making of this object to ``measure``."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self._read_tokens = driver.engine.read_tokens
        self._reused_tokens = driver.engine.reused_tokens
        self._waited = driver.waited

    def measure(self, metrics: Metrics) -> None:
        """Add the engine's idle time, and the share of prompt tokens that it did not read again."""
        engine = self.driver.engine
        metrics.add("time/engine_idle_s", self.driver.waited - self._waited)
        n_read = engine.read_tokens - self._read_tokens
        if n_read > 0:
            n_reused = engine.reused_tokens - self._reused_tokens
            metrics.add("agent/prefix_reuse", n_reused / n_read)
