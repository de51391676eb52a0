"""Random changes of the setting in every step of a library's loop, against the loop untuned: weights, and the order of samples.

`python -m benchmarks.inside.libraries LOOP SCHEDULES` on each rank; `benchmarks.inside.page` and
`tests/autotune/inside/test_libraries.py` run it.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.inside import loops
from benchmarks.inside.loops import LOOPS, Run, collect_tuners, micro_batches, model_of, note_samples
from benchmarks.inside.models import full_weights
from benchmarks.inside.random_changes import RandomlyTuned

ROWS, STEPS, LENGTH = 4, 8, 12
# DeepSpeed's with buckets that a small model fills.
CASES = {name: loop for name, loop in LOOPS.items() if name != "deepspeed"} | {
    f"deepspeed-{stage}": partial(loops.deepspeed, stage=stage, bucket=5000) for stage in range(4)
}


def compare(loop: str, seed: int) -> dict[str, Any]:
    """One schedule: the largest difference of weights, whether each sample was trained once and in order, and settings."""
    per_step, seen, weights = 1 + seed % 3, ([], []), []
    RandomlyTuned.seed, tuners = seed, collect_tuners(RandomlyTuned)
    for is_tuned in (False, True):
        # A label of a Trainer may be left out, and nanoGPT's mean is over all tokens.
        batches = micro_batches(STEPS * per_step, ROWS, 100, ragged=per_step == 1 and loop != "nanogpt")
        model = model_of(loop, 128, 3, LENGTH)
        note_samples(model, seen[is_tuned])
        weights.append(full_weights(CASES[loop](Run(model, batches, per_step, is_tuned))))
    return {
        "weights": max(float((a - b).detach().abs().max()) for a, b in zip(*weights, strict=True) if a.numel()),
        "in_order": seen[0] == seen[1] and len(seen[0]) == STEPS * per_step * ROWS,
        "settings": len(tuners[0].schedule.used) if tuners[0].schedule is not None else 0,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if not sys.argv[1].startswith("deepspeed"):  # its optimizers keep fp32
        torch.set_default_dtype(torch.float64)
    if loops.WORLD > 1:
        dist.init_process_group("gloo")
    print(json.dumps([compare(sys.argv[1], seed) for seed in range(int(sys.argv[2]))]))
    if dist.is_initialized():
        dist.destroy_process_group()
