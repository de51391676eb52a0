#!/bin/bash
#SBATCH --job-name=autotuned
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --distribution=block
# Slurm (sbatch FILE train.py …): the best configuration that Autotune found (job 20261121-120000-abcd).
# a launcher says where ranks run; the knobs are the program's to set, from another export: micro_batch_size=2 reduce_bucket_size=20000
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
# mesh, innermost first: tp-cp-dp-pp
# node 0: ranks 0-1 (data 0-1)
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
srun bash -c 'exec torchrun --nnodes=1 --nproc-per-node=2 --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port=29500 "$@"' bash "$@"
