"""Launched by torchrun: ``run_steps.py CASES.json OUT`` runs a few steps of a trainer for each case.

A case: ``name``; ``command`` (train_ppo or a supervised one) and its ``arguments``; ``n_steps`` of ``n_rows``
each, or without them all of ``fit()``; ``extra_columns`` of padding in every batch; ``no_compiler`` for a machine
without; ``lockstep`` for weights that are too large to gather. ``OUT/<name>`` receives the models (``model``, and for
PPO ``model_critic``) and ``result.json``.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.experience.replay_buffer import join_rows
from openppo.models import padding
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import PPOTrainer
from openppo.trainer.build import build_ppo_trainer
from openppo.trainer.supervised.build import build_prm_trainer, build_rm_trainer, build_sft_trainer
from openppo.types import Experience, Trajectory

JUNK_ID = 5
PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
HANG_AFTER = timedelta(seconds=100)
SUPERVISED: dict[str, tuple[Any, Callable[..., Any]]] = {
    "train_sft": (TrainSFTConfig, build_sft_trainer),
    "train_rm": (TrainRMConfig, build_rm_trainer),
    "train_prm": (TrainPRMConfig, build_prm_trainer),
}
Case = dict[str, Any]


class Widener:
    """Puts ``columns`` more columns of padding on batches, and counts the batches."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.n_batches = 0

    def join_rows(self, rows: Sequence[Experience]) -> Experience:
        """The wider batch: junk ids, and zeros or False elsewhere."""
        self.n_batches += 1
        batch = join_rows(rows)
        wide = {
            name: F.pad(tensor, (0, self.columns), value=JUNK_ID if name == "sequences" else 0)
            for name, tensor in batch.tensors().items()
            if tensor.dim() == 2
        }
        return batch.with_fields(**wide)

    def pad_right(self, rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The wider batch and its mask."""
        self.n_batches += 1
        sequences, mask = padding.pad_right(rows, pad_token_id)
        return F.pad(sequences, (0, self.columns), value=pad_token_id), F.pad(mask, (0, self.columns))


def circumstances(case: Case, widener: Widener) -> ExitStack:
    """What a case changes around the library, as long as the stack is open."""
    stack = ExitStack()
    if case.get("extra_columns"):
        stack.enter_context(mock.patch("openppo.experience.replay_buffer.join_rows", widener.join_rows))
        for module in (
            "experience.replay_buffer",
            "trainer.supervised.batches",
            "trainer.supervised.trainers",
            "rewards.model",
        ):
            stack.enter_context(mock.patch(f"openppo.{module}.pad_right", widener.pad_right))
    if case.get("no_compiler"):
        missing = mock.Mock(return_value=mock.Mock(is_compatible=mock.Mock(return_value=False)))
        stack.enter_context(mock.patch("openppo.strategy.deepspeed.CPUAdamBuilder", missing))
    if case.get("lockstep"):
        stack.enter_context(mock.patch.object(DeepspeedStrategy, "fits_gathered", return_value=False))
    return stack


def partitioned_share(module: nn.Module) -> float:
    """This rank's share of a module's parameters; 1 where they are not partitioned."""
    held = sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in module.parameters())
    return held / sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in module.parameters())


def record(trainer: PPOTrainer) -> list[list[Trajectory]]:
    """A list to which each step adds the trajectories of this rank that experience is made of."""
    recorded: list[list[Trajectory]] = []
    make: Callable[..., list[Experience]] = trainer.maker.make

    def recording(trajectories: Sequence[Trajectory], *arguments: Any) -> list[Experience]:
        made = make(trajectories, *arguments)
        recorded.append(list(trajectories))
        return made

    trainer.maker.make = recording  # type: ignore[method-assign]
    return recorded


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """What tests want to know of a sample."""
    return {
        "prompt": trajectory.prompt.token_ids,
        "response": trajectory.response_ids,
        "group": trajectory.group,
        "score": trajectory.total_reward({}),
        "scores": trajectory.scores,
        "finish_reason": trajectory.finish_reason.value,
    }


@torch.no_grad()
def probe(trainer: PPOTrainer) -> dict[str, list[Any]]:
    """What the trained models say of the first three prompts."""
    ids = [prompt.token_ids for prompt in trainer.components.prompts[:3]]
    sequences, mask = padding.pad_right(ids, 0)
    trainer.components.actor.train(False)
    found = {"ids": ids, "log_probs": trainer.components.actor(sequences, mask, temperature=1.0).tolist()}
    if trainer.components.critic is not None:
        trainer.components.critic.train(False)
        found["values"] = trainer.components.critic(sequences, mask).tolist()
    return found


def run_ppo(case: Case, arguments: list[str]) -> dict[str, Any]:
    """Global steps of PPO."""
    has_critic = "--advantage_estimator" not in arguments
    config = parse_options(TrainPPOConfig, [*arguments, "--save_value_network"] if has_critic else arguments)
    strategy = DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    trainer = build_ppo_trainer(config, strategy)
    parts: Any = trainer.components
    found = {
        "actor": parts.actor.module,
        "critic": parts.critic and parts.critic.module,
        "reference": trainer.maker.reference,
        "reward": getattr(parts.scorer, "model", None),
    }
    models = {name: model for name, model in found.items() if isinstance(model, nn.Module)}
    shares = {name: partitioned_share(model) for name, model in models.items()}
    recorded = record(trainer)
    metrics = []
    if "n_steps" in case:
        for start in range(0, case["n_steps"] * case["n_rows"], case["n_rows"]):
            metrics.append(trainer.step(trainer.components.prompts[start : start + case["n_rows"]]))
        trainer.save()
    else:
        trainer.fit()
    steps = [[plain(t) for t in step] for step in recorded]
    of_ranks = strategy.comm.all_gather_object(steps)
    return {
        "metrics": metrics,
        "samples": [[t for of_rank in of_ranks for t in of_rank[i]] for i in range(len(steps))],
        "probe": probe(trainer),
        "shares": shares,
        "buffer_types": sorted({str(b.dtype) for model in models.values() for b in model.buffers()}),
        "zero_stage": trainer.components.actor.deepspeed.zero_optimization_stage(),
    }


def run_supervised(case: Case, arguments: list[str]) -> dict[str, Any]:
    """Optimizer steps of supervised training."""
    config_type, build = SUPERVISED[case["command"]]
    config = parse_options(config_type, arguments)
    strategy = DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    trainer = build(config, strategy)
    size = case["n_rows"]
    steps = [trainer.components.train_examples[i * size : (i + 1) * size] for i in range(case["n_steps"])]
    metrics = [trainer.step(examples) | trainer.evaluate() for examples in steps]
    trainer.save()
    return {
        "metrics": metrics,
        "samples": [],
        "shares": {"model": partitioned_share(trainer.components.model.module)},
        "zero_stage": trainer.components.model.deepspeed.zero_optimization_stage(),
    }


def leave() -> None:
    """End at once: a thread of gloo that frees a tensor while Python shuts down may abort the process."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """All cases of the file."""
    gc.freeze()  # DeepSpeed collects garbage for each ZeRO-3 engine: a second in all that was imported
    cases, out = Path(sys.argv[1]), Path(sys.argv[2])
    for case in json.loads(cases.read_text()):
        folder, widener = out / case["name"], Widener(case.get("extra_columns", 0))
        print(f"case {case['name']}", flush=True)  # shown if it fails
        run = run_ppo if case["command"] == "train_ppo" else run_supervised
        with circumstances(case, widener):
            result = run(case, [*case["arguments"], "--save_path", str(folder / "model")])
        if torch.distributed.get_rank() == 0:
            (folder / "result.json").write_text(json.dumps(result | {"wide_batches": widener.n_batches}))
    leave()


if __name__ == "__main__":
    main()
