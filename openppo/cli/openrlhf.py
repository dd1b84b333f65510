"""Flags of OpenRLHF 0.6.1's single-node train_ppo that OpenPPO does not have; all its others have the same name here.

An OpenRLHF command line runs with the module name changed: flags without a meaning here are dropped with a reason,
or refused with what to use instead. docs/openrlhf.md has the whole table.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignFlag:
    """A flag of OpenRLHF only: dropped because of ``reason``, or refused with ``remedy``.

    With a ``remedy`` only ``dropped_values`` are dropped. An empty ``reason`` drops it without a word.
    """

    takes_value: bool = False
    reason: str = ""
    remedy: str = ""
    dropped_values: tuple[str, ...] = ()


_RAY = "it is of OpenRLHF's train_ppo_ray; here all models share the processes of torchrun. Leave it out."

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "local_rank": ForeignFlag(takes_value=True),  # DeepSpeed's launcher adds it and says the same in LOCAL_RANK
    "disable_ds_ckpt": ForeignFlag(remedy="use --save_steps 0 for no checkpoints."),
    "max_ckpt_mem": ForeignFlag(takes_value=True, reason="--max_ckpt_num alone says how many checkpoints are kept"),
    "max_len": ForeignFlag(takes_value=True, remedy="use --prompt_max_len and --generate_max_len."),
    "aux_loss_coef": ForeignFlag(
        takes_value=True,
        reason="0 is no such loss",
        remedy="there is no balancing loss for mixtures of experts here. Leave it out.",
        dropped_values=("0", "0.0"),
    ),
    "grad_accum_dtype": ForeignFlag(
        takes_value=True,
        reason="gradients are accumulated in float32 anyway",
        remedy="gradients are always accumulated in float32. Leave it out.",
        dropped_values=("fp32",),
    ),
    "actor_init_on_gpu": ForeignFlag(reason="models are moved to the GPU before DeepSpeed wraps them anyway"),
    "gradient_checkpointing_use_reentrant": ForeignFlag(
        reason="--gradient_checkpointing is the non-reentrant kind, with the same gradients"
    ),
    "disable_fast_tokenizer": ForeignFlag(reason="transformers 5 chooses the tokenizer's implementation"),
    "use_ms": ForeignFlag(remedy="download the model with ModelScope and give its folder as --pretrain."),
    "perf": ForeignFlag(reason="times and tokens per second are always in the metrics"),
    "packing_samples": ForeignFlag(reason="how samples are batched never changes the result"),
    **dict.fromkeys(
        (
            *("ref_num_nodes", "ref_num_gpus_per_node", "reward_num_nodes", "reward_num_gpus_per_node"),
            *("actor_num_nodes", "actor_num_gpus_per_node", "critic_num_nodes", "critic_num_gpus_per_node"),
            *("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "ref_reward_offload"),
            *("vllm_num_engines", "vllm_tensor_parallel_size", "vllm_sync_backend", "vllm_sync_with_ray"),
            *("vllm_enable_sleep", "deepspeed_enable_sleep", "enforce_eager"),
            *("enable_prefix_caching", "ring_attn_size", "ring_head_stride"),
        ),
        ForeignFlag(remedy=_RAY),
    ),
}


def without_foreign_flags(arguments: Sequence[str], all_of_them: bool = True) -> tuple[list[str], list[str]]:
    """Take out OpenRLHF's flags that change nothing here, and return one notice per flag with the reason.

    Raises ``ValueError`` with the remedy for a flag whose effect is not available. ``all_of_them``: else only the flag
    of DeepSpeed's launcher.
    """
    kept: list[str] = []
    notices: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        flag = FOREIGN_FLAGS.get(name) if argument.startswith("--") and (all_of_them or name == "local_rank") else None
        if flag is None:
            kept.append(argument)
            continue
        if flag.takes_value and not has_value:
            value = next(remaining, "")
        if flag.remedy and value not in flag.dropped_values:
            raise ValueError(f"--{name} {value}".rstrip() + f" does not exist here: {flag.remedy}")
        if flag.reason:
            notices.append(f"--{name} {value}".rstrip() + f" of OpenRLHF is left out: {flag.reason}.")
    return kept, notices
