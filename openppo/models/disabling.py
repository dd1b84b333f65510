"""Switch off what a pretrained model does beside computing the same logits each time: dropout and noise."""

from collections.abc import Iterator
from functools import partial

from torch import nn
from transformers import PreTrainedConfig

from openppo.overrides import override

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(model: nn.Module) -> None:
    """Switch off dropout, layerdrop and router noise.

    A policy with it would have ratios other than 1 before its first update. Its rate may be that of a module, a plain
    attribute of one, or be read from the config in each forward (Persimmon, Falcon).
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        if getattr(module, "router_jitter_noise", 0) > 0:
            # Phi-MoE draws among the experts within that margin, which it has in evaluation mode too: it stays there.
            vars(module.eval())["train"] = partial(_stay, module)
        for name, value in vars(module).items():
            if _is_rate(name, value):
                setattr(module, name, 0.0)
    for config in _configs_of(model):
        for name in [name for name, value in vars(config).items() if _is_rate(name, value)]:
            override(config, name, 0.0)


def _is_rate(name: str, value: object) -> bool:
    """Recognize, by its name, a number above 0 that makes forwards random in training mode."""
    is_random = ("drop" in name or "jitter" in name) and name != "router_jitter_noise"
    return is_random and isinstance(value, float) and value > 0


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Each config that a part of ``model`` holds, and those inside it, once."""
    holders: list[object] = list(model.modules())
    seen = set[int]()
    while holders:
        for value in list(vars(holders.pop()).values()):
            if isinstance(value, PreTrainedConfig) and id(value) not in seen:
                seen.add(id(value))
                holders.append(value)
                yield value
