#!/bin/bash
#SBATCH --job-name=autotuned
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --distribution=block
# Slurm (sbatch FILE train.py …): the best configuration that Autotune found (job 20261121-120000-abcd).
# a launcher says where ranks run; the knobs are the program's to set, from another export: zero_stage=1 micro_batch_size=2 tensor_parallel_size=4 sequence_parallel=true pipeline_parallel_size=2 virtual_stages=2 pipeline_schedule=interleaved_1f1b activation_checkpointing=selective precision=bf16
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
# mesh, innermost first: tp-cp-dp-pp
# node 0: ranks 0-7 (tensor 0-3, data 0-1, pipeline 0)
# node 1: ranks 8-15 (tensor 0-3, data 0-1, pipeline 1)
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
srun bash -c 'exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port=29500 "$@"' bash "$@"
