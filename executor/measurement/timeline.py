"""Divides the time of profiled steps by what happened in it, and counts it."""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_spaces.trial import StepProfile

PARTS = ("compute", "communication", "data", "host")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CONTAINERS = ("autograd::", "c10d::", "_c10d_functional::", "autotune::", "torch::", "torch.distributed", "record_param_comms")
"""Beginnings of names of operators that wait for collectives, or consist of other operators."""
COMPILED_CODE = "## Call CompiledFxGraph"
"""Beginning of the annotation of a graph that torch compiled, whose kernels on CPUs are no operators."""

INPUTS = ("Input Dims", "In msg nelems", "grid", "bytes")
"""What the profiler says of the size of an operator, a kernel, a collective or a copy."""
LONGEST_INPUTS = 80
"""Characters from which a checksum stands for the sizes."""


def step_profile(path: Path, steps: int) -> StepProfile:
    """Read a trace of torch's profiler, of `steps` optimizer steps.

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
    belonging = [(event, part) for event in events if (part := _part(event, on_device)) is not None]
    return StepProfile(seconds=_seconds(whole, belonging, on_device, steps), calls=_calls(belonging, on_device, steps))


def _seconds(
    whole: Mapping[str, Any], events: Iterable[tuple[Mapping[str, Any], str]], on_device: bool, steps: int
) -> dict[str, float]:
    """Seconds of a step by part."""
    order = ("compute", "communication", "data") if on_device else ("data", "compute", "communication")
    edges = [(whole["ts"], 0, "host"), (whole["ts"] + whole["dur"], 0, "host")]
    for event, part in events:
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


def _calls(events: Sequence[tuple[Mapping[str, Any], str]], on_device: bool, steps: int) -> dict[str, tuple[float, float]]:
    """`StepProfile.calls`. On CPUs, an operator that a loader calls is part of the data."""
    calls, microseconds = Counter[str](), Counter[str]()
    outer: dict[Any, list[tuple[float, str, str]]] = {}
    """Thread -> the ends, parts and names of the events that contain the present one."""
    for event, part in sorted(events, key=lambda each: (each[0]["ts"], -each[0]["dur"])):
        around = outer.setdefault((event.get("pid"), event.get("tid")), [])
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        if around and around[-1][1] == "data" and not on_device:
            part = "data"
        sizes = next((json.dumps(value) for kind in INPUTS if (value := event.get("args", {}).get(kind)) is not None), "")
        if len(sizes) > LONGEST_INPUTS:
            sizes = f"{zlib.crc32(sizes.encode()):08x}"
        name = f"{part} {event['name']} {sizes}".rstrip()
        calls[name] += 1
        microseconds[name] += event["dur"]
        end = event["ts"] + event["dur"]
        if around:  # an annotation may begin in a call and end after it
            microseconds[around[-1][2]] -= min(end, around[-1][0]) - event["ts"]
        around.append((end, part, name))
    return {name: (count / steps, microseconds[name] / count / 1e6) for name, count in calls.items()}


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
