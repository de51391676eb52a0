"""The parity of a project whose packages have our names, in ranks that were given it as a trial's ranks are.

    python -m benchmarks.project_ranks FOLDER CONFIGURATIONS

To be run where the wheel is installed, with nothing of this repository on the path but `benchmarks`. CONFIGURATIONS is a JSON
list of knobs; what is printed is one of differences. Imports nothing of ours: what a rank needs is imported by `load` alone.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gang import Gang

RANKS = 2


def run(rank: int, task: Mapping[str, Any]) -> float:
    """One configuration on this rank."""
    difference: float = _isolated(task["folder"])(rank, RANKS, task["knobs"])
    return difference


@functools.cache
def _isolated(folder: str) -> Callable[..., Any]:
    """The comparison, after which every import in this process means the project's module."""
    from executor.runners.rank_main import load, put_first

    _, difference = load("benchmarks.project_parity:difference")
    put_first([folder])
    return difference


def main() -> None:
    folder, configurations = sys.argv[1:]
    with Gang(RANKS, run) as gang:
        found = [max(gang.run({"folder": folder, "knobs": knobs})) for knobs in json.loads(configurations)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
