#!/usr/bin/env bash
# A student learns from a teacher, on what it writes itself and without a reward: bash distill.sh [TEACHER STUDENT] [more flags]
# Without models: small ones that sort letters, on two CPU cores, within minutes. With models of one family, on GPUs, with prompts:
#   PROMPTS=train.jsonl HELDOUT=heldout.jsonl bash examples/scripts/distill.sh Qwen/Qwen2.5-7B-Instruct \
#       Qwen/Qwen2.5-0.5B-Instruct --apply_chat_template --bf16 --actor_learning_rate 2e-6 --generate_max_len 512
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt
run="${SAVE_PATH:-ckpt/distill}"
first="${1:---}"
if [ "${first#--}" = "$first" ]; then # a model, not a flag
    teacher="$1" student="${2:?name the student after the teacher}"
    shift 2
    prompts="${PROMPTS:?set it to the prompts of training}" heldout="${HELDOUT:?set it to other prompts}"
    launch="torchrun --standalone --nproc_per_node ${GPUS:-8}"
    sizes=(--rollout_batch_size 256 --train_batch_size 128)
else
    teacher="$run/teacher" student="$run/sft" prompts="$run/data/prompts.jsonl" heldout="$run/data/heldout.jsonl"
    export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" # two processes on two cores: models this small gain nothing on a GPU
    launch="torchrun --standalone --nproc_per_node 2"
    sizes=(--rollout_batch_size 256 --train_batch_size 128 --micro_rollout_batch_size 128 --micro_train_batch_size 64
        --generate_max_len 16 --actor_learning_rate 1e-3 --lr_scheduler constant_with_warmup)

    echo "1/4 data: letters to sort, and two small Llamas with random weights"
    python "$repo/examples/sort_letters.py" make --out "$run/data" --seed 1
    python "$repo/examples/sort_letters.py" student --out "$run/small" --seed 2
    echo "2/4 the teacher, fine-tuned on many right answers"
    sft=(--input_key prompt --output_key chosen --learning_rate 2e-3 --train_batch_size 64 --max_len 32 --logging_steps 100)
    $launch -m openppo.cli.train_sft --pretrain "$run/data/model" --dataset "$run/data/preference.jsonl" \
        --save_path "$teacher" "${sft[@]}"
    echo "3/4 the student, fine-tuned on a few"
    $launch -m openppo.cli.train_sft --pretrain "$run/small/model" --dataset "$run/data/preference.jsonl" \
        --save_path "$student" "${sft[@]}" --max_steps 40
    echo "4/4 distillation: each token of the student is judged by the teacher"
fi

$launch -m openppo.cli.train_ppo \
    --pretrain "$student" --ref_pretrain "$teacher" --reward_fn none \
    --prompt_data "$prompts" --eval_data "$heldout" --eval_temperature 1 --eval_before_training --eval_steps 24 \
    --save_path "$run/student" --use_tensorboard "$run/tensorboard" --logging_steps 4 \
    --advantage_estimator reinforce --gamma 0 --normalize_advantages off --init_kl_coef 1 \
    "${sizes[@]}" "$@"
[ "$teacher" != "$run/teacher" ] || python "$repo/examples/distill_report.py" --run "$run"
