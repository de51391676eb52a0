"""The GPUs of this machine, found without loading torch."""

import os
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpus:
    """Identical GPUs."""

    name: str
    count: int
    memory_bytes: int
    """Of one GPU."""


def local_gpus() -> LocalGpus | None:
    """Return the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible; if they differ, those like the first.

    None: no GPU is visible. An empty CUDA_VISIBLE_DEVICES therefore hides all GPUs, as it does for torch.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = [line.split(", ") for line in listed.splitlines() if line.count(", ") == 3]
    rows = _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not rows:
        return None
    _, _, name, mebibytes = rows[0]
    return LocalGpus(name=name.strip(), count=sum(row[2] == name for row in rows), memory_bytes=int(float(mebibytes)) * 2**20)


def _visible(rows: list[list[str]], visible: str | None) -> list[list[str]]:
    """Return the GPUs that the variable names, by index or by UUID prefix. As in CUDA, the first invalid name ends the list.
    MIG partitions are not resolved."""
    if visible is None or "MIG-" in visible:
        return rows
    chosen = []
    for word in map(str.strip, visible.split(",")):
        row = next((row for row in rows if word == row[0] or (word and row[1].startswith(word))), None)
        if row is None:
            break
        chosen.append(row)
    return chosen
