"""Which device each rank of a gang gets, and which backend joins them."""

import collections
from collections.abc import Sequence

from executor.errors import RunnerError
from executor.runners.messages import Message


def assign(ready: Sequence[Message], device: str) -> list[Message]:
    """The `device`, `backend`, `local_rank` and `local_world_size` of each rank, from what the ranks told when ready.

    `device` is `auto` (the accelerator where every rank sees one), `cpu`, or the accelerator's type. Ranks that see the
    same devices of a host take one each in turn. NCCL refuses two ranks on one device: there, gloo carries the tensors.

    Raises:
        RunnerError: a rank does not see the accelerator that is asked for.
    """
    accelerator = _accelerator(ready, device)
    seen: collections.Counter[tuple[str, str | None]] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    places: list[Message] = []
    shared = False
    for rank in ready:
        pool, count = (rank["host"], rank["visible_devices"]), rank["device_count"]
        shared = shared or seen[pool] >= count
        index = seen[pool] % count if accelerator else 0
        places.append({"device": f"{accelerator}:{index}" if accelerator else "cpu", "local_rank": hosts[rank["host"]]})
        seen[pool] += 1
        hosts[rank["host"]] += 1
    backend = "nccl" if accelerator == "cuda" and not shared else "gloo"
    return [
        {**place, "backend": backend, "local_world_size": hosts[rank["host"]]}
        for place, rank in zip(places, ready, strict=True)
    ]


def _accelerator(ready: Sequence[Message], device: str) -> str | None:
    kinds = {rank["accelerator"] for rank in ready}
    if device == "cpu" or (device == "auto" and (len(kinds) > 1 or None in kinds)):
        return None
    if device != "auto" and kinds != {device}:
        raise RunnerError(f"not every rank sees a {device} device; give fewer ranks, or run on the CPU")
    return next(iter(kinds))  # type: ignore[no-any-return]
