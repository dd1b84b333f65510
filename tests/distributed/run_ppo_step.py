"""Launched by torchrun: ``run_ppo_step.py CASES.json OUT`` runs one PPO step for each case, always from the same start.

A case: ``name``; ``arguments``, a command line of train_ppo; ``n_prompts`` of the step; ``extra_columns`` of
padding in every batch. ``OUT/<name>`` receives the models (``actor``, ``actor_critic``) and ``result.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.experience import collate
from openppo.models import padding
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import PPOTrainer, build_ppo_trainer
from openppo.types import Experience, Trajectory

JUNK_ID = 5
PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def widened(join: Callable[..., Experience], columns: int) -> Callable[..., Experience]:
    """``join_rows`` with more padding: junk ids, and zeros or False elsewhere."""

    def joined(rows: Sequence[Experience]) -> Experience:
        batch = join(rows)
        wide = {
            name: F.pad(tensor, (0, columns), value=JUNK_ID if name == "sequences" else 0)
            for name, tensor in batch.tensors().items()
            if tensor.dim() == 2
        }
        return batch.with_fields(**wide)

    return joined


def widened_pad_right(columns: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``pad_right`` with more padding."""

    def pad_right(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        sequences, mask = padding.pad_right(rows, pad_token_id)
        return F.pad(sequences, (0, columns), value=pad_token_id), F.pad(mask, (0, columns))

    return pad_right


def more_padding(columns: int) -> ExitStack:
    """While the stack is open, every batch has this many more columns."""
    stack = ExitStack()
    if columns > 0:
        wide = widened(collate.join_rows, columns)
        stack.enter_context(mock.patch("openppo.experience.replay_buffer.join_rows", wide))
        for module in ("experience.collate", "trainer.token_batches", "rollout.rewards"):
            stack.enter_context(mock.patch(f"openppo.{module}.pad_right", widened_pad_right(columns)))
    return stack


def record_trajectories(trainer: PPOTrainer) -> list[Trajectory]:
    """A list that fills with the trajectories of this rank that experience is made of."""
    recorded: list[Trajectory] = []
    make = trainer.maker.make

    def recording(trajectories: Sequence[Trajectory], metrics: Any) -> list[Experience]:
        recorded.extend(trajectories)
        return make(trajectories, metrics)

    trainer.maker.make = recording  # type: ignore[method-assign]
    return recorded


def run(case: dict[str, Any], out: Path) -> None:
    """One case."""
    folder = out / case["name"]
    config = parse_options(TrainPPOConfig, [*case["arguments"], "--save_path", str(folder / "actor")])
    strategy = DeepspeedStrategy(config.deepspeed, timedelta(seconds=60), PARTITION_EVERYTHING)
    with more_padding(case.get("extra_columns", 0)):
        trainer = build_ppo_trainer(config, strategy)
        recorded = record_trajectories(trainer)
        metrics = trainer.step(trainer.parts.prompts[: case["n_prompts"]])
        trainer.save()
    trajectories = [t for of_rank in strategy.comm.all_gather_object(recorded) for t in of_rank]
    if strategy.is_main:
        samples = [{"prompt": t.prompt.token_ids, "response": t.response_ids, **t.scores} for t in trajectories]
        (folder / "result.json").write_text(json.dumps({"metrics": metrics, "samples": samples}))


def main() -> None:
    """All cases of the file."""
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    for case in json.loads(cases.read_text()):
        run(case, out)


if __name__ == "__main__":
    main()
