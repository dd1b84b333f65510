"""Launched by torchrun: ``run_policy_weights.py MODEL OUT`` hands over weights that are partitioned under ZeRO-3.

``OUT/result.json`` says for each case and rank which weights differ from those that peft merges in one process.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.models import Actor
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.weights import PolicyWeights

PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def compare(folder: str, lora_rank: int) -> dict[str, Any]:
    """One case, on this rank."""
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=3), timedelta(seconds=100), PARTITION_EVERYTHING)
    actor = Actor(folder, lora_rank=lora_rank)
    whole: Any = copy.deepcopy(actor.model)
    if lora_rank > 0:
        with torch.no_grad():
            for name, parameter in actor.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
                    whole.get_parameter(name).copy_(parameter)
        whole = whole.merge_and_unload()
    expected = dict(whole.named_parameters())
    engine = strategy.prepare(actor, AdamConfig(), 1e-3, total_steps=1)
    pairs = list(PolicyWeights(strategy, engine).merged())  # kept until the end: each must be a copy
    found = dict(pairs)
    return {
        "names": list(found) == list(expected),
        "different": [name for name in expected if not torch.allclose(found[name], expected[name], atol=1e-6)],
        "gathered afterwards": [name for name, p in engine.module.named_parameters() if p.numel() > 0],
    }


def main() -> None:
    """Without adapters, and with."""
    folder, out = sys.argv[1], Path(sys.argv[2])
    of_ranks: dict[str, Any] = {}
    for name, lora_rank in (("whole", 0), ("adapted", 4)):
        gathered: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
        mine = compare(folder, lora_rank)
        torch.distributed.all_gather_object(gathered, mine)
        of_ranks[name] = gathered
    if torch.distributed.get_rank() == 0:
        (out / "result.json").write_text(json.dumps(of_ranks))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that frees a tensor while Python shuts down may abort the process


if __name__ == "__main__":
    main()
