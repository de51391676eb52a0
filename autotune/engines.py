"""What each engine honours, by name: read from the files that engines keep free of torch."""

from autotune.errors import RequestError
from executor.engines.ddp.capability import DDP
from executor.engines.fsdp2.capability import FSDP2
from executor.engines.native.capability import NATIVE
from search_spaces.capability import Capability

CAPABILITIES: dict[str, Capability] = {engine.engine: engine for engine in (NATIVE, DDP, FSDP2)}
"""Engine -> what it honours and refuses."""


def capability_of(engine: str) -> Capability:
    """The capability of the engine of that name.

    Raises:
        RequestError: no engine has it.
    """
    if engine not in CAPABILITIES:
        raise RequestError("engine", f"{engine!r} is not known", f"use one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[engine]
