#!/bin/bash
# Megatron-LM: the best configuration that Autotune found (job 20261121-120000-abcd).
# add your data and tokenizer: --data-path, --tokenizer-type, --train-iters
# not stated: lr; the script takes it from the variable LR, as in LR=3e-4 bash FILE (a sweep takes --lr)
# not stated: weight_decay, clip, optimizer; left out, Megatron-LM's own defaults hold (a sweep takes --weight-decay, --clip, --optimizer)
# prefetch_bucket_size=20000000: not part of Megatron-LM's arguments; --suggested-communication-unit-size is the nearest, for gathers and reductions together
# param_persistence_threshold=1000000: not part of Megatron-LM's arguments; it shards every parameter
# checkpoints: zero_stage 1 -> 3: Megatron-FSDP has a format of its own, fsdp_dtensor: convert them by tools/checkpoint/checkpoint_inspector.py
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
export PYTORCH_ALLOC_CONF=expandable_segments:True
ARGUMENTS=(
  # the layout
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --micro-batch-size 2
  --global-batch-size 64
  --seq-length 4096
  --lr "${LR:?your learning rate}"
  --ddp-bucket-size 100000000
  --overlap-grad-reduce
  --use-distributed-optimizer
  --overlap-param-gather
  --use-megatron-fsdp
  --data-parallel-sharding-strategy optim_grads_params
  --ckpt-format fsdp_dtensor
  --bf16
  --accumulate-allreduce-grads-in-fp32
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  # the model
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --kv-channels 128
  --max-position-embeddings 8192
  --vocab-size 128256
  --norm-epsilon 1e-05
  --attention-dropout 0
  --hidden-dropout 0
  --group-query-attention --num-query-groups 8
  --normalization RMSNorm
  --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
  --swiglu
  --untie-embeddings-and-output-weights
  --disable-bias-linear
)
exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port=29500 pretrain_gpt.py "${ARGUMENTS[@]}" "$@"
