"""Numbers that the peers' own code gave, float64 unless it casts: OpenRLHF 0.6.1 and TRL 1.12.0.

They were made once with torch 2.13 on a CPU. OpenRLHF: ``process_experiences``, ``get_advantages_and_returns`` and
``get_cumulative_returns`` of its ``NaiveExperienceMaker`` (with "cpu" for "cuda"), ``compute_approx_kl``,
``compute_reward`` and ``AdaptiveKLController``. TRL: ``GRPOTrainer._compute_loss``, and that of its experimental
``gspo_token``, with the log-probs below as the model's.
"""

import pytest
import torch
from torch import Tensor

from openppo.experience import (
    AdaptiveKLController,
    compute_reward,
    get_advantages_and_returns,
    get_cumulative_returns,
)
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.token_rewards import StepRewards
from openppo.models.log_probs import compute_approx_kl
from openppo.models.loss import CISPOLoss, GSPOLoss, PolicyLoss, token_weights


def float64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(found: Tensor, expected: list, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found.double(), float64(expected), rtol=0, atol=tolerance)


# OpenRLHF 0.6.1

SCORES = float64([0.5, -1.0, 2.0, 0.25, 0.75, -2.5])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
VALUES = float64([[0.1, -0.4, 0.7, 9.0], [0.3, 0.2, -0.6, 0.5]])
REWARDS = float64([[-0.01, 0.02, 1.5, 9.0], [0.03, -0.02, 0.01, -1.25]])
POLICY = float64([[-1.0, -2.0, -0.5, 9.0], [-0.3, -1.2, -2.2, -0.7]])
REFERENCE = float64([[-1.2, -1.5, -0.5, 3.0], [-0.8, -1.0, -2.0, -1.7]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [0.0, -2.25, 2.25, 1.125, 1.875, -3.0]),
        ("reinforce_baseline", [0.0, -1.5, 1.5, 0.75, 1.25, -2.0]),
        ("group_norm", [0.0, -0.999999999, 0.999999999, 0.428571428, 0.714285714, -1.142857142]),
    ],
)
def test_scores_less_their_baseline_are_those_of_openrlhf(name: str, expected: list[float]) -> None:
    no_steps = StepRewards(torch.zeros(6, 1), torch.zeros(6, 1).bool())
    same(ESTIMATORS[name].rewards(SCORES, no_steps, GROUPS, None)[0], expected, 2e-9)


def test_advantages_and_returns_are_those_of_openrlhf() -> None:
    advantages, returns = get_advantages_and_returns(VALUES, REWARDS, MASK, 0.99, 0.9)
    same(
        advantages,
        [[1.1207878, 1.8258, 0.8, 0], [-1.15789444425, -1.21873675, -0.45425, -1.75]],
        1e-9,
    )
    same(
        returns, [[1.2207878, 1.4258, 1.5, 0], [-0.85789444425, -1.01873675, -1.05425, -1.25]], 1e-9
    )
    same(
        get_cumulative_returns(REWARDS, MASK, 0.99),
        [[1.47995, 1.505, 1.5, 0], [-1.19287275, -1.235225, -1.2275, -1.25]],
        1e-9,
    )


@pytest.mark.parametrize(
    ("estimator", "kl", "rewards"),
    [
        (
            "k1",
            [[0.2, -0.5, 0, 0], [0.5, -0.2, -0.2, 1.0]],
            [[-0.01, 0.025, 10, 0], [-0.025, 0.01, 0.01, -0.8]],
        ),
        (
            "k2",
            [[0.02, 0.125, 0, 0], [0.125, 0.02, 0.02, 0.5]],
            [[-0.001, -0.00625, 10, 0], [-0.00625, -0.001, -0.001, -0.775]],
        ),
        (
            "k3",
            [[0.01873076, 0.14872122, 0, 0], [0.10653067, 0.02140272, 0.02140272, 0.36787945]],
            [
                [-0.00093654, -0.00743606, 10, 0],
                [-0.00532653, -0.00107014, -0.00107014, -0.76839399],
            ],
        ),
    ],
)
def test_kl_and_token_rewards_are_those_of_openrlhf(
    estimator: str, kl: list, rewards: list
) -> None:
    found = compute_approx_kl(POLICY, REFERENCE, MASK, estimator)
    same(found, kl)
    same(compute_reward(torch.tensor([12.0, -0.75]), found, MASK, 0.05, (-10.0, 10.0)), rewards)


def test_the_adaptive_coefficient_is_that_of_openrlhf() -> None:
    controller, found = AdaptiveKLController(0.02, 6.0, 10000), []
    for measured in (3.0, 6.6, 30.0, 0.0):
        controller.update(measured, 512)
        found.append(controller.value)
    assert found == pytest.approx(
        [0.0197952, 0.019896551424, 0.02010029211058176, 0.019894465119369403], rel=1e-12
    )


# TRL 1.12.0; the second row has a token of a tool

ACTIONS = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()
NEW = float64([[-1.0, -2.0, -0.5, -7.0], [-0.3, -1.2, -2.2, -0.7]])
OLD = float64([[-1.2, -1.5, -0.5, -3.0], [-1.2, -1.0, -2.0, -2.9]])
PER_ROW = float64([[1.25], [-0.75]]).expand(2, 4)
PER_TOKEN = float64([[1.25, -0.5, 0.3, 0.0], [-0.75, 9.0, 0.6, -0.1]])


A, B = (
    [-0.25445890795, -0.1263605541, -0.2083333333, 0],
    [0.3074503888, 0, 0.1023413441, 1.1281266874],
)
SEQUENCE = [[-0.1885077954] * 3 + [0], [0.3286457438, 0, 0.3286457438, 0.3286457438]]
DR_GRPO = [[0, -0.0473852077, -0.078125, 0], [0.1152938958, 0, 0.0383780040, 0.4230475077]]
DELTA = [[0, 0, -0.05, 0], [0.3074503888, 0, -0.0818730753, 0]]
GSPO_TOKEN = [[-0.1885077954, 0, -0.0452418709, 0], [0.3286457438, 0, 0, 0.0438194325]]
TRL = {  # loss, aggregation, advantages, value, gradient
    "dapo": (PolicyLoss(0.2, 0.28), "token_mean", PER_ROW, 0.9487656250684643, [A, B]),
    "grpo": (PolicyLoss(0.2), "sequence_mean", PER_ROW, 0.9532245330184996, [[0, *A[1:]], B]),
    "dr_grpo": (PolicyLoss(0.2), "constant", PER_ROW, 0.35745919988193736, DR_GRPO),
    "delta": (PolicyLoss(0.2, dual_clip=3.0), "token_mean", PER_TOKEN, 0.04224398025348717, DELTA),
    "gspo": (GSPOLoss(0.2, 0.28), "sequence_mean", PER_ROW, 0.4204138450274959, SEQUENCE),
    "gspo_token": (
        GSPOLoss(0.02, 0.03),
        "sequence_mean",
        PER_TOKEN,
        0.11738217660958825,
        GSPO_TOKEN,
    ),
    "cispo": (
        CISPOLoss(1.5),
        "token_mean",
        PER_ROW,
        0.19869572573385433,
        [A, [0.1875, 0, B[2], 0.1875]],
    ),
}


@pytest.mark.parametrize(
    ("loss", "loss_agg", "advantages", "value", "gradient"), TRL.values(), ids=TRL
)
def test_policy_losses_and_gradients_are_those_of_trl(
    loss, loss_agg, advantages, value, gradient
) -> None:
    loss.reduction = "none"
    log_probs = NEW.clone().requires_grad_()
    weights = token_weights(ACTIONS, loss_agg, n_tokens=6, n_sequences=2, max_len=8).double()
    total = (loss(log_probs, OLD, advantages, ACTIONS) * weights).sum()
    assert total.item() == pytest.approx(value, abs=1e-7)  # the weights are float32
    same(torch.autograd.grad(total, log_probs)[0], gradient, 1e-7)
