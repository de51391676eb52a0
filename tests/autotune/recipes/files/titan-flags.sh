#!/bin/bash
# torchtitan 0.3: a pipeline without switching CUDA graphs off
torchrun --nproc_per_node=8 --nnodes=8 -m torchtitan.train --module llama3 --config llama3_70b \
  --training.local_batch_size=16 --training.seq_len=8192 \
  --parallelism.tensor_parallel_degree=8 --parallelism.pipeline_parallel_degree 4 \
  activation-checkpoint:full
