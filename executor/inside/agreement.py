"""How the ranks of a run agree between optimizer steps: through the store of the process group, without a collective.

A collective would need every rank to reach it, and on GPUs wait for the device. The store is a side channel: a rank that ran
out of memory can write to it whatever the others do.
"""

import itertools
import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Agreement:
    """The ranks of the default process group; one rank without it. All ranks make theirs in the same order."""

    _made = itertools.count()

    def __init__(self, name: str = "autotune-inside", timeout: float = 1800.0) -> None:
        """`timeout`: seconds that a rank waits for another one's part of a step."""
        self.world_size, self.rank, self._store = 1, 0, None
        self._number = 0
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
            self._store = dist.distributed_c10d.PrefixStore(
                f"{name}/{next(self._made)}", dist.distributed_c10d._get_default_store()
            )
            self._timeout = timedelta(seconds=timeout)

    def decided(self, value: Any) -> Any:
        """Rank 0's value, as JSON has it, on every rank."""
        if self._store is None:
            return value
        self._number += 1
        key = f"decision/{self._number}"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            self._forget(f"decision/{self._number - 2}")
            return json.loads(json.dumps(value))
        return json.loads(self._read(key))

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self._store is None:
            return [value]
        self._number += 1
        self._store.set(f"gathered/{self._number}/{self.rank}", json.dumps(value))
        rows = [json.loads(self._read(f"gathered/{self._number}/{rank}")) for rank in range(self.world_size)]
        # Who has read this exchange has read the one before it.
        self._forget(f"gathered/{self._number - 1}/{self.rank}")
        return rows

    def _read(self, key: str) -> bytes:
        assert self._store is not None
        self._store.wait([key], self._timeout)
        value: bytes = self._store.get(key)
        return value

    def _forget(self, key: str) -> None:
        if self._store is not None:
            self._store.delete_key(key)
