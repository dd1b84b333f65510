"""Launched by torchrun: ``run_cases.py CASES.json OUT [MODE]`` trains each case in ``OUT/<name>``, one after the other.

A case: ``name``; ``command`` (train_ppo unless given) and ``arguments``; ``n_steps`` of ``n_rows`` each, else all of
``fit()``; ``lockstep`` for weights that are too large to gather; ``poison``
makes optimizer steps not finite. Mode ``first`` stops a case at its check number ``stop_at`` as a signal would, mode
``rest`` resumes from the checkpoint, with ``own_loop`` in a loop of one's own. ``OUT/<name>`` receives the models
(``model``, and of PPO without a mode ``model_critic``) and ``result.json``.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from openppo.agents import agent_source
from openppo.build.ppo import build_ppo_trainer
from openppo.build.supervised import build_supervised_trainer
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.checkpoint import model_state
from openppo.strategy.signals import SignalStop
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import setup_logging
from openppo.trainer import PPOTrainer
from openppo.types import Interrupted, ModelInputs, Sample

PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
HANG_AFTER = timedelta(seconds=100)
SMALL_PIECES = mock.patch.object(model_state, "PIECE_BYTES", 20_000)
TRAINERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "train_ppo": (
        TrainPPOConfig,
        lambda config, strategy: build_ppo_trainer(
            config, strategy, source=agent_source(config.agents)
        ),
    ),
    "train_sft": (TrainSFTConfig, build_supervised_trainer),
    "train_rm": (TrainRMConfig, build_supervised_trainer),
    "train_prm": (TrainPRMConfig, build_supervised_trainer),
}
POISON = {"nan": math.nan, "infinite loss": math.inf, "infinite gradient": 3e38}
Case = dict[str, Any]


class StopAt:
    """Stands for the check of signals: stops all ranks at check number ``at``, never at 0."""

    def __init__(self, at: int) -> None:
        self.at, self.n_checks = at, 0

    def __call__(self) -> None:
        self.n_checks += 1
        if self.n_checks == self.at:
            raise Interrupted("the test")


def poison(model: TrainableModel, how: str, calls: Sequence[int], here: bool) -> None:
    """Spoil optimizer steps number ``calls`` of a model ``here``, or for ``how`` "left out" train nothing anywhere."""
    n_done, backward, step = 0, model.backward, model.step

    def poisoned_backward(loss: Tensor, last: bool) -> None:
        if n_done + 1 not in calls:
            backward(loss, last)
        elif how != "left out":
            backward(loss * (POISON[how] if here else 1.0), last)

    def poisoned_step() -> float:
        nonlocal n_done
        n_done += 1
        return math.inf if how == "left out" and n_done in calls else step()

    model.backward, model.step = poisoned_backward, poisoned_step  # type: ignore[method-assign]


def partitioned_share(module: nn.Module) -> float:
    """This rank's share of a module's parameters; 1 where they are not partitioned."""
    held = sum(
        p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in module.parameters()
    )
    return held / sum(
        p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in module.parameters()
    )


def record(trainer: PPOTrainer) -> list[Sequence[Sample]]:
    """A list to which each step adds the samples that this rank trains on."""
    recorded: list[Sequence[Sample]] = []
    train_on = trainer.train_on

    def recording(samples: Sequence[Sample]) -> dict[str, float]:
        metrics = train_on(samples)
        recorded.append(samples)
        return metrics

    trainer.train_on = recording  # type: ignore[method-assign]
    return recorded


def plain(sample: Sample) -> dict[str, Any]:
    """What tests want to know of a sample."""
    return {
        "prompt": sample.prompt.token_ids,
        "response": sample.last.response_ids,
        "group": sample.group,
        "score": sample.total_reward({}),
        "scores": sample.scores,
        "finish_reason": sample.last.finish_reason.value,
    }


@torch.no_grad()
def probe(trainer: PPOTrainer) -> dict[str, list[Any]]:
    """What the trained models say of the first three prompts."""
    prompts = trainer.components.data.prompts[:3]
    ids = [prompt.token_ids or [3, 4, 5] for prompt in prompts]
    inputs = ModelInputs.of_ids(ids, pad_token_id=0).with_media(
        [prompt.media for prompt in prompts]
    )
    trainer.components.actor.train(False)
    log_probs = trainer.components.actor(inputs, temperature=1.0)
    found = {"ids": ids, "log_probs": log_probs.tolist()}
    if trainer.components.critic is not None:
        trainer.components.critic.train(False)
        found["values"] = trainer.components.critic(inputs).tolist()
    return found


def take_steps(
    trainer: Any, case: Case, own_loop: bool, rows: Sequence[Any], step: Callable[..., Any]
) -> list[Any]:
    """Metrics of steps of so many rows each; none after all of ``fit()``, or of a loop of one's own."""
    size = case.get("n_rows", 0)
    metrics = [step(rows[i * size : (i + 1) * size]) for i in range(case.get("n_steps", 0))]
    if metrics:
        trainer.save()
    elif own_loop:
        with trainer.components.trackers:
            for prompts in trainer.prompt_batches():
                trainer.report(trainer.step(prompts))
            trainer.save()
    else:
        trainer.fit()
    return metrics


def run_ppo(trainer: PPOTrainer, case: Case, own_loop: bool) -> dict[str, Any]:
    """Global steps of PPO."""
    parts: Any = trainer.components
    found = {"actor": parts.actor.module, "critic": parts.critic and parts.critic.module}
    (task,) = parts.data.tasks
    found |= {"reference": trainer.maker.reference, "reward": getattr(task.scorer, "model", None)}
    models = {name: model for name, model in found.items() if isinstance(model, nn.Module)}
    shares = {name: partitioned_share(model) for name, model in models.items()}
    recorded = record(trainer)
    metrics = take_steps(trainer, case, own_loop, parts.data.prompts, trainer.step)
    of_ranks = parts.strategy.comm.all_gather_object(
        [[plain(sample) for sample in step] for step in recorded]
    )
    return {
        "metrics": metrics,
        "samples": [list(chain.from_iterable(steps)) for steps in zip(*of_ranks, strict=True)],
        "probe": probe(trainer),
        "shares": shares,
        "buffer_types": sorted(
            {str(b.dtype) for model in models.values() for b in model.buffers()}
        ),
        "zero_stage": parts.actor.deepspeed.zero_optimization_stage(),
        "shares_prompts": parts.actor.module.shares_prompts,
        "optimizer_steps": parts.actor.scheduler.last_epoch,
    }


def run_supervised(trainer: Any, case: Case, own_loop: bool) -> dict[str, Any]:
    """Optimizer steps of supervised training."""
    parts = trainer.components
    shares = {"model": partitioned_share(parts.model.module)}
    metrics = take_steps(
        trainer,
        case,
        own_loop,
        parts.train_examples,
        lambda r: trainer.step(r) | trainer.evaluate(),
    )
    stage = parts.model.deepspeed.zero_optimization_stage()
    return {"metrics": metrics, "samples": [], "shares": shares, "zero_stage": stage}


def run(case: Case, folder: Path, mode: str) -> dict[str, Any]:
    """One case."""
    ppo = case.get("command", "train_ppo") == "train_ppo"
    config_type, build = TRAINERS[case.get("command", "train_ppo")]
    arguments = [*case["arguments"], "--save_path", str(folder / "model")]
    arguments += ["--load_checkpoint"] if mode == "rest" else []
    arguments += (
        ["--save_value_network"]
        if ppo and not mode and "--advantage_estimator" not in arguments
        else []
    )
    config = parse_options(config_type, arguments)
    strategy = DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    setup_logging(strategy.comm.rank)
    stop = StopAt(case["stop_at"] if mode == "first" else 0)
    with ExitStack() as changed:
        changed.enter_context(SMALL_PIECES)
        changed.enter_context(mock.patch.object(SignalStop, "__call__", lambda _: stop()))
        if case.get("lockstep"):
            changed.enter_context(
                mock.patch.object(DeepspeedStrategy, "fits_gathered", return_value=False)
            )
        trainer = build(config, strategy)
        if spoiled := case.get("poison"):
            here = strategy.comm.rank == spoiled["rank"]
            poison(
                getattr(trainer.components, spoiled["role"]), spoiled["how"], spoiled["calls"], here
            )
        own_loop = mode == "rest" and case.get("own_loop", False)
        result = (run_ppo if ppo else run_supervised)(trainer, case, own_loop)
    return result | {"checks": stop.n_checks}


def leave() -> None:
    """End at once: a thread of gloo that frees a tensor while Python shuts down may abort the process."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """All cases of the file."""
    gc.freeze()  # DeepSpeed collects garbage for each ZeRO-3 engine: a second in all that was imported
    cases, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:])
    for case in json.loads(cases.read_text()):
        print(f"case {case['name']}", flush=True)  # shown if it fails
        torch.manual_seed(hash(mode) % 1000)  # a session begins with random numbers of its own
        result = run(case, out / case["name"], mode)
        if torch.distributed.get_rank() == 0:
            (out / case["name"] / "result.json").write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
