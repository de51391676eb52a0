"""What each engine honours, by name: read from the files that engines keep free of torch."""

from autotune.errors import RequestError
from executor.engines.native.capability import NATIVE
from search_spaces.capability import Capability

CAPABILITIES: dict[str, Capability] = {NATIVE.engine: NATIVE}


def capability_of(engine: str) -> Capability:
    """The capability of the engine of that name.

    Raises:
        RequestError: there is none.
    """
    if engine not in CAPABILITIES:
        raise RequestError("engine", f"{engine!r} is not known", f"use one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[engine]
