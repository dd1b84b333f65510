"""The corridor on one process, for tests of players and agents, and an engine that answers at once."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from openppo.datasets import shard
from openppo.media import Tokens
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.rollout.players import Player, ResponsePlayer
from openppo.rollout.seeds import sample_seed
from openppo.sources.groups import GroupInput, GroupPlayer, play_together
from openppo.sources.held_out import held_out_group
from openppo.tracking import Metrics
from openppo.types import Comm, Completion, Prompt, Sample, SamplingParams, SingleProcess


class InstantEngine(Engine):
    """Answers all waiting requests in one step, with the completions of ``answers(prompts, params, seeds)``."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, tuple[Tokens, SamplingParams, int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def answers(
        self, prompts: Sequence[Tokens], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Return one completion for each prompt."""
        raise NotImplementedError

    def submit(
        self,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
    ) -> int:
        number = next(self._numbers)
        self.waiting[number] = (prompt, params, seed)
        return number

    def cancel(self, number: int) -> None:
        self.waiting.pop(number, None)

    def step(self) -> None:
        prompts, params, seeds = zip(*self.waiting.values(), strict=True)
        completions = self.answers(prompts, params[0], seeds)
        self._ended |= dict(zip(self.waiting, completions, strict=True))
        self.waiting = {}

    def with_weights(self, weights: Any) -> Any:
        return nullcontext()


class Plays:
    """Groups of ``player``, played as a synchronous run plays them."""

    def __init__(self, player: Player, driver: EngineDriver, eval_seed: int = 0) -> None:
        self.player: Any = player
        self.driver = driver
        self.engine: Any = driver.engine
        self.eval_seed = eval_seed
        self.groups = GroupPlayer({"": player}, driver)

    @classmethod
    def responses(cls, engine: Engine) -> "Plays":
        """Groups of single responses."""
        driver = EngineDriver(engine)
        return cls(ResponsePlayer(driver), driver)

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n_samples: int = 1,
        seed: int = 1,
        first_group: int = 0,
        metrics: Metrics | None = None,
        evaluation: bool = False,
        note_failed: Callable[[Sample], None] = lambda sample: None,
    ) -> list[Sample]:
        """Play a group for each prompt; return its samples, or with ``evaluation`` also those that failed."""
        groups = []
        for number, prompt in enumerate(prompts, first_group):
            group = held_out_group(
                prompt,
                number,
                params=params,
                n_samples=n_samples,
                seed=seed,
                eval_seed=self.eval_seed,
            )
            if not evaluation:
                env_seed = sample_seed(seed, number) % 2**31
                group = GroupInput(number, prompt, params, group.seeds, env_seed=env_seed)
            groups.append(group)

        measured = Metrics() if metrics is None else metrics
        played = play_together(self.groups, groups, SingleProcess(), metrics=measured)
        for group in played:
            for failed in group.failures:
                note_failed(failed)
        if evaluation:
            return [sample for group in played for sample in group.members]
        return [sample for group in played for sample in group.samples]

    def close(self) -> None:
        """End the player and the driver."""
        self.groups.close()


def sample_responses(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    n_samples: int,
    seed: int,
    first_group: int = 0,
    comm: Comm | None = None,
) -> list[Sample]:
    """Sample single responses for the share of ``comm``, those of one prompt beside each other."""
    comm = comm or SingleProcess()
    before = comm.rank * len(prompts) // comm.world_size
    plays = Plays.responses(engine)
    try:
        return plays.sample(
            shard(prompts, comm.rank, comm.world_size),
            params,
            n_samples,
            seed=seed,
            first_group=first_group + before,
            evaluation=True,
        )
    finally:
        plays.close()
