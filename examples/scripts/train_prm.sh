#!/usr/bin/env bash
# A process reward model from judged steps. Copy, change the model and data, run: bash train_prm.sh [more flags]
set -euo pipefail
torchrun --standalone --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_prm \
    --pretrain "${PRETRAIN:-ckpt/sft}" \
    --dataset "${DATASET:-peiyi9979/Math-Shepherd}" \
    --input_key "${INPUT_KEY:-input}" \
    --label_key "${LABEL_KEY:-label}" \
    --save_path "${SAVE_PATH:-ckpt/prm}" \
    --zero_stage 2 \
    --bf16 \
    --max_len 2048 \
    --max_epochs 1 \
    --train_batch_size 256 \
    --micro_train_batch_size 8 \
    --learning_rate 1e-6 \
    --placeholder_token ки \
    --reward_tokens + - \
    "$@"
