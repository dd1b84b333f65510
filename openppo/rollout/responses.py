"""Single responses, sampled one by one through a driver."""

import asyncio
from itertools import product

from openppo.rollout.engine_sampler import make_trajectory, rank_share
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import SampleFailed, SamplerParts
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics
from openppo.types import Prompt, SamplingParams, Trajectory


class ResponseSampler:
    """One response to each sample of a prompt, also while requests of others are under way."""

    def __init__(self, parts: SamplerParts) -> None:
        self.parts = parts
        self.driver = parts.own_driver()

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """This rank's share, as ``sample_trajectories`` numbers it."""
        mine, first_group = rank_share(asked.prompts, asked.first_group, self.parts.comm)

        async def one(group: int, prompt: Prompt, sample: int) -> list[Trajectory]:
            seed = sample_seed(asked.seed, group * asked.n_samples + sample)
            return await self.sample_one(
                prompt, asked.params, seed, env_seed=0, group=group, metrics=asked.metrics
            )

        async def everything() -> list[list[Trajectory]]:
            samples = product(enumerate(mine, first_group), range(asked.n_samples))
            with self.driver.hold():  # in the order that an engine's ``generate`` gives them
                work = [
                    asyncio.ensure_future(one(*numbered, sample)) for numbered, sample in samples
                ]
                await asyncio.sleep(0)
            return await asyncio.gather(*work)

        return [
            trajectory
            for parts in self.driver.drive(everything(), leave=self.parts.leave)
            for trajectory in parts
        ]

    async def start(self) -> None:
        """Nothing to do."""

    async def end(self) -> None:
        """Nothing to do."""

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Metrics,
    ) -> list[Trajectory]:
        """One response; ``SampleFailed`` if the engine cannot read the prompt."""
        try:
            completion = await self.driver.generate(
                prompt.token_ids, params, seed, park=False, media=prompt.media
            )
        except ValueError as error:
            raise SampleFailed(str(error)) from error
        return [make_trajectory(prompt, completion, group, stop=params.stop)]

    def close(self) -> None:
        """End the driver's thread."""
        self.driver.close()
