"""Starts a function of a module on several ranks of this machine, each a process with torch's environment variables."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_ranks(module: str, ranks: int, *arguments: str, seconds: float = 600.0) -> list[Any]:
    """Run `python -m module arguments` on each rank; return the last line of each as JSON.

    Raises:
        RuntimeError: a rank failed, or did not end in time.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        with ThreadPoolExecutor(ranks) as readers:  # a rank whose output nobody reads stops when its pipe is full
            outputs = [*readers.map(lambda process: process.communicate(timeout=seconds), processes)]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise RuntimeError(f"{module} did not end within {seconds:g} s: a rank hangs") from None
    failures = [errors[-3000:] for process, (_, errors) in zip(processes, outputs, strict=True) if process.returncode]
    if failures:
        raise RuntimeError("\n\n".join(failures))
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in outputs]
