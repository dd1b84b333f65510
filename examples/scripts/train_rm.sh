#!/usr/bin/env bash
# A reward model from preference pairs. Copy, change the model and data, run: bash train_rm.sh [more flags]
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_rm \
    --pretrain "${PRETRAIN:-ckpt/sft}" \
    --dataset "${DATASET:-data/preference.jsonl}" \
    --prompt_key "${PROMPT_KEY:-prompt}" \
    --save_path "${SAVE_PATH:-ckpt/rm}" \
    --zero_stage 2 \
    --bf16 \
    --max_len 2048 \
    --max_epochs 1 \
    --train_batch_size 128 \
    --micro_train_batch_size 4 \
    --learning_rate 9e-6 \
    --loss sigmoid \
    "$@"
