"""One kernel each for RMSNorm, rotary embedding and gated MLP, by liger-kernel on GPUs.

Kernels are bound to modules of one model, and only if they agree with the module: outputs and gradients, of prompts and
of single tokens. liger-kernel's own functions replace classes of the whole process, and ignore activations.
"""

import importlib.util
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from openppo import logger
from openppo.strategy.fused_bindings import Settings, binding_of
from openppo.types import Comm

Choices = dict[str, Settings | None]
"""Settings of the kernel by the name of a binding; None if no kernel agrees."""


def has_kernels(device: torch.device, comm: Comm) -> bool:
    """True on GPUs if all ranks have the packages of the kernels. Collective on GPUs."""
    if device.type != "cuda":
        return False
    is_installed = all(map(importlib.util.find_spec, ("liger_kernel", "triton")))
    if all(comm.all_gather_object(is_installed)):
        return True
    missing = "" if is_installed else ": install liger-kernel (pip install 'openppo[gpu]')"
    logger.info(
        "fused kernels: none, so norms and activations take several kernels each%s", missing
    )
    return False


def fuse_kernels(module: nn.Module, device: torch.device, comm: Comm) -> Counter[str]:
    """Bind kernels to the submodules that they agree with; return their number by kind. Collective.

    Tensors on other devices than ``device`` go to the plain module. Names and values of parameters stay.
    """
    modules = [(binding_of(child), child) for child in module.modules()]
    bindings = {binding.name: binding for binding, _ in modules if binding is not None}
    choices: Choices = {name: binding.choose(device) for name, binding in sorted(bindings.items())}
    agreed = _common_choices(choices, comm)

    counts = Counter[str]()
    for binding, child in modules:
        if binding is None:
            continue
        choice = agreed.get(binding.name)
        if choice is not None:
            binding.bind(child, choice, device.type)
            counts[binding.kind] += 1

    plain = []
    for name, binding in bindings.items():
        if agreed.get(name) is None:
            plain.append(f"{name} ({binding.reason or 'differs on another rank'})")
    _log(_model_name(module), counts, plain)
    return counts


def fused_in(module: nn.Module) -> list[str]:
    """Return the kinds of kernels that are bound to modules of ``module``, sorted."""
    kinds = set[str]()
    for child in module.modules():
        if "fused_kernel" in vars(child):
            kinds.add(vars(child)["fused_kernel"])
    return sorted(kinds)


def _common_choices(choices: Choices, comm: Comm) -> Choices:
    """Return the choices that are equal on all ranks. Collective."""
    common = dict(choices)
    for rank_choices in comm.all_gather_object(choices):
        for name, choice in choices.items():
            if rank_choices.get(name) != choice:
                common.pop(name, None)
    return common


def _model_name(module: nn.Module) -> str:
    """Class name of the Hugging Face model in ``module``, else that of ``module``."""
    for child in module.modules():
        if hasattr(type(child), "config_class"):
            return type(child).__name__
    return type(module).__name__


def _log(model: str, counts: Counter[str], plain: Sequence[str]) -> None:
    if counts:
        bound = ", ".join(f"{kind} ({n})" for kind, n in sorted(counts.items()))
        left = f"; as they were: {', '.join(plain)}" if plain else ""
        logger.info("fused kernels in %s: %s%s", model, bound, left)
    else:
        reasons = f": {', '.join(plain)}" if plain else ""
        logger.info(
            "fused kernels: %s stays as it is, as none computes a part of it alike%s",
            model,
            reasons,
        )
