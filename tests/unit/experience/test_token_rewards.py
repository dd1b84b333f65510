"""The reward of each token, penalties, filters, running moments and KL coefficients, worked out by hand."""

import math
import statistics

import pytest
import torch

from openppo.config import RewardShapingConfig
from openppo.experience import AdaptiveKLController, FixedKLController, compute_reward
from openppo.experience.group_filters import one_reward_groups
from openppo.experience.running_moments import RunningMoments
from openppo.experience.token_rewards import overlong_mask, shape_scores, soft_overlong_penalty
from openppo.models import compute_approx_kl
from openppo.types import SingleProcess
from tests.ranks import on_ranks

KL = torch.tensor([[0.5, 0.25, -1.0, 2.0, 4.0, 8.0]])
EXTRA = torch.tensor([[9.0, 9.0, 0.5, 0.0, -7.0, 9.0]])


@pytest.mark.parametrize(
    ("actions", "score", "options", "expected"),
    [  # prompt of two tokens, response of three that ends with the end of sequence, one place of padding
        ([0, 0, 1, 1, 1, 0], 3.0, {}, [0, 0, 0.1, -0.2, 3.0 - 0.4, 0]),
        (
            [0, 1, 0, 1, 0, 0],
            3.0,
            {},
            [0, -0.025, 0, 3.0 - 0.2, 0, 0],
        ),  # the environment wrote more
        ([0, 0, 0, 1, 1, 1], -2.0, {}, [0, 0, 0, -0.2, -0.4, -2.0 - 0.8]),  # cut by length
        ([1, 0, 0, 0, 0, 0], 3.0, {}, [3.0 - 0.05, 0, 0, 0, 0, 0]),  # ended at once
        ([0] * 6, 3.0, {}, [0] * 6),
        ([0, 0, 1, 1, 1, 0], 3.0, {"kl": None}, [0, 0, 0, 0, 3.0, 0]),
        # the score is clipped, KL and rewards of single tokens are not
        (
            [0, 0, 0, 0, 1, 1],
            -3.0,
            {"kl": 100 * KL, "reward_clip_range": (-2.0, 1.5)},
            [0, 0, 0, 0, -40, -2.0 - 80],
        ),
        (
            [0, 0, 1, 1, 1, 0],
            3.0,
            {"token_rewards": EXTRA},
            [0, 0, 0.5 + 0.1, -0.2, 3.0 - 7.0 - 0.4, 0],
        ),
    ],
)
def test_token_rewards_by_hand(actions, score, options, expected):
    mask = torch.tensor([actions]).bool()
    options = {"kl": KL} | options
    found = compute_reward(torch.tensor([score]), action_mask=mask, kl_coef=0.1, **options)
    assert found.dtype == torch.float32
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)
    for strange in (math.nan, math.inf):
        per_token = {
            n: torch.where(mask, x, strange)
            for n, x in options.items()
            if isinstance(x, torch.Tensor)
        }
        again = compute_reward(
            torch.tensor([score]), action_mask=mask, kl_coef=0.1, **options | per_token
        )
        assert torch.equal(again, found), "nothing outside the mask is read"


def test_rows_have_their_own_last_action_and_scores_may_be_whole_numbers():
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 1, 0]]).bool()
    rewards = compute_reward(torch.tensor([1, 2, 3]), None, mask, 0.1, (-1.0, 2.5))
    assert rewards.tolist() == [[0, 0, 1.0], [0, 0, 0], [0, 2.5, 0]]


@pytest.mark.parametrize("policy", [[0.1, 0.3, 0.3, 0.3], [0.3, 0.2, 0.28, 0.22]])
def test_only_k1_as_a_reward_leads_to_the_reference(policy):
    """Expected policy gradients by enumeration of four tokens (arXiv 2510.01555, 2512.21852)."""
    reference = torch.full((4,), 0.25, dtype=torch.float64).log()
    logits = torch.tensor(policy, dtype=torch.float64).log().requires_grad_()
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()

    def gradient(objective):
        return torch.autograd.grad(objective, logits, retain_graph=True)[0]

    def ascent(estimator):
        kl = compute_approx_kl(
            log_probs.detach()[:, None], reference[:, None], kl_estimator=estimator
        )
        rewards = compute_reward(torch.zeros(4), kl, torch.ones(4, 1).bool(), kl_coef=1.0)[:, 0]
        return gradient((probs.detach() * rewards * log_probs).sum())  # E[reward grad log p]

    of_kl = gradient((probs * (log_probs - reference)).sum())
    of_reverse_kl = gradient((reference.exp() * (reference - log_probs)).sum())
    torch.testing.assert_close(ascent("k1"), -of_kl, rtol=0, atol=1e-7)
    torch.testing.assert_close(ascent("k3"), of_reverse_kl - of_kl, rtol=0, atol=1e-7)
    for estimator in ("k2", "k3"):
        assert ascent(estimator) @ of_kl > 1e-5, "a step along it makes the KL larger"


RAMP = {"overlong_buffer_len": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, -3, 10]),  # clipped at 10 by default
        ({"missing_eos_penalty": 0.5}, [1, 0.5, -3.5, 10]),
        (RAMP, [1, 0, -4, 10]),
        (
            {**RAMP, "overlong_penalty_factor": 3.0, "reward_clip_range": (-5.0, 50.0)},
            [1, -2, -5, 18.5],
        ),
        ({**RAMP, "missing_eos_penalty": 0.5}, [1, -0.5, -4.5, 10]),
    ],
)
def test_scores_are_penalized_and_then_clipped(options, expected):
    scores, truncated = (
        torch.tensor([1.0, 1.0, -3.0, 20.0]),
        torch.tensor([False, True, True, False]),
    )
    shaped = shape_scores(
        scores, truncated, torch.tensor([10, 20, 20, 18]), RewardShapingConfig(**options), 20
    )
    assert shaped.tolist() == pytest.approx(expected)
    lengths = torch.tensor([0, 15, 16, 17, 18, 20, 25])  # a ramp
    assert soft_overlong_penalty(lengths, max_len=20, buffer_len=4).tolist() == [
        0,
        0,
        0,
        -0.25,
        -0.5,
        -1,
        -1,
    ]


def test_filters_by_hand():
    mask = overlong_mask(torch.tensor([[0, 1, 1], [0, 1, 0]]), torch.tensor([False, True]))
    assert mask.tolist() == [[False, True, True], [False, False, False]]
    rewards, groups = (
        torch.tensor([1.0, 0.0, 1.0, -2.0, -0.1, 1.0, -0.1]),
        torch.tensor([70, 3, 70, 3, -5, 3, -5]),
    )
    assert one_reward_groups(rewards, groups).tolist() == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert one_reward_groups(torch.zeros(0), torch.zeros(0).long()).tolist() == []


BATCHES = [[1.0, 2.0, 4.0, 1e4], [1e4 + 1], [], [-5.0, 0.5, 1e4 + 2]]


def moments_of(batches, comm, start=None):
    moments = RunningMoments()
    moments.load_state_dict(start or {})
    for batch in batches:
        moments.update(torch.tensor(batch)[comm.rank :: comm.world_size], comm)
    return moments.state_dict()


def test_running_moments_are_those_of_all_scores_of_all_ranks_at_once():
    alone, everything = (
        moments_of(BATCHES, SingleProcess()),
        [score for batch in BATCHES for score in batch],
    )
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    assert (alone["count"], alone["mean"]) == (len(everything), pytest.approx(mean, rel=1e-12))
    moments = RunningMoments(**alone)
    normalized = moments.normalize(
        torch.tensor([mean, mean + deviation, mean - 2 * deviation], dtype=torch.float64)
    )
    assert normalized.tolist() == pytest.approx([0, 1, -2], abs=1e-9)
    for together in on_ranks(3, lambda comm: moments_of(BATCHES, comm)):
        assert together == pytest.approx(alone, rel=1e-12)
    assert (
        moments_of(BATCHES[2:], SingleProcess(), moments_of(BATCHES[:2], SingleProcess())) == alone
    ), "resumed"
    assert RunningMoments(**moments_of([[3.0]], SingleProcess())).normalize(
        torch.tensor([3.0])
    ).tolist() == [0.0]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.6, 0.5 * (1 + 0.1 * 0.25)),  # 10 % above the target, a quarter of the horizon
        (600.0, 0.5 * (1 + 0.2 * 0.25)),  # the error is clipped to 20 %
        (-3.0, 0.5 * (1 - 0.2 * 0.25)),  # k1 may be negative
        *(
            (strange, 0.5) for strange in (6.0, math.nan, math.inf, -math.inf)
        ),  # one spoiled sample spoils nothing
    ],
)
def test_the_adaptive_coefficient_follows_the_error_and_a_fixed_one_stays(measured, expected):
    adaptive, fixed = (
        AdaptiveKLController(init_kl_coef=0.5, target=6.0, horizon=1000),
        FixedKLController(0.5),
    )
    for controller in (adaptive, fixed):
        controller.update(measured, n_steps=250)
    assert (adaptive.value, fixed.value) == (pytest.approx(expected, rel=1e-12), 0.5)
    for controller in (fixed, adaptive):  # a run may change from one to the other
        controller.load_state_dict(AdaptiveKLController(0.4, 6.0, 1000).state_dict())
        assert controller.value == (0.5 if controller is fixed else 0.4)
