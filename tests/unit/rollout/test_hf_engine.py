"""The engine against transformers' own generation and against a loop without batch, padding and cache."""

import copy
import dataclasses
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from openppo.media import TokenIds
from openppo.models.size import cache_elements, check_cache
from openppo.rollout import hf_engine, row_cache
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import request_uniforms
from openppo.types import Completion, FinishReason, SamplingParams
from tests.unit.rollout.conftest import assert_same

ARCHITECTURES = ["llama", "gpt2", "mistral"]
EOS_IDS = [0, 12, 17, 19]
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.3)
WARPED = SamplingParams(max_new_tokens=12, temperature=1.6, top_k=15, top_p=0.95)
VOCAB = 24
WHOLE: Any = SimpleNamespace(
    gathered=lambda in_lockstep: nullcontext()
)  # weights of the module itself


def text_of(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def engine_of(model, eos=EOS_IDS, pad=0, batch=8):
    """An engine with the settings that most claims share."""
    return HFEngine(model, eos, pad, batch, decode=text_of)


def sampled(engine, prompts, params=SAMPLED):
    """Completions, each with a seed of its own."""
    return engine.generate(
        [TokenIds(ids) for ids in prompts], params, range(100, 100 + len(prompts))
    )


@contextmanager
def shapes_of_forwards(model):
    """The shapes of input ids of the model's forwards inside."""
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    yield shapes
    hook.remove()


@pytest.fixture(params=ARCHITECTURES)
def model(request, models):
    """Each architecture: rotary positions, learned positions, and a sliding window shorter than a prompt."""
    return models[request.param]


def test_greedy_responses_are_those_of_transformers_generate(model, prompts):
    def by_transformers(prompt, eos):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
        return model.generate(ids, attention_mask=mask, **options)[0, len(prompt) :].tolist()

    endless = [by_transformers(prompt, None) for prompt in prompts]
    eos = [endless[0][4], endless[2][1]]  # so that responses end at different places
    expected = [by_transformers(prompt, eos) for prompt in prompts]
    assert len({len(tokens) for tokens in expected}) > 1, "else the claim below would be weak"

    completions = sampled(
        engine_of(model, eos), prompts, SamplingParams(max_new_tokens=12, temperature=0)
    )
    for completion, ids in zip(completions, expected, strict=True):
        reason = FinishReason.STOP if ids[-1] in eos else FinishReason.LENGTH
        assert completion == Completion(ids, [0.0] * len(ids), [0] * len(ids), reason)


@pytest.mark.parametrize("params", [SAMPLED, WARPED], ids=["temperature", "top-k-and-top-p"])
def test_sampled_responses_are_those_of_a_loop_without_batch_padding_and_cache(
    model, prompts, params, naive_sample
):
    completions = sampled(engine_of(model), prompts, params)
    assert len({len(completion.token_ids) for completion in completions}) > 1, (
        "rows leave at different times"
    )
    for seed, (prompt, completion) in enumerate(zip(prompts, completions, strict=True), 100):
        uniforms = request_uniforms(seed, params.max_new_tokens).tolist()
        tokens, log_probs = naive_sample(model, prompt, params, uniforms, EOS_IDS)
        assert completion.token_ids == tokens
        np.testing.assert_allclose(completion.log_probs, log_probs, atol=1e-4)


@pytest.mark.parametrize(("batch", "pad"), [(1, 0), (2, 12), (3, 5), (64, 23)])
def test_a_response_does_not_depend_on_batch_size_or_padding_id(model, prompts, batch, pad):
    """Even if the id is EOS or in a prompt."""
    assert_same(
        sampled(engine_of(model, pad=pad, batch=batch), prompts),
        sampled(engine_of(model, pad=1), prompts),
    )


def test_an_empty_prompt_and_logits_that_are_not_finite_are_errors(models):
    with pytest.raises(ValueError, match="at least one token"):
        sampled(engine_of(models["llama"]), [[1], []])
    assert sampled(engine_of(models["llama"]), []) == [], "no prompts, no completions"
    broken = copy.deepcopy(models["llama"])
    broken.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        sampled(engine_of(broken), [[7, 8]])


@pytest.mark.parametrize(("has_sdpa", "instead"), [(True, "sdpa"), (False, "eager")])
def test_flash_attention_stands_back_while_the_engine_is_awake(models, has_sdpa, instead):
    """It would gather the keys and values of padded rows in each layer of each step."""
    model, chosen = copy.deepcopy(models["llama"]), []
    model.config._attn_implementation = "flash_attention_2"
    model.set_attn_implementation = chosen.append
    model._supports_sdpa = has_sdpa
    with engine_of(model).with_weights(WHOLE):
        assert chosen == [instead]
    assert chosen == [instead, "flash_attention_2"]


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("qwen3_next", {}, "qwen3_next has layers with linear_attention"),
        ("gemma3n_text", {"num_kv_shared_layers": 15}, "shared keys and values"),
        ("llama", {"layer_types": ["new_kind"]}, "llama has layers with new_kind"),
        ("xlnet", {}, "xlnet has layers with no key-value cache"),
    ],
)
def test_models_without_keys_of_their_own_in_each_layer_are_refused_by_name(kind, options, named):
    config = AutoConfig.for_model(kind)
    vars(config).update(options)
    with pytest.raises(ValueError, match=named):
        check_cache(config)
    check_cache(AutoConfig.for_model("gemma3_text"))


def test_the_model_keeps_its_gradients_and_mode(models, prompts):
    model = models["llama"]
    sampled(engine_of(model), prompts)
    loss = model(torch.tensor([[1, 2, 3]])).logits.square().mean()
    loss.backward()
    assert all(p.grad is not None and not p.is_inference() for p in model.parameters())
    model.zero_grad()
    assert not model.training


def test_a_step_is_one_forward_pass_without_equal_prompts_and_finished_rows(models, prompts):
    with shapes_of_forwards(models["llama"]) as shapes:
        completions = sampled(engine_of(models["llama"]), prompts)
    lengths = [len(completion.token_ids) for completion in completions]
    still_running = [sum(length > step for length in lengths) for step in range(max(lengths))]
    n_different = len(set(map(tuple, prompts)))
    assert n_different < len(prompts)
    assert shapes == [
        (n_different, max(map(len, prompts))),
        *((rows, 1) for rows in still_running[1:]),
    ]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("slack", [1, 64])
def test_unequal_requests_that_enter_while_others_run_get_what_they_get_alone(
    model, prompts, slack, monkeypatch
):
    """Also where columns are moved often, for little slack."""
    monkeypatch.setattr(row_cache, "SLACK_COLUMNS", slack)
    greedy, short = (
        SamplingParams(max_new_tokens=9, temperature=0),
        SamplingParams(max_new_tokens=4),
    )
    stops = [
        dataclasses.replace(SAMPLED, stop=tuple(letters))
        for letters in ("abcdefghijkl", "mnopqrstuvwx")
    ]
    kinds = [SAMPLED, short, greedy, WARPED, SAMPLED, *stops, *stops] * 3
    requests = list(zip([*prompts, *prompts[1:]] * 3, kinds, range(100, 127), strict=True))
    alone = []
    for batch, at_once in ((8, 1), (8, 27), (2, 1), (5, 3)):
        engine, numbers, done = engine_of(model, batch=batch), [], {}
        alone = alone or [
            engine.generate([TokenIds(prompt)], params, [seed])[0]
            for prompt, params, seed in requests
        ]
        while engine.busy or len(numbers) < len(requests):
            numbers += [
                engine.submit(TokenIds(prompt), params, seed)
                for prompt, params, seed in requests[len(numbers) : len(numbers) + at_once]
            ]
            assert engine.busy
            engine.step()
            collected = engine.collect()
            assert not done.keys() & collected.keys()
            done |= collected
        assert engine.collect() == {}
        assert_same([done[number] for number in numbers], alone)
    assert all(completion.finish_reason is FinishReason.STOP for completion in alone[5:9]), (
        "by their stop strings"
    )


def test_weights_are_read_in_place(models):
    model = copy.deepcopy(models["llama"])
    engine, greedy = engine_of(model, eos=[]), SamplingParams(max_new_tokens=3, temperature=0)
    wanted = next(iter({*range(VOCAB)} - {*sampled(engine, [[3, 4]], greedy)[0].token_ids}))
    with torch.no_grad():
        model.lm_head.weight[wanted] = (
            100 * model.model(torch.tensor([[3, 4]])).last_hidden_state[0, -1]
        )
    assert sampled(engine, [[3, 4]], greedy)[0].token_ids[0] == wanted


def test_short_and_long_prompts_are_not_read_in_one_padded_forward(models):
    """Of 2000 places less than a quarter would be tokens."""
    prompts = [
        [1 + i % 20 for i in range(start, start + length)]
        for start, length in enumerate([60] * 20 + [5] * 20)
    ]
    with shapes_of_forwards(models["llama"]) as shapes:
        sampled(engine_of(models["llama"], eos=[], batch=64), prompts, SamplingParams(1))
    assert shapes == [(20, 60), (20, 5)]


@pytest.mark.parametrize(
    ("free", "given", "rows"),
    [
        (0.0, 3, 3),
        (0.0, 70, 70),
        (None, None, 64),
        (0.3, None, 1),
        (5.5, None, 5),
        (17.2, None, 16),
        (1000, None, 64),
    ],
)
def test_max_num_seqs_else_half_of_free_memory_else_64_rows_are_decoded(
    free, given, rows, models, monkeypatch
):
    """``free`` rows fit in half of it."""
    model, n_new = models["llama"], 7
    row = 4 * (len([3, 4, 5, 6]) + n_new + row_cache.SLACK_COLUMNS) * cache_elements(model.config)
    monkeypatch.setattr(
        hf_engine, "free_memory", lambda device: None if free is None else int(2 * free * row)
    )
    engine = HFEngine(model, [], 0, given)
    with shapes_of_forwards(model) as shapes, engine.with_weights(WHOLE):
        sampled(engine, [[3, 4, 5, i % 20] for i in range(300)], SamplingParams(n_new))
    assert max(n_rows for n_rows, _ in shapes) == rows
