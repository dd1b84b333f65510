"""Single responses that a driver samples."""

import asyncio

from openppo.rollout.engine_sampler import rank_share
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import SampleFailed, SamplerParts
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics
from openppo.types import Prompt, Sample, SamplingParams


class ResponseSampler:
    """Sampler of single responses that shares a driver with other samplers."""

    def __init__(self, parts: SamplerParts) -> None:
        self.parts = parts
        self.driver = parts.own_driver()

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Sample this rank's share, with the numbers of ``sample_responses``."""
        return self.driver.drive(self._sample_all(request), leave=self.parts.leave)

    async def _sample_all(self, request: SampleRequest) -> list[Sample]:
        prompts, first_group = rank_share(request.prompts, request.first_group, self.parts.comm)
        with self.driver.hold():
            work = [
                asyncio.ensure_future(self._sample_numbered(request, prompt, group, number=number))
                for group, prompt in enumerate(prompts, first_group)
                for number in range(request.n_samples)
            ]
            await asyncio.sleep(0)
        return await asyncio.gather(*work)

    async def _sample_numbered(
        self, request: SampleRequest, prompt: Prompt, group: int, number: int
    ) -> Sample:
        seed = sample_seed(request.seed, group * request.n_samples + number)
        return await self.sample_one(
            prompt, request.params, seed, env_seed=0, group=group, metrics=request.metrics
        )

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
    ) -> Sample:
        """Sample one response; ``SampleFailed`` if the engine cannot read the prompt."""
        try:
            completion = await self.driver.generate(prompt, params, seed, park=False)
        except ValueError as error:
            raise SampleFailed(str(error)) from error
        return Sample.of_response(prompt, completion, group, stop=params.stop)

    def close(self) -> None:
        """End the driver's thread."""
        self.driver.close()
