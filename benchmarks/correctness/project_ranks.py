"""Parity of a project whose packages have our names, in ranks that load it as a trial's ranks do.

    python -m benchmarks.correctness.project_ranks FOLDER CONFIGURATIONS

Run it with the wheel installed, and only `benchmarks` of this repository on the path. CONFIGURATIONS is a JSON list of knobs;
it prints a JSON list of differences. This module imports none of our packages: only `load` imports what a rank needs.
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.common.gang import Gang

RANKS = 2


def run(rank: int, task: Mapping[str, Any]) -> float:
    """Compare one configuration on this rank."""
    difference: float = _isolated(task["folder"])(rank, RANKS, task["knobs"])
    return difference


@functools.cache
def _isolated(folder: str) -> Callable[..., Any]:
    """Load the comparison; every later import in this process finds the project's module."""
    program = _rank_main()
    _, difference = program.load("benchmarks.correctness.project_parity:difference")
    program.put_first([folder])
    return difference


def _rank_main() -> ModuleType:
    """Load a rank's program from its file: it must run before our packages are imported."""
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
