"""Single responses of an engine as samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from openppo.rollout.engine import Engine
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.seeds import sample_seed
from openppo.types import Comm, Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class EngineSampler:
    """Sampler of single responses, for an engine without a driver."""

    engine: Engine
    comm: Comm

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Return this rank's share of the samples."""
        return sample_responses(
            self.engine,
            request.prompts,
            request.params,
            n_samples=request.n_samples,
            seed=request.seed,
            first_group=request.first_group,
            comm=self.comm,
        )

    def close(self) -> None:
        """Do nothing."""


def rank_share(
    prompts: Sequence[Prompt], first_group: int, comm: Comm
) -> tuple[Sequence[Prompt], int]:
    """Return this rank's share of ``prompts``, and the group of its first."""
    start = comm.rank * len(prompts) // comm.world_size
    end = (comm.rank + 1) * len(prompts) // comm.world_size
    return prompts[start:end], first_group + start


def sample_responses(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    n_samples: int,
    seed: int,
    first_group: int = 0,
    comm: Comm | None = None,
) -> list[Sample]:
    """Sample ``n_samples`` responses for each prompt, or with ``comm`` for each of this rank's share.

    Responses of one prompt are beside each other. ``first_group`` is the number of the first prompt in the whole run;
    groups and seeds follow from it, so that a response does not depend on the number of ranks.
    """
    if comm is not None:
        prompts, first_group = rank_share(prompts, first_group, comm)

    repeated: list[Prompt] = []
    groups: list[int] = []
    for group, prompt in enumerate(prompts, first_group):
        repeated += [prompt] * n_samples
        groups += [group] * n_samples
    first_sample = first_group * n_samples
    seeds = [sample_seed(seed, first_sample + i) for i in range(len(repeated))]

    completions = engine.generate(repeated, params, seeds)
    return [
        Sample.of_response(prompt, completion, group, stop=params.stop)
        for prompt, completion, group in zip(repeated, completions, groups, strict=True)
    ]
