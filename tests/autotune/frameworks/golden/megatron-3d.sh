#!/bin/bash
# Megatron-LM: the best configuration that Autotune found (job 20261121-120000-abcd).
# add your data and tokenizer: --data-path, --tokenizer-type, --train-iters
# not stated: lr; the script takes it from the variable LR, as in LR=3e-4 bash FILE (a sweep takes --lr)
# not stated: weight_decay, clip, optimizer; left out, Megatron-LM's own defaults hold (a sweep takes --weight-decay, --clip, --optimizer)
# checkpoints: tensor_parallel_size 1 -> 4, pipeline_parallel_size 1 -> 2, virtual_stages 1 -> 2, ranks that divide the states 16 -> 2: --ckpt-format torch_dist loads them unchanged, the optimizer state where --dist-ckpt-optim-fully-reshardable saved it; those of --ckpt-format torch are converted by `tools/checkpoint/convert.py --model-type GPT --loader core --saver core --target-tensor-parallel-size 4 --target-pipeline-parallel-size 2`
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
export CUDA_DEVICE_MAX_CONNECTIONS=1
ARGUMENTS=(
  # the layout
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 2
  --context-parallel-size 1
  --micro-batch-size 2
  --global-batch-size 64
  --seq-length 4096
  --lr "${LR:?your learning rate}"
  --sequence-parallel
  --pipeline-model-parallel-layout 'Etttttttt|ttttttttt|ttttttttt|ttttttL'
  --ddp-bucket-size 40000000
  --overlap-grad-reduce
  --use-distributed-optimizer
  --bf16
  --accumulate-allreduce-grads-in-fp32
  --recompute-granularity selective
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
