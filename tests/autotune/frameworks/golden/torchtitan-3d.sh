#!/bin/bash
# torchtitan: the best configuration that Autotune found (job 20261121-120000-abcd).
# zero_stage=1: FSDP2 shards parameters too; reshard_after_forward never is the nearest
# activation_checkpointing=selective: torchtitan computes every second matrix product again too
# not stated: lr, weight_decay, clip, optimizer; left out, those of the registry hold (a sweep takes --lr, --weight-decay, --clip, --optimizer)
# checkpoints: tensor_parallel_size 1 -> 4, pipeline_parallel_size 1 -> 2, virtual_stages 1 -> 2, ranks that divide the states 16 -> 2: torch.distributed.checkpoint loads them unchanged, it divides them anew by the names of the parameters
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
exec torchrun \
  --nnodes=2 \
  --nproc-per-node=8 \
  --node-rank="${NODE_RANK:-0}" \
  --master-addr="${MASTER_ADDR:-127.0.0.1}" \
  --master-port=29500 \
  -m torchtitan.train \
  --module llama3 \
  --config llama3_8b \
  --training.disable_cuda_graphs \
  --parallelism.pipeline_parallel_schedule Interleaved1F1B \
  --parallelism.pipeline_parallel_microbatch_size 2 \
  --parallelism.module_fqns_per_model_part \
  tok_embeddings,layers.0,layers.1,layers.2,layers.3,layers.4,layers.5,layers.6,layers.7 \
  layers.8,layers.9,layers.10,layers.11,layers.12,layers.13,layers.14,layers.15,layers.16 \
  layers.17,layers.18,layers.19,layers.20,layers.21,layers.22,layers.23,layers.24,layers.25 \
  layers.26,layers.27,layers.28,layers.29,layers.30,layers.31,norm,lm_head \
  --training.local_batch_size 32 \
  --training.global_batch_size 64 \
  --training.seq_len 4096 \
  --training.mixed_precision_param bfloat16 \
  --parallelism.data_parallel_replicate_degree 1 \
  --parallelism.data_parallel_shard_degree 2 \
  --parallelism.fsdp_reshard_after_forward never \
  --parallelism.tensor_parallel_degree 4 \
  --parallelism.context_parallel_degree 1 \
  --parallelism.pipeline_parallel_degree 2 \
  --parallelism.expert_parallel_degree 1 \
  "$@" \
  activation-checkpoint:selective
