"""Writes the time, the losses and once the allocated bytes of each optimizer of a program, apart from autotune's own probe.

`benchmarks.frameworks.real_scripts` copies it as `sitecustomize.py` into a folder on PYTHONPATH. In each process that has a
RANK it imports torch, seeds it, and appends a line of JSON for each step to `steps-PORT-RANK-PID.jsonl` in the folder that
`STEP_OBSERVER` names. Then it runs the shim that the variable `SHIM` contains, with which a program runs on CPUs.
"""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path

if "RANK" in os.environ and "STEP_OBSERVER" in os.environ:
    import torch

    rank, losses, steps_of = int(os.environ["RANK"]), [], {}
    random.seed(rank + 1)
    torch.manual_seed(rank + 1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank + 1)
    name = f"steps-{os.environ['MASTER_PORT']}-{rank}-{os.getpid()}.jsonl"
    lines = Path(os.environ["STEP_OBSERVER"], name).open("a", buffering=1)  # noqa: SIM115
    backward = torch.Tensor.backward

    def observed_backward(loss, *arguments, **keywords):
        """Keep the bits of the loss."""
        if loss.numel() == 1 and not loss.is_meta:
            losses.append(float(loss.detach()).hex())
        return backward(loss, *arguments, **keywords)

    def allocated():
        """Bytes of all tensors of the process: weights, gradients, states of the optimizer, data."""
        gc.collect()
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu")
        storages = (each.untyped_storage() for each in tensors if each.layout is torch.strided)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def write_step(optimizer, *_):
        """Write the time of a step and the losses since the last one; at the third step, when all states exist, the bytes."""
        if losses:
            elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            step = {"clock": time.perf_counter(), "losses": losses, "elements": elements}
            steps_of[id(optimizer)] = steps_of.get(id(optimizer), 0) + 1
            if steps_of[id(optimizer)] == 3:
                step["bytes"] = allocated()
            lines.write(json.dumps(step) + "\n")
            losses.clear()

    torch.Tensor.backward = observed_backward
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(write_step)
    exec(os.environ.get("SHIM", ""))
