"""Tiny models with random weights, and generation that uses nothing of the library."""

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from openppo.rollout import device_rows


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """These models are too small to share among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(ours, expected):
    """Completions equal but for the order of floating-point operations."""
    for one, other in zip(ours, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def prompts():
    """Token ids of unequal lengths, two of them equal and one longer than the sliding window."""
    return [[3, 4, 5], [7], [9, 2, 2, 6, 11, 13, 8, 1, 4], [7], [5, 4, 3, 21, 20]]


@pytest.fixture(scope="session")
def warp_by_transformers():
    """Logits after transformers' own warpers, in the order of its ``generate``."""

    def warp(logits, params):
        logits = logits.float()
        ids = torch.zeros(logits.shape[0], 1, dtype=torch.long)
        logits = TemperatureLogitsWarper(params.temperature)(ids, logits)
        if params.top_k is not None:
            logits = TopKLogitsWarper(params.top_k)(ids, logits)
        if params.top_p < 1:
            logits = TopPLogitsWarper(params.top_p)(ids, logits)
        return logits

    return warp


@pytest.fixture(scope="session")
def naive_sample(warp_by_transformers):
    """One response, one full forward pass per token: no batch, no padding, no cache.

    ``uniforms[t]`` decides token t by inverting the cumulative distribution. Returns token ids and their log-probs.
    """

    @torch.no_grad()
    def sample(model, prompt, params, uniforms, eos_token_ids=()):
        tokens: list[int] = []
        log_probs: list[float] = []
        while len(tokens) < params.max_new_tokens and not (tokens and tokens[-1] in eos_token_ids):
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[:, -1]
            if params.temperature == 0:
                tokens.append(int(logits.argmax()))
                log_probs.append(0.0)
                continue
            probs = warp_by_transformers(logits, params).double().softmax(-1)[0].numpy()
            token = int(np.searchsorted(np.cumsum(probs), uniforms[len(tokens)], side="right"))
            tokens.append(token)
            log_probs.append(float(np.log(probs[token])))
        return tokens, log_probs

    return sample


@pytest.fixture(params=[0, 1], ids=["read at once", "read late"])
def late(request, monkeypatch):
    """Steps after which the engine reads what was sampled: none, and one as on a GPU."""
    monkeypatch.setattr(device_rows, "steps_late", lambda device: request.param)
    return request.param
