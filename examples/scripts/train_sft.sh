#!/usr/bin/env bash
# Supervised fine-tuning. Copy, change the model and data, run: bash train_sft.sh [more flags]
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_sft \
    --pretrain "${PRETRAIN:-meta-llama/Llama-3.1-8B}" \
    --dataset "${DATASET:-data/sft.jsonl}" \
    --input_key "${INPUT_KEY:-input}" \
    --output_key "${OUTPUT_KEY:-output}" \
    --save_path "${SAVE_PATH:-ckpt/sft}" \
    --zero_stage 2 \
    --bf16 \
    --max_len 2048 \
    --max_epochs 1 \
    --train_batch_size 128 \
    --micro_train_batch_size 4 \
    --learning_rate 5e-6 \
    "$@"
