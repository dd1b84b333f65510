"""Third phase: sources of rewards, whose models are the first to load."""

from dataclasses import dataclass, replace

from openppo.build.check import Checked
from openppo.build.data import LoadedData
from openppo.build.scorers import ScorerBuilder
from openppo.rewards import Scorer
from openppo.sources.task import Tasks
from openppo.trainer.run_data import RunData


@dataclass(frozen=True)
class Rewards:
    """Tasks with their scorers, also in ``run_data``, and the scorer of ``--eval_reward_fn``.

    ``tasks`` are None if the caller's source makes the samples, ``held_out`` without the option.
    """

    run_data: RunData
    tasks: Tasks | None
    held_out: Scorer | None


def make_rewards(checked: Checked, data: LoadedData) -> Rewards:
    """Load reward models and start other sources of rewards; ``ValueError`` names the task and the flag at fault."""
    if data.tasks is None:
        return Rewards(data.run_data, tasks=None, held_out=None)
    builder = ScorerBuilder.of(checked, data.run_data, data.resolved)
    tasks = builder.build()
    return Rewards(
        run_data=replace(data.run_data, tasks=tasks),
        tasks=replace(data.tasks, tasks=tasks),
        held_out=builder.build_held_out(),
    )
