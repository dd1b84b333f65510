#!/usr/bin/env bash
# From nothing to a policy that PPO has made better, on two CPU cores: bash examples/scripts/quickstart.sh [SEED] [FOLDER]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
seed="${1:-1}"
run="${2:-$repo/quickstart}"
case "$run" in /*) ;; *) run="$PWD/$run" ;; esac
cd "$repo"
install requirements.txt
started=$SECONDS
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" # two processes on two cores: models this small gain nothing on a GPU
launch="torchrun --standalone --nproc_per_node 2"

echo "1/4 data: letters to sort, and a small Llama with random weights"
rm -rf "$run"/{data,sft,rm,ppo,tensorboard,report.json} # of an earlier quickstart; nothing else in that folder
python examples/sort_letters.py make --out "$run/data" --seed "$seed"

echo "2/4 supervised fine-tuning, stopped early"
$launch -m openppo.cli.train_sft --seed "$seed" \
    --pretrain "$run/data/model" --dataset "$run/data/sft.jsonl" \
    --save_path "$run/sft" --use_tensorboard "$run/tensorboard" --logging_steps 25 \
    --learning_rate 2e-3 --train_batch_size 32 --micro_train_batch_size 16 --max_len 32 --max_steps 42

echo "3/4 a reward model from preference pairs"
$launch -m openppo.cli.train_rm --seed "$seed" \
    --pretrain "$run/sft" --dataset "$run/data/preference.jsonl" --eval_dataset "$run/data/preference_heldout.jsonl" \
    --prompt_key prompt --save_path "$run/rm" --use_tensorboard "$run/tensorboard" --logging_steps 100 \
    --learning_rate 1e-3 --train_batch_size 32 --micro_train_batch_size 16 --max_len 32

echo "4/4 PPO: actor, critic, reward and reference model"
$launch -m openppo.cli.train_ppo --seed "$seed" \
    --pretrain "$run/sft" --reward_pretrain "$run/rm" --prompt_data "$run/data/prompts.jsonl" \
    --eval_data "$run/data/heldout.jsonl" --eval_before_training \
    --save_path "$run/ppo" --use_tensorboard "$run/tensorboard" --logging_steps 4 \
    --zero_stage 2 --generate_max_len 16 --rollout_batch_size 256 --micro_rollout_batch_size 128 \
    --train_batch_size 128 --micro_train_batch_size 64 --max_epochs 2 \
    --actor_learning_rate 3e-4 --critic_learning_rate 1e-3 --lr_scheduler constant_with_warmup \
    --init_kl_coef 0.4 --reward_clip_range -20 20 --value_clip 5 --missing_eos_penalty 20

python examples/quickstart_report.py --run "$run"
echo "done in $((SECONDS - started)) s"
