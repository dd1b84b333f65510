"""Actor, critic, reward model and losses. Names load on first use, so a loss costs torch only."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.models.actor import Actor
    from openppo.models.loss import (
        POLICY_LOSSES,
        CISPOLoss,
        GPTLMLoss,
        GSPOLoss,
        LogExpLoss,
        PairWiseLoss,
        PolicyLoss,
        PRMLoss,
        ValueLoss,
        policy_loss,
        token_weights,
    )
    from openppo.models.masked import compute_approx_kl, masked_mean
    from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression

_HOME = {
    "Actor": "actor",
    "ScalarHeadModel": "scalar_head",
    "get_llm_for_sequence_regression": "scalar_head",
    "PolicyLoss": "loss",
    "ValueLoss": "loss",
    "GPTLMLoss": "loss",
    "PairWiseLoss": "loss",
    "LogExpLoss": "loss",
    "PRMLoss": "loss",
    "masked_mean": "masked",
    "compute_approx_kl": "masked",
    "CISPOLoss": "loss",
    "GSPOLoss": "loss",
    "POLICY_LOSSES": "loss",
    "policy_loss": "loss",
    "token_weights": "loss",
}

__all__ = [
    "POLICY_LOSSES",
    "Actor",
    "CISPOLoss",
    "GPTLMLoss",
    "GSPOLoss",
    "LogExpLoss",
    "PRMLoss",
    "PairWiseLoss",
    "PolicyLoss",
    "ScalarHeadModel",
    "ValueLoss",
    "compute_approx_kl",
    "get_llm_for_sequence_regression",
    "masked_mean",
    "policy_loss",
    "token_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
