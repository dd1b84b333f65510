#!/usr/bin/env bash
# A chat model with tools from nothing, and two agents of it that PPO makes better, on two CPU cores:
# bash examples/scripts/agent.sh [SEED] [FOLDER] [more flags of train_ppo]
# PROGRAM: the command of the first agent; SFT_STEPS: steps of supervised fine-tuning.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
seed="${1:-1}"
run="${2:-$repo/agent_demo}"
shift $(($# < 2 ? $# : 2))
case "$run" in /*) ;; *) run="$PWD/$run" ;; esac
cd "$repo"
install requirements.txt
if [ -z "${PROGRAM:-}" ] && ! python -c "import openai" 2> /dev/null; then
    python -m pip install --quiet --disable-pip-version-check "$(grep '^openai==' tests/agents_clients/requirements.txt)"
fi
started=$SECONDS
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" # two processes on two cores: models this small gain nothing on a GPU
launch="torchrun --standalone --nproc_per_node 2"
train() { # an agent of the model, with these flags
    $launch -m openppo.cli.train_ppo --config examples/agents/laptop.yaml --pretrain "$run/model" --seed "$seed" "$@"
}

echo "1/4 data: chats with tools, and a small Llama with random weights"
rm -rf "$run"/{random,model,program,game} # of an earlier run; nothing else in that folder
python examples/agent_model.py make --out "$run" --seed "$seed"

echo "2/4 supervised fine-tuning: the model learns to speak"
$launch -m openppo.cli.train_sft --seed "$seed" \
    --pretrain "$run/random" --dataset "$run/chats.jsonl" --apply_chat_template --tools_key tools \
    --save_path "$run/model" --logging_steps 50 --max_len 192 --max_epochs 100 --max_steps "${SFT_STEPS:-450}" --packing \
    --learning_rate 3e-3 --train_batch_size 32 --micro_train_batch_size 16

echo "3/4 GRPO behind a program of OpenAI's SDK, which is started for each sum"
train --save_path "$run/program" \
    --agent_command "${PROGRAM:-python examples/agents/openai_sum.py}" --max_turns 3 \
    --prompt_data "$run/sums.jsonl" --label_key label --verifiable_reward exact_match \
    --eval_data "$run/heldout.jsonl" --eval_before_training --eval_steps 4 \
    --rollout_batch_size 4 --train_batch_size 16 --max_steps 4 "$@"

echo "4/4 GRPO of a game that is a tool: find a number in four guesses"
train --save_path "$run/game" \
    --tools examples/tools/guess.py --apply_chat_template --max_turns 4 --prompt_data "$run/games.jsonl" \
    --eval_data "$run/playoffs.jsonl" --eval_before_training --eval_steps 16 \
    --rollout_batch_size 16 --train_batch_size 64 --max_steps 16 --actor_learning_rate 3e-4 "$@"

python examples/agent_report.py --run "$run"
echo "done in $((SECONDS - started)) s"
if [ -t 1 ] && [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then
    python -m webbrowser "file://$run/program/logs/report.html" > /dev/null
fi
