"""The names that outside code relies on are importable from their package."""

from importlib import import_module

import pytest

LOSSES = "PolicyLoss GSPOLoss CISPOLoss ValueLoss GPTLMLoss PairWiseLoss LogExpLoss PRMLoss token_weights policy_loss"
ADVANTAGES = "get_advantages_and_returns get_cumulative_returns compute_reward"
PUBLIC = {
    "openppo.models": f"Actor get_llm_for_sequence_regression {LOSSES} masked_mean compute_approx_kl",
    "openppo.models.loss": LOSSES,
    "openppo.trainer": "PPOTrainer SFTTrainer RewardModelTrainer build_ppo_trainer",
    "openppo.experience": f"ExperienceMaker ReplayBuffer AdaptiveKLController FixedKLController {ADVANTAGES}",
    "openppo.strategy": "DeepspeedStrategy get_strategy",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_name_imports(package):
    assert all(getattr(import_module(package), name).__name__ == name for name in PUBLIC[package].split())
