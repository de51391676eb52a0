#!/bin/bash
# torchrun: the best configuration that Autotune found (job 20261121-120000-abcd).
# a launcher says where ranks run; the knobs are the program's to set, from another export: micro_batch_size=2 reduce_bucket_size=20000
# verified: native-only, measured by the engine native; measure it in this framework before you rely on it
# bash FILE train.py …
# mesh, innermost first: tp-cp-dp-pp
# node 0: ranks 0-1 (data 0-1)
exec torchrun --nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port=29500 "$@"
