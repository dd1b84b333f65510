"""Choosing a token as transformers' warpers do, and stops: responses that nothing stops, cut by hand."""

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer

from openppo.media import TokenIds
from openppo.rollout import sampling
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import (
    completed_stop,
    decoder,
    request_uniforms,
    sample,
    text_before_stop,
    warp_logits,
)
from openppo.types import FinishReason, SamplingParams

LARGEST_UNIFORM = 1 - 2.0**-53
PARAMS = [
    SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (None, 1, 5, 31, 100)
    for top_p in (1.0, 0.9, 0.37, 1e-6)
]


@pytest.fixture(params=[None, (8, 16)], ids=["usual blocks", "small blocks"])
def blocks(request, monkeypatch):
    """All claims hold of the small vocabularies here as they would of large ones."""
    if request.param is not None:
        for name, value in zip(("_BLOCK", "_ONE_LEVEL"), request.param, strict=True):
            monkeypatch.setattr(sampling, name, value)


def by_formula(logits, params):
    """In float64: the distribution, and of each token the probability of those that are likelier."""
    probs = (logits.double() / params.temperature).softmax(-1)
    if params.top_k is not None:
        probs = probs * (logits >= logits.topk(params.top_k).values[:, -1:])
    probs /= probs.sum(-1, keepdim=True)
    ordered, order = probs.sort(descending=True)
    before = torch.empty_like(probs).scatter_(-1, order, ordered.cumsum(-1) - ordered)
    probs = probs * (before < params.top_p)
    return probs / probs.sum(-1, keepdim=True), before


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("n_draws", "n_ids", "spread"), [(25_000, 101, 2), (300, 9_001, 4), (8, 152_000, 4)]
)
@pytest.mark.parametrize(
    "warp", [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 40, "top_p": 0.8}], ids=str
)
def test_draws_are_those_of_one_cumulative_sum(n_draws, n_ids, spread, warp):
    """But where a uniform number, or top-p, lies within rounding of a token's border."""
    torch.manual_seed(2)
    logits, params = (
        spread * torch.randn(n_draws, n_ids),
        SamplingParams(1, temperature=0.8, **warp),
    )
    uniforms = torch.rand(n_draws, dtype=torch.float64)
    expected, before = by_formula(logits, params)
    differs = warp_logits(logits, params).isinf() != (expected == 0)
    assert ((before - params.top_p).abs() < 1e-4)[differs].all()
    tokens, log_probs = sample(logits, uniforms, params)
    cumulative = expected.cumsum(-1)
    naive = torch.searchsorted(cumulative, uniforms[:, None], right=True)[:, 0]
    first = torch.minimum(tokens, naive)[:, None]
    at_border = (cumulative.gather(-1, first)[:, 0] - uniforms).abs() < (
        1e-4 if n_ids > 1000 else 1e-6
    )
    assert (at_border | (tokens == naive)).all()
    assert (tokens != naive).sum() <= 1, "of so many draws"
    same = tokens == naive
    torch.testing.assert_close(
        log_probs[same].exp().double(),
        expected.gather(-1, naive[:, None])[same, 0],
        rtol=1e-3,
        atol=0,
    )


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}")
def test_warped_distribution_is_that_of_transformers(params, warp_by_transformers):
    torch.manual_seed(1)
    logits = torch.cat(
        [torch.randn(4, 31), 20 * torch.randn(4, 31), torch.randn(1, 31).expand(1, -1) * 0.01]
    )
    ours, theirs = warp_logits(logits, params), warp_by_transformers(logits, params)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)
    ties = torch.randint(
        -2, 3, (16, 31)
    ).float()  # which of equally likely tokens top-p keeps is up to the sort
    ours, theirs = (
        warp(ties, params).softmax(-1).sort(-1).values
        for warp in (warp_logits, warp_by_transformers)
    )
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
    uniforms = torch.tensor(
        [0.0, 0.05, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, LARGEST_UNIFORM]
    )
    tokens, _ = sample(logits, uniforms.double(), SamplingParams(1))
    assert tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    torch.manual_seed(5)
    logits = torch.randn(200, 1000)
    excluded = torch.rand(200, 1000) < 0.9
    excluded[:, :3] = excluded[:, -3:] = True
    excluded[:, 500] = False
    excluded[:20] = torch.arange(1000) != 500  # one token left
    logits[excluded] = -torch.inf
    tokens, log_probs = sample(
        logits, torch.full((200,), uniform, dtype=torch.float64), SamplingParams(1)
    )
    assert not excluded.gather(-1, tokens[:, None]).any()
    assert log_probs.isfinite().all()
    border = torch.tensor([0.5 + k * 2.0**-53 for k in range(-64, 64)], dtype=torch.float64)
    tokens, _ = sample(
        torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0]]).expand(128, -1),
        border,
        SamplingParams(1),
    )
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


FREE = SamplingParams(max_new_tokens=24, temperature=1.3)
PIECES = ["", "a", "b", "ab", "ba", "aab", "c", "bc"] * 3  # text of each of the 24 tokens


def text_of(ids):
    return "".join(PIECES[i] for i in ids)


def sampled(model, prompts, params, eos=()):
    engine = HFEngine(model, eos, 0, 3, decode=text_of)
    return engine.generate([TokenIds(ids) for ids in prompts], params, range(50, 50 + len(prompts)))


def cut_by_hand(ids, stop):
    """Tokens up to the first whose text completes a stop string."""
    n = next(
        (n for n in range(1, len(ids) + 1) if any(text in text_of(ids[:n]) for text in stop)),
        len(ids),
    )
    return ids[:n]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("stop", [("abba",), ("cab",), ("bc", "aaa"), ("no such text",)])
def test_a_stop_string_ends_a_response_where_it_is_complete(stop, models, prompts):
    free = sampled(models["llama"], prompts, FREE)
    found = sampled(models["llama"], prompts, dataclasses.replace(FREE, stop=stop))
    for whole, ours in zip(free, found, strict=True):
        assert ours.token_ids == cut_by_hand(whole.token_ids, stop)
        assert ours.log_probs == pytest.approx(whole.log_probs[: len(ours.token_ids)], abs=1e-5)
        stopped = any(text in text_of(ours.token_ids) for text in stop)
        assert ours.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    lengths = {len(ours.token_ids) for ours in found}
    assert len(lengths) > 1 or stop == ("no such text",), "else the claim would be weak"


@pytest.mark.usefixtures("late")
def test_a_stop_token_ends_a_response_as_eos_does(models, prompts):
    by_eos = sampled(models["llama"], prompts, FREE, eos=[5, 9])
    by_stop = sampled(
        models["llama"], prompts, dataclasses.replace(FREE, stop_token_ids=(9,)), eos=[5]
    )
    assert by_stop == by_eos
    assert FinishReason.STOP in {ours.finish_reason for ours in by_stop}


@pytest.mark.usefixtures("late")
def test_nothing_ends_a_response_before_the_least_length(models):
    model, least = models["llama"], 4
    ends = [i for i, piece in enumerate(PIECES) if piece in ("", "b", "ab")]
    params = SamplingParams(
        8, 1.0, stop=("c",), stop_token_ids=tuple(ends[3:]), min_new_tokens=least
    )
    lengths = set()
    for seed in range(12):
        engine = HFEngine(model, ends[:3], 0, 1, decode=text_of)
        [ours] = engine.generate([TokenIds([3, 4])], params, [seed])
        uniforms, ids = request_uniforms(seed, 8).tolist(), []
        for uniform, log_prob in zip(uniforms, ours.log_probs, strict=False):
            with torch.no_grad():
                logits = model(torch.tensor([[3, 4, *ids]])).logits[0, -1].double()
            if len(ids) < least:
                logits[ends] = -torch.inf
            distribution = logits.softmax(-1)
            ids.append(int((distribution.cumsum(-1) <= uniform).sum()))
            assert log_prob == pytest.approx(distribution[ids[-1]].log().item(), abs=1e-4)
        assert ours.token_ids == ids
        assert not set(ids[:least]) & set(ends)
        assert ids[-1] in ends or "c" in PIECES[ids[-1]] or len(ids) == 8
        lengths.add(len(ids))
    assert min(lengths) >= least
    assert len(lengths) > 2


TEXT = "Let me see: 3 * 4 = 12.\nObservation: naïve 🙂🙂\n\nThought:</code> Ende"


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "phi3-mini", "qwen2.5"])
@pytest.mark.parametrize("stop", ["\nObservation:", "</code>", "ï", "🙂🙂", "\n\n", " ", "e"])
def test_real_tokenizers_complete_a_stop_where_their_whole_text_has_it(stop, name, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    decode, ids = decoder(tokenizer), tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    params = SamplingParams(100, stop=(stop,))
    counts = [decode(ids[:n]).count(stop) for n in range(len(ids) + 1)]
    more = [n for n in range(1, len(ids) + 1) if counts[n] > max(counts[:n])]
    assert (
        [n for n in range(1, len(ids) + 1) if completed_stop(ids[:n], params, decode)][:1]
        == more[:1]
        != []
    )
    first = ids[: more[0]]
    assert (
        text_before_stop(decode(first), first, params, decode) == decode(first).partition(stop)[0]
    )
    assert text_before_stop("", [], params, decode) == ""
    assert text_before_stop("abc", [1, 7], SamplingParams(9, stop=("ba",)), text_of) == "abc", (
        "no stop, no cut"
    )
