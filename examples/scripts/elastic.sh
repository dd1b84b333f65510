#!/usr/bin/env bash
# PPO that comes back by itself: after a crash torchrun starts all ranks again, from the newest checkpoint. The same
# line again goes on with a run that was stopped. Copy, change the models and data, run: bash elastic.sh [more flags]
# SIGTERM (of Slurm, say) and Ctrl-C save first; torchrun kills ranks that take longer than SECONDS_TO_SAVE.
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SECONDS_TO_SAVE:-600}"
exec torchrun --standalone --nproc_per_node "${GPUS:-8}" --max_restarts "${RESTARTS:-3}" -m openppo.cli.train_ppo \
    --pretrain "${MODEL:-meta-llama/Llama-3.1-8B-Instruct}" \
    --reward_pretrain "${REWARD_MODEL:-Skywork/Skywork-Reward-Llama-3.1-8B-v0.2}" \
    --prompt_data "${DATA:-data/prompts.jsonl}" \
    --apply_chat_template \
    --save_path "${SAVE_PATH:-ckpt/elastic}" \
    --save_steps "${SAVE_STEPS:-20}" \
    --load_checkpoint \
    --bf16 \
    --zero_stage 3 \
    --gradient_checkpointing \
    --rollout_batch_size 512 \
    --train_batch_size 128 \
    --prompt_max_len 1024 \
    --generate_max_len 1024 \
    "$@"
