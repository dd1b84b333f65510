"""Launched by torchrun: ``run_watching.py CASES`` trains once for each line of flags and counts what really happens.

``CASES`` is a JSON file with a list of [folder, flags]; ``folder/counts_<rank>.json`` gets one entry per global step,
``folder/plan.json`` what the run was planned to be.
"""

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.tracking import setup_logging
from openppo.trainer import PPOTrainer, build_ppo_trainer
from openppo.trainer.summary import batch_plan


def count_calls(trainer: PPOTrainer) -> list[dict[str, Any]]:
    """One entry per global step, filled while ``trainer`` runs."""
    steps: list[dict[str, Any]] = []

    def counted(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "prompts":
                steps.append({"prompts": len(args[0]), "optimizer_steps": 0})
            else:
                steps[-1][name] += 1
            return original(*args, **kwargs)

        setattr(owner, method, call)

    counted(trainer.source, "rollout", "prompts")
    counted(trainer.components.actor, "step", "optimizer_steps")
    return steps


def main() -> None:
    """All cases."""
    for folder, flags in json.loads(Path(sys.argv[1]).read_text()):
        config = parse_options(TrainPPOConfig, flags.split())
        strategy = DeepspeedStrategy(config.deepspeed, timedelta(seconds=100))
        setup_logging(strategy.comm.rank)
        trainer = build_ppo_trainer(config, strategy)
        steps = count_calls(trainer)
        trainer.fit()
        plan = batch_plan(config, len(trainer.components.prompts), trainer.comm.world_size)
        rank = trainer.comm.rank
        Path(folder, f"counts_{rank}.json").write_text(json.dumps(steps))
        Path(folder, "plan.json").write_text(json.dumps(dataclasses.asdict(plan) | {"total": plan.optimizer_steps()}))
        if rank == 0:
            print("END OF", Path(folder).name, flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
