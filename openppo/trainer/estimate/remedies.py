"""Changes of flags that may lower a peak, as they are written on the command line, with the config that they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from openppo.config import TrainPPOConfig
from openppo.config.commands import SupervisedCommand

Config = TypeVar("Config", TrainPPOConfig, SupervisedCommand)

_LORA_RANK = 16
_DECODE_ROWS = 64


def ppo_changes(config: TrainPPOConfig) -> Iterator[tuple[str, TrainPPOConfig]]:
    """For train_ppo."""
    for change in _shared_changes(config):
        if not (config.ppo.offload_idle and change[0] == "--adam_offload"):  # which has what it would offload
            yield change
    ppo, generation = config.ppo, config.generation
    if not ppo.offload_idle and not config.deepspeed.adam_offload:
        yield "--offload_idle", replace(config, ppo=replace(ppo, offload_idle=True))
    rows, new = ppo.micro_rollout_batch_size // 2, generation.generate_max_len // 2
    if rows > 0:
        yield f"--micro_rollout_batch_size {rows}", replace(config, ppo=replace(ppo, micro_rollout_batch_size=rows))
    if ppo.micro_train_tokens is not None and ppo.micro_train_tokens > 1:
        tokens = ppo.micro_train_tokens // 2
        yield f"--micro_train_tokens {tokens}", replace(config, ppo=replace(ppo, micro_train_tokens=tokens))
    if ppo.micro_rollout_tokens is not None and ppo.micro_rollout_tokens > 1:
        tokens = ppo.micro_rollout_tokens // 2
        yield f"--micro_rollout_tokens {tokens}", replace(config, ppo=replace(ppo, micro_rollout_tokens=tokens))
    if generation.rollout_engine == "vllm":
        share = round(generation.vllm_gpu_memory_utilization / 2, 3)
        less = replace(generation, vllm_gpu_memory_utilization=share)
        yield f"--vllm_gpu_memory_utilization {share}", replace(config, generation=less)
    seqs = (generation.max_num_seqs or _DECODE_ROWS) // 2
    if seqs > 0:
        yield f"--max_num_seqs {seqs}", replace(config, generation=replace(generation, max_num_seqs=seqs))
    if new > 0:
        yield f"--generate_max_len {new}", replace(config, generation=replace(generation, generate_max_len=new))


def supervised_changes(config: SupervisedCommand) -> Iterator[tuple[str, SupervisedCommand]]:
    """For train_sft, train_rm and train_prm."""
    yield from _shared_changes(config)
    half = config.supervised.max_len // 2
    yield f"--max_len {half}", replace(config, supervised=replace(config.supervised, max_len=half))


def _shared_changes(config: Config) -> Iterator[tuple[str, Config]]:
    deepspeed, lora, batch = config.deepspeed, config.lora, config.batch
    rows = batch.micro_train_batch_size // 2
    if rows > 0:
        yield f"--micro_train_batch_size {rows}", replace(config, batch=replace(batch, micro_train_batch_size=rows))
    if not deepspeed.gradient_checkpointing:
        yield "--gradient_checkpointing", replace(config, deepspeed=replace(deepspeed, gradient_checkpointing=True))
    if not deepspeed.bf16:
        yield "--bf16", replace(config, deepspeed=replace(deepspeed, bf16=True))
    if deepspeed.overlap_comm:
        yield "--no_overlap_comm", replace(config, deepspeed=replace(deepspeed, overlap_comm=False))
    if not deepspeed.adam_offload and deepspeed.zero_stage > 0:
        yield "--adam_offload", replace(config, deepspeed=replace(deepspeed, adam_offload=True))
    if deepspeed.zero_stage < 2:
        yield "--zero_stage 2", replace(config, deepspeed=replace(deepspeed, zero_stage=2))
    if deepspeed.zero_stage < 3 and not lora.load_in_4bit:
        yield "--zero_stage 3", replace(config, deepspeed=replace(deepspeed, zero_stage=3))
    if lora.lora_rank == 0:
        yield f"--lora_rank {_LORA_RANK}", replace(config, lora=replace(lora, lora_rank=_LORA_RANK))
    elif deepspeed.zero_stage < 3 and not lora.load_in_4bit:
        yield "--load_in_4bit", replace(config, lora=replace(lora, load_in_4bit=True))
