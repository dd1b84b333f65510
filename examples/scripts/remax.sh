#!/usr/bin/env bash
# ReMax: no critic, the reward of the greedy response is the baseline: bash remax.sh [more flags]
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_ppo \
    --pretrain "${MODEL:-meta-llama/Llama-3.1-8B-Instruct}" \
    --reward_pretrain "${REWARD_MODEL:-Skywork/Skywork-Reward-Llama-3.1-8B-v0.2}" \
    --prompt_data "${DATA:-data/prompts.jsonl}" \
    --apply_chat_template \
    --save_path "${SAVE_PATH:-ckpt/remax}" \
    --use_tensorboard "${SAVE_PATH:-ckpt/remax}/tensorboard" \
    --advantage_estimator remax \
    --bf16 \
    --zero_stage 3 \
    --gradient_checkpointing \
    --rollout_batch_size 512 \
    --train_batch_size 128 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --actor_learning_rate 1e-6 \
    --init_kl_coef 0.01 \
    "$@"
