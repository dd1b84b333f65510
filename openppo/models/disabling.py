"""Switch off everything in a pretrained model but its logits: dropout, noise, further outputs."""

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
"""Options of configs that change the outputs of a forward, with their values here."""


def disable_extras(model: nn.Module) -> None:
    """Switch off dropout, noise and all outputs but the logits, in place; log these outputs.

    The config of ``model`` changes too, but is saved as it was (see ``openppo.overrides``).
    """
    disable_dropout(model)
    changed = disable_outputs(model)
    if changed:
        logger.warning(
            "%s: %s is switched off while OpenPPO runs the model, which trains on logits alone, without an auxiliary "
            "loss of routers. What OpenPPO saves keeps the option.",
            type(model).__name__,
            ", ".join("return_dict=false" if name == "return_dict" else name for name in changed),
        )


def disable_outputs(model: nn.Module) -> list[str]:
    """Override options that add outputs or return tuples, in all configs; return their names, sorted.

    Router logits do not match packed rows, or the mask of a decoded batch. With ``output_attentions`` transformers
    would refuse to save the config after training.
    """
    changed = set[str]()
    for config in _configs_of(model):
        for name, value in _OUTPUTS.items():
            if getattr(config, name, None) is (not value):
                override(config, name, value)
                changed.add(name)
    return sorted(changed)


def disable_dropout(model: nn.Module) -> None:
    """Switch off dropout, layerdrop and router noise.

    Dropout would make policy ratios differ from 1 before the first update. Its rate may belong to a dropout module,
    be a plain attribute of another module, or be read from the config in each forward (Persimmon, Falcon).
    """
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        if getattr(module, "router_jitter_noise", 0) > 0:
            # In training mode Phi-MoE draws among experts within that margin, so the module stays in evaluation mode.
            vars(module.eval())["train"] = partial(_stay, module)
        for name, value in vars(module).items():
            if _is_rate(name, value):
                setattr(module, name, 0.0)

    for config in _configs_of(model):
        for name in [name for name, value in vars(config).items() if _is_rate(name, value)]:
            override(config, name, 0.0)


def _is_rate(name: str, value: object) -> bool:
    """True for a number above 0 that, by its name, makes forwards random in training mode."""
    is_random = ("drop" in name or "jitter" in name) and name != "router_jitter_noise"
    return is_random and isinstance(value, float) and value > 0


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Ignore a change of mode, in place of ``Module.train``."""
    return module


def _configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Yield each config that a module of ``model`` holds, and the configs inside it, once."""
    holders: list[object] = list(model.modules())
    seen = set[int]()
    while holders:
        for value in list(vars(holders.pop()).values()):
            if isinstance(value, PreTrainedConfig) and id(value) not in seen:
                seen.add(id(value))
                holders.append(value)
                yield value
