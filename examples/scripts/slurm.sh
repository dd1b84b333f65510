#!/usr/bin/env bash
# PPO on several hosts under Slurm. Copy, change the models and data, run: sbatch slurm.sh [more flags]
#SBATCH --job-name=openppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${hosts[0]}" MASTER_PORT="${MASTER_PORT:-29500}"
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # if the hosts do not find each other: docs/hosts.md

# One torchrun on each host, which starts a rank on each of its GPUs. The quotes keep SLURM_NODEID for the host to read.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --shutdown_timeout 110 "$@"' bash \
    --nproc_per_node "${GPUS:-8}" -m openppo.cli.train_ppo \
    --pretrain "${PRETRAIN:-meta-llama/Llama-3.1-8B-Instruct}" \
    --reward_pretrain "${REWARD_PRETRAIN:-Skywork/Skywork-Reward-Llama-3.1-8B-v0.2}" \
    --prompt_data "${PROMPT_DATA:-data/prompts.jsonl}" \
    --input_key "${INPUT_KEY:-input}" \
    --apply_chat_template \
    --save_path "${SAVE_PATH:-ckpt/ppo}" \
    --bf16 \
    --zero_stage 3 \
    --gradient_checkpointing \
    --rollout_batch_size 512 \
    --train_batch_size 128 \
    "$@"
