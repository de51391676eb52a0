"""The micro-benchmark in a second or two: the ranks of a node are forked from one process, so that torch is loaded once.

For processors only: a process that has touched a GPU cannot be forked.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.measurement.microbenchmark import run_microbenchmark
from search_spaces.microbenchmark import MicrobenchmarkRequest
from search_spaces.plain import from_plain, to_plain


def main() -> None:
    """Read a `MicrobenchmarkRequest` from standard input, write the result of rank 0 to standard output, both as JSON.

    1. Fork all ranks but the first before anything computes: threads of a library would not come along.
    2. Join over a file, since no rank listens on a port that others know of.
    3. End without finalisers: the other ranks may have left the group already.
    """
    request = from_plain(MicrobenchmarkRequest, json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as folder:
        gc.freeze()
        rank = _forked(request.world_size)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        store = dist.FileStore(str(Path(folder) / "ranks"), request.world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world_size)
        control = dist.new_group(backend="gloo") if request.world_size > 1 else None
        context = RankContext(rank=rank, world_size=request.world_size, device=torch.device("cpu"), control_group=control)
        result = run_microbenchmark(context, request, lambda _: None)
        if rank:
            os._exit(0)
        json.dump(to_plain(result), sys.stdout)
        sys.stdout.flush()
    os._exit(0)


def _forked(world_size: int) -> int:
    """This process's rank: 0 in the one that was there before."""
    for rank in range(1, world_size):
        if os.fork() == 0:
            return rank
    return 0


if __name__ == "__main__":
    main()
