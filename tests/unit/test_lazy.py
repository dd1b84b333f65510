"""Faces of the packages: each name is written once and loads on first use."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import openppo

PACKAGE = Path(openppo.__file__).parent
FACES = sorted(
    file.parent.name for file in PACKAGE.glob("*/__init__.py") if "lazy_names" in file.read_text()
)


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_loads(face):
    package = import_module(f"openppo.{face}")
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=f"module 'openppo.{face}' has no attribute 'nothing'"):
        _ = package.nothing


LOSSES = "PolicyLoss GSPOLoss CISPOLoss ValueLoss GPTLMLoss PairWiseLoss LogExpLoss PRMLoss token_weights policy_loss"
ADVANTAGES = "get_advantages_and_returns get_cumulative_returns compute_reward"
PUBLIC = {
    "openppo.models": f"Actor get_llm_for_sequence_regression {LOSSES} masked_mean compute_approx_kl "
    "log_probs_from_logits",
    "openppo.models.loss": LOSSES,
    "openppo.trainer": "PPOTrainer SFTTrainer RewardModelTrainer build_ppo_trainer",
    "openppo.experience": f"ExperienceMaker ReplayBuffer AdaptiveKLController FixedKLController {ADVANTAGES}",
    "openppo.strategy": "DeepspeedStrategy get_strategy",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_public_name_imports(package):
    assert all(
        getattr(import_module(package), name).__name__ == name for name in PUBLIC[package].split()
    )


def test_type_checkers_know_the_public_names(tmp_path):
    (tmp_path / "user.py").write_text(
        "from openppo.models import PolicyLoss\nreveal_type(PolicyLoss())\n"
    )
    flags = (
        "--strict --ignore-missing-imports --follow-imports silent --config-file= user.py".split()
    )
    command, env = [sys.executable, "-m", "mypy", *flags], {"MYPYPATH": str(PACKAGE.parent)}
    checked = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert 'Revealed type is "openppo.models.loss.PolicyLoss"' in checked.stdout, checked.stdout
