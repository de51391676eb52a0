"""The parity of a project whose packages have our names, in ranks that were given it as a trial's ranks are.

    python -m benchmarks.project_ranks FOLDER CONFIGURATIONS

To be run where the wheel is installed, with nothing of this repository on the path but `benchmarks`. CONFIGURATIONS is a JSON
list of knobs; what is printed is one of differences. Imports nothing of ours: what a rank needs is imported by `load` alone.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
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
    program = _rank_main()
    _, difference = program.load("benchmarks.project_parity:difference")
    program.put_first([folder])
    return difference


def _rank_main() -> ModuleType:
    """The program of a rank, by its file: it takes our packages for the user's where they are imported before it."""
    (place,) = importlib.util.find_spec("executor").submodule_search_locations
    spec = importlib.util.spec_from_file_location("rank_main", Path(place) / "runners" / "rank_main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    folder, configurations = sys.argv[1:]
    with Gang(RANKS, run) as gang:
        found = [max(gang.run({"folder": folder, "knobs": knobs})) for knobs in json.loads(configurations)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
