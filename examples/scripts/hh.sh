#!/usr/bin/env bash
# A helpful assistant from human preferences: supervised fine-tuning, reward model, PPO: bash hh.sh [more flags for PPO]
# With SFT=folder or REWARD_MODEL=folder that part is not trained again. DATA holds pairs of whole dialogues (HH-RLHF).
set -euo pipefail
data="${DATA:-Anthropic/hh-rlhf}"
save_path="${SAVE_PATH:-ckpt/hh}"
launch="torchrun --standalone --nproc_per_node ${GPUS:-8}"
shared="--data_format hh --bf16 --zero_stage 2 --train_batch_size ${BATCH:-128}"

sft="${SFT:-$save_path/sft}"
if [ -z "${SFT:-}" ]; then
    $launch -m openppo.cli.train_sft $shared \
        --pretrain "${MODEL:-Qwen/Qwen2.5-1.5B}" --dataset "$data" --save_path "$sft" \
        --max_len 1024 --learning_rate 1e-5 --micro_train_batch_size 4
fi

reward_model="${REWARD_MODEL:-$save_path/rm}"
if [ -z "${REWARD_MODEL:-}" ]; then
    $launch -m openppo.cli.train_rm $shared \
        --pretrain "$sft" --dataset "$data" --save_path "$reward_model" \
        --max_len 1024 --learning_rate 9e-6 --micro_train_batch_size 4
fi

$launch -m openppo.cli.train_ppo $shared \
    --pretrain "$sft" \
    --reward_pretrain "$reward_model" \
    --prompt_data "$data" \
    --save_path "$save_path/ppo" \
    --use_tensorboard "$save_path/tensorboard" \
    --normalize_reward \
    --rollout_batch_size 512 \
    --prompt_max_len 512 \
    --generate_max_len 512 \
    --actor_learning_rate 1e-6 \
    --critic_learning_rate 9e-6 \
    --init_kl_coef 0.01 \
    "$@"
