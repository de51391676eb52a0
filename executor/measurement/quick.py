"""The micro-benchmark in one or two seconds: the ranks of a node are forked from one process, so torch is loaded once.

For CPUs only: a process that has used a GPU cannot be forked.
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
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.plain import from_plain, to_plain


def main() -> None:
    """Read a `MicrobenchmarkRequest` from standard input, write rank 0's result to standard output, both as JSON.

    1. Fork all ranks except the first before anything computes, because a fork does not copy a library's threads.
    2. Join over a file, because no rank listens on a port that the others know.
    3. Exit without finalisers, because the other ranks may have left the group already.
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
    """Fork and return this process's rank; the original process has rank 0."""
    for rank in range(1, world_size):
        if os.fork() == 0:
            return rank
    return 0


if __name__ == "__main__":
    main()
