#!/usr/bin/env bash
# A real chat model learns to add, by GRPO and by PPO, all weights and LoRA, on two CPU cores in about 15 minutes:
#     bash examples/scripts/chat_model.sh [MODEL] [more flags of train_ppo]
# RUNS="grpo grpo-lora ppo ppo-lora" chooses the runs; SAVE_PATH is the folder of results.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt
model="${1:-HuggingFaceTB/SmolLM2-135M-Instruct}"
shift || true
examples="$repo/examples"
save_path="${SAVE_PATH:-ckpt/chat_model}"
read -ra runs <<< "${RUNS:-grpo grpo-lora ppo ppo-lora}"
started=$SECONDS

answers() { # MODEL FILE: greedy answers to the held-out questions
    python -m openppo.cli.generate --pretrain "$1" --bf16 --apply_chat_template --prompt_data "$save_path/heldout.jsonl" \
        --micro_batch_size 64 --generate_max_len 16 --output_path "$2"
}

flags_of() { # RUN: sets flags
    local grpo=(--advantage_estimator group_norm --init_kl_coef 0)
    local ppo=(--lambd 1 --init_kl_coef 0.01 --critic_learning_rate 2e-5)
    local lora=(--lora_rank 16 --lora_alpha 32 --actor_learning_rate 5e-4)
    case "$1" in
        grpo) flags=("${grpo[@]}" --actor_learning_rate 2e-5) ;;
        grpo-lora) flags=("${grpo[@]}" "${lora[@]}") ;;
        ppo) flags=("${ppo[@]}" --actor_learning_rate 4e-5) ;;
        ppo-lora) flags=("${ppo[@]}" "${lora[@]}") ;;
        *) echo "error: RUNS has $1; there are grpo, grpo-lora, ppo and ppo-lora" >&2; exit 2 ;;
    esac
}

for run in "${runs[@]}"; do
    flags_of "$run" # a wrong name ends the script before it trains
done
python "$examples/addition.py" make --out "$save_path"
answers "$model" "$save_path/before.jsonl"

results=()
for run in "${runs[@]}"; do
    flags_of "$run"
    echo "training: $run"
    python -m openppo.cli.train_ppo --pretrain "$model" --bf16 \
        --prompt_data "$save_path/train.jsonl" --apply_chat_template --reward_fn "$examples/addition.py" \
        --rollout_batch_size 16 --n_samples_per_prompt 8 --train_batch_size 128 --generate_max_len 16 --max_steps 8 \
        --lr_scheduler constant_with_warmup --save_path "$save_path/$run" "${flags[@]}" "$@"
    answers "$save_path/$run" "$save_path/$run.jsonl"
    results+=("$run=$save_path/$run.jsonl")
done

python "$examples/addition.py" table --heldout "$save_path/heldout.jsonl" --before "$save_path/before.jsonl" "${results[@]}"
echo "reports $save_path/*/logs/report.html"
echo "done in $((SECONDS - started)) s"
