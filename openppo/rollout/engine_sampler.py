"""Single responses of an engine as trajectories."""

from collections.abc import Sequence
from dataclasses import dataclass

from openppo.rollout.engine import Engine
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.seeds import sample_seed
from openppo.types import (
    Comm,
    Completion,
    Prompt,
    SamplingParams,
    Trajectory,
)


@dataclass(frozen=True)
class EngineSampler:
    """One response of the engine to each sample of a prompt."""

    engine: Engine
    comm: Comm

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """This rank's share."""
        return sample_trajectories(self.engine, *asked[:5], self.comm)

    def close(self) -> None:
        """Hold nothing."""


def rank_share(
    prompts: Sequence[Prompt], first_group: int, comm: Comm
) -> tuple[Sequence[Prompt], int]:
    """This rank's share of ``prompts``, and the group of its first."""
    start, end = (rank * len(prompts) // comm.world_size for rank in (comm.rank, comm.rank + 1))
    return prompts[start:end], first_group + start


def sample_trajectories(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    n_samples: int,
    seed: int,
    first_group: int = 0,
    comm: Comm | None = None,
) -> list[Trajectory]:
    """``n_samples`` responses for each prompt, those of one prompt beside each other; with ``comm`` this rank's share.

    ``first_group`` is the number in the whole run of the first prompt; group and seeds follow from it, so that a
    response does not depend on the number of ranks.
    """
    if comm is not None:
        prompts, first_group = rank_share(prompts, first_group, comm)
    repeated = [
        (prompt, first_group + i) for i, prompt in enumerate(prompts) for _ in range(n_samples)
    ]
    seeds = [sample_seed(seed, first_group * n_samples + i) for i in range(len(repeated))]
    media = [prompt.media for prompt, _ in repeated]
    more = {"media": media} if any(media) else {}
    completions = engine.generate(
        [prompt.token_ids for prompt, _ in repeated], params, seeds, **more
    )
    sampled = zip(repeated, completions, strict=True)
    return [
        make_trajectory(prompt, made, group, stop=params.stop) for (prompt, group), made in sampled
    ]


def make_trajectory(
    prompt: Prompt, completion: Completion, group: int, stop: tuple[str, ...] = ()
) -> Trajectory:
    """A trajectory of one turn: prompt, then a completion whose every token is an action.

    ``stop`` are texts that end a response.
    """
    n_prompt, n_response = len(prompt.token_ids), len(completion.token_ids)
    return Trajectory(
        token_ids=prompt.token_ids + completion.token_ids,
        action_mask=[False] * n_prompt + [True] * n_response,
        log_probs=[0.0] * n_prompt + completion.log_probs,
        versions=[-1] * n_prompt + completion.versions,
        finish_reason=completion.finish_reason,
        prompt=prompt,
        group=group,
        stop=stop,
    )
