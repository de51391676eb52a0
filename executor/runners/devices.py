"""Assigns devices to the ranks of a gang, and chooses the backend of their process group."""

import collections
from collections.abc import Sequence

from executor.errors import RunnerError
from executor.runners.messages import Message

AUTO = "auto"
CPU = "cpu"


def assign(ready: Sequence[Message], device: str) -> list[Message]:
    """Return the device fields of each rank's `join` message, from what the ranks reported when ready.

    `device` is `cpu`, the accelerator's type, or `auto`: the accelerator that a rank sees or a driver lists, otherwise the CPU.
    Ranks that see the same devices of a host take them in turn. NCCL does not support two ranks on one device; gloo is used
    then.

    Raises:
        RunnerError: a rank cannot provide the accelerator. A job for an accelerator never falls back to CPUs.
    """
    accelerator = _accelerator(ready, device)
    ranks_in_pool: collections.Counter[tuple[str, str | None]] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    assignments: list[Message] = []
    shared = False
    for rank in ready:
        pool, count = (rank["host"], rank["visible_devices"]), rank["device_count"]
        shared = shared or (accelerator is not None and ranks_in_pool[pool] >= count)
        index = ranks_in_pool[pool] % count if accelerator else 0
        assignments.append({"device": f"{accelerator}:{index}" if accelerator else CPU, "local_rank": hosts[rank["host"]]})
        ranks_in_pool[pool] += 1
        hosts[rank["host"]] += 1
    backend = "nccl" if accelerator == "cuda" and not shared else "gloo"
    return [
        {**assignment, "backend": backend, "shares_device": shared, "local_world_size": hosts[rank["host"]]}
        for assignment, rank in zip(assignments, ready, strict=True)
    ]


def _accelerator(ready: Sequence[Message], device: str) -> str | None:
    if device == CPU:
        return None
    accelerators = (rank["accelerator"] or (rank["driver_devices"] and "cuda") for rank in ready)
    kind_needed = next((kind for kind in accelerators if kind), None) if device == AUTO else device
    for rank in ready:
        if kind_needed is not None and rank["accelerator"] != kind_needed:
            raise RunnerError(_missing(rank, kind_needed))
    return kind_needed


def _missing(rank: Message, accelerator: str) -> str:
    """Return one line: why this rank has no such device, and the remedy."""
    has, build, visible = f"torch {rank['torch']} on host {rank['host']}", rank["torch_build"], rank["visible_devices"]
    if build != accelerator:
        why = f"{has} is built for {build}"
        remedy = f"install the {accelerator.upper()} build of torch there"
    else:
        why = f"{has} finds no {accelerator} device" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES there, or use fewer ranks"
    return f"device: this job needs {accelerator}, but {why}; {remedy}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
