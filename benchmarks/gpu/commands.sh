#!/usr/bin/env bash
# What a user starts beside plain PPO, two chains at the same time: logs, status.txt and models in the folder FOLDER.
#
#     bash benchmarks/gpu/commands.sh FOLDER         called by functions.py, with PYTHONPATH set by run.sh
set -u
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
examples="$here/../../examples"
python="${PYTHON:-python3}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
dtype=(--bf16)
limit=100
if [ "${KIT_DRY:-0}" = 1 ]; then
    dtype=(--no_bf16)
    limit=300
fi
steps() { [ "${KIT_DRY:-0}" = 1 ] && echo 3 || echo "$1"; }
rm -rf "$1" && mkdir -p "$1" && cd "$1" || exit 1

run() { # NAME COMMAND FLAGS...: its status and seconds are one line of status.txt
    local name="$1" command="$2" began="$SECONDS" status=0
    shift 2
    timeout "$limit" "$python" -m "openppo.cli.$command" "$@" "${dtype[@]}" > "$name.log" 2>&1 || status=$?
    echo "$name $status $((SECONDS - began))" >> status.txt
    return "$status"
}

letters() {
    local sizes=(--train_batch_size 32 --micro_train_batch_size 16 --max_len 32)
    "$python" "$examples/sort_letters.py" make --out letters --seed 1 > make_letters.log 2>&1
    run sft train_sft --pretrain letters/model --dataset letters/sft.jsonl --save_path sft --learning_rate 2e-3 \
        --max_steps "$(steps 42)" "${sizes[@]}" || return
    run rm train_rm --pretrain sft --dataset letters/preference.jsonl --eval_dataset letters/preference_heldout.jsonl \
        --prompt_key prompt --save_path rm --learning_rate 1e-3 --max_steps "$(steps 40)" "${sizes[@]}"
    local ppo=(--prompt_data letters/prompts.jsonl --generate_max_len 16 --rollout_batch_size 64 --actor_learning_rate 3e-4)
    local groups=(--advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0)
    local heldout=(--prompt_data letters/heldout.jsonl --generate_max_len 16)
    run ppo_rm train_ppo --pretrain sft --reward_pretrain rm "${ppo[@]}" --eval_data letters/heldout.jsonl \
        --eval_steps "$(steps 15)" --train_batch_size 64 --critic_learning_rate 1e-3 --max_steps "$(steps 30)" --save_path ppo_rm \
        --init_kl_coef 0.1 &
    run stale train_ppo --pretrain sft --reward_fn "$here/letters.py" "${ppo[@]}" "${groups[@]}" --max_staleness 2 \
        --max_steps "$(steps 6)" --train_batch_size 512 --save_path stale &
    run generate generate --pretrain sft "${heldout[@]}" --output_path generated.jsonl &
    run evaluate evaluate --pretrain sft "${heldout[@]}" --reward_fn "$here/letters.py" &
    echo "{% for m in messages %}{{ m['content'] }}{% endfor %}" > chat.jinja
    run agents train_ppo --pretrain sft --apply_chat_template --chat_template chat.jinja --n_envs 16 \
        --environment "$here/letters.py:Letters" \
        --n_samples_per_prompt 4 --train_batch_size 64 --generate_max_len 8 --episode_max_len 64 --max_steps "$(steps 4)" \
        --save_path agents --advantage_estimator group_norm --init_kl_coef 0
    wait
}

pictures() {
    "$python" "$examples/squares.py" make --out pictures --seed 1 > make_pictures.log 2>&1
    run pictures_sft train_sft --pretrain pictures/model --dataset pictures/sft.jsonl --image_key images \
        --no_freeze_vision_tower --max_steps "$(steps 40)" --save_path pictures_sft --learning_rate 1e-3 --train_batch_size 32 \
        --micro_train_batch_size 16 --max_len 64 || return
    run pictures_ppo train_ppo --pretrain pictures_sft --prompt_data pictures/prompts.jsonl --image_key images \
        --reward_fn "$examples/squares.py" --advantage_estimator group_norm --n_samples_per_prompt 8 --init_kl_coef 0 \
        --rollout_batch_size 64 --train_batch_size 512 --micro_train_batch_size 128 --generate_max_len 4 --max_steps "$(steps 4)" \
        --save_path pictures_ppo
}

letters &
pictures &
wait
for log in *.log; do
    echo "== $log"
    grep -iE "warn|error|Traceback|launched one by one|padded|saved the|eval" "$log" | cut -c1-260 | tail -6
done
