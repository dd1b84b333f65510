"""Decode steps in recorded shapes, by a recorder that runs them again; tests/gpu records CUDA graphs."""

import copy
import logging

import pytest
import torch

from openppo.media import TokenIds
from openppo.rollout import decode_graphs, row_cache
from openppo.rollout.decode_graphs import CannotRecordError, check_layers, choose_recorder
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, SamplingParams
from tests.architectures import tiny_config
from tests.unit.rollout.conftest import assert_same
from tests.unit.rollout.test_hf_engine import WHOLE

EOS_IDS = [0, 12, 17, 19]
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.3)


class RunsAgain:
    """In place of a CUDA graph: each replay runs the forward, into the output of the first run."""

    def __init__(self):
        self.n_recorded = self.n_replayed = 0

    def __call__(self, forward):
        self.n_recorded += 1
        output = forward()

        def replay():
            self.n_replayed += 1
            return output.copy_(forward())

        return replay


def engine(model, recorder, rows=8, eos=EOS_IDS):
    return HFEngine(
        model, eos, 0, rows, new_recorder=None if recorder is None else lambda: recorder
    )


def generate(model, prompts, recorder, rows=8):
    return engine(model, recorder, rows).generate(
        [TokenIds(ids) for ids in prompts], PARAMS, [100 + i for i in range(len(prompts))]
    )


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_replayed_steps_give_the_same_responses(models, prompts, name, rows, monkeypatch):
    """With rows that enter and leave, rows moved back to the first column, and several graphs."""
    monkeypatch.setattr(decode_graphs, "COLUMNS_TOGETHER", 8)
    monkeypatch.setattr(row_cache, "SLACK_COLUMNS", 2)
    expected = generate(models[name], prompts * 3, None, rows)
    assert len({len(completion.token_ids) for completion in expected}) > 3, (
        "rows leave at different times"
    )
    recorder = RunsAgain()
    assert_same(generate(models[name], prompts * 3, recorder, rows), expected)
    assert recorder.n_replayed > 2 * recorder.n_recorded > 2


def test_a_longer_request_that_comes_later_gets_graphs_of_its_larger_buffers(models):
    recorder = RunsAgain()
    results = []
    for mine in (engine(models["llama"], recorder, eos=[]), engine(models["llama"], None, eos=[])):
        numbers = [mine.submit(TokenIds([3, 4]), SamplingParams(40), 1)]
        for _ in range(3):
            mine.step()
        numbers.append(mine.submit(TokenIds(list(range(1, 20))), SamplingParams(200), 2))
        done: dict[int, Completion] = {}
        while mine.busy:
            mine.step()
            done |= mine.collect()
        results.append([done[number] for number in numbers])
    assert_same(*results)


@pytest.mark.usefixtures("late")
def test_turns_that_resume_are_decoded_with_the_graphs_of_before(models, monkeypatch):
    """Buffers and graphs stay while tools run, as long as something is kept."""
    monkeypatch.setattr(decode_graphs, "COLUMNS_TOGETHER", 64)
    recorder = RunsAgain()
    mine = engine(models["llama"], recorder, eos=[])
    ids, handle = [3, 4, 5], None
    for turn in range(3):
        number, done = mine.submit(TokenIds(ids), SamplingParams(6), turn, True, handle), {}
        while mine.busy:
            mine.step()
            done |= mine.collect()
        assert_same(
            [done[number]],
            engine(models["llama"], None, eos=[]).generate(
                [TokenIds(ids)], SamplingParams(6), [turn]
            ),
        )
        ids, handle = [*ids, *done[number].token_ids, 7], done[number].parked
    assert recorder.n_recorded == 1 and recorder.n_replayed >= 14


def test_three_rollouts_record_once_while_weights_stay_where_they_are(models, prompts):
    """Their values change, and nothing of the old ones is used."""
    model, recorder = copy.deepcopy(models["llama"]), RunsAgain()
    mine, counts = engine(model, recorder, eos=[]), []
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.2)
        mine.use_version(version)
        seeds = range(100 * version, 100 * version + len(prompts))
        with mine.with_weights(WHOLE):
            found = mine.generate([TokenIds(ids) for ids in prompts], PARAMS, seeds)
        counts.append(recorder.n_recorded)
        expected = engine(model, None, eos=[]).generate(
            [TokenIds(ids) for ids in prompts], PARAMS, seeds
        )
        assert {v for each in found for v in each.versions} == {version}
        assert_same(found, expected)
    assert counts == [1] * 3


@pytest.mark.parametrize("why", ["moved", "moved while it samples", "memory is short"])
def test_recorded_steps_are_dropped_where_they_cannot_stay(models, prompts, why, monkeypatch):
    model, recorder = copy.deepcopy(models["llama"]), RunsAgain()
    mine = engine(model, recorder, eos=[])
    if why == "memory is short":
        monkeypatch.setattr(row_cache, "free_memory", lambda device: 1000)
    with mine.with_weights(WHOLE):
        number = mine.submit(TokenIds([3, 4]), SamplingParams(9), 1)
        for _ in range(3):
            mine.step()
        if why == "moved while it samples":
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
            mine.use_version(1)
            mine.step()
            mine.step()
            assert recorder.n_recorded == 2
    assert (mine._cache is None) == (why == "memory is short"), "else buffers stay"
    if why == "moved":
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
    done = {}
    with mine.with_weights(WHOLE):
        while mine.busy:
            mine.step()
            done |= mine.collect()
    assert recorder.n_recorded == 2
    assert_same(
        [done[number]],
        engine(model, None, eos=[]).generate([TokenIds([3, 4])], SamplingParams(9), [1]),
    )


def test_steps_that_cannot_be_recorded_are_launched(models, prompts, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("openppo"), "propagate", True)

    def refuse(forward):
        raise CannotRecordError("a sync")

    mine = HFEngine(models["llama"], EOS_IDS, 0, 8, new_recorder=lambda: refuse)
    assert_same(
        mine.generate([TokenIds(ids) for ids in prompts], PARAMS, range(5)),
        engine(models["llama"], None).generate(
            [TokenIds(ids) for ids in prompts], PARAMS, range(5)
        ),
    )
    assert caplog.text.count("launched one by one") == 1


def test_graphs_are_chosen_on_gpus_where_nothing_refuses_them():
    llama, mistral = tiny_config("llama"), tiny_config("mistral", sliding_window=8)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_recorder("auto", llama, gpu) and choose_recorder("on", llama, gpu)
    refused = [
        ("off", llama, gpu),
        ("auto", llama, cpu),
        ("auto", mistral, gpu),
        ("auto", llama, gpu, True),
    ]
    assert [choose_recorder(*given) for given in refused] == [None] * 4
    with pytest.raises(ValueError, match="sliding_attention"):
        choose_recorder("on", mistral, gpu)


def test_only_layers_that_see_the_whole_row_are_recorded(models):
    with pytest.raises(
        ValueError, match="--cuda_graphs: mistral has layers with sliding_attention"
    ):
        engine(models["mistral"], RunsAgain())
    for name, kind in (
        ("gpt_neo", "local"),
        ("doge", "dynamic_mask"),
        ("llama4_text", "chunked_attention"),
    ):
        with pytest.raises(ValueError, match=f"--cuda_graphs: {name} has layers with {kind}"):
            check_layers(tiny_config(name))
    for other in ("llama", "gpt2", "qwen2", "mixtral"):
        check_layers(tiny_config(other))
    check_layers(tiny_config("gpt_neo", attention_types=[[["global"], 2]]))
