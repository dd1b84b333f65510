"""Where rewards come from: reward models, Python functions, servers, verifiers. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openppo.rewards.function import FunctionScorer, as_reward_function, load_reward_function
    from openppo.rewards.http import RemoteScorer
    from openppo.rewards.model import ModelScorer
    from openppo.rewards.scoring import CombinedScorer, PendingScores, Scorer, check_scores, start_scoring
    from openppo.rewards.steps import step_ends
    from openppo.rewards.verifiable import VerifiableScorer

_HOME = {
    "CombinedScorer": "scoring",
    "FunctionScorer": "function",
    "ModelScorer": "model",
    "PendingScores": "scoring",
    "RemoteScorer": "http",
    "Scorer": "scoring",
    "VerifiableScorer": "verifiable",
    "as_reward_function": "function",
    "check_scores": "scoring",
    "load_reward_function": "function",
    "start_scoring": "scoring",
    "step_ends": "steps",
}

__all__ = [
    "CombinedScorer",
    "FunctionScorer",
    "ModelScorer",
    "PendingScores",
    "RemoteScorer",
    "Scorer",
    "VerifiableScorer",
    "as_reward_function",
    "check_scores",
    "load_reward_function",
    "start_scoring",
    "step_ends",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
