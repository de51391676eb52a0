#!/bin/bash
# Megatron-LM: the best configuration that Autotune found (job 20261121-120000-abcd).
# add your data and tokenizer: --data-path, --tokenizer-type, --train-iters
# not stated: lr; the script takes it from the variable LR, as in LR=3e-4 bash FILE (a sweep takes --lr)
# not stated: weight_decay, clip, optimizer; left out, Megatron-LM's own defaults hold (a sweep takes --weight-decay, --clip, --optimizer)
# checkpoints: those of the baseline load unchanged, every rank holds what it held
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
ARGUMENTS=(
  # the layout
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --micro-batch-size 2
  --global-batch-size 8
  --seq-length 64
  --lr "${LR:?your learning rate}"
  --distributed-backend gloo
  --ddp-bucket-size 20000
  --overlap-grad-reduce
  # the model
  --num-layers 2
  --hidden-size 64
  --ffn-hidden-size 128
  --num-attention-heads 4
  --kv-channels 16
  --max-position-embeddings 128
  --vocab-size 256
  --norm-epsilon 1e-05
  --attention-dropout 0
  --hidden-dropout 0
  --group-query-attention --num-query-groups 2
  --normalization RMSNorm
  --position-embedding-type rope --rotary-base 10000 --rotary-percent 1.0
  --swiglu
  --untie-embeddings-and-output-weights
  --disable-bias-linear
)
exec torchrun --nnodes=1 --nproc-per-node=2 --node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port=29500 pretrain_gpt.py "${ARGUMENTS[@]}" "$@"
