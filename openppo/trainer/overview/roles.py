"""Who takes part in a run: models with what is trained and frozen of them, and other sources of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from openppo.config import DeepSpeedConfig
from openppo.rewards.model import ModelScorer
from openppo.rewards.process import ProcessScorer
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.strategy.deepspeed import DeepspeedStrategy


@dataclass(frozen=True)
class Role:
    """One line of the table. Counts are of whole models; 0 where there are no weights of its own."""

    name: str
    model: str
    trained: int = 0
    frozen: int = 0
    dtype: str = ""
    place: str = ""


def model_role(name: str, model: str, module: nn.Module, strategy: DeepspeedStrategy, is_trained: bool) -> Role:
    """The role of ``module``, which ``DeepspeedStrategy`` may have wrapped and partitioned."""
    parameters: list[Any] = list(module.parameters())
    trained = sum(count_elements(p) for p in parameters if p.requires_grad)
    total = sum(count_elements(p) for p in parameters)
    stage = strategy.zero_stage if is_trained or strategy.zero_stage == 3 else 0
    n_ranks = strategy.comm.world_size
    place = strategy.device.type if n_ranks == 1 else f"{n_ranks} x {strategy.device.type}"
    return Role(
        name,
        model,
        trained,
        total - trained,
        _dtypes(parameters, strategy.config, is_trained),
        f"{place}, ZeRO-{stage}" if stage > 0 else f"{place}, whole",
    )


def scorer_roles(scorer: Scorer, sources: dict[str, str], strategy: DeepspeedStrategy) -> Iterator[Role]:
    """Sources of rewards; ``sources`` says what to call those of a kind, by flag."""
    if isinstance(scorer, CombinedScorer):
        for part in scorer.scorers:
            yield from scorer_roles(part, sources, strategy)
    elif isinstance(scorer, ModelScorer):
        yield model_role("reward", sources["reward_pretrain"], _module(scorer.model), strategy, is_trained=False)
    elif isinstance(scorer, ProcessScorer):
        yield model_role("reward", sources["prm_pretrain"], _module(scorer.model), strategy, is_trained=False)
    else:  # of text: a function, a server, a verifier
        flag, _, where = str(scorer).partition(" ")
        yield Role("reward", where or sources.get(flag.removeprefix("--"), flag))


def count_elements(parameter: Any) -> int:
    """Elements of a whole parameter, also where this rank holds a part of it, or where it is packed in 4 bits."""
    if hasattr(parameter, "ds_numel"):  # partitioned by ZeRO-3: what is here is empty
        return int(parameter.ds_numel)
    if getattr(parameter, "quant_state", None) is not None:  # of bitsandbytes: two elements in a byte
        return int(parameter.quant_state.shape.numel())
    return int(parameter.numel())


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module), f"{type(model).__name__} has no parameters to count"
    return model


def _dtypes(parameters: list[Any], options: DeepSpeedConfig, is_trained: bool) -> str:
    short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "4 bit"}
    names = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    shown = ", ".join(short.get(name, name) for name in names)
    return f"{shown} + fp32 master" if is_trained and options.bf16 else shown
