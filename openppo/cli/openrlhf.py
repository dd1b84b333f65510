"""Flags of OpenRLHF 0.6.1's single-node train_ppo that OpenPPO does not have; all others have the same name.

An OpenRLHF command line runs with the module name changed: flags with another form here are rewritten, flags without
a meaning are dropped with a reason, or refused with a remedy. docs/openrlhf.md has the whole table.
"""

import os
from collections.abc import Sequence

ALSO_FLAGS = ("zpg", "overlap_comm", "value_head_prefix", "kl_horizon")
"""Options of files here that are flags of OpenRLHF, and may be given as such."""

WANDB_VARIABLES = {
    "wandb_project": "WANDB_PROJECT",
    "wandb_run_name": "WANDB_NAME",
    "wandb_group": "WANDB_RUN_GROUP",
    "wandb_org": "WANDB_ENTITY",
}
"""Variables that the package wandb reads, by the flag of OpenRLHF that says the same."""

_EMA_BETA = "0.992"
"""OpenRLHF's share of the old average."""

DROPPED = {
    # Dropped in silence: DeepSpeed's launcher adds it and sets LOCAL_RANK, too.
    "local_rank": "",
    "max_ckpt_mem": "--max_ckpt_num alone says how many checkpoints are kept",
    **dict.fromkeys(("aux_loss_coef 0", "aux_loss_coef 0.0"), "0 is no such loss"),
    "grad_accum_dtype fp32": "gradients are accumulated in float32 anyway",
    "actor_init_on_gpu": "models are moved to the GPU before DeepSpeed wraps them anyway",
    "gradient_checkpointing_use_reentrant": "--gradient_checkpointing gives the same gradients",
    "disable_fast_tokenizer": "transformers 5 chooses the tokenizer's implementation",
    "perf": "times and tokens per second are always in the metrics",
    "packing_samples": "how samples are batched never changes the result",
}
"""Reasons by flag that changes nothing here; a flag with a value does so for that value only."""

_RAY = """
    ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node actor_num_nodes
    actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward
    colocate_all_models ref_reward_offload vllm_num_engines vllm_sync_backend
    vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep enforce_eager enable_prefix_caching ring_attn_size
    ring_head_stride
""".split()

REFUSED = {
    "disable_ds_ckpt": "use --save_steps 0 for no checkpoints.",
    "max_len": "use --prompt_max_len and --generate_max_len.",
    "aux_loss_coef": "there is no balancing loss for mixtures of experts here. Leave it out.",
    "grad_accum_dtype": "gradients are always accumulated in float32. Leave it out.",
    "use_ms": "download the model with ModelScope and give its folder as --pretrain.",
    **dict.fromkeys(
        _RAY,
        "it is of OpenRLHF's train_ppo_ray; here all models share the processes of torchrun. Leave it out.",
    ),
}
"""Remedies by flag whose effect is not available."""


def without_foreign_flags(
    arguments: Sequence[str], all_of_them: bool = True
) -> tuple[list[str], list[str]]:
    """Rewrite or take out OpenRLHF's flags that we do not have; return all words, and notices with reasons.

    Those of W&B become variables of the environment. Raises ``ValueError`` with the remedy for a flag whose effect is
    not available. Without ``all_of_them`` only flags of DeepSpeed's launcher and of W&B count.
    """
    foreign = {"local_rank", *WANDB_VARIABLES}
    if all_of_them:
        foreign |= {"enable_ema", *(flag.split()[0] for flag in (*DROPPED, *REFUSED))}

    kept: list[str] = []
    notices: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in foreign:
            kept.append(argument)
            continue

        if name == "enable_ema":
            if not any(word.startswith("--ema_beta") for word in arguments):
                kept.append(f"--ema_beta={_EMA_BETA}")
            continue

        if not has_value and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if name in WANDB_VARIABLES:
            variable = WANDB_VARIABLES[name]
            os.environ[variable] = value
            notices.append(f"--{name} of OpenRLHF is read as {variable}={value}.")
            continue

        option = f"{name} {value}".rstrip()
        reason = DROPPED.get(option, DROPPED.get(name))
        if reason is None:
            raise ValueError(f"--{option} does not exist here: {REFUSED[name]}")
        if reason:
            notices.append(f"--{option} of OpenRLHF is left out: {reason}.")
    return kept, notices
