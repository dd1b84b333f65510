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

python "$examples/addition.py" make --out "$save_path"
answers "$model" "$save_path/before.jsonl"

results=()
for run in "${runs[@]}"; do
    flags=(--actor_learning_rate 2e-5)
    case "$run" in
        *-lora) flags=(--actor_learning_rate 5e-4 --lora_rank 16 --lora_alpha 32) ;;
    esac
    case "$run" in
        grpo*) flags+=(--advantage_estimator group_norm --init_kl_coef 0) ;;
        ppo*) flags+=(--lambd 1 --init_kl_coef 0.01 --critic_learning_rate 2e-5) ;;
        *) echo "error: RUNS has $run; there are grpo, grpo-lora, ppo and ppo-lora" >&2; exit 2 ;;
    esac
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
