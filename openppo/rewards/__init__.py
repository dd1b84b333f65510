"""Sources of rewards: reward models, Python functions, servers, verifiers. Names load on first use."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.rewards.function import FunctionScorer as FunctionScorer
    from openppo.rewards.http import RemoteScorer as RemoteScorer
    from openppo.rewards.model import ModelScorer as ModelScorer
    from openppo.rewards.reward_function import RewardFunction as RewardFunction
    from openppo.rewards.scoring import (
        CombinedScorer as CombinedScorer,
        Scorer as Scorer,
        check_scores as check_scores,
        start_scoring as start_scoring,
        step_ends as step_ends,
    )
    from openppo.rewards.verifiable import VerifiableScorer as VerifiableScorer

__getattr__, __dir__, __all__ = lazy_names(__name__)
