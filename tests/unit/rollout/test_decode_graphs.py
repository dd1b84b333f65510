"""Recorded decode steps: what a CUDA graph asks of a forward, checked without a GPU by a recorder that runs it again.

A graph launches the same kernels on the same addresses each time, so the recorder checks that replayed forwards do.
"""

from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openppo.rollout import decode_graphs, row_cache
from openppo.rollout.decode_graphs import check_layers
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, SamplingParams
from tests.architectures import tiny_config

EOS_IDS = [0, 12, 17, 19]
PARAMS = SamplingParams(max_new_tokens=12, temperature=1.3)
READS_VALUES = ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal", "masked_select")
"""Operators that a CPU must wait for: a graph cannot hold them."""


class Trace(TorchDispatchMode):
    """Names of operators, shapes and numbers they get, and addresses of tensors that were there before."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self._made: list[Tensor] = []  # kept, so that no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert not any(name in str(func) for name in READS_VALUES), f"{func} needs a value of the device"
        made = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        seen = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                inside = leaf.untyped_storage().data_ptr() in made
                seen.append((tuple(leaf.shape), leaf.stride(), "made" if inside else leaf.data_ptr()))
            else:
                seen.append(leaf)
        self.calls.append((str(func), tuple(map(str, seen))))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not any(leaf.data_ptr() == a.data_ptr() for a in self._made):
                self._made.append(leaf)
        return result


class RunsAgain:
    """In place of a CUDA graph: each replay runs the forward, and checks that a graph would have done the same."""

    def __init__(self):
        self.n_recorded = self.n_replayed = 0

    def __call__(self, forward):
        self.n_recorded += 1
        forward()
        with _tracing(), Trace() as recorded:
            output = forward()

        def replay():
            self.n_replayed += 1
            with _tracing(), Trace() as again:
                result = forward()
            assert again.calls == recorded.calls
            output.copy_(result)
            return output

        return replay


def _tracing():
    """transformers asks whether a stream is being recorded before it looks at the values of a mask."""
    return patch("torch.cuda.is_current_stream_capturing", return_value=True)


def engine(model, recorder, rows=8, eos=EOS_IDS):
    return HFEngine(model, eos, 0, rows, new_recorder=None if recorder is None else lambda: recorder)


def generate(model, prompts, recorder, rows=8):
    return engine(model, recorder, rows).generate(prompts, PARAMS, [100 + i for i in range(len(prompts))])


def assert_same(ours, expected):
    assert [completion.token_ids for completion in ours] == [completion.token_ids for completion in expected]
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_replayed_steps_give_the_same_responses(models, prompts, name, rows, monkeypatch):
    """With rows that enter and leave, rows moved back to the first column, and several graphs."""
    monkeypatch.setattr(decode_graphs, "COLUMNS_TOGETHER", 8)
    monkeypatch.setattr(row_cache, "SLACK_COLUMNS", 2)
    expected = generate(models[name], prompts * 3, None, rows)
    assert len({len(completion.token_ids) for completion in expected}) > 3, "rows leave at different times"
    recorder = RunsAgain()
    assert_same(generate(models[name], prompts * 3, recorder, rows), expected)
    assert recorder.n_replayed > 2 * recorder.n_recorded > 2


def test_a_longer_request_that_comes_later_gets_graphs_of_its_larger_buffers(models):
    recorder = RunsAgain()
    results = []
    for mine in (engine(models["llama"], recorder, eos=[]), engine(models["llama"], None, eos=[])):
        numbers = [mine.submit([3, 4], SamplingParams(40), 1)]
        for _ in range(3):
            mine.step()
        numbers.append(mine.submit(list(range(1, 20)), SamplingParams(200), 2))
        done: dict[int, Completion] = {}
        while mine.busy:
            mine.step()
            done |= mine.collect()
        results.append([done[number] for number in numbers])
    assert_same(*results)


def test_graphs_do_not_outlive_the_weights_they_were_recorded_with(models):
    class Weights:
        def gathered(self, in_lockstep):
            return nullcontext()

    recorder = RunsAgain()
    mine = engine(models["llama"], recorder, eos=[])
    mine.submit([3, 4], SamplingParams(30), 1)
    for n_recorded in (1, 2):
        with mine.with_weights(Weights()):  # type: ignore[arg-type]
            for _ in range(3):
                mine.step()
            assert mine.busy
        assert recorder.n_recorded == n_recorded


def test_a_model_with_a_sliding_window_is_refused(models):
    with pytest.raises(ValueError, match="--cuda_graphs: mistral has layers with sliding_attention"):
        engine(models["mistral"], RunsAgain())


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt_neo", "local"), ("doge", "dynamic_mask"), ("llama4_text", "chunked_attention")]
)
def test_layers_that_see_a_part_of_the_row_are_named(name, kind):
    with pytest.raises(ValueError, match=f"--cuda_graphs: {name} has layers with {kind}"):
        check_layers(tiny_config(name))


def test_layers_that_see_the_whole_row_are_recorded():
    for name in ("llama", "gpt2", "qwen2", "mixtral"):
        check_layers(tiny_config(name))
    check_layers(tiny_config("gpt_neo", attention_types=[[["global"], 2]]))
