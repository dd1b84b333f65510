"""The names that outside code relies on are importable from their package."""

from importlib import import_module

import pytest

LOSSES = "PolicyLoss GSPOLoss CISPOLoss ValueLoss GPTLMLoss PairWiseLoss LogExpLoss PRMLoss token_weights policy_loss"
PUBLIC = {
    "openppo.models": f"Actor get_llm_for_sequence_regression {LOSSES} masked_mean compute_approx_kl",
    "openppo.models.loss": LOSSES,
    "openppo.trainer": "PPOTrainer SFTTrainer RewardModelTrainer build_ppo_trainer",
    "openppo.experience": "ExperienceMaker ReplayBuffer AdaptiveKLController FixedKLController "
    "get_advantages_and_returns get_cumulative_returns compute_reward",
    "openppo.strategy": "DeepspeedStrategy get_strategy",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_name_imports(package):
    module = import_module(package)
    assert [name for name in PUBLIC[package].split() if getattr(module, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="PolicyLos"):
        _ = module.PolicyLos
