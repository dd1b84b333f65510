"""Names that several libraries have, in the form that ``foreign.read_table`` reads."""

OTHERS = """
    n_samples, num_samples, samples_per_prompt, group_size = --n_samples_per_prompt
    epochs, num_epochs = --num_episodes | passes over the prompts; --max_epochs are those over each rollout batch
    epochs, num_epochs = --max_epochs
    lr = --actor_learning_rate and --critic_learning_rate
    lr, actor_learning_rate = --learning_rate
    model, model_path, model_name = --pretrain
    reward_model = --reward_pretrain
    reward_function = --reward_fn
    adv_estimator = --advantage_estimator
    clip_ratio, clip_range, clip_eps = --eps_clip
    kl_loss_coef = --init_kl_coef
    max_tokens, max_response_length = --generate_max_len
    out, output, out_dir = --save_path
    log_dir, tensorboard = --use_tensorboard
    wandb = --use_wandb
    resume = --load_checkpoint
"""
"""Short names, for train_ppo first."""
