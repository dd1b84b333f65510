#!/usr/bin/env bash
# GRPO: no critic, several responses to each prompt are compared: bash grpo.sh [more flags]
# Its relatives have no KL and, but for GSPO, another mean of the loss; more flags make this script one of them:
#   DAPO      --init_kl_coef 0 --no_use_kl_loss --loss_agg token_mean --eps_clip_high 0.28 --dynamic_sampling
#             --overlong_buffer_len 128
#   Dr. GRPO  --init_kl_coef 0 --no_use_kl_loss --loss_agg constant --advantage_estimator dr_grpo
#   GSPO      --init_kl_coef 0 --no_use_kl_loss --policy_loss_type gspo --eps_clip 3e-4 --eps_clip_high 4e-4
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_ppo \
    --pretrain "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
    --verifiable_reward math \
    --prompt_data "${DATA:-data/gsm8k/train.jsonl}" \
    --data_format question_answer \
    --input_template '{}
Think step by step, and write the final answer after "####".' \
    --apply_chat_template \
    --save_path "${SAVE_PATH:-ckpt/grpo}" \
    --use_tensorboard "${SAVE_PATH:-ckpt/grpo}/tensorboard" \
    --advantage_estimator group_norm \
    --n_samples_per_prompt 8 \
    --use_kl_loss \
    --kl_estimator k3 \
    --init_kl_coef 0.001 \
    --loss_agg sequence_mean \
    --bf16 \
    --zero_stage 2 \
    --num_episodes 5 \
    --rollout_batch_size 128 \
    --train_batch_size 256 \
    --prompt_max_len 512 \
    --generate_max_len 512 \
    --actor_learning_rate 1e-6 \
    "$@"
