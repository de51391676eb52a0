#!/bin/bash
# torchtitan: the best configuration that Autotune found (job 20261121-120000-abcd).
# not stated: lr, weight_decay, clip, optimizer; left out, those of the registry hold (a sweep takes --lr, --weight-decay, --clip, --optimizer)
# reduce_bucket_size=100000000: not part of torchtitan's command line; it has no bucket of so many elements
# prefetch_bucket_size=20000000: not part of torchtitan's command line; it prefetches whole modules
# param_persistence_threshold=1000000: not part of torchtitan's command line; it shards every parameter
# checkpoints: zero_stage 1 -> 3: torch.distributed.checkpoint loads them unchanged, it divides them anew by the names of the parameters
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
export PYTORCH_ALLOC_CONF=expandable_segments:True
exec torchrun \
  --nnodes=2 \
  --nproc-per-node=8 \
  --node-rank="${NODE_RANK:-0}" \
  --master-addr="${MASTER_ADDR:-127.0.0.1}" \
  --master-port=29500 \
  -m torchtitan.train \
  --module llama3 \
  --config llama3_8b \
  --training.local_batch_size 2 \
  --training.global_batch_size 64 \
  --training.seq_len 4096 \
  --training.mixed_precision_param bfloat16 \
  --parallelism.data_parallel_replicate_degree 1 \
  --parallelism.data_parallel_shard_degree 16 \
  --parallelism.fsdp_reshard_after_forward always \
  --parallelism.tensor_parallel_degree 1 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 1 \
  --parallelism.expert_parallel_degree 1 \
  "$@" \
  activation-checkpoint:full
