"""The GPUs of this machine, found without loading torch."""

import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpus:
    """GPUs of one kind."""

    name: str
    count: int
    memory_bytes: int
    """Of one."""


def local_gpus() -> LocalGpus | None:
    """What nvidia-smi lists, where all are alike (otherwise those like the first); None: there is none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rsplit(",", 1) for line in listed.splitlines() if "," in line]
    if not rows:
        return None
    name, mebibytes = rows[0]
    return LocalGpus(name=name.strip(), count=sum(row[0] == name for row in rows), memory_bytes=int(float(mebibytes)) * 2**20)
