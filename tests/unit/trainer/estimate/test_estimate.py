"""The estimate of whole runs: roles, phases, remedies."""

from dataclasses import replace
from typing import Any

import pytest

from openppo.config import TrainSFTConfig, from_options
from openppo.trainer.estimate import Estimate
from openppo.trainer.estimate.ppo import Lengths, PPORun, estimate_ppo, most_decode_rows
from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.supervised import SupervisedRun, estimate_supervised

LENGTHS = Lengths(shortest_prompt=10, longest_prompt=50)


@pytest.fixture
def shapes(shape: ModelShape) -> dict[str, ModelShape]:
    """Actor, critic and reward model."""
    scalar = replace(shape, vocabulary=0, n_parameters=900_000)
    return {"actor": shape, "critic": scalar, "reward model": scalar}


def phase_total(estimate: Estimate, name: str) -> int:
    """Peak of the phase."""
    return next(phase.total for phase in estimate.phases if phase.name == name)


def test_roles_are_those_of_the_run(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    assert set(estimate_ppo(PPORun(ppo_config(), shapes, LENGTHS)).roles) == {*shapes, "reference"}
    with_lora = estimate_ppo(PPORun(ppo_config(lora_rank=8), shapes, LENGTHS))
    assert set(with_lora.roles) == set(shapes)  # the actor without adapters is the reference
    of_its_own = {**shapes, "reference": replace(shapes["actor"], n_parameters=2_000_000)}
    other = estimate_ppo(PPORun(ppo_config(lora_rank=8, ref_pretrain="x", zero_stage=0), of_its_own, LENGTHS))
    assert list(other.roles)[-1] == "reference"
    assert sum(other.roles["reference"].values()) == 4 * 2_000_000
    without_penalty = estimate_ppo(PPORun(ppo_config(init_kl_coef=0.0), shapes, LENGTHS))
    assert set(without_penalty.roles) == set(shapes)


def test_what_lasts_is_in_every_phase_but_loading(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    estimate = estimate_ppo(PPORun(ppo_config(), shapes, LENGTHS))
    lasting = sum(sum(parts.values()) for parts in estimate.roles.values())
    assert [phase.lasting for phase in estimate.phases[1:]] == [lasting] * 3
    assert estimate.peak == max(phase.total for phase in estimate.phases)


def test_peaks_are_those_of_the_phases_that_a_step_times(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    estimate = estimate_ppo(PPORun(ppo_config(), shapes, LENGTHS))
    peaks = {name: phase_total(estimate, name) for name in ("generation", "experience", "training")}
    assert estimate.peaks == peaks | {"step": max(peaks.values())}


@pytest.mark.parametrize(("wanted", "on_cpu", "rows"), [(None, True, 64), (None, False, 256), (3, True, 3)])
def test_rows_without_an_estimate_are_those_asked_for(
    wanted: int | None, on_cpu: bool, rows: int, ppo_config: Any
) -> None:
    assert most_decode_rows(ppo_config(max_num_seqs=wanted).generation, on_cpu) == rows


def test_the_host_is_the_device_on_cpus(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    config = ppo_config(enable_ema=True, adam_offload=True)
    gpu, cpu = (estimate_ppo(PPORun(config, shapes, LENGTHS, on_cpu=on_cpu)) for on_cpu in (False, True))
    assert gpu.host == cpu.host
    assert cpu.phases[1].total - gpu.phases[1].total == sum(gpu.host.values())
    assert cpu.host["average (EMA)"] == 4_000_000
    assert cpu.host["optimizer of the actor"] > 12_000_000


def test_moments_that_rest_on_the_host_leave_the_device_to_all_but_training(
    shapes: dict[str, ModelShape], ppo_config: Any
) -> None:
    configs = (ppo_config(), ppo_config(offload_idle=True))
    before, after = (estimate_ppo(PPORun(config, shapes, LENGTHS)) for config in configs)
    saved = {phase.name: phase.total - other.total for phase, other in zip(before.phases, after.phases, strict=True)}
    moments = sum(parts.get("Adam moments", 0) for parts in before.roles.values())
    assert moments > 8_000_000
    assert saved == {"loading": 0, "generation": moments, "experience": moments, "training": 0}
    assert sum(after.host.values()) - sum(before.host.values()) == moments


@pytest.mark.parametrize(
    ("change", "phase", "times"),
    [
        ({"micro_train_batch_size": 1}, "training", 1),
        ({"gradient_checkpointing": True}, "training", 1),
        ({"max_num_seqs": 2}, "generation", 1),
        ({"micro_rollout_batch_size": 1}, "experience", 1),
        ({"generate_max_len": 10}, "experience", 1),
        ({"lora_rank": 4}, "training", 100),
        ({"bf16": True}, "training", 100),
        ({"zero_stage": 3}, "training", 100),
        ({"adam_offload": True}, "training", 100),
        ({"load_in_4bit": True, "lora_rank": 8}, "training", 100),
    ],
)
def test_what_should_save_memory_does(
    shapes: dict[str, ModelShape], ppo_config: Any, change: dict[str, Any], phase: str, times: int
) -> None:
    large = {role: replace(shape, n_parameters=times * shape.n_parameters) for role, shape in shapes.items()}
    before, after = (estimate_ppo(PPORun(ppo_config(**o), large, LENGTHS, n_ranks=8)) for o in ({}, change))
    assert phase_total(after, phase) < phase_total(before, phase)


def test_remedies_come_in_the_order_of_their_effect(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    estimate = estimate_ppo(PPORun(ppo_config(micro_train_batch_size=16), shapes, LENGTHS))
    assert estimate.largest.name == "training"
    less = []
    for change, other in estimate.changes:
        saved = estimate.peak - phase_total(other(), "training")
        if saved > 0:
            less.append((saved, change))
    assert [line.split(" saves ")[0] for line in estimate.remedies()] == [c for _, c in sorted(less, reverse=True)]
    assert "--micro_train_batch_size 8" in {change for _, change in less}
    assert all(line.endswith(" in training") for line in estimate.remedies())


def test_remedies_name_only_what_helps(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    saver = ppo_config(bf16=True, gradient_checkpointing=True, micro_train_batch_size=1, lora_rank=8)
    remedies = " ".join(estimate_ppo(PPORun(saver, shapes, LENGTHS)).remedies())
    for given in ("--bf16", "--gradient_checkpointing", "--micro_train_batch_size", "--lora_rank"):
        assert given not in remedies


def test_every_remedy_is_a_change_that_the_options_allow(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    for given in ({}, {"offload_idle": True}):
        run = PPORun(ppo_config(train_batch_size=64, **given), shapes, LENGTHS, n_ranks=4)
        for _, other in estimate_ppo(run).changes:
            other()
            changed = other.args[0].config  # type: ignore[attr-defined]
            changed.validate(4)


def test_a_device_that_is_too_small_is_named(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    small = estimate_ppo(PPORun(ppo_config(), shapes, LENGTHS, device_memory=10_000_000))
    assert not small.fits
    assert "DOES NOT FIT" in "\n".join(small.table())
    assert estimate_ppo(PPORun(ppo_config(), shapes, LENGTHS, device_memory=2**40)).fits


def test_the_table_has_a_line_for_each_role_and_phase(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    table = "\n".join(estimate_ppo(PPORun(ppo_config(zero_stage=3), shapes, LENGTHS, n_ranks=4)).table())
    for word in ("actor", "critic", "reward model", "reference", "generation", "experience", "training", "sent by"):
        assert word in table


def test_the_summary_is_what_each_role_lasts_at_and_the_peak(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    million = {role: replace(shape, n_parameters=2**20, n_small=0, vocabulary=0) for role, shape in shapes.items()}
    estimate = estimate_ppo(PPORun(ppo_config(zero_stage=2), million, LENGTHS, n_ranks=4))
    roles = "reward model 4 MiB, critic 7 MiB, actor 7 MiB, reference 4 MiB"  # 4 bytes, and (4 + 8) / 4 where trained
    peak = f"at most {estimate.peak / 2**20:.0f} MiB, in training"
    assert estimate.summary() == f"estimated memory on each of 4 ranks: {roles}; {peak}"


def test_weights_that_do_not_fit_gathered_are_gathered_for_each_token(
    shapes: dict[str, ModelShape], ppo_config: Any
) -> None:
    config = ppo_config(zero_stage=3, max_num_seqs=8)
    large = {"actor": replace(shapes["actor"], n_parameters=10_000_000_000)} | {"critic": shapes["critic"]}
    roomy, tight = (
        estimate_ppo(PPORun(config, large, LENGTHS, n_ranks=8, device_memory=memory * 2**30)) for memory in (400, 40)
    )
    assert roomy.phases[1].passing["gathered weights"] == 40_000_000_000
    assert tight.phases[1].passing["gathered weights"] < 1_000_000_000
    assert tight.sent["generation"] == 100 * roomy.sent["generation"]  # one batch of 8 responses of 100 tokens
    by_threes = PPORun(ppo_config(zero_stage=3, max_num_seqs=3), large, LENGTHS, n_ranks=8, device_memory=40 * 2**30)
    assert estimate_ppo(by_threes).sent["generation"] == 300 * roomy.sent["generation"]


@pytest.mark.parametrize("memory", [70, 115, 130, 200])
@pytest.mark.parametrize("rests", [False, True])
def test_cache_and_gathered_weights_fit_beside_what_lasts_whenever_that_does(
    shapes: dict[str, ModelShape], ppo_config: Any, memory: int, rests: bool
) -> None:
    """Adam's moments come with the first step: what fits the first rollout must fit the second."""
    config = ppo_config(zero_stage=3, rollout_batch_size=2048, generate_max_len=1000, offload_idle=rests)
    large = shapes | {"actor": replace(shapes["actor"], n_parameters=10_000_000_000, layers=200, keys=200)}
    run = PPORun(config, large, LENGTHS, n_ranks=4, device_memory=memory * 2**30)
    estimate = estimate_ppo(run)
    generation = estimate.phases[1]
    assert generation.lasting < run.device_memory
    assert estimate.decode_rows > 1
    gathered, cache = (generation.passing[name] for name in ("gathered weights", "key-value cache"))
    assert generation.lasting + gathered + cache < run.device_memory


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (299, 1), (300, 2), (749, 4), (10_000, 16)])
def test_a_bound_on_tokens_is_as_many_of_the_longest_samples_as_fit(
    shapes: dict[str, ModelShape], ppo_config: Any, tokens: int, rows: int
) -> None:
    """Samples have at most 50 + 100 tokens; a rank has 16 of them."""
    bound = {"micro_train_tokens": tokens, "micro_rollout_tokens": tokens, "zero_stage": 3}
    size = {"micro_train_batch_size": rows, "micro_rollout_batch_size": rows, "zero_stage": 3}
    by_tokens, by_rows = (
        estimate_ppo(PPORun(ppo_config(train_batch_size=64, **options), shapes, LENGTHS, n_ranks=4))
        for options in (bound, size)
    )
    for name in ("experience", "training"):
        assert phase_total(by_tokens, name) == phase_total(by_rows, name)
        assert by_tokens.sent[name] == by_rows.sent[name]


def test_what_is_sent_with_a_bound_on_tokens_by_hand(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    config = ppo_config(zero_stage=3, micro_train_tokens=300, micro_rollout_tokens=450, micro_rollout_batch_size=8)
    sent = estimate_ppo(PPORun(config, shapes, LENGTHS, n_ranks=4)).sent
    actor, scalar = 4 * 999_000 * 3 // 4, 4 * 899_000 * 3 // 4  # one pass in float32, without small parameters
    assert sent["experience"] == 6 * (actor + 2 * scalar)  # 16 samples by 3: reference, critic and reward model
    gradients = 4 * (1_000_000 + 900_000) * 3 // 4
    assert sent["training"] == 4 * 2 * (2 * (actor + scalar) + gradients)  # 4 steps, on each rank 4 samples by 2


def test_passes_that_training_makes_anyway_are_not_sent_twice(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    """Where one optimizer step takes all 64 samples; then experience is exchanged twice instead, and three fields."""

    def sent(**options: Any) -> dict[str, int]:
        config = ppo_config(zero_stage=3, micro_rollout_batch_size=8, train_batch_size=64, **options)
        return estimate_ppo(PPORun(config, shapes, LENGTHS, n_ranks=4)).sent

    actor, scalar = 999_000 * 3 // 4, 899_000 * 3 // 4  # elements of one pass, without small parameters
    at_once, before = sent(), sent(buffer_limit=64)
    assert at_once["experience"] == 2 * 4 * (actor + scalar)  # reference and reward model
    assert before["experience"] == 2 * 4 * (actor + 2 * scalar)
    assert at_once["exchange of experience"] == 2 * before["exchange of experience"]
    assert sent(bf16=True)["experience"] == 2 * 2 * (actor + scalar)
    assert sent(bf16=True, max_epochs=2)["experience"] == 2 * 2 * (2 * actor + scalar)


def test_one_micro_batch_of_many_tokens_accumulates_no_gradient(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    config = ppo_config(micro_train_batch_size=1, micro_train_tokens=16 * 150)
    assert PPORun(config, shapes, LENGTHS).micro_batches == 1
    assert PPORun(ppo_config(micro_train_batch_size=1), shapes, LENGTHS).micro_batches == 16


def test_a_bound_on_tokens_is_lowered_instead_of_a_number_of_samples(
    shapes: dict[str, ModelShape], ppo_config: Any
) -> None:
    estimate = estimate_ppo(PPORun(ppo_config(micro_train_tokens=16 * 150), shapes, LENGTHS))
    changes = [line.split(" saves ")[0] for line in estimate.remedies()]
    assert "--micro_train_tokens 1200" in changes
    assert not any("--micro_train_batch_size" in change for change in changes)


def test_a_replay_buffer_on_the_device_is_there_while_training(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    away, here = (
        estimate_ppo(PPORun(ppo_config(buffer_cpu_offload=offload), shapes, LENGTHS, n_ranks=2))
        for offload in (True, False)
    )
    everyones = (32 + 64) * 150 * 42  # own samples and all, of 150 tokens, 42 bytes each
    assert phase_total(here, "training") - phase_total(away, "training") == everyones
    assert away.host["experience"] - here.host["experience"] == everyones


def test_documents_of_the_ptx_loss_count(shapes: dict[str, ModelShape], ppo_config: Any) -> None:
    with_ptx, without = (
        estimate_ppo(PPORun(ppo_config(), shapes, replace(LENGTHS, document=document))) for document in (2000, 0)
    )
    assert phase_total(with_ptx, "training") > phase_total(without, "training")


def test_pairs_are_two_rows(shape: ModelShape) -> None:
    config = from_options(TrainSFTConfig, pretrain="p", dataset="d", max_len=512)
    one, two = (estimate_supervised(SupervisedRun(config, shape, 512, 512, rows)) for rows in (1, 2))
    activations = [estimate.phases[1].passing["activations and logits"] for estimate in (one, two)]
    assert activations[1] == 2 * activations[0]
    assert any(line.startswith("--max_len 256") for line in two.remedies())
