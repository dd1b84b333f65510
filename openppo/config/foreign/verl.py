"""Names of verl's main_ppo, 0.9 and some earlier ones, in the form that ``foreign.read_table`` reads."""

PPO = """
    data.train_files = --prompt_data | several with commas
    data.val_files = --eval_data
    data.train_max_samples (-1) = --max_samples
    data.val_max_samples (-1), data.val_batch_size = none | all of --eval_data is evaluated
    data.prompt_key (prompt) = --input_key | rows of verl are recognized without it
    data.reward_fn_key (data_source) = none | a --reward_fn gets each column that its parameters name
    data.image_key (images) = --image_key
    data.video_key (videos) = --video_key
    data.max_prompt_length (512) = --prompt_max_len
    data.max_response_length (512) = --generate_max_len
    data.truncation (error), data.filter_overlong_prompts (off) = --prompt_truncation
    data.train_batch_size (1024) = --rollout_batch_size | prompts of a step
    data.gen_batch_size = --dynamic_sampling | further batches have the same size
    data.shuffle (on), data.seed = --seed | prompts are always shuffled
    data.custom_cls.path, data.custom_cls.name = --dataset_class | path.py:name
    data.apply_chat_template_kwargs = --chat_template_kwargs | with --apply_chat_template
    data.tool_config_path = --tools
    data.trust_remote_code (off), actor_rollout_ref.model.trust_remote_code (off) = --trust_remote_code
    data.filter_overlong_prompts_workers (1) = --dataset_num_proc
    data.dataloader_num_workers, data.return_raw_chat, data.return_raw_input_ids, data.return_full_prompt
    = none | leave it out
    actor_rollout_ref.model.path = --pretrain
    actor_rollout_ref.model.custom_chat_template = --chat_template | a file, with --apply_chat_template
    actor_rollout_ref.model.enable_gradient_checkpointing (on) = --gradient_checkpointing
    actor_rollout_ref.model.use_liger (off), actor_rollout_ref.model.use_fused_kernels (off) = --fused_kernels
    actor_rollout_ref.model.use_remove_padding (on) = none | how samples are batched never changes the result
    actor_rollout_ref.model.lora_rank (0) = --lora_rank
    actor_rollout_ref.model.lora_alpha (16) = --lora_alpha
    actor_rollout_ref.model.target_modules (all-linear) = --target_modules
    actor_rollout_ref.actor.ppo_mini_batch_size (256) = --train_batch_size | samples, verl counts prompts
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = --micro_train_batch_size
    actor_rollout_ref.actor.use_dynamic_bsz (off) = --micro_train_tokens | batches count tokens by default
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu (16384) = --micro_train_tokens
    actor_rollout_ref.actor.ppo_epochs (1) = --max_epochs
    actor_rollout_ref.actor.clip_ratio (0.2), actor_rollout_ref.actor.clip_ratio_low (0.2) = --eps_clip
    actor_rollout_ref.actor.clip_ratio_high (0.2) = --eps_clip_high
    actor_rollout_ref.actor.clip_ratio_c (3.0) = --dual_clip
    actor_rollout_ref.actor.policy_loss.loss_mode (vanilla) = --policy_loss_type
    actor_rollout_ref.actor.loss_agg_mode (token-mean) = --loss_agg
    actor_rollout_ref.actor.entropy_coeff (0) = --entropy_coef
    actor_rollout_ref.actor.use_kl_loss (off) = --use_kl_loss
    actor_rollout_ref.actor.kl_loss_coef (0.001) = --init_kl_coef | with --use_kl_loss
    actor_rollout_ref.actor.kl_loss_type (low_var_kl) = --kl_estimator | with --use_kl_loss
    actor_rollout_ref.actor.optim.lr (1e-6) = --actor_learning_rate
    actor_rollout_ref.actor.optim.lr_warmup_steps (-1) = --lr_warmup_ratio | a share of all steps
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio (0), critic.optim.lr_warmup_steps_ratio (0) = --lr_warmup_ratio
    actor_rollout_ref.actor.optim.lr_scheduler_type (constant) = --lr_scheduler
    actor_rollout_ref.actor.optim.weight_decay (0.01), critic.optim.weight_decay (0.01) = --l2 | of both
    actor_rollout_ref.actor.optim.betas (0.9 0.999), critic.optim.betas (0.9 0.999) = --adam_betas | of both
    actor_rollout_ref.actor.grad_clip (1.0), critic.grad_clip (1.0) = --max_norm | of both
    actor_rollout_ref.actor.strategy (fsdp), actor_rollout_ref.actor.fsdp_config.fsdp_size (-1) = --zero_stage
    actor_rollout_ref.actor.fsdp_config.optimizer_offload (off) = --adam_offload
    actor_rollout_ref.actor.fsdp_config.param_offload (off), actor_rollout_ref.ref.fsdp_config.param_offload (off)
    = none | --zero_stage 3 divides the weights among the ranks
    actor_rollout_ref.actor.use_torch_compile (on) = --compile
    actor_rollout_ref.actor.freeze_vision_tower (off) = --freeze_vision_tower
    actor_rollout_ref.actor.checkpoint.save_contents = --save_hf_ckpt | for hf_model in it
    actor_rollout_ref.actor.ulysses_sequence_parallel_size (1) = none | a sequence lies on one rank
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu = --micro_rollout_batch_size
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = --micro_rollout_batch_size
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu (16384) = --micro_rollout_tokens
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu (16384) = --micro_rollout_tokens
    actor_rollout_ref.rollout.name = --rollout_engine
    actor_rollout_ref.rollout.n (1) = --n_samples_per_prompt
    actor_rollout_ref.rollout.temperature (1.0) = --temperature
    actor_rollout_ref.rollout.top_p (1) = --top_p
    actor_rollout_ref.rollout.top_k (-1) = --top_k
    actor_rollout_ref.rollout.prompt_length (512) = --prompt_max_len
    actor_rollout_ref.rollout.response_length (512) = --generate_max_len
    actor_rollout_ref.rollout.gpu_memory_utilization (0.5) = --vllm_gpu_memory_utilization
    actor_rollout_ref.rollout.tensor_model_parallel_size (2) = --vllm_tensor_parallel_size
    actor_rollout_ref.rollout.max_num_seqs (256) = --max_num_seqs
    actor_rollout_ref.rollout.val_kwargs.temperature (0) = --eval_temperature
    actor_rollout_ref.rollout.val_kwargs.n (1) = --eval_n_samples_per_prompt
    actor_rollout_ref.rollout.val_kwargs.do_sample (off) = --eval_temperature | 0 takes the likeliest token
    actor_rollout_ref.rollout.multi_turn.enable (off) = --tools | or --agent, --environment, --agent_command
    actor_rollout_ref.rollout.multi_turn.tool_config_path = --tools | the same YAML file
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns = --max_turns
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length (256)
    = the line 'max_tool_response_tokens' of a --config file
    actor_rollout_ref.rollout.multi_turn.format (hermes) = --tool_parser
    actor_rollout_ref.rollout.agent.default_agent_loop, actor_rollout_ref.rollout.agent.agent_loop_config_path
    = --agent | path.py:name of a coroutine
    actor_rollout_ref.rollout.mode, actor_rollout_ref.rollout.dtype, actor_rollout_ref.rollout.load_format,
    actor_rollout_ref.rollout.enforce_eager, actor_rollout_ref.rollout.free_cache_engine,
    actor_rollout_ref.rollout.enable_chunked_prefill, actor_rollout_ref.rollout.max_num_batched_tokens,
    actor_rollout_ref.rollout.max_model_len = none | leave it out
    critic.model.path = --critic_pretrain
    critic.optim.lr (1e-5) = --critic_learning_rate
    critic.cliprange_value (0.5) = --value_clip
    critic.ppo_mini_batch_size (256) = --train_batch_size | of actor and critic
    critic.ppo_micro_batch_size_per_gpu = --micro_train_batch_size | of actor and critic
    critic.ppo_max_token_len_per_gpu (32768) = --micro_train_tokens | of actor and critic
    critic.ppo_epochs (1) = --max_epochs | of actor and critic
    critic.model.enable_gradient_checkpointing = --gradient_checkpointing | of actor and critic
    critic.enable = --advantage_estimator | gae alone has a critic
    algorithm.adv_estimator (gae) = --advantage_estimator
    algorithm.gamma (1.0) = --gamma
    algorithm.lam (1.0) = --lambd
    algorithm.norm_adv_by_std_in_grpo (on) = --advantage_estimator | off is dr_grpo, with --loss_agg token_mean
    algorithm.use_kl_in_reward (off) = --init_kl_coef | 0 is off; --use_kl_loss puts the penalty into the loss instead
    algorithm.kl_penalty (kl) = --kl_estimator
    algorithm.kl_ctrl.kl_coef (0.001) = --init_kl_coef
    algorithm.kl_ctrl.type (fixed), algorithm.kl_ctrl.target_kl (0.1) = --kl_target | adaptive if given
    algorithm.kl_ctrl.horizon (10000) = the line 'kl_horizon' of a --config file
    algorithm.filter_groups.enable (off) = --dynamic_sampling
    algorithm.filter_groups.metric (reward) = none | --dynamic_sampling compares the rewards
    algorithm.filter_groups.max_num_gen_batches (0) = --dynamic_sampling
    algorithm.rollout_correction.rollout_is = --rollout_correction tis | with level=sequence for sequences
    algorithm.rollout_correction.rollout_is_threshold (2.0) = --rollout_correction | its word high=NUMBER
    algorithm.rollout_correction.rollout_rs = --rollout_correction mis | with level=sequence for sequences
    algorithm.rollout_correction.rollout_rs_threshold = --rollout_correction | its words low=NUMBER and high=NUMBER
    algorithm.rollout_correction.bypass_mode (off) = --old_log_probs rollout
    algorithm.use_pf_ppo (off) = none | leave it out
    reward.reward_model.enable (off), reward_model.enable = --reward_pretrain | a model that is given counts
    reward.reward_model.model_path, reward_model.model.path = --reward_pretrain
    reward.custom_reward_function.path, custom_reward_function.path = --reward_fn | path.py:name
    reward.custom_reward_function.name (compute_score), custom_reward_function.name = --reward_fn | path.py:name
    reward.reward_manager.name (naive), reward_model.reward_manager = --reward_fn | or --verifiable_reward
    reward.num_workers (8), reward_model.num_workers = --reward_workers
    reward.reward_kwargs.overlong_buffer_cfg.len, reward_model.reward_kwargs.overlong_buffer_cfg.len
    = --overlong_buffer_len
    reward.reward_kwargs.overlong_buffer_cfg.penalty_factor,
    reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor
    = --overlong_penalty_factor
    trainer.total_epochs (30) = --num_episodes
    trainer.total_training_steps = --max_steps
    trainer.project_name (verl_examples) = the environment variable WANDB_PROJECT
    trainer.experiment_name (gsm8k) = the environment variable WANDB_NAME
    trainer.logger (console wandb) = --use_wandb or --use_tensorboard | the logs in --save_path are always written
    trainer.log_val_generations (0) = --log_samples_every
    trainer.rollout_data_dir, trainer.validation_data_dir = --dump_rollouts
    trainer.nnodes (1), trainer.n_gpus_per_node (8) = none | start as many processes with torchrun
    trainer.save_freq (-1) = --save_steps | here -1 saves after each pass over the prompts
    trainer.test_freq (-1) = --eval_steps | here -1 evaluates after each pass over the prompts
    trainer.val_before_train (on) = --eval_before_training
    trainer.val_only (off) = --val_only
    trainer.resume_mode (auto), trainer.resume_from_path = --load_checkpoint
    trainer.default_local_dir = --ckpt_path | the trained model goes to --save_path
    trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep = --max_ckpt_num
    trainer.critic_warmup (0) = --freezing_actor_steps | of N steps verl freezes N - 1
    trainer.balance_batch, trainer.device, trainer.default_hdfs_dir, trainer.use_v1 = none | leave it out
"""
"""Keys of ppo_trainer.yaml, which are overridden on the command line."""
