"""The names that outside code relies on are importable from their package."""

from importlib import import_module

import pytest

PUBLIC = {
    "openppo.models": [
        "Actor",
        "get_llm_for_sequence_regression",
        "PolicyLoss",
        "GSPOLoss",
        "CISPOLoss",
        "ValueLoss",
        "GPTLMLoss",
        "PairWiseLoss",
        "LogExpLoss",
        "PRMLoss",
        "masked_mean",
        "compute_approx_kl",
    ],
    "openppo.trainer": ["PPOTrainer", "SFTTrainer", "RewardModelTrainer"],
    "openppo.experience": [
        "ExperienceMaker",
        "ReplayBuffer",
        "AdaptiveKLController",
        "FixedKLController",
        "compute_advantages",
        "get_advantages_and_returns",
        "get_cumulative_returns",
        "compute_reward",
    ],
    "openppo.strategy": ["DeepspeedStrategy", "get_strategy"],
}


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in PUBLIC for name in PUBLIC[package]])
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
