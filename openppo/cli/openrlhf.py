"""Flags of OpenRLHF 0.6.1's single-node train_ppo that OpenPPO does not have; all others have the same name.

An OpenRLHF command line runs with the module name changed: flags without a meaning here are dropped with a reason,
or refused with a remedy. docs/openrlhf.md has the whole table.
"""

from collections.abc import Sequence

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
    """Take out OpenRLHF's flags that change nothing here; return the others, and notices with reasons.

    Raises ``ValueError`` with the remedy for a flag whose effect is not available. Without ``all_of_them`` only the
    flag of DeepSpeed's launcher is taken out.
    """
    foreign = {"local_rank"}
    if all_of_them:
        foreign = {flag.split()[0] for flag in (*DROPPED, *REFUSED)}

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

        if not has_value and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        option = f"{name} {value}".rstrip()
        reason = DROPPED.get(option, DROPPED.get(name))
        if reason is None:
            raise ValueError(f"--{option} does not exist here: {REFUSED[name]}")
        if reason:
            notices.append(f"--{option} of OpenRLHF is left out: {reason}.")
    return kept, notices
