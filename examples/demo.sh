#!/usr/bin/env bash
# Tunes a small Llama by real trials on two ranks of this machine and leaves best-config.json in the current folder.
set -euo pipefail

# A limit per rank under which the larger micro-batches do not fit without activation checkpointing: what does not fit is
# predicted, and a trial that runs out of memory all the same is recorded, and the sweep goes on.
autotune sweep llama-tiny --cluster local --ranks 2 --space zero \
    --trials 14 --seed 0 \
    --global-batch-size 16 --sequence-length 128 --memory-limit 40MB --trial-seconds 2 \
    --db demo.db --out best-config.json

echo
echo "The same as a DeepSpeed configuration:"
autotune export --format deepspeed --db demo.db
