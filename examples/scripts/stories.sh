#!/usr/bin/env bash
# A small real language model learns to tell happier stories: MODEL=folder bash examples/scripts/stories.sh [more flags]
set -euo pipefail
: "${MODEL:?set it to the folder or hub name of a small language model, such as roneneldan/TinyStories-1M}"
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
install requirements.txt
python -c "import vaderSentiment" || { echo "error: the reward needs vaderSentiment: pip install vaderSentiment" >&2; exit 1; }
examples="$repo/examples"
save_path="${SAVE_PATH:-ckpt/stories}"
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" # two processes on two cores
python "$examples/stories.py" make --out "$save_path/data"
torchrun --standalone --nproc_per_node 2 -m openppo.cli.train_ppo \
    --pretrain "$MODEL" \
    --reward_fn "$examples/reward_sentiment.py" \
    --prompt_data "$save_path/data/train.jsonl" \
    --save_path "$save_path" \
    --use_tensorboard "$save_path/tensorboard" \
    --num_episodes 12 \
    --rollout_batch_size 128 --micro_rollout_batch_size 64 \
    --train_batch_size 64 --micro_train_batch_size 32 \
    --generate_max_len 96 \
    --actor_learning_rate 5e-4 --critic_learning_rate 1e-3 \
    --init_kl_coef 0.02 --lambd 1 \
    "$@"
python "$examples/stories.py" evaluate --model "$MODEL" --base "$MODEL" --prompts "$save_path/data/heldout.jsonl"
python "$examples/stories.py" evaluate --model "$save_path" --base "$MODEL" --prompts "$save_path/data/heldout.jsonl"
