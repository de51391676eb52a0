#!/bin/bash
# torchtitan: the best configuration that Autotune found (job 20261121-120000-abcd).
# small: torchtitan has shapes by name alone; put your own registry function in the place of llama3_debugmodel
# not stated: lr, weight_decay, clip, optimizer; left out, those of the registry hold (a sweep takes --lr, --weight-decay, --clip, --optimizer)
# reduce_bucket_size=20000: not part of torchtitan's command line; it has no bucket of so many elements
# checkpoints: those of the baseline load unchanged, every rank holds what it held
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
exec torchrun \
  --nnodes=1 \
  --nproc-per-node=2 \
  --node-rank="${NODE_RANK:-0}" \
  --master-addr="${MASTER_ADDR:-127.0.0.1}" \
  --master-port=29500 \
  -m torchtitan.train \
  --module llama3 \
  --config llama3_debugmodel \
  --training.local_batch_size 2 \
  --training.global_batch_size 8 \
  --training.seq_len 64 \
  --training.mixed_precision_param float32 \
  --parallelism.data_parallel_replicate_degree 2 \
  --parallelism.data_parallel_shard_degree 1 \
  --parallelism.fsdp_reshard_after_forward never \
  --parallelism.tensor_parallel_degree 1 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 1 \
  --parallelism.expert_parallel_degree 1 \
  "$@" \
  activation-checkpoint:none
