"""Switch off what a pretrained model does beside computing the same logits each time: dropout, noise, more outputs."""

from collections.abc import Iterator
from functools import partial

from torch import nn
from transformers import PreTrainedConfig

from openppo import logger
from openppo.overrides import override

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_OUTPUTS = {
    "output_router_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
}
"""Options of configs that change what a forward returns, with the values that the models here run with."""


def disable_extras(model: nn.Module) -> None:
    """Switch off dropout, noise and outputs beside the logits, in place; log which outputs the config had on.

    The config of ``model`` changes with it, and is saved as it was (see ``openppo.overrides``).
    """
    disable_dropout(model)
    if changed := disable_outputs(model):
        logger.warning(
            "%s: %s is switched off while OpenPPO runs the model, which trains on logits alone, without an auxiliary "
            "loss of routers. What OpenPPO saves keeps the option.",
            type(model).__name__,
            ", ".join("return_dict=false" if name == "return_dict" else name for name in changed),
        )


def disable_outputs(model: nn.Module) -> list[str]:
    """Names of the options, sorted, that added outputs or returned tuples; they are overridden in all configs.

    Router logits do not match the rows of one that is packed, or the mask of one that is decoded. With
    ``output_attentions`` transformers would refuse to save the config after training.
    """
    changed = set()
    for config in _configs_of(model):
        for name, value in _OUTPUTS.items():
            if getattr(config, name, None) is (not value):
                override(config, name, value)
                changed.add(name)
    return sorted(changed)


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
