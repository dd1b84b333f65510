"""The KL coefficient over time, worked out by hand."""

import math

import pytest

from openppo.experience import AdaptiveKLController, FixedKLController


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (6.6, 0.5 * (1 + 0.1 * 0.25)),  # 10 % above the target, a quarter of the horizon
        (5.7, 0.5 * (1 - 0.05 * 0.25)),
        (600.0, 0.5 * (1 + 0.2 * 0.25)),  # the error is clipped to 20 %
        (-3.0, 0.5 * (1 - 0.2 * 0.25)),  # k1 may be negative
        (6.0, 0.5),
    ],
)
def test_the_coefficient_follows_the_error(measured: float, expected: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.5, target=6.0, horizon=1000)
    controller.update(measured, n_steps=250)
    assert controller.value == pytest.approx(expected, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    controller = FixedKLController(0.02)
    controller.update(100.0, 1000)
    assert controller.value == 0.02


def test_an_adaptive_controller_goes_on_where_it_stopped_and_a_fixed_one_keeps_its_option() -> None:
    before = AdaptiveKLController(0.5, 6.0, 1000)
    before.update(12.0, 100)
    adaptive, fixed = AdaptiveKLController(0.1, 6.0, 1000), FixedKLController(0.1)
    for controller in (adaptive, fixed):
        controller.load_state_dict(before.state_dict())
    assert (adaptive.value, fixed.value) == (before.value, 0.1)
    adaptive.load_state_dict(fixed.state_dict())  # a run may change from one to the other
    assert adaptive.value == 0.1


@pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(measured: float) -> None:
    """One spoiled sample must not spoil the rewards of all later steps."""
    controller = AdaptiveKLController(init_kl_coef=0.5, target=6.0, horizon=1000)
    controller.update(measured, n_steps=250)
    assert controller.value == 0.5
