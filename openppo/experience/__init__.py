"""From samples to experience: token rewards, advantages, the maker and the replay buffer."""

from typing import TYPE_CHECKING

from openppo.lazy import lazy_names

if TYPE_CHECKING:
    from openppo.experience.advantages import (
        get_advantages_and_returns as get_advantages_and_returns,
    )
    from openppo.experience.advantages import get_cumulative_returns as get_cumulative_returns
    from openppo.experience.advantages import length_adaptive_lambda as length_adaptive_lambda
    from openppo.experience.estimators import ESTIMATORS as ESTIMATORS, Estimator as Estimator
    from openppo.experience.estimators import centred as centred
    from openppo.experience.maker import ExperienceMaker as ExperienceMaker
    from openppo.experience.replay_buffer import ReplayBuffer as ReplayBuffer
    from openppo.experience.kl_controller import AdaptiveKLController as AdaptiveKLController
    from openppo.experience.kl_controller import FixedKLController as FixedKLController
    from openppo.experience.token_rewards import compute_reward as compute_reward

__getattr__, __dir__, __all__ = lazy_names(__name__)
