"""Launched by torchrun: ``run_lora.py adapters|four_bits|averages MODELS OUT`` trains adapters, or averages weights.

``MODELS`` holds the folders ``actor`` and ``reward``. ``OUT/<case>`` receives the models that were saved, and in
``result.pt`` what was computed and found while they were trained.
"""

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor

from openppo.config import AdamConfig, DeepSpeedConfig, LoRAConfig
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.models.adapters import AdapterOffReference
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import PolicyWeights, TrainableModel

PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
LORA = LoRAConfig(lora_rank=4, lora_alpha=8)
ADAM = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
LEARNING_RATE, MAX_NORM, N_STEPS, N_ROWS = 1e-2, 0.5, 4, 12


def batch(step: int) -> dict[str, Tensor]:
    """12 sequences of 4 to 10 tokens with a weight and a target for each token."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 11, (N_ROWS, 1), generator=generator)
    return {
        "sequences": torch.randint(3, 11, (N_ROWS, 10), generator=generator),
        "mask": torch.arange(10) < lengths,
        "weights": torch.randn(N_ROWS, 10, generator=generator),
        "targets": torch.randn(N_ROWS, 10, generator=generator),
    }


def train(engine: TrainableModel, strategy: DeepspeedStrategy, step: int, role: str) -> float:
    """One optimizer step on this rank's half of the batch in micro-batches of 4 and 2; the gradient's norm."""
    rows = {name: tensor.chunk(strategy.comm.world_size)[strategy.comm.rank] for name, tensor in batch(step).items()}
    micro_batches = [{name: tensor[part] for name, tensor in rows.items()} for part in (slice(4), slice(4, None))]
    engine.train()
    for i, micro in enumerate(micro_batches):
        outputs = engine(micro["sequences"], micro["mask"])
        loss = micro["weights"] * outputs if role == "actor" else (outputs - micro["targets"]).square()
        loss = torch.where(micro["mask"], loss, 0.0).sum() / N_ROWS * strategy.comm.world_size
        engine.backward(loss, last=i == 1)
    return engine.step()


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    """Of the whole batch that nobody was trained on."""
    data = batch(-1)
    return model(data["sequences"], data["mask"])


def elements_of_optimizer(engine: TrainableModel) -> int:
    """Elements of Adam's first moment on this rank."""
    optimizer: Any = engine.deepspeed.optimizer
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return sum(state["exp_avg"].numel() for state in states)


def facts(engine: TrainableModel, strategy: DeepspeedStrategy) -> dict[str, Any]:
    """Names of the trained parameters, and who holds how much."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    size = {name: getattr(p, "ds_numel", p.numel()) for name, p in parameters.items()}
    held = {name: getattr(p, "ds_tensor", p).numel() for name, p in parameters.items()}
    return {
        "trained": {name: size[name] for name, p in parameters.items() if p.requires_grad},
        "frozen": {name: (size[name], held[name]) for name, p in parameters.items() if not p.requires_grad},
        "optimizer": strategy.comm.all_gather_object(elements_of_optimizer(engine)),
        "bucket": engine.deepspeed.zero_reduce_bucket_size(),
    }


def lora(models: Path, out: Path, config: DeepSpeedConfig, load_in_4bit: bool = False) -> None:
    """Trains both, with the reference in between, and saves them."""
    strategy = DeepspeedStrategy(config, timedelta(seconds=100), PARTITION_EVERYTHING)
    options: dict[str, Any] = {"bf16": config.bf16, **vars(LORA), "load_in_4bit": load_in_4bit}
    critic = get_llm_for_sequence_regression(str(models / "reward"), "critic", **options)
    engines = {
        "critic": strategy.prepare(critic, ADAM, LEARNING_RATE, N_STEPS),
        "actor": strategy.prepare(Actor(str(models / "actor"), **options), ADAM, LEARNING_RATE, N_STEPS),
    }
    reference = AdapterOffReference(engines["actor"])
    result: dict[str, Any] = {"norms": {role: [] for role in engines}, "reference": []}
    for role, engine in engines.items():
        strategy.save_pretrained(engine.module.model, out / f"start_{role}")
    for step in range(N_STEPS):
        engines["actor"].train(False)
        result["reference"].append(outputs(reference))
        for role, engine in engines.items():
            result["norms"][role].append(train(engine, strategy, step, role))
    for role, engine in engines.items():
        engine.train(False)
        result[role] = outputs(engine)
        result[f"facts {role}"] = facts(engine, strategy)
        strategy.save_pretrained(engine.module.model, out / role)
    with mock.patch.object(
        PartitionedParameterCoordinator, "_invalidate_trace", autospec=True, side_effect=AssertionError
    ):
        for model in (reference, engines["actor"], reference):
            outputs(model)
    if strategy.is_main:
        torch.save(result, out / "result.pt")


def hand_over(models: Path, out: Path) -> None:
    """For each rank, which weights that an engine gets differ from those that peft merges in one process."""
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=3), timedelta(seconds=100), PARTITION_EVERYTHING)
    result: dict[str, Any] = {}
    for name, options in (("whole", {}), ("adapted", vars(LORA))):
        actor = Actor(str(models / "actor"), **options)
        whole: Any = copy.deepcopy(actor.model)
        if options:
            with torch.no_grad():
                for weight, parameter in actor.model.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(torch.randn_like(parameter) * 0.1)
                        whole.get_parameter(weight).copy_(parameter)
            whole = whole.merge_and_unload()
        expected = dict(whole.named_parameters())
        engine = strategy.prepare(actor, ADAM, LEARNING_RATE, 1)
        found = dict(
            list(PolicyWeights(strategy.for_generation, engine).merged())
        )  # kept until the end: each must be a copy
        mine = {
            "names": list(found) == list(expected),
            "different": [n for n, weight in expected.items() if not torch.allclose(found[n], weight, atol=1e-6)],
            "gathered afterwards": [n for n, p in engine.module.named_parameters() if p.numel() > 0],
        }
        result[name] = strategy.comm.all_gather_object(mine)
    if strategy.is_main:
        torch.save(result, out / "handed_over.pt")


def full_weights(engine: TrainableModel) -> dict[str, Tensor]:
    """Copies of the trained parameters."""
    trained: dict[str, Any] = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    with GatheredParameters(list(trained.values()), enabled=hasattr(next(iter(trained.values())), "ds_id")):
        return {name: p.detach().clone() for name, p in trained.items()}


def average(models: Path, out: Path, config: DeepSpeedConfig, options: dict[str, Any]) -> None:
    """Weights after each step, their average at the end, and what is there afterwards.

    Without LoRA DeepSpeed keeps its default, by which ZeRO-3 never releases weights as small as some of these.
    """
    strategy = DeepspeedStrategy(config, timedelta(seconds=100), PARTITION_EVERYTHING if options else {})
    actor = Actor(str(models / "actor"), bf16=config.bf16, **options)
    engine = strategy.prepare(actor, ADAM, LEARNING_RATE, N_STEPS)
    ema = ParameterAverage(engine, beta=0.7)
    result: dict[str, Any] = {"weights": [full_weights(engine)]}
    for step in range(N_STEPS):
        train(engine, strategy, step, "actor")
        ema.update()
        result["weights"].append(full_weights(engine))
        if step == 1:  # a checkpoint between two steps
            saved = {name: fragment.values.clone() for name, fragment in ema.fragments().items()}
            ema = ParameterAverage(engine, beta=0.7)
            for name, fragment in ema.fragments().items():
                fragment.values.copy_(saved[name])
    engine.train(False)
    before = outputs(engine)
    with ema.swapped_in():
        result["average"] = full_weights(engine)
        result["outputs"] = outputs(engine)
        strategy.save_pretrained(engine.module.model, out / "actor")
    result["restored"] = full_weights(engine)
    result["same outputs again"] = torch.equal(outputs(engine), before)
    result["elements"] = strategy.comm.all_gather_object(sum(f.values.numel() for f in ema.fragments().values()))
    train(engine, strategy, N_STEPS, "actor")
    result["next step"] = full_weights(engine)
    if strategy.is_main:
        torch.save(result, out / "result.pt")


def train_adapters(models: Path, out: Path) -> None:
    """Every case of ``lora``."""
    checkpointing = {"max_norm": MAX_NORM, "gradient_checkpointing": True}
    for name, config in {
        "0": DeepSpeedConfig(zero_stage=0, **checkpointing),
        "1": DeepSpeedConfig(zero_stage=1, max_norm=MAX_NORM),
        "2": DeepSpeedConfig(zero_stage=2, max_norm=MAX_NORM, overlap_comm=True),
        "3": DeepSpeedConfig(zero_stage=3, **checkpointing),
        "3 zpg": DeepSpeedConfig(zero_stage=3, max_norm=MAX_NORM, zpg=2),
        "0 bf16": DeepSpeedConfig(zero_stage=0, bf16=True, **checkpointing),
        "3 bf16": DeepSpeedConfig(zero_stage=3, bf16=True, **checkpointing),
    }.items():
        lora(models, out / name, config)
    hand_over(models, out)


def train_on_4_bits(models: Path, out: Path) -> None:
    """``lora`` on frozen weights in 4 bits."""
    for stage in (0, 2):
        lora(models, out / str(stage), DeepSpeedConfig(zero_stage=stage, max_norm=MAX_NORM), load_in_4bit=True)


def average_weights(models: Path, out: Path) -> None:
    """Every case of ``average``."""
    for stage in (0, 2, 3):
        config = DeepSpeedConfig(zero_stage=stage)
        average(models, out / str(stage), config, {})
        average(models, out / f"{stage} lora", config, vars(LORA))
    average(models, out / "3 zpg", DeepSpeedConfig(zero_stage=3, zpg=torch.distributed.get_world_size()), {})
    average(models, out / "3 bf16", DeepSpeedConfig(zero_stage=3, bf16=True), {})


def main() -> None:
    """The experiment of the first argument."""
    experiments = {"adapters": train_adapters, "four_bits": train_on_4_bits, "averages": average_weights}
    experiments[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that frees a tensor while Python shuts down may abort the process


if __name__ == "__main__":
    main()
