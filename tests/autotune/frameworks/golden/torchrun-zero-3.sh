#!/bin/bash
# torchrun: the best configuration that Autotune found (job 20261121-120000-abcd).
# a launcher says where ranks run; the knobs are the program's to set, from another export: zero_stage=3 micro_batch_size=2 reduce_bucket_size=100000000 prefetch_bucket_size=20000000 param_persistence_threshold=1000000 activation_checkpointing=full precision=bf16
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
# NODE_RANK=0 MASTER_ADDR=first-node bash FILE train.py …
# mesh, innermost first: tp-cp-dp-pp
# node 0: ranks 0-7 (data 0-7)
# node 1: ranks 8-15 (data 8-15)
export PYTORCH_ALLOC_CONF=expandable_segments:True
case "${NODE_RANK:?0 to 1}" in
  0) exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank=0 --master-addr="${MASTER_ADDR:?the first node}" --master-port=29500 "$@" ;;
  1) exec torchrun --nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr="${MASTER_ADDR:?the first node}" --master-port=29500 "$@" ;;
esac
