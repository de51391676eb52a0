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
    seen: collections.Counter[tuple[str, str | None]] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    places: list[Message] = []
    shared = False
    for rank in ready:
        pool, count = (rank["host"], rank["visible_devices"]), rank["device_count"]
        shared = shared or (accelerator is not None and seen[pool] >= count)
        index = seen[pool] % count if accelerator else 0
        places.append({"device": f"{accelerator}:{index}" if accelerator else CPU, "local_rank": hosts[rank["host"]]})
        seen[pool] += 1
        hosts[rank["host"]] += 1
    backend = "nccl" if accelerator == "cuda" and not shared else "gloo"
    return [
        {**place, "backend": backend, "shares_device": shared, "local_world_size": hosts[rank["host"]]}
        for place, rank in zip(places, ready, strict=True)
    ]


def _accelerator(ready: Sequence[Message], device: str) -> str | None:
    if device == CPU:
        return None
    seen = (rank["accelerator"] or (rank["driver_devices"] and "cuda") for rank in ready)
    wanted = next((kind for kind in seen if kind), None) if device == AUTO else device
    for rank in ready:
        if wanted is not None and rank["accelerator"] != wanted:
            raise RunnerError(_missing(rank, wanted))
    return wanted


def _missing(rank: Message, wanted: str) -> str:
    """Return one line: why this rank has no such device, and the remedy."""
    has, build, visible = f"torch {rank['torch']} on host {rank['host']}", rank["torch_build"], rank["visible_devices"]
    if build != wanted:
        why = f"{has} is built for {build}"
        remedy = f"install the {wanted.upper()} build of torch there"
    else:
        why = f"{has} finds no {wanted} device" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES there, or use fewer ranks"
    return f"device: this job needs {wanted}, but {why}; {remedy}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
