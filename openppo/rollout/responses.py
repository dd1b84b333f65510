"""Single responses, sampled one by one through a driver."""

import asyncio
from collections.abc import Sequence

from openppo.rollout.rollout import SampleFailed, SamplerParts, make_trajectory, rank_share, sample_seed
from openppo.tracking import Metrics
from openppo.types import Prompt, SamplingParams, Trajectory


class ResponseSampler:
    """One response to each sample of a prompt, also while requests of others are under way."""

    def __init__(self, parts: SamplerParts) -> None:
        self.parts = parts
        self.driver = parts.own_driver()

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
        """This rank's share, as ``sample_trajectories`` numbers it."""
        mine, first_group = rank_share(prompts, first_group, self.parts.comm)

        async def one(group: int, prompt: Prompt, sample: int) -> list[Trajectory]:
            return await self.sample_one(
                prompt, params, sample_seed(seed, group * n_samples + sample), 0, group, metrics
            )

        async def everything() -> list[list[Trajectory]]:
            numbered = list(enumerate(mine, first_group))
            with self.driver.hold():  # in the order that an engine's ``generate`` gives them
                work = [asyncio.ensure_future(one(*each, sample)) for each in numbered for sample in range(n_samples)]
                await asyncio.sleep(0)
            return await asyncio.gather(*work)

        return [trajectory for parts in self.driver.drive(everything(), leave=self.parts.leave) for trajectory in parts]

    async def start(self) -> None:
        """Nothing to do."""

    async def end(self) -> None:
        """Nothing to do."""

    async def sample_one(
        self, prompt: Prompt, params: SamplingParams, seed: int, env_seed: int, group: int, metrics: Metrics
    ) -> list[Trajectory]:
        """One response; ``SampleFailed`` if the engine cannot read the prompt."""
        try:
            completion = await self.driver.generate(prompt.token_ids, params, seed, park=False, media=prompt.media)
        except ValueError as error:
            raise SampleFailed(str(error)) from error
        return [make_trajectory(prompt, completion, group)]

    def close(self) -> None:
        """End the driver's thread."""
        self.driver.close()
