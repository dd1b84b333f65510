"""Choosing a token: the distribution is the one of transformers' warpers, and draws follow it."""

import pytest
import torch

from openppo.rollout.sampling import request_uniforms, sample, warp_logits
from openppo.types import SamplingParams

LARGEST_UNIFORM = 1 - 2.0**-53
PARAMS = [
    SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (None, 1, 5, 31, 100)
    for top_p in (1.0, 0.9, 0.37, 1e-6)
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}")
def test_warped_distribution_is_that_of_transformers(params, warp_by_transformers):
    torch.manual_seed(1)
    logits = torch.cat([torch.randn(4, 31), 20 * torch.randn(4, 31), torch.randn(1, 31).expand(1, -1) * 0.01])
    ours, theirs = warp_logits(logits, params), warp_by_transformers(logits, params)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)
    ties = torch.randint(-2, 3, (16, 31)).float()  # which of equally likely tokens top-p keeps is up to the sort
    ours, theirs = (warp(ties, params).softmax(-1).sort(-1).values for warp in (warp_logits, warp_by_transformers))
    torch.testing.assert_close(ours, theirs)


def test_log_probs_of_bfloat16_logits_are_taken_in_float32():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = SamplingParams(1, temperature=0.7)
    tokens, log_probs = sample(logits, torch.tensor([0.1, 0.5, 0.9]), params)
    expected = (logits.float() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=0)


def test_a_uniform_number_selects_the_token_whose_share_of_the_unit_interval_it_falls_into():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(9, 4)
    uniforms = torch.tensor([0.0, 0.05, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, LARGEST_UNIFORM])
    tokens, _ = sample(logits, uniforms.double(), SamplingParams(1))
    assert tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    torch.manual_seed(5)
    logits = torch.randn(200, 1000)
    excluded = torch.rand(200, 1000) < 0.9
    excluded[:, :3] = excluded[:, -3:] = True
    excluded[:, 500] = False
    excluded[:20] = torch.arange(1000) != 500  # one token left
    logits[excluded] = -torch.inf
    tokens, log_probs = sample(logits, torch.full((200,), uniform, dtype=torch.float64), SamplingParams(1))
    assert not excluded.gather(-1, tokens[:, None]).any()
    assert log_probs.isfinite().all()
    border = torch.tensor([0.5 + k * 2.0**-53 for k in range(-64, 64)], dtype=torch.float64)
    tokens, _ = sample(torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0]]).expand(128, -1), border, SamplingParams(1))
    assert set(tokens.tolist()) <= {0, 3}, "on the border between two tokens"


def test_temperature_zero_takes_the_likeliest_token_with_log_prob_zero():
    logits = torch.randn(50, 31, generator=torch.Generator().manual_seed(7))
    greedy = SamplingParams(1, temperature=0, top_k=3, top_p=0.1)
    tokens, log_probs = sample(logits, torch.linspace(0, 1, 51)[:50].double(), greedy)
    assert tokens.tolist() == [max(range(31), key=row.__getitem__) for row in logits.tolist()]
    assert log_probs.tolist() == [0.0] * 50


def test_the_uniforms_of_a_request_follow_from_its_seed_alone():
    before = torch.get_rng_state()
    first = request_uniforms(seed=11, count=1000)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert (first.dtype, first.min() >= 0, first.max() < 1) == (torch.float64, True, True)
    torch.rand(3)
    assert torch.equal(request_uniforms(seed=11, count=1000), first)
    assert not torch.equal(request_uniforms(seed=12, count=1000), first)
