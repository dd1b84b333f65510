"""Facts of a run for the cards of its models, gathered while it runs and kept in checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from openppo.config import Options, TrainPPOConfig
from openppo.config.command_line import command_line
from openppo.sources.task import Task
from openppo.strategy.comm import collective
from openppo.tracking import environment
from openppo.tracking.card_file import write_card
from openppo.trainer.cards.data import describe_data
from openppo.trainer.cards.text import CardText, model_facts
from openppo.types import Comm


class RunCard:
    """Facts about a run, as JSON, and its first and last evaluation; without facts no card is written."""

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        self.facts = facts
        self.evaluations: list[dict[str, Any]] = []

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation after ``step``."""
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        if held_out:
            # A resumed run may repeat the evaluation of a step.
            first = [each for each in self.evaluations[:1] if each["step"] != step]
            self.evaluations = [*first, {"step": step, "metrics": held_out}]

    def resume(self, trainer_state: Mapping[str, Any]) -> None:
        """Take over the evaluations of a checkpoint; one of an earlier version has none."""
        self.evaluations = list(trainer_state.get("evaluations", []))

    def write(self, folder: Path, step: int, samples: int, comm: Comm) -> None:
        """Write the card of a model in ``folder`` that was saved after ``step``; all ranks raise ``OSError`` alike."""

        def write() -> None:
            if self.facts is not None and comm.rank == 0:
                text = CardText(
                    self.facts, folder, step, samples=samples, evaluations=self.evaluations
                )
                write_card(folder, text.header(), text.body())

        def failure(message: str) -> OSError:
            return OSError(f"the model card cannot be written to {folder}: {message}")

        collective(comm, write, OSError, raised=failure)


def make_run_card(
    config: Options,
    comm: Comm,
    start: str,
    rows: Mapping[str, int],
    tasks: Sequence[Task] = (),
    resolved: Mapping[str, Any] = MappingProxyType({}),
) -> RunCard:
    """Gather the facts of a run that starts from the model ``start``; collective.

    ``rows`` are the numbers of rows by flag, ``resolved`` the values that the run gives to open options. Rank 0 alone
    reads the files again, for their hashes.
    """
    versions = environment(comm)
    data = describe_data(config, tasks) if comm.rank == 0 else []
    return RunCard(
        {
            **facts_of(config, start, comm.world_size, resolved=resolved),
            "data": comm.all_gather_object(data)[0],
            "rows": dict(rows),
            "devices": sorted({rank["device"] for rank in versions["ranks"]}),
            "versions": {
                "openppo": versions["openppo"],
                "python": versions["python"],
                **versions["packages"],
            },
        }
    )


def facts_of(
    config: Options,
    start: str,
    n_ranks: int = 1,
    resolved: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the facts that the options of a run tell: kind, command, and the model it starts from."""
    kind = type(config).__name__.removeprefix("Train").removesuffix("Config").lower()
    estimator = ""
    if isinstance(config, TrainPPOConfig):
        estimator = config.advantage.advantage_estimator
        n_ranks += config.orchestrator.rollout_ranks
    command = command_line(
        f"train_{kind}", config, n_ranks, left_out=["load_checkpoint"], resolved=resolved
    )
    return {
        "kind": kind,
        "estimator": estimator,
        "command": command,
        "n_ranks": n_ranks,
        "start": model_facts(start),
    }
