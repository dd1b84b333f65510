"""LoRA and averaged weights on two ranks against plain peft, plain torch and naive loops.

Launched by torchrun with the arguments MODELS OUT [4bit], this file trains adapters with DeepSpeed, and averages
weights. ``OUT/<case>`` receives the models, which tests read with peft alone, ``OUT/results.pt`` what was computed.
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from openppo.config import AdamConfig, DeepSpeedConfig, LoRAConfig
from openppo.media import TokenIds
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.models.adapters import AdapterOffReference
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.start_reference import StartReference
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import ModelInputs, SamplingParams
from tests.distributed.run_cases import PARTITION_EVERYTHING, leave

LORA = LoRAConfig(lora_rank=4, lora_alpha=8)
ADAM = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
PROMPTS = ([3, 4, 5], [9, 8, 7, 3, 10, 4])
LEARNING_RATE, MAX_NORM, N_STEPS, N_ROWS, BETA = 1e-2, 0.5, 4, 12, 0.7
ADAPTED: dict[str, dict[str, Any]] = {
    "0": {"zero_stage": 0, "gradient_checkpointing": True},
    "2": {"zero_stage": 2, "overlap_comm": "on"},
    "3": {"zero_stage": 3, "gradient_checkpointing": True},
    "3 zpg": {"zero_stage": 3, "zpg": 2},
    "3 bf16": {"zero_stage": 3, "bf16": True, "gradient_checkpointing": True},
}
AVERAGED: dict[str, dict[str, Any]] = {
    **{str(stage): {"zero_stage": stage} for stage in (0, 2)},
    "3 zpg": {"zero_stage": 3, "zpg": 2},
    "3 bf16": {"zero_stage": 3, "bf16": True},
    **{f"{stage} lora": {"zero_stage": stage} for stage in (0, 3)},
}


def batch(step: int) -> dict[str, Tensor]:
    """12 sequences of 4 to 10 tokens with a weight and a target for each token."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 11, (N_ROWS, 1), generator=generator)
    return {
        "sequences": torch.randint(3, 11, (N_ROWS, 10), generator=generator),
        "mask": torch.arange(10) < lengths,
        "weights": torch.randn(N_ROWS, 10, generator=generator),
        "targets": torch.randn(N_ROWS, 10, generator=generator),
    }


def train(engine: TrainableModel, strategy: DeepspeedStrategy, step: int, role: str) -> float:
    """One optimizer step on this rank's half of the batch in micro-batches of 4 and 2; the gradient's norm."""
    rows = {
        name: tensor.chunk(strategy.comm.world_size)[strategy.comm.rank]
        for name, tensor in batch(step).items()
    }
    engine.train()
    for part in (slice(4), slice(4, None)):
        micro = {name: tensor[part] for name, tensor in rows.items()}
        outputs = engine(ModelInputs(micro["sequences"], micro["mask"]))
        loss = (
            micro["weights"] * outputs if role == "actor" else (outputs - micro["targets"]).square()
        )
        loss = torch.where(micro["mask"], loss, 0.0).sum() / N_ROWS * strategy.comm.world_size
        engine.backward(loss, last=part.start == 4)
    return engine.step()


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    """Of the whole batch that nobody was trained on."""
    data = batch(-1)
    return model(ModelInputs(data["sequences"], data["mask"]))


def full_weights(engine: TrainableModel) -> dict[str, Tensor]:
    """Copies of the trained parameters."""
    trained: dict[str, Any] = {
        name: p for name, p in engine.module.named_parameters() if p.requires_grad
    }
    with GatheredParameters(
        list(trained.values()), enabled=hasattr(next(iter(trained.values())), "ds_id")
    ):
        return {name: p.detach().clone() for name, p in trained.items()}


def adapt(
    models: Path, out: Path, config: DeepSpeedConfig, load_in_4bit: bool = False
) -> dict[str, Any]:
    """Train both, with the reference in between, and save them."""
    strategy = DeepspeedStrategy(config, timedelta(seconds=100), PARTITION_EVERYTHING)
    options: dict[str, Any] = {"bf16": config.bf16, **vars(LORA), "load_in_4bit": load_in_4bit}
    critic = get_llm_for_sequence_regression(str(models / "reward"), "critic", **options)
    engines = {
        "critic": strategy.prepare(critic, ADAM, LEARNING_RATE, N_STEPS),
        "actor": strategy.prepare(
            Actor(str(models / "actor"), **options), ADAM, LEARNING_RATE, N_STEPS
        ),
    }
    reference = AdapterOffReference(engines["actor"])
    result: dict[str, Any] = {"norms": {role: [] for role in engines}, "reference": []}
    for role, engine in engines.items():
        strategy.save_pretrained(engine.module.model, out / f"start_{role}")
    start = None
    for step in range(N_STEPS):
        engines["actor"].train(False)
        result["reference"].append(outputs(reference))
        if step == 1:
            start = StartReference(engines["actor"])
            result["start"] = [outputs(engines["actor"]), outputs(start)]
        for role, engine in engines.items():
            result["norms"][role].append(train(engine, strategy, step, role))
    for role, engine in engines.items():
        engine.train(False)
        result[role] = outputs(engine)
        result[f"trained {role}"] = list(full_weights(engine))
    result["start"] += [outputs(start), outputs(engines["actor"])]
    for role, engine in engines.items():
        strategy.save_pretrained(engine.module.model, out / role)
    return result | sample(engines["actor"], strategy)


def sample(actor: TrainableModel, strategy: DeepspeedStrategy) -> dict[str, Any]:
    """Completions of the engine, and what sampling calls and leaves behind; under ZeRO-3 of gathered weights."""
    layers, calls = (
        [layer for name, layer in actor.module.named_modules() if name.endswith(".lora_A.default")],
        [],
    )
    assert layers
    hooks = [layer.register_forward_hook(lambda *_: calls.append(1)) for layer in layers]
    before, was = whole_weights(actor), outputs(actor)
    calls.clear()
    if strategy.fits_merged(actor):
        actor.merge_when_gathered()
    engine = HFEngine(actor.module.model, (), 0)  # type: ignore[arg-type]
    with engine.with_weights(actor):
        sampled = engine.generate(
            [TokenIds(ids) for ids in PROMPTS], SamplingParams(8), range(len(PROMPTS))
        )
    found = {"sampled": [(c.token_ids, c.log_probs) for c in sampled], "adapter calls": len(calls)}
    found["same weights"] = all(map(torch.equal, before, whole_weights(actor)))
    found["same outputs"] = torch.equal(outputs(actor), was) and len(calls) > found["adapter calls"]
    for hook in hooks:
        hook.remove()
    return found


def whole_weights(actor: TrainableModel) -> list[Tensor]:
    """Copies of all parameters."""
    copies = []
    for parameter in actor.module.parameters():
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            copies.append(parameter.detach().clone())
    return copies


def average(models: Path, out: Path, config: DeepSpeedConfig, lora: bool) -> dict[str, Any]:
    """Weights after each step, their average at the end, and what is there afterwards.

    Without LoRA DeepSpeed keeps its default, by which ZeRO-3 never releases weights as small as some of these.
    """
    strategy = DeepspeedStrategy(
        config, timedelta(seconds=100), PARTITION_EVERYTHING if lora else {}
    )
    actor = Actor(str(models / "actor"), bf16=config.bf16, **(vars(LORA) if lora else {}))
    engine = strategy.prepare(actor, ADAM, LEARNING_RATE, N_STEPS)
    ema = ParameterAverage(engine, beta=BETA)
    result: dict[str, Any] = {"weights": [full_weights(engine)]}
    for step in range(N_STEPS):
        train(engine, strategy, step, "actor")
        ema.update()
        result["weights"].append(full_weights(engine))
        if step == 1:  # a checkpoint between two steps
            saved = {name: fragment.values.clone() for name, fragment in ema.fragments().items()}
            ema = ParameterAverage(engine, beta=BETA)
            for name, fragment in ema.fragments().items():
                fragment.values.copy_(saved[name])
    engine.train(False)
    before = outputs(engine)
    with ema.swapped_in():
        result["average"] = full_weights(engine)
        result["outputs"] = outputs(engine)
        strategy.save_pretrained(engine.module.model, out / "actor")
    result["restored"] = full_weights(engine)
    result["same outputs again"] = torch.equal(outputs(engine), before)
    result["elements"] = strategy.comm.all_gather_object(
        sum(f.values.numel() for f in ema.fragments().values())
    )
    return result


def main() -> None:
    """All cases."""
    (models, out), in_4bit, results = map(Path, sys.argv[1:3]), "4bit" in sys.argv, {}
    for name, options in {"4bit": {"zero_stage": 2}}.items() if in_4bit else ADAPTED.items():
        config = DeepSpeedConfig(max_norm=MAX_NORM, **options)
        results[f"adapted {name}"] = adapt(models, out / f"adapted {name}", config, in_4bit)
    for name, options in {}.items() if in_4bit else AVERAGED.items():
        place = out / f"averaged {name}"
        results[f"averaged {name}"] = average(
            models, place, DeepSpeedConfig(**options), "lora" in name
        )
    if torch.distributed.get_rank() == 0:
        torch.save(results, out / "results.pt")
    leave()


ROLES = pytest.mark.parametrize("role", ("actor", "critic"))
Found = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str], tiny: Path
) -> Found:
    """The folder of what was saved, and results by case."""
    folder = tmp_path_factory.mktemp("lora")
    launch(2, __file__, tiny, folder)
    return folder, torch.load(folder / "results.pt")


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the tokens after the first."""
    return torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1).gather(
        -1, ids[1:, None]
    )[:, 0]


def values(model: Any, ids: Tensor) -> Tensor:
    classifier = model.get_base_model()
    return classifier.score(classifier.model(input_ids=ids[None]).last_hidden_state)[
        0, :-1, 0
    ].float()


COMPUTE: dict[str, Callable[[Any, Tensor], Tensor]] = {"actor": log_probs, "critic": values}


def load(folder: Path, role: str, **options: Any) -> Any:
    """What a user without this library does."""
    if role == "actor":
        return AutoPeftModelForCausalLM.from_pretrained(folder, **options)
    return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)


@torch.no_grad()
def plain_outputs(model: Any, role: str) -> Tensor:
    """Row by row without padding, on the batch that nobody was trained on."""
    data, made = batch(-1), torch.zeros(N_ROWS, 10)
    for row, (ids, mask) in enumerate(zip(data["sequences"], data["mask"], strict=True)):
        made[row, 1 : mask.sum()] = COMPUTE[role](model, ids[mask])
    return made


def close(found: Tensor, given: Tensor, atol: float) -> bool:
    """Whether outputs are those given, where there are tokens."""
    return torch.allclose(found, torch.where(batch(-1)["mask"], given, 0.0), rtol=0, atol=atol)


class NaiveLoop:
    """Plain peft and torch: all rows one at a time, one process, from the adapters that the script started with."""

    def __init__(self, folder: Path, role: str, **options: Any) -> None:
        self.role = role
        self.model = load(folder / f"start_{role}", role, is_trainable=True, **options).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(
            self.trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, step: int) -> float:
        """The norm of the gradient before clipping."""
        loss = torch.zeros(())
        for ids, mask, weights, targets in zip(*batch(step).values(), strict=True):
            made = COMPUTE[self.role](self.model, ids[mask])
            if self.role == "actor":
                loss = loss + (weights[mask][1:] * made).sum()
            else:
                loss = loss + (made - targets[mask][1:]).square().sum()
        self.adam.zero_grad()
        (loss / N_ROWS).backward()
        norm = nn.utils.clip_grad_norm_(self.trained, MAX_NORM).item()
        self.adam.step()
        return norm


@pytest.mark.parametrize("case", ADAPTED)
@ROLES
def test_training_equals_a_naive_loop_and_peft_alone_reads_what_is_saved(found, tiny, case, role):
    """Although the reference, which is the base model all along, runs in between."""
    folder, result = found[0] / f"adapted {case}", found[1][f"adapted {case}"]
    dtype, atol = (torch.bfloat16, 0.05) if "bf16" in case else (torch.float32, 1e-5)
    saved = plain_outputs(load(folder / role, role, dtype=dtype), role)
    assert close(saved, result[role], atol)
    start = plain_outputs(load(folder / f"start_{role}", role), role)
    assert (saved - start).abs().max() > 0.1, "training did something"
    tensors = load_file(folder / role / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert len(tensors) == 2 * 14 + (role == "critic"), "whole adapters and the head, nothing else"
    assert all(
        "lora_" in name or "score.modules_to_save" in name for name in result[f"trained {role}"]
    )
    if "bf16" not in case:
        loop = NaiveLoop(folder, role)
        assert result["norms"][role] == pytest.approx(
            [loop.step(step) for step in range(N_STEPS)], rel=1e-4
        )
        assert close(plain_outputs(loop.model, role), result[role], 1e-3)
        base = plain_outputs(AutoModelForCausalLM.from_pretrained(tiny / "actor"), "actor")
        assert all(close(base, reference, 1e-6) for reference in result["reference"])


@pytest.mark.parametrize("case", ADAPTED)
@torch.no_grad()
def test_sampling_with_merged_adapters_leaves_no_trace(found, case):
    folder, result = found[0] / f"adapted {case}", found[1][f"adapted {case}"]
    merged = load(folder / "actor", "actor").merge_and_unload()
    atol = 0.2 if "bf16" in case else 1e-4
    for prompt, (token_ids, sampled) in zip(PROMPTS, result["sampled"], strict=True):
        theirs = log_probs(merged, torch.tensor([*prompt, *token_ids]))[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(sampled), theirs, rtol=0, atol=atol)
    assert result["adapter calls"] == 0, "forwards skip merged adapters"
    assert result["same weights"] and result["same outputs"]


@ROLES
def test_training_on_4_bits_equals_a_naive_loop_with_plain_bitsandbytes(tmp_path, launch, role):
    """The models are as wide as a block of 4-bit weights is long."""
    pytest.importorskip("bitsandbytes", reason="--load_in_4bit needs bitsandbytes")
    torch.manual_seed(5)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=11, initializer_range=0.2, num_labels=1, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "actor")
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "reward")
    launch(2, __file__, tmp_path, tmp_path, "4bit")
    result, folder = torch.load(tmp_path / "results.pt")["adapted 4bit"], tmp_path / "adapted 4bit"
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    heads = ["lm_head", "score"]
    four_bits = BitsAndBytesConfig(
        **nf4, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=heads
    )
    loop = NaiveLoop(folder, role, quantization_config=four_bits)
    assert result["norms"][role] == pytest.approx(
        [loop.step(step) for step in range(N_STEPS)], rel=1e-3
    )
    assert close(plain_outputs(loop.model, role), result[role], 5e-3)
    assert result["adapter calls"] > 0 and result["same weights"], "4-bit weights are not merged"
    exact = plain_outputs(load(folder / role, role), role)  # the saved folder asks for no 4 bits
    assert not close(exact, result[role], 0.01)


@pytest.mark.parametrize("case", AVERAGED)
def test_the_average_equals_a_naive_loop_in_float64_is_saved_and_leaves_the_weights(found, case):
    result = found[1][f"averaged {case}"]
    first, *later = result["weights"]
    assert all(("lora_" in name) == ("lora" in case) for name in first)
    for name, average in result["average"].items():
        expected = first[name].double()
        for weights in later:
            expected = BETA * expected + (1 - BETA) * weights[name].double()
        if "bf16" in case:
            assert (average != expected.bfloat16()).float().mean() < 0.01, (
                name
            )  # but for ties of rounding
        else:
            assert torch.allclose(average.double(), expected, rtol=0, atol=1e-6), name
    assert any((result["average"][name] - later[-1][name]).abs().max() > 1e-3 for name in first)
    n_trained = sum(weight.numel() for weight in first.values())
    assert n_trained <= sum(result["elements"]) <= 1.01 * n_trained
    assert max(result["elements"]) < 0.75 * n_trained, "each rank keeps a share"
    if "bf16" not in case:
        folder = found[0] / f"averaged {case}" / "actor"
        model = (
            load(folder, "actor")
            if "lora" in case
            else AutoModelForCausalLM.from_pretrained(folder)
        )
        assert close(plain_outputs(model, "actor"), result["outputs"], 1e-5), "the average is saved"
    assert all(torch.equal(result["restored"][name], weight) for name, weight in later[-1].items())
    assert result["same outputs again"]


if __name__ == "__main__":
    main()


@pytest.mark.parametrize("name", ADAPTED)
def test_the_start_reference_stays_as_it_began_and_leaves_the_actor_alone(
    found: Found, name: str
) -> None:
    result = found[1][f"adapted {name}"]
    began, *later, trained = result["start"]
    assert all(torch.equal(outputs, began) for outputs in later)
    assert torch.equal(trained, result["actor"])
    assert not torch.equal(trained, began)
