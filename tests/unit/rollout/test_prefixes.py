"""Requests that continue earlier ones give what reading their whole prompts gives."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from openppo.media import TokenIds
from openppo.rollout import prefixes, row_cache
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, SamplingParams
from tests.architectures import tiny_config
from tests.unit.rollout.conftest import assert_same
from tests.unit.rollout.test_hf_engine import shapes_of_forwards

EOS_IDS = [0, 12, 17, 19]
PARAMS = SamplingParams(max_new_tokens=5, temperature=1.3)
WHOLE: Any = SimpleNamespace(gathered=lambda in_lockstep: nullcontext())
OTHERS = {  # kinds of layers beside those of ``models``: alternating windows, chunks, latent and local attention
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {},
    "qwen3": {},
    "deepseek_v3": {},
    "gpt_neo": {},
    "llama4_text": {"attention_chunk_size": 8, "num_hidden_layers": 4},
}


@pytest.fixture(scope="module", params=["llama", "gpt2", "mistral", *OTHERS])
def model(request: Any, models: Any) -> Any:
    """Each architecture, those of ``models`` with a sliding window shorter than the prompts."""
    if request.param in models:
        return models[request.param]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        tiny_config(request.param, **OTHERS[request.param])
    ).eval()


def finish(engine: Any, numbers: list[int]) -> list[Completion]:
    done: dict[int, Completion] = {}
    while engine.busy:
        engine.step()
        done |= engine.collect()
    return [done[number] for number in numbers]


def whole(model: Any, prompt: list[int], seed: int, params: SamplingParams = PARAMS) -> Completion:
    """What an engine that reads all of a prompt samples."""
    return HFEngine(model, EOS_IDS, 0, 8).generate([TokenIds(prompt)], params, [seed])[0]


def park(engine: Any, prompts: list[list[int]], first_seed: int = 0) -> list[tuple[list[int], int]]:
    """The tokens of each prompt and its response, and the handle of both."""
    numbers = [
        engine.submit(TokenIds(prompt), PARAMS, first_seed + i, park=True)
        for i, prompt in enumerate(prompts)
    ]
    made = []
    for prompt, completion in zip(prompts, finish(engine, numbers), strict=True):
        assert completion.parked is not None
        made.append((prompt + completion.token_ids, completion.parked))
    return made


@pytest.mark.parametrize("slack", [1, 64])
def test_turns_that_resume_equal_those_that_read_all(model, prompts, slack, monkeypatch):
    """Three turns of unequal length, of many rows and few, beside fresh prompts that enter between them."""
    monkeypatch.setattr(row_cache, "SLACK_COLUMNS", slack)
    for batch in (2, 8):
        engine = HFEngine(model, EOS_IDS, 0, batch)
        parked = park(engine, prompts)
        for turn in range(1, 4):
            asked = [
                (ids + list(range(3, 4 + (turn + i) % 4)), handle)
                for i, (ids, handle) in enumerate(parked)
            ]
            fresh = [[8, 3 + turn] * turn, [9] * 13]
            seeds = [100 * turn + i for i in range(len(asked) + len(fresh))]
            read, reused = engine.read_tokens, engine.reused_tokens
            numbers = [
                engine.submit(TokenIds(ids), PARAMS, seeds[i], True, handle)
                for i, (ids, handle) in enumerate(asked)
            ]
            engine.step()
            numbers += [
                engine.submit(TokenIds(ids), PARAMS, seeds[len(asked) + i], True)
                for i, ids in enumerate(fresh)
            ]
            completions = finish(engine, numbers)
            together = [ids for ids, _ in asked] + fresh
            expected = [whole(model, ids, seed) for ids, seed in zip(together, seeds, strict=True)]
            assert_same(completions, expected)
            assert engine.read_tokens - read == sum(map(len, together))
            assert engine.reused_tokens - reused == sum(len(ids) - 1 for ids, _ in parked)
            parked = [
                (ids + completion.token_ids, completion.parked)
                for (ids, _), completion in zip(asked, completions, strict=False)
            ]


def test_a_forward_reads_only_new_tokens(models):
    model = models["llama"]
    engine = HFEngine(model, [], 0, 8)
    (first, a), (second, b) = park(engine, [[3, 4, 5, 6, 7, 8], [9, 10]])
    with shapes_of_forwards(model) as shapes:
        numbers = [
            engine.submit(TokenIds([*first, 3, 4]), PARAMS, 5, continue_from=a),
            engine.submit(TokenIds([*second, 7]), PARAMS, 6, continue_from=b),
        ]
        finish(engine, numbers)
    assert shapes == [(2, 3), *[(2, 1)] * 4], "the last sampled token has no keys yet"


@pytest.mark.usefixtures("late")
def test_branches_of_one_handle_are_independent(models):
    model, engine = models["llama"], HFEngine(models["llama"], EOS_IDS, 0, 8)
    [(ids, handle)] = park(engine, [[3, 4, 5, 6]])
    branches = [[*ids, 7], [*ids, 8, 9, 10], [*ids, 7, 11]]
    at_once = finish(
        engine,
        [
            engine.submit(TokenIds(branch), PARAMS, i, True, handle)
            for i, branch in enumerate(branches)
        ],
    )
    later = [
        finish(engine, [engine.submit(TokenIds(branch), PARAMS, i, True, handle)])
        for i, branch in enumerate(branches)
    ]
    expected = [whole(model, branch, i) for i, branch in enumerate(branches)]
    assert_same(at_once, expected)
    assert_same([each for [each] in later], expected)
    assert engine.reused_tokens == 6 * (len(ids) - 1)


@pytest.mark.parametrize(
    "prompt", [[3, 4, 5, 6], [3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14]], ids=["shorter", "different"]
)
@pytest.mark.parametrize("known", [True, False])
def test_a_handle_that_does_not_match_is_a_miss(models, prompt, known):
    engine = HFEngine(models["llama"], EOS_IDS, 0, 8)
    [(_, handle)] = park(engine, [[3, 4, 5, 6]])
    completion = finish(
        engine, [engine.submit(TokenIds(prompt), PARAMS, 3, continue_from=handle if known else 99)]
    )
    assert_same(completion, [whole(models["llama"], prompt, 3)])
    assert engine.reused_tokens == 0


@pytest.mark.usefixtures("late")
def test_a_prompt_of_the_kept_tokens_alone_reads_its_last(models):
    engine = HFEngine(models["llama"], [], 0, 8)
    [(ids, handle)] = park(engine, [[3, 4, 5, 6]])
    completion = finish(
        engine, [engine.submit(TokenIds(ids[:-1]), PARAMS, 3, continue_from=handle)]
    )
    assert_same(
        completion,
        [HFEngine(models["llama"], [], 0, 8).generate([TokenIds(ids[:-1])], PARAMS, [3])[0]],
    )
    assert engine.reused_tokens == len(ids) - 2


def test_the_least_recently_used_are_evicted_where_memory_is_full(models, monkeypatch):
    """Room for two conversations of eight tokens: 2 layers, keys and values, 2 heads, width 4, float32."""
    monkeypatch.setattr(prefixes, "PARKED_BYTES_ON_CPU", 2 * 8 * 2 * 2 * 2 * 4 * 4)
    engine = HFEngine(models["llama"], [], 0, 8)
    [(first, a)], [(second, b)] = (park(engine, [[start, 4, 5, 6]]) for start in (3, 7))

    def reused(ids: list[int], handle: int) -> bool:
        before = engine.reused_tokens
        completion = finish(
            engine, [engine.submit(TokenIds([*ids, 5]), PARAMS, 9, continue_from=handle)]
        )
        assert_same(
            completion,
            [HFEngine(models["llama"], [], 0, 8).generate([TokenIds([*ids, 5])], PARAMS, [9])[0]],
        )
        return engine.reused_tokens > before

    assert reused(first, a) and reused(second, b) and reused(first, a)
    [(third, c)] = park(engine, [[9, 4, 5, 6]])
    assert [reused(first, a), reused(second, b), reused(third, c)] == [True, False, True]


@pytest.mark.usefixtures("late")
def test_a_conversation_is_kept_once_however_many_turns_it_has(models, monkeypatch):
    """Room for one of 40 tokens; the sum over its turns would be three times that."""
    monkeypatch.setattr(prefixes, "PARKED_BYTES_ON_CPU", 40 * 2 * 2 * 2 * 4 * 4)
    engine = HFEngine(models["llama"], [], 0, 8)
    handles = park(engine, [[3, 4, 5]])
    for turn in range(5):
        ids = [*handles[-1][0], 7]
        [completion] = finish(
            engine, [engine.submit(TokenIds(ids), PARAMS, turn, True, handles[-1][1])]
        )
        handles.append((ids + completion.token_ids, completion.parked))
    assert len(handles[-1][0]) == 38
    before = engine.reused_tokens
    finish(
        engine,
        [
            engine.submit(TokenIds([*ids, 9]), PARAMS, 1, continue_from=handle)
            for ids, handle in handles
        ],
    )
    assert engine.reused_tokens - before == sum(len(ids) - 1 for ids, _ in handles)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("how", ["a new version", "with_weights again", "while a row is decoded"])
def test_keys_of_old_weights_are_never_resumed(models, how):
    model = copy.deepcopy(models["llama"])
    engine, others = HFEngine(model, [], 0, 8), copy.deepcopy(models["llama"])
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(1.1)

    def ask(ids: list[int], handle: int | None) -> Completion:
        return finish(
            engine, [engine.submit(TokenIds([*ids, 9]), PARAMS, 7, continue_from=handle)]
        )[0]

    with engine.with_weights(WHOLE):
        [(ids, handle)] = park(engine, [[3, 4, 5, 6, 7]])
        before = ask(ids, handle)
        if how == "while a row is decoded":
            number = engine.submit(TokenIds([3, 4, 5, 6, 7]), PARAMS, 0, park=True)
            engine.step()
        if how != "with_weights again":
            model.load_state_dict(others.state_dict())
            engine.use_version(engine.version + 1)
            if how == "while a row is decoded":
                [completion] = finish(engine, [number])
                ids, handle = [3, 4, 5, 6, 7, *completion.token_ids], completion.parked
            after = ask(ids, handle)
    if how == "with_weights again":
        model.load_state_dict(others.state_dict())
        with engine.with_weights(WHOLE):
            after = ask(ids, handle)
    expected = HFEngine(model, [], 0, 8).generate([TokenIds([*ids, 9])], PARAMS, [7])
    assert_same([after], expected)
    assert after.log_probs != pytest.approx(before.log_probs, abs=1e-3), (
        "else stale keys would pass"
    )


def test_a_cancelled_request_frees_its_row_and_changes_no_other(models, prompts):
    model, engine = models["mistral"], HFEngine(models["mistral"], [], 0, 3)
    numbers = [engine.submit(TokenIds(prompt), PARAMS, i) for i, prompt in enumerate(prompts)]
    engine.step()
    engine.step()
    engine.cancel(numbers[1])  # is decoded
    engine.cancel(numbers[4])  # waits
    engine.cancel(999)
    with shapes_of_forwards(model) as shapes:
        engine.step()
    assert shapes == [(1, len(prompts[3]))], "its row was given to the next at once"
    done: dict[int, Completion] = {}
    while engine.busy:
        engine.step()
        done |= engine.collect()
    assert done.keys() == {numbers[0], numbers[2], numbers[3]}
    alone = [
        HFEngine(model, [], 0, 3).generate([TokenIds(prompts[i])], PARAMS, [i])[0]
        for i in (0, 2, 3)
    ]
    assert_same([done[numbers[i]] for i in (0, 2, 3)], alone)


def test_a_row_is_free_within_a_step_when_all_are_cancelled(models):
    engine = HFEngine(models["llama"], [], 0, 2)
    numbers = [engine.submit(TokenIds([3, 4 + i]), PARAMS, i) for i in range(3)]
    engine.step()
    for number in numbers:
        engine.cancel(number)
    assert not engine.busy
    assert_same(
        engine.generate([TokenIds([7, 8])], PARAMS, [1]),
        [HFEngine(models["llama"], [], 0, 2).generate([TokenIds([7, 8])], PARAMS, [1])[0]],
    )
