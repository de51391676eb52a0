"""The real trial, but one rank does what the request's `engine` says, `HOW@RANK`, in the middle of step 2 of its pipeline.

Rank processes import it by name from this folder, as they import `executor.trial.run` otherwise.
"""

import dataclasses
import itertools
import os
import signal
import threading

import torch
import torch.distributed as dist

from executor.engines.native.engine import NativeEngine
from executor.trial import run as trial

STEP = 2


def in_forward(tensor):
    raise ValueError("this layer has enough")


def in_exit(tensor):
    os._exit(3)


def in_kill(tensor):
    os.kill(os.getpid(), signal.SIGKILL)


def in_backward(tensor):
    tensor.register_hook(in_forward)


def in_oom(tensor):
    """What torch's allocator raises on a device, in backward, where other ranks wait for this one."""

    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free")

    tensor.register_hook(fail)


def in_stuck(tensor):
    """The same, and this rank can never leave its process groups."""
    dist.distributed_c10d._abort_process_group = dist.destroy_process_group = threading.Event().wait
    in_oom(tensor)


class FailingEngine(NativeEngine):
    """Its second micro-batch of step 2 fails on one rank."""

    def __init__(self, how, rank):
        super().__init__()
        self.fail, self.rank = globals()[f"in_{how}"], rank

    def build(self, context, model, config, workload):
        session = super().build(context, model, config, workload)
        if context.rank == self.rank:
            calls, last = itertools.count(), STEP * session.accumulation + 1

            def after(module, inputs, output):
                if next(calls) == last:
                    self.fail(output)

            session.replicas[0].module.layers()[0].register_forward_hook(after)
        return session


def run_trial(context, request, progress):
    how, _, rank = request.engine.partition("@")
    if rank:
        trial.ENGINES["failing"] = FailingEngine(how, int(rank))
        request = dataclasses.replace(request, engine="failing")
    return trial.run_trial(context, request, progress)
