#!/usr/bin/env bash
# PPO with a reward model. Copy, change the models and data, run: bash train_ppo.sh [more flags]
# One GPU: GPUS=1. Eight GPUs: GPUS=8. Out of memory: --micro_train_tokens below what the log says (results stay
# the same), then --adam_offload. A model that fits easily: --zero_stage 2 --no_gradient_checkpointing is faster.
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_ppo \
    --pretrain "${PRETRAIN:-meta-llama/Llama-3.1-8B-Instruct}" \
    --reward_pretrain "${REWARD_PRETRAIN:-Skywork/Skywork-Reward-Llama-3.1-8B-v0.2}" \
    --prompt_data "${PROMPT_DATA:-data/prompts.jsonl}" \
    --input_key "${INPUT_KEY:-input}" \
    --apply_chat_template \
    --save_path "${SAVE_PATH:-ckpt/ppo}" \
    --use_tensorboard "${SAVE_PATH:-ckpt/ppo}/tensorboard" \
    --bf16 \
    --zero_stage 3 \
    --gradient_checkpointing \
    --num_episodes 1 \
    --rollout_batch_size 512 \
    --train_batch_size 128 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    --actor_learning_rate 1e-6 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    "$@"
