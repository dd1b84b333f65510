"""The table of what lowers memory: the same in code and docs, and only what the run can still do."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from openppo.config import EvaluateConfig, TrainPPOConfig, TrainSFTConfig, flat_dict, from_options
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
    for phase, text in re.findall(
        r"^\| `(\w+)` \| (`--.*) \|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    ):
        assert set(re.findall("`(--[^`]*)`", text)) <= {r.flag for r in REMEDIES if phase in r.phases} | {
            "--critic_pretrain"
        }


def test_each_flag_is_an_option_of_a_command() -> None:
    groups = [
        group for kind in (TrainPPOConfig, TrainSFTConfig, EvaluateConfig) for group in get_type_hints(kind).values()
    ]
    assert {remedy.option for remedy in REMEDIES} <= {f.name for group in groups for f in fields(group)}


def test_each_phase_has_remedies_of_its_own() -> None:
    assert names("generation") >= {"max_num_seqs", "generate_max_len", "zero_stage"}
    assert names("scoring") >= {"micro_rollout_batch_size"}
    assert names("training") >= {"micro_train_batch_size", "gradient_checkpointing", "adam_offload"}
    assert "micro_train_batch_size" not in names("generation") | names("experience") | names("loading")
    assert "max_num_seqs" not in names("training") | names("loading")
    assert names("saving") >= names("generation") | names("training"), "of an unknown phase all"


def test_flags_that_keep_the_gradient_come_first() -> None:
    flags = remedies("training", ppo(zero_stage=1))
    assert flags[:2] == ["--micro_train_batch_size", "--gradient_checkpointing"]
    assert flags.index("--zero_stage 2") < flags.index("--adam_offload") < flags.index("--generate_max_len")
    assert flags[-1] == "--lora_rank 16"


@pytest.mark.parametrize(
    "given",
    [
        {"zero_stage": 3},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"adam_offload": True},
        {"lora_rank": 8},
        {"micro_train_batch_size": 1},
    ],
)
def test_what_the_run_has_is_not_named(given: dict[str, Any]) -> None:
    assert set(given) <= names("training")
    assert not set(given) & names("training", **given)


def test_options_that_refuse_each_other_are_not_named() -> None:
    assert "offload_idle" in names("generation")
    assert "offload_idle" not in names("generation", adam_offload=True)
    assert "adam_offload" not in names("generation", offload_idle=True) | names("training", zero_stage=0)
    assert "load_in_4bit" in names("training", lora_rank=8)
    assert "load_in_4bit" not in names("training") | names("training", lora_rank=8, zero_stage=3)
    vllm = "vllm_gpu_memory_utilization"
    assert (vllm in names("generation"), vllm in names("generation", rollout_engine="vllm")) == (False, True)


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    assert not any("offload" in flag for flag in remedies("training", ppo(buffer_cpu_offload=False), on_cpu=True))


@pytest.mark.parametrize(("kind", "phase"), [("train", "training"), ("rollout", "experience")])
def test_a_bound_on_tokens_replaces_the_batch_size(kind: str, phase: str) -> None:
    tokens, rows = f"micro_{kind}_tokens", f"micro_{kind}_batch_size"
    assert (tokens in names(phase), rows in names(phase)) == (False, True)
    bounded = names(phase, **{tokens: 4096})
    assert (tokens in bounded, rows in bounded) == (True, False)
    assert "micro_rollout_batch_size" in names("scoring", micro_rollout_tokens=4096), "as reward models have it"


def test_only_flags_of_the_command_are_named() -> None:
    sft = remedies("step", flat_dict(from_options(TrainSFTConfig, pretrain="m", dataset="d")))
    assert "--max_len" in sft
    assert not {"--generate_max_len", "--max_num_seqs", "--buffer_cpu_offload"} & set(sft)
    assert remedies("step", {}) == []


def test_sizes_are_the_options_that_decide_memory() -> None:
    given = sizes(ppo(micro_train_batch_size=3, micro_train_tokens=512))
    assert {"--micro_train_batch_size 3", "--micro_train_tokens 512", "--zero_stage 2", "--lora_rank 0"} <= set(given)
    assert not any(flag.startswith(("--seed", "--micro_rollout_tokens")) for flag in given)
    assert len(given) == len({flag.split()[0] for flag in given})
