#!/usr/bin/env bash
# PPO on school mathematics, with a reward that checks the final answer: bash gsm8k.sh [more flags]
# DATA and EVAL_DATA are GSM8K's files (columns question and answer). One GPU: GPUS=1 and the same sizes, only slower.
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_ppo \
    --pretrain "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" \
    --verifiable_reward math \
    --prompt_data "${DATA:-data/gsm8k/train.jsonl}" \
    --data_format question_answer \
    --input_template '{}
Think step by step, and write the final answer after "####".' \
    --apply_chat_template \
    --eval_data "${EVAL_DATA:-data/gsm8k/test.jsonl}" \
    --eval_before_training \
    --save_path "${SAVE_PATH:-ckpt/gsm8k}" \
    --use_tensorboard "${SAVE_PATH:-ckpt/gsm8k}/tensorboard" \
    --bf16 \
    --zero_stage 2 \
    --num_episodes 15 \
    --rollout_batch_size 256 \
    --train_batch_size 64 \
    --prompt_max_len 512 \
    --generate_max_len 512 \
    --actor_learning_rate 1e-6 \
    --critic_learning_rate 1e-5 \
    --init_kl_coef 0.001 \
    --lambd 1 \
    "$@"
