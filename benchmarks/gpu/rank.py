"""A trial inside a rank that shares its GPU with another: pipeline messages go through host memory.

gloo accesses the memory of `isend` and `irecv` from the host, so that CUDA tensors fail with "Bad address" [pytorch,
ProcessGroupGloo.cpp, `send`]; its collectives copy CUDA tensors to the host themselves. The engine does not need this:
ranks with their own GPUs send by NCCL.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from executor.engine import RankContext
from executor.trial.run import run_trial as run_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult


class HostMessage:
    """A message through host memory that is in flight."""

    def __init__(self, work: dist.Work | None, host: Tensor, target: Tensor | None) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self, *timeout: Any) -> bool:
        """Return when the message is sent, or when the received one is on the device."""
        work, self._work = self._work, None
        if work is not None:
            work.wait(*timeout)
            if self._target is not None:
                self._target.copy_(self._host)
        return True


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """`executor.trial.run.run_trial` with point-to-point messages through host memory."""
    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Tensor, *where: Any, **how: Any) -> HostMessage:
        host = tensor.detach().to("cpu", copy=True)  # waits for the current stream
        return HostMessage(isend(host, *where, **how), host, None)

    def receive(tensor: Tensor, *where: Any, **how: Any) -> HostMessage:
        host = tensor.new_empty(tensor.shape, device="cpu")
        return HostMessage(irecv(host, *where, **how), host, tensor.detach())

    # In both modules: torch checks an operation's identity against the function in one of them.
    with (
        patch.multiple(dist, isend=send, irecv=receive),
        patch.multiple(distributed_c10d, isend=send, irecv=receive),
    ):
        return run_plain(context, request, progress)
