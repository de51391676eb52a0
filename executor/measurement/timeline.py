"""Divides the time of profiled steps by what happened in it. Imports only the standard library."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

PARTS = ("compute", "communication", "data", "host")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CONTAINERS = ("autograd::", "c10d::", "_c10d_functional::", "autotune::", "torch::", "torch.distributed", "record_param_comms")
"""Beginnings of names of operators that wait for collectives, or consist of other operators."""
COMPILED_CODE = "## Call CompiledFxGraph"
"""Beginning of the annotation of a graph that torch compiled, whose kernels on CPUs are no operators."""


def part_seconds(path: Path, steps: int) -> dict[str, float]:
    """Read a trace of torch's profiler, of `steps` optimizer steps. Return seconds of a step by part, which sum to all of it.

    Each moment belongs to the first of these that applies:

    1. data, on CPUs: a data loader of torch is asked for its next batch. (A device may compute meanwhile.)
    2. compute: a kernel or a copy runs on the device; without a device: an operator runs in any thread.
    3. communication: a collective runs, which nothing of this rank overlaps. It includes the wait for slower ranks.
    4. data, with a device.
    5. host: none of these. Python runs, launches work, or waits for something that the profiler does not see.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read, or is no such trace.
    """
    events = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]
    whole = next(event for event in events if event.get("cat") == "Trace")
    on_device = any(event.get("cat") == "kernel" for event in events)
    order = ("compute", "communication", "data") if on_device else ("data", "compute", "communication")
    edges = [(whole["ts"], 0, "host"), (whole["ts"] + whole["dur"], 0, "host")]
    for event in events:
        if (part := _part(event, on_device)) is not None:
            edges += [(event["ts"], 1, part), (event["ts"] + event["dur"], -1, part)]
    edges.sort(key=lambda edge: edge[0])
    active, microseconds = Counter[str](), dict.fromkeys(PARTS, 0.0)
    before, end = whole["ts"], whole["ts"] + whole["dur"]
    for time, change, part in edges:
        now = min(max(time, before), end)
        microseconds[next((name for name in order if active[name]), "host")] += now - before
        active[part] += change
        before = now
    return {part: value / steps / 1e6 for part, value in microseconds.items()}


def _part(event: dict[str, Any], on_device: bool) -> str | None:
    """The part to which the time of an event belongs; None: to those of the events inside of it."""
    kind, name = event.get("cat"), event["name"]
    if kind in DEVICE_WORK:
        return "communication" if name.startswith(("nccl", "Memcpy PtoP")) else "compute"
    if name.startswith("enumerate(DataLoader)"):
        return "data"
    if on_device:
        return None
    if name.startswith("gloo:"):
        return "communication"
    is_operator = kind == "cpu_op" and "::" in name and not name.startswith(CONTAINERS)
    return "compute" if is_operator or name.startswith(COMPILED_CODE) else None
