"""Names of TRL 1.12, in the form that ``foreign.read_table`` reads."""

PPO = """
    learning_rate (3e-6) = --actor_learning_rate and --critic_learning_rate
    num_mini_batches (1) = --train_batch_size | samples of one optimizer step
    total_episodes (None) = --max_samples | prompts, times --num_episodes passes over them
    local_rollout_forward_batch_size (64) = --micro_rollout_batch_size | --max_num_seqs limits what is decoded at a time
    num_sample_generations (10) = --eval_steps | with --eval_data
    response_length (53) = --generate_max_len
    stop_token (None), stop_token_id (None) = --stop_token_ids | every EOS id ends a response anyway
    sft_model_path = --pretrain
    reward_model_path = --reward_pretrain
    world_size, num_total_batches = none | the launcher and the sizes of batches say it
    micro_batch_size, local_mini_batch_size, mini_batch_size = --train_batch_size | sizes are of the whole run
    local_batch_size, batch_size = --rollout_batch_size and --train_batch_size | sizes are of the whole run
    push_to_hub (off) = none | upload the saved folder with hf upload
    model_adapter_name, ref_adapter_name = --lora_rank | the reference is the actor with its adapters off
    num_ppo_epochs (4) = --max_epochs
    whiten_rewards (off) = --normalize_reward | running or group, and without the KL
    kl_coef (0.05) = --init_kl_coef
    cliprange (0.2) = --eps_clip
    vf_coef (0.1) = --critic_learning_rate | actor and critic have an optimizer each
    cliprange_value (0.2) = --value_clip
    lam (0.95) = --lambd
    ds3_gather_for_generation (on) = none | weights are always gathered once per rollout
"""
"""Fields of PPOConfig."""

TRAINING = """
    output_dir = --save_path
    per_device_train_batch_size (8) = --micro_train_batch_size | it changes memory and speed, never the gradient
    gradient_accumulation_steps (1) = --train_batch_size | samples of one optimizer step, however they are accumulated
    num_train_epochs (3) = --num_episodes | passes over the prompts; --max_epochs are those over each rollout batch
    per_device_eval_batch_size = none | evaluation decodes as training does
    lr_scheduler_type (linear) = --lr_scheduler
    warmup_steps = --lr_warmup_ratio | a share of all steps
    weight_decay = --l2
    adam_beta1, adam_beta2 (0.999) = --adam_betas | both numbers
    max_grad_norm (1.0) = --max_norm
    report_to = --use_wandb or --use_tensorboard | the latter takes a folder; the logs in --save_path are always written
    save_total_limit = --max_ckpt_num
    resume_from_checkpoint = --load_checkpoint
    eval_strategy = --eval_steps | also --eval_before_training
    deepspeed = --zero_stage | also --adam_offload, and in a --config file the lines 'zpg' and 'overlap_comm'
    peft_config = --lora_rank | also --lora_alpha, --lora_dropout and --target_modules
    callbacks = none | give them to build_ppo_trainer(config, callbacks=[...])
    processing_class = none | give it to build_ppo_trainer(config, tokenizer=...)
    use_liger_kernel = --fused_kernels
    fp16, fsdp, torch_empty_cache_steps = none | use --bf16 and --zero_stage
"""
"""Fields of TrainingArguments, and arguments of trainers."""

GRPO = """
    beta (0.0) = --init_kl_coef | in the loss as there with --use_kl_loss --kl_estimator k3
    num_generations (8) = --n_samples_per_prompt
    num_generations_eval = --eval_n_samples_per_prompt
    max_completion_length (512), max_new_tokens = --generate_max_len
    max_prompt_length = --prompt_max_len | longer prompts are dropped, or cut with --prompt_truncation left
    generation_batch_size, steps_per_generation = --rollout_batch_size | prompts, --n_samples_per_prompt responses each
    num_iterations (1) = --max_epochs
    epsilon (0.2) = --eps_clip
    epsilon_high = --eps_clip_high | of loss_type cispo too
    delta = --dual_clip
    loss_type (dapo) = --loss_agg | dapo: token_mean, grpo: sequence_mean, dr_grpo: constant; cispo: --policy_loss_type
    importance_sampling_level (token) = --policy_loss_type gspo | for sequence
    scale_rewards (group) = --advantage_estimator | group_norm divides by the std of the group, dr_grpo does not
    mask_truncated_completions (off) = --overlong_filter
    use_vllm (off) = --rollout_engine vllm
    vllm_importance_sampling_correction (on), vllm_importance_sampling_mode = --rollout_correction | tis cuts, mis masks
    vllm_importance_sampling_clip_max (3.0), vllm_importance_sampling_cap = --rollout_correction | its word high=NUMBER
    vllm_importance_sampling_clip_min = --rollout_correction | its word low=NUMBER
    min_p, repetition_penalty = none | log-probs are those of the model at --temperature, cut by --top_p and --top_k
    sync_ref_model, ref_model_sync_steps, ref_model_mixup_alpha = none | the reference stays as it is
    top_entropy_quantile, use_adaptive_entropy, multi_objective_aggregation = none | leave it out
    log_completions = --log_samples_every
    max_tool_calling_iterations = --max_turns
    reward_funcs = --reward_fn | a file, path.py:name; built in are those of --verifiable_reward
    reward_model_name_or_path = --reward_pretrain
    model_name_or_path = --pretrain
    model_revision, model_init_kwargs, load_in_8bit, use_dora, use_rslora = none | download the model, give its folder
    dtype (float32), torch_dtype = --bf16
    attn_implementation = --flash_attn | without it PyTorch's attention
    use_peft (off), lora_r (16) = --lora_rank
    lora_target_modules = --target_modules
    dataset_name = --prompt_data
    dataset_train_split (train) = --prompt_split
    dataset_test_split (test) = --eval_split
    dataset_config = none | write it behind the name, as in openai/gsm8k@main
    warmup_ratio = --lr_warmup_ratio
    run_name = the environment variable WANDB_NAME
    logging_dir = --use_tensorboard
    save_strategy = --save_steps
    eval_on_start = --eval_before_training
    load_best_model_at_end, metric_for_best_model = --keep_best | name the metric
    gradient_checkpointing_kwargs, remove_unused_columns, disable_dropout = none | leave it out
"""
"""Fields of GRPOConfig, RLOOConfig, ModelConfig and ScriptArguments, and names of earlier versions."""

SUPERVISED = """
    num_train_epochs (3) = --max_epochs
    max_length (1024), max_seq_length = --max_len | longer samples are dropped
    dataset_name = --dataset
    dataset_train_split (train) = --dataset_split
    dataset_text_field (text) = --input_key | with --output_key None
    completion_only_loss, assistant_only_loss = --output_key | loss is on responses; None trains on all tokens
    packing_strategy, padding_free, eval_packing = --packing
    chat_template_path = --chat_template
    center_rewards_coefficient, pad_token, eos_token, activation_offloading = none | leave it out
    deepspeed = --zero_stage
"""
"""Fields of SFTConfig and RewardConfig that have another flag in our supervised commands."""
