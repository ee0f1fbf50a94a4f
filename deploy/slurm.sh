#!/usr/bin/env bash
# Two hosts of eight GPUs under Slurm. One torchrun a host starts and restarts the ranks; draftline joins.
#   sbatch deploy/slurm.sh recipes/two_hosts.yaml train.out=/shared/runs/mine target.path=/shared/model ...
#SBATCH --job-name=draftline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A job that Slurm has queued again goes on from its newest checkpoint.
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(--resume); fi

exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29400" \
    -m draftline train "$@" "${resume[@]}"
