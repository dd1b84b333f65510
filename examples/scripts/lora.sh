#!/usr/bin/env bash
# PPO with LoRA on one GPU. The reference is the actor with its adapters off: no second copy. bash lora.sh [more flags]
# Out of memory: --gradient_checkpointing first (results stay the same), then --load_in_4bit (needs bitsandbytes).
set -euo pipefail
save_path="${SAVE_PATH:-ckpt/lora}"
torchrun --standalone --nproc_per_node "${GPUS:-1}" -m openppo.cli.train_ppo \
    --pretrain "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    --reward_pretrain "${REWARD_MODEL:-Skywork/Skywork-Reward-V2-Qwen3-0.6B}" \
    --critic_pretrain "${CRITIC:-Qwen/Qwen2.5-0.5B-Instruct}" \
    --prompt_data "${DATA:-data/prompts.jsonl}" \
    --apply_chat_template \
    --save_path "$save_path" \
    --use_tensorboard "$save_path/tensorboard" \
    --lora_rank 16 \
    --lora_alpha 32 \
    --critic_lora_rank 0 \
    --bf16 \
    --zero_stage 2 \
    --rollout_batch_size 128 \
    --train_batch_size 64 \
    --prompt_max_len 1024 \
    --generate_max_len 512 \
    --actor_learning_rate 1e-5 \
    --critic_learning_rate 1e-5 \
    --init_kl_coef 0.01 \
    "$@"

# The adapters alone are small; this writes them into full weights, for programs that do not read PEFT folders.
python -m openppo.cli.merge_lora --lora_path "$save_path" --save_path "${save_path}_merged" --bf16
