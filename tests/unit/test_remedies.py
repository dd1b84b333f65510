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
    return flat_dict(from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="r.py", **options))


def names(phase: str, **options: Any) -> set[str]:
    """Options named for a phase of such a run."""
    return {flag.split()[0][2:] for flag in remedies(phase, ppo(**options))}


def test_docs_print_the_table() -> None:
    rows = re.findall(r"^\| `(--.*)` \| (.*) \|$", (DOCS / "memory.md").read_text(), flags=re.MULTILINE)
    assert rows == [(remedy.flag, remedy.lowers) for remedy in REMEDIES]
    advised = re.findall(r"^\| `(\w+)` \| (`--.*) \|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    for phase, text in advised:
        known = {remedy.flag for remedy in REMEDIES if phase in remedy.phases} | {"--critic_pretrain"}
        assert set(re.findall("`(--[^`]*)`", text)) <= known


def test_each_phase_has_remedies_of_its_own_flags_of_the_command() -> None:
    assert names("generation") >= {"max_num_seqs", "generate_max_len", "zero_stage"}
    assert names("scoring") >= {"micro_rollout_batch_size"}
    assert names("training") >= {"micro_train_batch_size", "gradient_checkpointing", "adam_offload"}
    assert "micro_train_batch_size" not in names("generation") | names("experience") | names("loading")
    assert "max_num_seqs" not in names("training") | names("loading")
    assert names("saving") >= names("generation") | names("training"), "of an unknown phase all"
    sft = remedies("step", flat_dict(from_options(TrainSFTConfig, pretrain="m", dataset="d")))
    assert "--max_len" in sft
    assert not {"--generate_max_len", "--max_num_seqs", "--buffer_cpu_offload"} & set(sft)
    commands = map(declared_options, (TrainPPOConfig, TrainSFTConfig, EvaluateConfig))
    assert {remedy.option for remedy in REMEDIES} <= {name for options in commands for name in options}


def test_flags_that_keep_the_gradient_come_first_and_a_cpu_offloads_nothing() -> None:
    flags = remedies("training", ppo(zero_stage=1))
    assert flags[:2] == ["--micro_train_batch_size", "--gradient_checkpointing"]
    assert flags.index("--zero_stage 2") < flags.index("--adam_offload") < flags.index("--generate_max_len")
    assert flags[-1] == "--lora_rank 16"
    assert not any("offload" in flag for flag in remedies("training", ppo(buffer_cpu_offload=False), on_cpu=True))


NOT_NAMED = [
    *(("training", {name: value}, name) for name, value in (("zero_stage", 3), ("lora_rank", 8), ("bf16", True))),
    *(("training", {name: True}, name) for name in ("gradient_checkpointing", "adam_offload")),
    ("training", {"micro_train_batch_size": 1}, "micro_train_batch_size"),
    ("training", {"micro_train_tokens": 4096}, "micro_train_batch_size"),
    ("experience", {"micro_rollout_tokens": 4096}, "micro_rollout_batch_size"),
    ("generation", {"adam_offload": True}, "offload_idle"),
    ("generation", {"offload_idle": True}, "adam_offload"),
    ("training", {"zero_stage": 0}, "adam_offload"),
]
"""Phase, options that the run has, and the option that it makes useless or refuses."""


@pytest.mark.parametrize(("phase", "given", "name"), NOT_NAMED)
def test_what_the_run_has_or_refuses_is_not_named(phase: str, given: dict[str, Any], name: str) -> None:
    assert name in names(phase)
    assert name not in names(phase, **given)


@pytest.mark.parametrize(
    ("phase", "name", "needed"),
    [
        ("generation", "vllm_gpu_memory_utilization", {"rollout_engine": "vllm"}),
        ("training", "load_in_4bit", {"lora_rank": 8}),
        ("training", "micro_train_tokens", {"micro_train_tokens": 4096}),
        ("experience", "micro_rollout_tokens", {"micro_rollout_tokens": 4096}),
    ],
)
def test_what_needs_another_option_is_named_with_it(phase: str, name: str, needed: dict[str, Any]) -> None:
    assert name not in names(phase)
    assert name in names(phase, **needed)
    assert "load_in_4bit" not in names("training", lora_rank=8, zero_stage=3)
    assert "micro_rollout_batch_size" in names("scoring", micro_rollout_tokens=4096), "as reward models have it"


def test_sizes_are_the_options_that_decide_memory() -> None:
    given = sizes(ppo(micro_train_batch_size=3, micro_train_tokens=512))
    assert {"--micro_train_batch_size 3", "--micro_train_tokens 512", "--zero_stage 2", "--lora_rank 0"} <= set(given)
    assert not any(flag.startswith(("--seed", "--micro_rollout_tokens")) for flag in given)
    assert len(given) == len({flag.split()[0] for flag in given})
