"""Models under ZeRO-3 on two ranks: loaded in partitions, the same weights as loaded whole.

Launched by torchrun with a folder, this file loads models of it both ways, and writes what it found to ``loaded.json``.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.models.scalar_head import ProcessRewardModel
from openppo.strategy import DeepspeedStrategy
from tests.distributed.run_cases import leave

HIDDEN, LAYERS, VOCABULARY = 64, 6, 96
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LORA = {"lora_rank": 1, "lora_alpha": 2}
STARTS: dict[str, Callable[..., Any]] = {
    "actor": lambda folder, **options: Actor(f"{folder}/causal", **options),
    "actor with adapters": lambda folder, **options: Actor(f"{folder}/causal", **LORA, **options),
    "merged": lambda folder, **options: Actor(f"{folder}/actor_adapters", **options),
    "judge": lambda folder, **options: ProcessRewardModel(Actor(f"{folder}/tied", **options).model),
    "fresh critic": lambda folder, **options: get_llm_for_sequence_regression(
        f"{folder}/causal", "critic", **options
    ),
    "critic with adapters": lambda folder, **options: get_llm_for_sequence_regression(
        f"{folder}/reward", "critic", **LORA, **options
    ),
    "merged reward": lambda folder, **options: get_llm_for_sequence_regression(
        f"{folder}/critic_adapters", "reward", **options
    ),
    "reward": lambda folder, **options: get_llm_for_sequence_regression(
        f"{folder}/reward", "reward", **options
    ),
}
MODES: dict[str, dict[str, Any]] = {"float32": {}, "bf16": {"bf16": True}}


class MostHeld(TorchDispatchMode):
    """The most bytes of tensors made inside that are alive at a time, and of the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        before = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves(args)
            if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in before:  # no view of a file, or of what is held already
                    self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {
            key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()
        }
        self.most = max(self.most, sum(size for _, size in self.held.values()))
        self.largest = max([self.largest, *(size for _, size in self.held.values())])
        return made


def compared(whole: Any, partitioned: Any) -> list[str]:
    """Names of parameters and buffers that are not the same."""
    ours, theirs = dict(partitioned.named_parameters()), dict(whole.named_parameters())
    assert list(ours) == list(theirs)
    different = []
    for name, parameter in ours.items():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            same = parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name])
            different += (
                [] if same and parameter.requires_grad == theirs[name].requires_grad else [name]
            )
    buffers = dict(partitioned.named_buffers())
    for name, buffer in whole.named_buffers():
        different += (
            []
            if buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name])
            else [name]
        )
    return different


def main() -> None:
    """Load all both ways."""
    folder, results = Path(sys.argv[1]), {}
    for mode, options in MODES.items():
        strategy = DeepspeedStrategy(
            DeepSpeedConfig(zero_stage=3, **options), timedelta(seconds=100)
        )
        for name, start in STARTS.items():
            frozen = name in ("merged", "judge", "merged reward", "reward")
            ways: list[tuple[Any, MostHeld, float]] = []
            for where in (nullcontext(), strategy.loading()):
                torch.manual_seed(3)
                with where, MostHeld() as held:
                    model = start(folder, bf16=mode == "bf16")
                ways.append((model, held, float(torch.rand(()))))
            (whole, _, after), (partitioned, held, then) = ways
            size = sum(p.numel() * p.element_size() for p in whole.parameters())
            result = {
                "different": compared(whole, partitioned),
                "random": after == then,
                "size": size,
            }
            result |= {"largest": held.largest, "most": held.most}
            if not frozen:
                result["n_trained"] = sum(p.numel() for p in whole.parameters() if p.requires_grad)
                engine = strategy.prepare(partitioned, AdamConfig(), 1e-3, 4)
                result["bucket"] = engine.deepspeed.zero_reduce_bucket_size()
            results[f"{mode} {name}"] = result
    everyones = strategy.comm.all_gather_object(results)
    if strategy.is_main:
        (folder / "loaded.json").write_text(json.dumps(everyones))
    try:
        with strategy.loading():
            get_llm_for_sequence_regression(f"{folder}/several", "reward")
    except ValueError as error:
        print(f"rank {strategy.comm.rank} refused: {error}", flush=True)
    leave()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Any]:
    """What each rank found of each model, and as ``output`` what they printed."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_attention_heads=4, rope_parameters=LLAMA3, **sizes
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "causal")
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(folder / "tied")
    for name, config.num_labels in (("several", 3), ("reward", 1)):
        LlamaForSequenceClassification(config).save_pretrained(folder / name)
    for name in ("actor", "critic"):
        adapted = STARTS[f"{name} with adapters"](folder).model
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key or "score" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder / f"{name}_adapters")
    output = launch(2, __file__, folder)
    return {"ranks": json.loads((folder / "loaded.json").read_text()), "output": output}


CASES = pytest.mark.parametrize("case", [f"{mode} {name}" for mode in MODES for name in STARTS])


@CASES
def test_partitions_hold_the_weights_that_are_loaded_whole(loaded, case):
    for rank in loaded["ranks"]:
        assert rank[case]["different"] == []
        assert rank[case]["random"]


@CASES
def test_no_rank_holds_more_than_its_share_and_a_weight(loaded, case):
    element = (
        2 if case.startswith("bf16") and "merged" not in case else 4
    )  # adapters are added in float32
    more = 0.3 if "merged" in case else 0.15  # with copies of a weight
    for rank in loaded["ranks"]:
        found = rank[case]
        assert found["largest"] == element * 2 * HIDDEN * HIDDEN  # of an MLP
        assert 0.5 <= found["most"] / found["size"] < 0.5 + more


def test_gradient_buckets_follow_the_number_of_trained_parameters(loaded):
    trained = [found for found in loaded["ranks"][0].values() if "bucket" in found]
    assert len(trained) > 4
    assert all(found["bucket"] == found["n_trained"] + found["n_trained"] % 2 for found in trained)


def test_all_ranks_refuse_weights_of_another_shape(loaded):
    for rank in (0, 1):
        assert f"rank {rank} refused: " in loaded["output"]
    assert loaded["output"].count("has several labels; exactly one is needed") == 2


if __name__ == "__main__":
    main()
