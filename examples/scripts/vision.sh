#!/usr/bin/env bash
# A small LLaVA learns to count squares in pictures, in three minutes on two cores: bash examples/scripts/vision.sh [more flags]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt
save_path="${SAVE_PATH:-ckpt/vision}"
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" # two processes on two cores
launch="torchrun --standalone --nproc_per_node 2"
python "$repo/examples/squares.py" make --out "$save_path/data" --seed "${SEED:-1}"
# Supervised fine-tuning until about half of the answers are right. What reads pictures is random, so it is trained here.
$launch -m openppo.cli.train_sft \
    --pretrain "$save_path/data/model" --dataset "$save_path/data/sft.jsonl" --image_key images \
    --eval_dataset "$save_path/data/heldout.jsonl" --eval_steps 5 --stop_when 'eval_loss < 0.35' \
    --save_path "$save_path/sft" --seed "${SEED:-1}" --no_freeze_vision_tower --max_epochs 4 \
    --learning_rate 1e-3 --lr_scheduler constant_with_warmup \
    --train_batch_size 32 --micro_train_batch_size 16 --max_len 64
$launch -m openppo.cli.train_ppo \
    --pretrain "$save_path/sft" --prompt_data "$save_path/data/prompts.jsonl" --image_key images \
    --eval_data "$save_path/data/heldout.jsonl" --eval_before_training --eval_steps 10 \
    --reward_fn "$repo/examples/squares.py" --save_path "$save_path/trained" --seed "${SEED:-1}" \
    --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \
    --rollout_batch_size 64 --train_batch_size 512 --micro_train_batch_size 128 --micro_rollout_batch_size 128 \
    --generate_max_len 4 --actor_learning_rate 5e-4 --critic_learning_rate 1e-3 --logging_steps 5 \
    "$@"
for pictures in heldout shuffled; do
    echo "$pictures pictures:"
    $launch -m openppo.cli.evaluate --pretrain "$save_path/trained" --prompt_data "$save_path/data/$pictures.jsonl" \
        --image_key images --reward_fn "$repo/examples/squares.py" --generate_max_len 4
done
