"""The memory estimate, against hand-computed numbers, DeepSpeed's own formulas and tensors that real models save."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from openppo.build.memory import budgets as budgets_module
from openppo.build.memory.budgets import (
    TOKEN_BUDGETS,
    TOKEN_BUDGETS_ON_CPU,
    machine_memory,
    token_budgets,
    with_token_budgets,
)
from openppo.build.memory.estimate import Estimate, estimate_supervised
from openppo.build.memory.machine import Machine
from openppo.build.memory.passes import Batch, Model
from openppo.build.memory.ppo_estimate import Lengths, estimate_ppo
from openppo.build.memory.shortage import compare
from openppo.build.memory.sizing import log_memory
from openppo.build.memory.states import model_memory
from openppo.config import DeepSpeedConfig, LoRAConfig, TrainPPOConfig, TrainSFTConfig, from_options
from openppo.config.resolved import Resolved
from openppo.models import Actor
from openppo.models.loading import freeze_vision
from openppo.models.size import ModelSize, model_size
from openppo.models.vision_models import n_patches
from openppo.types import ModelInputs
from tests.images import IMAGE, llava, random_image

M, GIB = 1_000_000, 2**30
SIZE = ModelSize(
    n_parameters=M,
    n_quantized=800_000,
    layers=4,
    hidden=100,
    width=2_000,
    adapter=2_400,
    cache=400,
    vocabulary=1_000,
)
SCALAR = SIZE._replace(vocabulary=0, n_parameters=900_000)
SIZES = {"reward model": SCALAR, "critic": SCALAR, "actor": SIZE, "reference": SIZE}
LENGTHS, FULL = Lengths(10, 50), LoRAConfig()


def machine(n_ranks: int = 1, on_cpu: bool = False, **options: Any) -> Machine:
    return Machine(DeepSpeedConfig(**options), n_ranks, on_cpu)


def ppo(
    sizes: dict[str, ModelSize] = SIZES,
    lengths: Lengths = LENGTHS,
    on: dict[str, Any] | None = None,
    **options: Any,
) -> Estimate:
    """Estimate of a small run: samples of at most 50 + 100 tokens."""
    given = {"pretrain": "p", "prompt_data": "d", "reward_pretrain": "r", "rollout_batch_size": 64}
    given |= {"train_batch_size": 16, "micro_train_batch_size": 4, "generate_max_len": 100}
    config = from_options(TrainPPOConfig, **{**given, **options})
    machine = Machine(config.deepspeed, **(on or {}))
    return estimate_ppo(config, Resolved.of(config), lengths, sizes=sizes, machine=machine)


STATES = {  # bytes per trained parameter on one of four ranks
    False: [4 + 8, 4 + (4 + 8) / 4, 4 + (4 + 8) / 4, (4 + 4 + 8 + 4) / 4 + 4],
    True: [2 + 6 + (4 + 8) / 4, 2 + 6 + (4 + 8) / 4, 2 + (4 + 8) / 4, (2 + 4 + 8 + 4) / 4 + 4],
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", STATES)
def test_states_of_four_ranks_are_those_of_the_table(stage: int, bf16: bool) -> None:
    here, away = (
        model_memory(
            SIZE, machine(4, zero_stage=stage, bf16=bf16, adam_offload=offload and stage > 0), FULL
        )
        for offload in (False, True)
    )
    assert here.lasting == STATES[bf16][stage] * M
    if (stage, bf16) == (3, True):
        _, deepspeeds, _ = estimate_zero3_model_states_mem_needs(M, 0, 4, 1, cpu_offload=False)
        assert here.lasting == deepspeeds + 4 * M, "and a bucket"
    if stage > 0:  # the optimizer goes to the host
        assert here.lasting - away.lasting >= 12 * M // 4 <= away.host
        assert (away.moments, here.host) == (0, 0)


@pytest.mark.parametrize(("stage", "each"), [(1, 2**33), (2, 2**33), (3, 2**32 + 2**31)])
def test_pinned_memory_takes_powers_of_two(stage: int, each: int) -> None:
    """6 GB of 1.5e9 numbers become 8 GiB; under ZeRO-3 a tensor has 1e9 of them. On CPUs nothing is pinned."""
    large, n = SIZE._replace(n_parameters=1_500 * M), 1_500 * M
    for on_cpu, expected in ((False, each), (True, 4 * n)):
        stays, away = (
            model_memory(large, machine(1, on_cpu, zero_stage=stage, adam_offload=offload), FULL)
            for offload in (False, True)
        )
        assert stays.resting == 2 * expected, "of two moments"
        assert away.host == 4 * n + 8 * n + 2 * expected, (
            "weights and moments, and two of gradients"
        )
    actor = {"actor": large}
    rests, stays = (
        ppo(actor, zero_stage=stage, critic_pretrain="c", offload_idle=rests)
        for rests in (True, False)
    )
    assert rests.host - stays.host == 2 * each
    assert stays.phases["generation"] - rests.phases["generation"] == 8 * n


def test_gradients_come_and_go_by_stage() -> None:
    large = SIZE._replace(n_parameters=8_000 * M)
    of = [
        model_memory(large, machine(8, zero_stage=stage, bf16=stage > 0), FULL)
        for stage in range(4)
    ]
    assert [memory.gradients for memory in of] == [4 * 8_000 * M, 0, 4 * 1_000 * M, 0], (
        "those of stage 1 last"
    )
    assert of[2].copies == (2 + 4) * 500 * M, "a bucket and its copy in float32"
    assert of[3].copies == 4 * 500 * M + 4 * 1_000 * M


def test_adapters_are_trained_and_the_rest_is_frozen() -> None:
    lora, bf16, adapters = (
        LoRAConfig(lora_rank=8),
        machine(zero_stage=2, bf16=True),
        8 * SIZE.adapter,
    )
    assert model_memory(SIZE, bf16, lora).lasting == 2 * M + (2 + 4 + 8) * adapters
    assert SCALAR.n_trained(8) == adapters + SCALAR.hidden
    scales = 800_000 // 64 + 4 * 800_000 / (
        64 * 256
    )  # a byte for 64 weights of 4 bits, a float32 for 256 of those
    quantized = model_memory(SIZE, bf16, LoRAConfig(lora_rank=8, load_in_4bit=True))
    assert quantized.lasting == round(400_000 + scales) + 2 * 200_000 + (2 + 4 + 8) * adapters
    assert [model_memory(SIZE, machine(4, zero_stage=z, bf16=True)).lasting for z in (2, 3)] == [
        2 * M,
        2 * M // 4,
    ]
    assert [model_memory(SIZE, machine(n, zero_stage=3), FULL).gathered for n in (1, 2)] == [
        0,
        4 * M,
    ]


WIDTHS = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3}
CONFIGS = [
    LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **WIDTHS),
    Qwen2Config(num_attention_heads=8, num_key_value_heads=2, **WIDTHS),
    Qwen3Config(num_attention_heads=8, num_key_value_heads=2, head_dim=16, **WIDTHS),
]


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_a_forward_saves_is_within_a_quarter(
    config: PreTrainedConfig, dtype: torch.dtype, lora_rank: int
) -> None:
    rows, length, prompt = 4, 96, 32
    model: nn.Module = Actor(
        AutoModelForCausalLM.from_config(config, dtype=dtype), lora_rank=lora_rank
    ).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[torch.Tensor] = []  # kept, so that no address is used twice
    mask = torch.ones(rows, length, dtype=torch.bool)
    actions = mask.clone()
    actions[:, :prompt] = False
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):  # type: ignore[func-returns-value]
        model(ModelInputs(torch.zeros(rows, length, dtype=torch.int64), mask), actions)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved
    }
    found = sum(n_bytes for address, n_bytes in storages.items() if address not in parameters)
    here = machine(on_cpu=True, bf16=dtype is torch.bfloat16)
    counted = Model(model_size(config), here).backward(Batch(rows, length, length - prompt)).total()
    logits = rows * (length - prompt) * 64
    assert counted - dtype.itemsize * logits - 8 * logits == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_tower_and_what_it_keeps_are_counted(frozen: bool) -> None:
    torch.manual_seed(0)
    model = llava().train()
    size = model_size(model.config)
    for part, counted in (("vision_tower", size.tower), ("multi_modal_projector", size.connector)):
        assert counted == sum(p.numel() for name, p in model.named_parameters() if part in name)
    freeze_vision(model, frozen, False)
    size = size._replace(n_frozen=size.tower * frozen)
    assert size.n_trained(0) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    item = random_image("llava", 1)
    ids = torch.tensor([[5, *[IMAGE] * item.n_tokens, *range(6, 26)]] * 3)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):  # type: ignore[func-returns-value]
        mask = torch.ones_like(ids, dtype=torch.bool)
        Actor(model)(ModelInputs(ids, mask, media=tuple([(item,)] * 3)), ~mask)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved
    }
    found = sum(n_bytes for address, n_bytes in storages.items() if address not in parameters)
    patches = n_patches([item], model.config)
    assert patches == 4
    batch = Batch(3, ids.shape[1], 0, patches)
    counted = Model(size, machine(on_cpu=True)).backward(batch).total()
    assert counted == pytest.approx(found, rel=0.3)


def test_a_pass_by_hand() -> None:
    bf16 = Model(SIZE, machine(bf16=True))
    checkpointing = Model(SIZE, machine(bf16=True, gradient_checkpointing=True))
    batch = Batch(2, 50, 10)
    layer, hidden, logits = 2 * 2_000 * 100, 2 * 100 * 100, 2 * 10 * 1_000  # bytes, bytes, elements
    assert bf16.backward(batch).total() == 4 * layer + 2 * hidden + (4 + 2 + 4 + 4) * logits
    assert checkpointing.backward(batch) == {
        "activations": layer + (4 + 2) * hidden,
        "logits": (4 + 2 + 4 + 4) * logits,
    }
    assert bf16.forward(batch).total() == 2 * hidden + max((4 + 4 + 4) * logits, layer // 2)
    gpu, cpu = (
        Model(SIZE, machine(on_cpu=on_cpu)).forward(Batch(64, 1000, 1000)).total()
        for on_cpu in (False, True)
    )
    assert gpu - cpu == 8 * ((1 << 24) - (1 << 20)), "chunks of float32 logits are bounded"
    once, twice = (bf16.forward(Batch(200, 1000, scored)) for scored in (1000, 2000))
    assert once == twice, "logits are not whole"
    returns_whole = Model(SIZE._replace(whole_logits=True), machine(bf16=True))
    whole = [returns_whole.forward(Batch(200, 1000, scored)).total() for scored in (1000, 2000)]
    assert whole[1] - whole[0] == 2 * 200 * 1000 * 1000


def test_roles_and_phases_are_those_of_the_run() -> None:
    estimate = ppo()
    assert list(estimate.roles) == list(SIZES)
    assert list(estimate.phases) == ["loading", "generation", "experience", "training"]
    steps = {name: total for name, total in estimate.phases.items() if name != "loading"}
    assert estimate.peaks == steps | {"step": max(steps.values())}
    assert min(steps.values()) > sum(estimate.roles.values()), "all of them last"
    assert estimate.checkpoint == 12 * (M + 900_000)
    assert ppo(ema_beta=0.9).checkpoint == estimate.checkpoint + 4 * M
    assert estimate.phases["loading"] == 4 * 900_000 + (4 + 4) * (M + 900_000) + 4 * M, (
        "float32, no moments yet"
    )


def test_what_rests_in_the_host_leaves_the_device() -> None:
    before, after = ppo(), ppo(offload_idle=True)
    moments = 8 * (M + 900_000)
    saved = {name: before.phases[name] - after.phases[name] for name in before.phases}
    assert saved == {"loading": 0, "generation": moments, "experience": moments, "training": 0}
    assert after.host - before.host == 4 * 2**22, "in powers of two: 4 and 3.6 MB are 4 MiB"
    everyones = (32 + 64) * 150 * 42  # own samples and all, of 150 tokens, 42 bytes each
    assert ppo(on={"n_ranks": 2}).host == everyones
    both: dict[str, Any] = {
        "ema_beta": 0.9,
        "adam_offload": True,
        "max_num_seqs": 8,
        "cuda_graphs": "off",
    }
    gpu, cpu = (ppo(**both, on={"on_cpu": on_cpu}) for on_cpu in (False, True))
    tensors = gpu.phases["generation"] - gpu.machine.workspaces
    assert cpu.phases["generation"] - tensors == cpu.host, "the host is the device"
    assert gpu.host - cpu.host == 2 * (4 * 2**20 - 4 * M) + 2 * (2**22 - 3_600_000), (
        "of weights and gradients"
    )
    assert gpu.host - ppo(adam_offload=True).host == 4 * M, "the average"


def test_merging_adapters_takes_a_copy_of_their_weights_where_it_fits() -> None:
    sizes = SIZES | {"actor": SIZE._replace(n_quantized=100 * M)}
    plain, merged = (
        ppo(sizes_of, lora_rank=8, max_num_seqs=1).phases for sizes_of in (SIZES, sizes)
    )
    assert merged["generation"] - plain["generation"] == 4 * (100 * M - SIZE.n_quantized)
    beside = ppo(sizes, lora_rank=8, max_num_seqs=1, on={"memory": 800 * M}).phases
    assert merged["generation"] - beside["generation"] == 4 * 100 * M, (
        "more than half of what is free"
    )


def test_what_the_table_names_lowers_the_phase() -> None:
    before, training = (
        ppo().phases,
        {"micro_train_batch_size": 2, "micro_train_tokens": 300, "lora_rank": 8},
    )
    lowering = {
        "training": training | {"gradient_checkpointing": True, "generate_max_len": 20},
        "experience": {"micro_rollout_batch_size": 2, "micro_rollout_tokens": 300},
        "generation": {"max_num_seqs": 2, "generate_max_len": 20},
    }
    for phase, options in lowering.items():
        for name, value in options.items():
            assert ppo(**{name: value}).phases[phase] < before[phase], name
    assert ppo(lengths=Lengths(10, 50, document=2000)).phases["training"] > ppo().phases["training"]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (299, 1), (300, 2), (749, 4), (10_000, 16)])
def test_a_bound_on_tokens_is_as_many_of_the_longest_samples_as_fit(tokens: int, rows: int) -> None:
    bound = {"micro_train_tokens": tokens, "micro_rollout_tokens": tokens}
    size = {"micro_train_batch_size": rows, "micro_rollout_batch_size": rows}
    by_tokens, by_rows = (
        ppo(train_batch_size=64, on={"n_ranks": 4}, **options) for options in (bound, size)
    )
    assert by_tokens.phases == by_rows.phases


@pytest.mark.parametrize("memory", [75, 115, 130, 200])
def test_generation_fits_wherever_the_models_do(memory: int) -> None:
    sizes = SIZES | {"actor": SIZE._replace(n_parameters=10_000 * M, cache=80_000)}
    for rests in (False, True):
        options = {
            "zero_stage": 3,
            "rollout_batch_size": 2048,
            "generate_max_len": 1000,
            "offload_idle": rests,
        }
        estimate = ppo(sizes, on={"n_ranks": 4, "memory": memory * GIB}, **options)
        assert estimate.phases["generation"] < memory * GIB


def test_verdict_and_tables_name_phase_and_device() -> None:
    fits, large = (ppo(on={"n_ranks": 4, "memory": memory}) for memory in (4 * GIB, M))
    assert fits.fits and not large.fits
    roles = "reward model 3 MiB, critic 6 MiB, actor 7 MiB, reference 4 MiB"  # 4 bytes, and (4 + 8) / 4 where trained
    peak = f"at most {max(fits.phases.values()) / 2**20:.0f} MiB, in {fits.largest}"
    assert fits.summary() == f"estimated memory on each of 4 ranks: {roles}; {peak}"
    for estimate, verdict in ((fits, "fits into 4.0 GiB"), (large, "DOES NOT FIT into 1 MiB")):
        table = "\n".join(estimate.table())
        assert f"the highest, {estimate.largest}, {verdict} of device memory" in table
        assert all(name in table for name in (*SIZES, *estimate.phases, "host"))
        assert "checkpoint on disk    22 MiB" in table
        parts = dict(re.findall(r"([a-z ]+) (\d+) MiB", table.splitlines()[-2]))
        assert {"weights", "optimizer", "workspaces"} <= {name.strip() for name in parts}
        total = estimate.phases[estimate.largest] / 2**20
        assert sum(map(int, parts.values())) == pytest.approx(total, abs=len(parts))


def test_a_shortage_sets_what_is_measured_beside_the_estimate() -> None:
    estimate = ppo(on={"memory": 140 * GIB})
    expected = estimate.phases["training"]
    ours = compare(estimate, "training", allocated=expected + M, outside=estimate.machine.outside)
    label, last = ours[-1]
    assert label == "memory"
    assert last.startswith("in training: ") and " estimated, " in last
    assert last.endswith(" allocated by PyTorch")
    assert not any("fits into" in line for _, line in ours), "it did not"

    tensors = compare(
        estimate, "training", allocated=expected + 128 * GIB, outside=estimate.machine.outside
    )
    assert tensors[-2][1] == "128.0 GiB are held by something else in this process"
    processes = compare(estimate, "scoring", allocated=expected, outside=128 * GIB)
    assert (
        processes[-2][1]
        == "128.0 GiB of the GPU are held by other processes, or libraries of this one"
    )
    advice = ("try", "end what else holds the GPU's memory: nvidia-smi lists processes")
    assert tensors[-1] == processes[-1] == advice


def test_gpus_hold_workspaces_while_they_compute() -> None:
    """Of an H200, where LoRA on a small model took 0.24 GiB more than its tensors."""
    cpu, gpu = (ppo(on={"on_cpu": on_cpu}, cuda_graphs="off") for on_cpu in (True, False))
    assert gpu.machine.workspaces == 2**28 and cpu.machine.workspaces == 0
    computing = [gpu.phases[phase] for phase in ("generation", "experience", "training")]
    assert min(computing) > 2**28 > gpu.phases["loading"]


@pytest.mark.parametrize(
    ("stage", "n_ranks", "memory", "expected"),
    [(2, 8, 80, 1), (2, 8, 0.001, 0), (2, 1, 80, 0), (3, 8, 80, 0)],
)
def test_stage_1_is_suggested_where_it_fits_on_several_gpus(
    stage, n_ranks, memory, expected, caplog
) -> None:
    run = {"dry_run": f"{n_ranks}x{memory}"}
    config = from_options(TrainSFTConfig, pretrain="p", dataset="d", zero_stage=stage, **run)
    strategy: Any = SimpleNamespace(device=torch.device("cpu"), is_main=False, close=lambda: None)

    def estimate(_: dict[str, ModelSize], machine: Machine) -> Estimate:
        return estimate_supervised(config, Batch(1, 512, 512), SIZE, machine)

    with caplog.at_level("INFO"), pytest.raises(SystemExit):
        log_memory(estimate, {}, config, strategy)
    assert caplog.text.count("--zero_stage 1 fits too") == expected


def test_pairs_of_supervised_training_are_two_rows() -> None:
    config = from_options(TrainSFTConfig, pretrain="p", dataset="d", max_len=512)
    one, two = (
        estimate_supervised(config, Batch(rows, 512, 512), SIZE, Machine(config.deepspeed))
        for rows in (1, 2)
    )
    assert list(one.phases) == ["loading", "training"]
    lasting = one.roles["model"] + one.machine.workspaces
    assert two.phases["training"] - lasting > 1.9 * (one.phases["training"] - lasting)


WIDE = {role: SIZES[role]._replace(width=20_000, vocabulary=50_000) for role in ("actor", "critic")}


USUAL = [tokens for tokens in TOKEN_BUDGETS if tokens <= 32768]


def sized(
    memory: float, on_cpu: bool = False, **options: Any
) -> tuple[dict[str, int | None], Estimate]:
    """Budgets of training and experience on a fake device of so many GiB, and the estimate with them."""
    given = {"pretrain": "p", "prompt_data": "d", "reward_fn": "r", "train_batch_size": 512}
    config = from_options(TrainPPOConfig, **given, **options)
    fake = Machine(config.deepspeed, on_cpu=on_cpu, memory=round(memory * GIB))
    tried = TOKEN_BUDGETS_ON_CPU if on_cpu else USUAL

    def estimate(resolved: Resolved) -> Estimate:
        return estimate_ppo(config, resolved, LENGTHS, sizes=WIDE, machine=fake)

    resolved = with_token_budgets(config, estimate, tried)
    budgets = {"train": resolved.micro_train_tokens, "rollout": resolved.micro_rollout_tokens}
    return budgets, estimate(resolved)


def test_a_gpu_gets_the_largest_budgets_that_its_memory_takes() -> None:
    found = {gib: sized(gib)[0] for gib in (0.5, 4, 8, 16, 80)}
    assert found[80] == {"train": 32768, "rollout": 32768}
    assert found[0.5] == {"train": None, "rollout": None}, "the context takes it all"
    for name in ("train", "rollout"):
        budgets = [of[name] or 0 for of in found.values()]
        assert budgets == sorted(budgets) and set(budgets) <= {0, *TOKEN_BUDGETS}
    assert 0 < (found[4]["train"] or 0) < 16384


@pytest.mark.parametrize(
    ("n_parameters", "layers", "largest"),
    [
        (7_600_000_000, 28, 32768),
        (494_000_000, 24, 32768),
        (135_000_000, 30, 65536),
        (1_000_000, 4, 131072),
    ],
)
def test_a_model_of_small_layers_gets_budgets_that_hide_its_launches(
    n_parameters: int, layers: int, largest: int
):
    budgets = token_budgets(SIZES["actor"]._replace(n_parameters=n_parameters, layers=layers))
    assert budgets[0] == largest
    assert budgets == [tokens for tokens in TOKEN_BUDGETS if tokens <= largest]


def test_a_cpu_fills_at_most_half_of_its_memory():
    chosen = {gib: sized(gib, on_cpu=True) for gib in (0.5, 4, 8, 16, 80)}
    assert chosen[80][0] == {"train": 8192, "rollout": 8192}
    assert chosen[0.5][0] == {"train": None, "rollout": None}
    for gib, (budgets, estimate) in chosen.items():
        for name, phase in (("train", "training"), ("rollout", "experience")):
            assert budgets[name] is None or estimate.phases[phase] <= gib * GIB / 2
    assert 0 < (chosen[8][0]["train"] or 0) < 8192


def test_a_container_has_the_memory_that_it_is_allowed(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budgets_module, "_CONTAINER_LIMIT", limit)
    machine = machine_memory()
    assert machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max", machine), (str(2**30), 2**30), (str(2**62), machine)):
        limit.write_text(f"{text}\n")
        assert machine_memory() == expected


def test_given_sizes_keep_theirs() -> None:
    assert sized(80, micro_train_batch_size=4)[0] == {"train": None, "rollout": 32768}
    assert sized(80, micro_rollout_batch_size=8)[0] == {"train": 32768, "rollout": None}
    assert sized(80, micro_train_tokens=1000, micro_rollout_tokens=77)[0] == {
        "train": 1000,
        "rollout": 77,
    }


def test_a_chosen_budget_is_within_nine_tenths_and_twice_is_not() -> None:
    (budgets, estimate), room = sized(8), 0.9 * (8 - 0.5) * GIB
    assert budgets["train"] in USUAL[1:]
    twice = sized(8, micro_train_tokens=2 * (budgets["train"] or 0))[1]
    assert estimate.phases["training"] <= room < twice.phases["training"]


def test_cuda_and_nccl_hold_memory_that_torch_does_not_count() -> None:
    on_cpu, one, two = (
        Machine(DeepSpeedConfig(), n, cpu, 8 * GIB)
        for n, cpu in ((2, True), (1, False), (2, False))
    )
    assert [8 * GIB - here.room for here in (on_cpu, one, two)] == [0, GIB // 2, GIB]
