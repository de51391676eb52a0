"""Messages of a pipeline: the backend keeps what is sent for as long as the program keeps the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class _Send:
    """A message on its way, as torch's pipelines use it."""

    def __init__(self, work: dist.Work | None, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *timeout: Any) -> bool:
        """There is nobody to wait for. The tensor stays: the works of gloo and NCCL hold theirs to their end."""
        return self._work is None or self._work.wait(*timeout)


@contextmanager
def tensors_kept() -> Iterator[None]:
    """While it holds, a message keeps its tensor: the works of a world that is not there keep none."""
    isend = dist.isend

    def send(tensor: Tensor, *where: Any, **how: Any) -> _Send:
        return _Send(isend(tensor, *where, **how), tensor)

    # In both modules: torch checks that an operation is the very function which one of them names.
    with patch.object(dist, "isend", send), patch.object(distributed_c10d, "isend", send):
        yield
