"""Messages of a pipeline: the backend keeps a sent tensor for as long as the program keeps the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class _Send:
    """A message in flight, as torch's pipelines use it."""

    def __init__(self, work: dist.Work | None, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *timeout: Any) -> bool:
        """Return at once, as there is no receiver. The tensor is kept: works of gloo and NCCL keep theirs to their end."""
        return self._work is None or self._work.wait(*timeout)


@contextmanager
def keep_sent_tensors() -> Iterator[None]:
    """Make messages keep their tensors inside the block: the works of the fake process group keep none."""
    isend = dist.isend

    def send(tensor: Tensor, *where: Any, **how: Any) -> _Send:
        return _Send(isend(tensor, *where, **how), tensor)

    # Patch both modules: torch checks the identity of an operation against their functions.
    with patch.object(dist, "isend", send), patch.object(distributed_c10d, "isend", send):
        yield
