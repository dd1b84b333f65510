"""The table of what lowers memory: the same in code and docs, and only what the run can still do."""

import re
from pathlib import Path
from typing import Any

import pytest

from openppo.config import EvaluateConfig, TrainPPOConfig, TrainSFTConfig, flat_dict, from_options
from openppo.config.fields import declared_options
from openppo.config.remedies import REMEDIES, remedies, sizes

DOCS = Path(__file__).parents[2] / "docs"


def ppo(**options: Any) -> dict[str, Any]:
    """All options of a train_ppo run."""
    return flat_dict(
        from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="r.py", **options)
    )


def test_docs_print_the_table():
    flags = re.findall(
        r"^\| `(--.*)` \| .* \|$", (DOCS / "memory.md").read_text(), flags=re.MULTILINE
    )
    assert flags == list(REMEDIES)
    advised = re.findall(
        r"^\| `(\w+)` \| (`--.*) \|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    phases = set().union(*REMEDIES.values())
    of_phases = {phase: text for phase, text in advised if phase in phases}
    assert len(of_phases) > 3
    for phase, text in of_phases.items():
        known = {flag for flag, phases in REMEDIES.items() if phase in phases} | {
            "--critic_pretrain"
        }
        assert set(re.findall("`(--[^`]*)`", text)) <= known


BASIC = "zero_stage lora_rank bf16 adam_offload"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("loading", {}, "zero_stage lora_rank", "micro_train_batch_size max_num_seqs"),
    (
        "generation",
        {},
        f"max_num_seqs offload_idle {BASIC}",
        "micro_train_batch_size vllm_gpu_memory_utilization",
    ),
    ("generation", {"rollout_engine": "vllm"}, "vllm_gpu_memory_utilization", ""),
    ("generation", {"adam_offload": True}, "", "adam_offload offload_idle"),
    ("generation", {"offload_idle": True}, "", "adam_offload offload_idle"),
    (
        "scoring",
        {"micro_rollout_tokens": 4096},
        "micro_rollout_batch_size",
        "",
    ),  # as reward models have it
    (
        "experience",
        {},
        f"micro_rollout_batch_size {BASIC}",
        "micro_train_batch_size micro_rollout_tokens",
    ),
    (
        "experience",
        {"micro_rollout_tokens": 4096},
        "micro_rollout_tokens",
        "micro_rollout_batch_size",
    ),
    (
        "training",
        {},
        f"micro_train_batch_size gradient_checkpointing {BASIC}",
        "load_in_4bit micro_train_tokens",
    ),
    ("training", {"micro_train_tokens": 4096}, "micro_train_tokens", "micro_train_batch_size"),
    ("training", {"micro_train_batch_size": 1}, "", "micro_train_batch_size"),
    (
        "training",
        {"zero_stage": 3, "lora_rank": 8},
        "adam_offload",
        "zero_stage lora_rank load_in_4bit",
    ),
    ("training", {"zero_stage": 0, "lora_rank": 8}, "load_in_4bit", "adam_offload"),
    ("training", {"bf16": True, "gradient_checkpointing": True}, "", "bf16 gradient_checkpointing"),
    ("saving", {}, f"micro_train_batch_size max_num_seqs {BASIC}", ""),  # of an unknown phase all
]
"""Phase, options that the run has, options that are named, and options that are not."""


@pytest.mark.parametrize(("phase", "given", "named", "others"), CASES)
def test_what_lowers_memory_in_a_phase_is_named_unless_the_run_has_or_refuses_it(
    phase, given, named, others
):
    found = {flag.split()[0][2:] for flag in remedies(phase, ppo(**given))}
    assert found >= set(named.split())
    assert found & set(others.split()) == set()


def test_flags_are_of_the_command_and_those_that_keep_the_gradient_come_first():
    sft = remedies("step", flat_dict(from_options(TrainSFTConfig, pretrain="m", dataset="d")))
    assert "--max_len" in sft
    assert not {"--generate_max_len", "--max_num_seqs", "--offload_idle"} & set(sft)
    commands = map(declared_options, (TrainPPOConfig, TrainSFTConfig, EvaluateConfig))
    assert {flag.split()[0][2:] for flag in REMEDIES} <= {
        name for options in commands for name in options
    }
    flags = remedies("training", ppo(zero_stage=1))
    assert flags[:2] == ["--micro_train_batch_size", "--gradient_checkpointing"]
    assert (
        flags.index("--zero_stage 2")
        < flags.index("--adam_offload")
        < flags.index("--generate_max_len")
    )
    assert flags[-1] == "--lora_rank 16"
    assert not any("offload" in flag for flag in remedies("training", ppo(), on_cpu=True))


def test_sizes_are_the_options_that_decide_memory():
    given = sizes(ppo(micro_train_batch_size=3, micro_train_tokens=512))
    assert {
        "--micro_train_batch_size 3",
        "--micro_train_tokens 512",
        "--zero_stage 2",
        "--lora_rank 0",
    } <= set(given)
    assert not any(flag.startswith(("--seed", "--micro_rollout_tokens")) for flag in given)
    assert len(given) == len({flag.split()[0] for flag in given})
