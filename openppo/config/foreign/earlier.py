"""Options of earlier versions of this library, in the form that ``foreign.read_table`` reads."""

EARLIER = """
    wandb_project = the environment variable WANDB_PROJECT
    wandb_run_name = the environment variable WANDB_NAME
    wandb_group = the environment variable WANDB_RUN_GROUP
    wandb_org = the environment variable WANDB_ENTITY
    wandb_mode = the environment variable WANDB_MODE
    rollout_correction_low = --rollout_correction | as in --rollout_correction mis low=0.5
    rollout_correction_high = --rollout_correction | as in --rollout_correction tis high=2
    rollout_correction_level = --rollout_correction | as in --rollout_correction mis level=sequence
    rollout_correction_veto = --rollout_correction | as in --rollout_correction mis veto=1e-4
    dynamic_sampling_max_batches = --dynamic_sampling | as in --dynamic_sampling 10
    enable_ema = --ema_beta | its value in OpenRLHF is 0.992
    reward_normalizer = --normalize_reward | as in --normalize_reward running
    verify_regex = --verifiable_reward | as in --verifiable_reward regex:PATTERN
    verify_length = --verifiable_reward | as in --verifiable_reward length:200
    cispo_eps_max = --eps_clip_high | with --policy_loss_type cispo
    dry_run_ranks, dry_run_memory = --dry_run | 8x80 for eight GPUs of 80 GiB
    dump_tokens = --dump_rollouts | tokens are always in it
    buffer_limit, buffer_cpu_offload = none | the samples of a rollout are kept in CPU memory; leave it out
"""
"""Options that have another form now, or none."""
