"""A user's policy loss: a function of a file, called with the values that its parameters name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openppo.config import LossConfig
from openppo.config.fields import names_file
from openppo.models.loss import policy_loss
from openppo.user_code import load_callable, parameters_among

TENSORS = ("log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs")
"""Parameters that get a tensor (B, L): float, 0 outside the bool ``action_mask``."""
_OPTIONS = ("eps_clip", "eps_clip_high", "dual_clip")
"""Parameters that get the value of an option."""
FLAG = "--policy_loss_type"


class FunctionLoss(nn.Module):
    """Loss of each token from ``function``, which is called with the values that its parameters name.

    These are ``TENSORS`` and the options ``eps_clip``, ``eps_clip_high`` (without a value that of ``eps_clip``) and
    ``dual_clip``. It returns the loss (B, L), or that and a dict of values (B, L) to log by name.
    ``where``, the flag and its value, begins messages. ``ValueError`` for a parameter without a value, and for an
    option of ``config`` that has another value than its default and no parameter.

    >>> loss = FunctionLoss(lambda log_probs, advantages: -advantages * log_probs, "a test", LossConfig())
    >>> log_probs = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    >>> mask = torch.tensor([[True, False]])
    >>> loss(log_probs, log_probs.detach(), torch.ones(1, 2), mask, log_probs.detach())[0].tolist()
    [[0.5, 0.0]]
    """

    def __init__(self, function: Callable[..., Any], where: str, config: LossConfig) -> None:
        super().__init__()
        self.function = function
        self.where = where
        values = vars(config)
        names = parameters_among(function, (*TENSORS, *_OPTIONS), where)
        if "log_probs" not in names:
            raise ValueError(
                f"{where}: without a parameter log_probs its loss has no gradient. Add it."
            )

        defaults = {declared.name: declared.default for declared in dataclasses.fields(config)}
        for name in _OPTIONS:
            if values[name] != defaults[name] and name not in names:
                raise ValueError(
                    f"--{name} {values[name]}: {where} has no parameter {name}. Leave the option out, or add it."
                )

        self.tensor_names = [name for name in names if name in TENSORS]
        self.options = {name: values[name] for name in names if name in _OPTIONS}
        if "eps_clip_high" in names and config.eps_clip_high is None:
            self.options["eps_clip_high"] = config.eps_clip

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss of each token (B, L), 0 outside the mask, and values (B, L) to log by name.

        ``ValueError`` for a result of another form.
        """
        values = (log_probs, old_log_probs, advantages, action_mask, rollout_log_probs)
        tensors = dict(zip(TENSORS, values, strict=True))
        arguments = {name: tensors[name] for name in self.tensor_names}
        result = self.function(**arguments, **self.options)

        loss = result
        logged: Mapping[str, Tensor] = {}
        if isinstance(result, tuple) and len(result) == 2:
            loss, logged = result
        self._check(loss, log_probs, "the loss")
        if log_probs.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"{self.where} returned a loss without gradient: use log_probs without detach() in it."
            )
        if not isinstance(logged, Mapping):
            raise ValueError(
                f"{self.where} returned a loss and {_described(logged)}: give a dict of values (B, L) by name."
            )
        for name, numbers in logged.items():
            self._check(numbers, log_probs, f"{name!r}")
        return torch.where(action_mask, loss, 0.0), logged

    def _check(self, tensor: Any, like: Tensor, name: str) -> None:
        """``ValueError`` unless ``tensor`` has the shape of ``like``, and a loss its kind of numbers."""
        if not isinstance(tensor, Tensor) or tensor.shape != like.shape:
            raise ValueError(
                f"{self.where} returned {_described(tensor)} as {name}: give one number for each token, "
                f"{tuple(like.shape)} here. How they add up is --loss_agg's."
            )
        if name == "the loss" and not tensor.is_floating_point():
            raise ValueError(f"{self.where} returned a loss of {tensor.dtype}: give floats.")


def _described(value: Any) -> str:
    """Name the kind of ``value``, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def policy_loss_of(config: LossConfig) -> Any:
    """Build the policy loss of options: one of ``POLICY_LOSSES``, or a ``FunctionLoss`` of a file."""
    if not names_file(config.loss_type):
        return policy_loss(config)
    function = load_callable(config.loss_type, FLAG)
    return FunctionLoss(function, f"{FLAG} {config.loss_type}", config)
