"""LoRA and averaged weights on one and two ranks against plain peft, plain torch and naive loops.

Actor and critic train adapters with DeepSpeed; the folders that they save are read by peft alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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

SCRIPT = Path(__file__).with_name("run_lora.py")
CASES = pytest.mark.parametrize("case", ("0", "1", "2", "3", "3 zpg"))
AVERAGES = pytest.mark.parametrize("case", ("0", "2", "3", "3 zpg", "0 lora", "2 lora", "3 lora"))
ROLES = pytest.mark.parametrize("role", ("actor", "critic"))
N_ROWS, N_STEPS, LEARNING_RATE, MAX_NORM, BETA = 12, 4, 1e-2, 0.5, 0.7
RANK, N_LINEAR = 4, 14


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str], tiny: Path) -> Path:
    """Adapters trained on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    launch(2, SCRIPT, "adapters", tiny, folder)
    return folder


@pytest.fixture(scope="module", params=(1, 2), ids=lambda ranks: f"{ranks} ranks")
def averaged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str], tiny: Path
) -> Path:
    """Weights averaged on one rank, and on two."""
    folder = tmp_path_factory.mktemp("averaged")
    launch(request.param, SCRIPT, "averages", tiny, folder)
    return folder


def result_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "result.pt")


def batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The script's sequences, lengths, weights and targets."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 11, (N_ROWS, 1), generator=generator)[:, 0]
    sequences = torch.randint(3, 11, (N_ROWS, 10), generator=generator)
    weights, targets = (torch.randn(N_ROWS, 10, generator=generator) for _ in range(2))
    return sequences, lengths, weights, targets


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the tokens after the first."""
    return torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0]


def values(model: Any, ids: Tensor) -> Tensor:
    """Of the states in which the tokens after the first were chosen."""
    classifier = model.get_base_model()
    return classifier.score(classifier.model(input_ids=ids[None]).last_hidden_state)[0, :-1, 0].float()


COMPUTE: dict[str, Callable[[Any, Tensor], Tensor]] = {"actor": log_probs, "critic": values}


def load(folder: Path, role: str, **options: Any) -> Any:
    """What a user without this library does."""
    if role == "actor":
        return AutoPeftModelForCausalLM.from_pretrained(folder, **options)
    return AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)


@torch.no_grad()
def outputs(model: Any, role: str) -> Tensor:
    """Row by row without padding, on the batch that nobody was trained on."""
    sequences, lengths, *_ = batch(-1)
    made = torch.zeros(N_ROWS, 10)
    for row, (ids, n) in enumerate(zip(sequences, lengths, strict=True)):
        made[row, 1:n] = COMPUTE[role](model, ids[:n])
    return made


def masked(tensor: Tensor) -> Tensor:
    return torch.where(torch.arange(10) < batch(-1)[1][:, None], tensor, 0.0)


@CASES
@ROLES
def test_a_saved_folder_gives_peft_alone_what_training_ended_with(trained: Path, case: str, role: str) -> None:
    found = outputs(load(trained / case / role, role), role)
    assert torch.allclose(found, masked(result_of(trained / case)[role]), rtol=0, atol=1e-5)
    before = outputs(load(trained / case / f"start_{role}", role), role)
    assert (found - before).abs().max() > 0.1  # training did something


@pytest.mark.parametrize("case", ("0 bf16", "3 bf16"))
@ROLES
def test_so_it_does_in_bfloat16(trained: Path, case: str, role: str) -> None:
    folder = trained / case / role
    found = outputs(load(folder, role, dtype=torch.bfloat16), role)
    assert torch.allclose(found, masked(result_of(trained / case)[role]), rtol=0, atol=0.05)
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}


@CASES
@ROLES
def test_a_saved_folder_holds_whole_adapters_and_the_head_and_nothing_else(trained: Path, case: str, role: str) -> None:
    saved = load_file(trained / case / role / "adapter_model.safetensors")
    assert len(saved) == 2 * N_LINEAR + (role == "critic")
    assert all(RANK in tensor.shape for name, tensor in saved.items() if "lora_" in name)
    assert ("base_model.model.score.weight" in saved) == (role == "critic")
    assert not (trained / case / role / "model.safetensors").exists()


class NaiveLoop:
    """Plain peft and torch: all rows one at a time, one process, from the adapters that the script started with."""

    def __init__(self, folder: Path, role: str, **options: Any) -> None:
        self.role = role
        self.model = load(folder / f"start_{role}", role, is_trainable=True, **options).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(self.trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int) -> float:
        """The norm of the gradient before clipping."""
        loss = torch.zeros(())
        for ids, n, weights, targets in zip(*batch(step), strict=True):
            made = COMPUTE[self.role](self.model, ids[:n])
            if self.role == "actor":
                loss = loss + (weights[1:n] * made).sum()
            else:
                loss = loss + (made - targets[1:n]).square().sum()
        self.adam.zero_grad()
        (loss / N_ROWS).backward()
        norm = nn.utils.clip_grad_norm_(self.trained, MAX_NORM).item()
        self.adam.step()
        return norm


@CASES
@ROLES
def test_training_equals_a_naive_loop_although_the_reference_runs_in_between(
    trained: Path, case: str, role: str
) -> None:
    loop = NaiveLoop(trained / case, role)
    norms = [loop.step(step) for step in range(N_STEPS)]
    result = result_of(trained / case)
    assert result["norms"][role] == pytest.approx(norms, rel=1e-4)
    assert torch.allclose(outputs(loop.model, role), masked(result[role]), rtol=0, atol=1e-3)


@CASES
def test_the_actor_with_adapters_off_is_the_base_model_all_along(trained: Path, case: str, tiny: Path) -> None:
    base = outputs(AutoModelForCausalLM.from_pretrained(tiny / "actor"), "actor")
    result = result_of(trained / case)
    assert len(result["reference"]) == N_STEPS
    for reference in result["reference"]:
        assert torch.allclose(masked(reference), base, rtol=0, atol=1e-6)
    assert (masked(result["actor"]) - base).abs().max() > 0.1


@CASES
@ROLES
def test_only_adapters_and_head_are_in_the_optimizer_and_its_buckets(trained: Path, case: str, role: str) -> None:
    facts = result_of(trained / case)[f"facts {role}"]
    assert all("lora_" in name or "score.modules_to_save" in name for name in facts["trained"])
    n_trained = sum(facts["trained"].values())
    assert n_trained < sum(size for size, _ in facts["frozen"].values())
    assert facts["bucket"] == n_trained
    if case == "0":
        assert facts["optimizer"] == [n_trained] * 2
    else:
        assert n_trained <= sum(facts["optimizer"]) <= 1.01 * n_trained  # padded so that it divides


@ROLES
def test_zero_3_partitions_frozen_weights_too(trained: Path, role: str) -> None:
    for size, held in result_of(trained / "3")[f"facts {role}"]["frozen"].values():
        assert held == -(-size // 2)


@pytest.mark.parametrize("case", ("whole", "adapted"))
def test_partitioned_weights_are_handed_over_whole_on_every_rank(trained: Path, case: str) -> None:
    result = torch.load(trained / "handed_over.pt")
    assert result[case] == [{"names": True, "different": [], "gathered afterwards": []}] * 2


@pytest.fixture(scope="module")
def trained_on_4_bits(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Path:
    """Adapters trained on two ranks; the models are as wide as a block of 4-bit weights is long."""
    pytest.importorskip("bitsandbytes", reason="--load_in_4bit needs bitsandbytes")
    folder = tmp_path_factory.mktemp("four_bits")
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=11, initializer_range=0.2, num_labels=1, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "actor")
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    launch(2, SCRIPT, "four_bits", folder, folder)
    return folder


@pytest.mark.parametrize("stage", ("0", "2"))
@ROLES
def test_training_on_4_bits_equals_a_naive_loop_with_plain_bitsandbytes(
    trained_on_4_bits: Path, stage: str, role: str
) -> None:
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", "score"],
    )
    loop = NaiveLoop(trained_on_4_bits / stage, role, quantization_config=nf4)
    norms = [loop.step(step) for step in range(N_STEPS)]
    result = result_of(trained_on_4_bits / stage)
    assert result["norms"][role] == pytest.approx(norms, rel=1e-3)
    assert torch.allclose(outputs(loop.model, role), masked(result[role]), rtol=0, atol=5e-3)
    exact = outputs(load(trained_on_4_bits / stage / role, role), role)  # the saved folder asks for no 4 bits
    assert (exact - masked(result[role])).abs().max() > 0.01


def naive_average(weights: list[dict[str, Tensor]], name: str) -> Tensor:
    """In float64, from the weights at the start and after each step."""
    average = weights[0][name].double()
    for step in weights[1:]:
        average = BETA * average + (1 - BETA) * step[name].double()
    return average


@AVERAGES
def test_the_average_equals_a_naive_loop_in_float64(averaged: Path, case: str) -> None:
    result = result_of(averaged / case)
    first, last = result["weights"][0], result["weights"][-1]
    assert all(("lora_" in name) == case.endswith("lora") for name in first)
    for name, average in result["average"].items():
        expected = naive_average(result["weights"], name)
        assert torch.allclose(average.double(), expected, rtol=0, atol=1e-6), name
    assert any((result["average"][name] - last[name]).abs().max() > 1e-3 for name in first)


def test_the_average_of_bfloat16_weights_is_taken_in_float32(averaged: Path) -> None:
    result = result_of(averaged / "3 bf16")
    for name, average in result["average"].items():
        expected = naive_average(result["weights"], name).bfloat16()
        assert (average != expected).float().mean() < 0.01, name  # but for ties of rounding


@AVERAGES
def test_after_saving_averages_training_goes_on_as_if_nothing_had_been(averaged: Path, case: str) -> None:
    result = result_of(averaged / case)
    assert all(torch.equal(result["restored"][name], weight) for name, weight in result["weights"][-1].items())
    assert result["same outputs again"]
    other = result_of(averaged / ("0 lora" if case.endswith("lora") else "0"))
    for name, weight in result["next step"].items():
        assert torch.allclose(weight, other["next step"][name], rtol=0, atol=1e-4), name


@AVERAGES
def test_what_is_saved_inside_is_the_average(averaged: Path, case: str) -> None:
    result, folder = result_of(averaged / case), averaged / case / "actor"
    model = load(folder, "actor") if case.endswith("lora") else AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(outputs(model, "actor"), masked(result["outputs"]), rtol=0, atol=1e-5)


@AVERAGES
def test_each_rank_keeps_a_share_of_the_average(averaged: Path, case: str) -> None:
    result = result_of(averaged / case)
    n_trained = sum(weight.numel() for weight in result["weights"][0].values())
    assert n_trained <= sum(result["elements"]) <= 1.01 * n_trained
    assert max(result["elements"]) < 0.75 * n_trained or len(result["elements"]) == 1
