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
NAMES = [(package, name) for package, names in PUBLIC.items() for name in names.split()]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_imports_and_is_listed(package, name):
    module = import_module(package)
    assert getattr(module, name).__name__ == name
    assert name in module.__all__


@pytest.mark.parametrize("package", PUBLIC)
def test_everything_listed_can_be_imported(package):
    module = import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="PolicyLos"):
        _ = import_module(package).PolicyLos
