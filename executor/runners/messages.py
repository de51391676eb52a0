"""What the parent and its rank processes say to each other: JSON objects with a `kind`, nothing pickled.

    parent                                     rank
       │ ◄──────────────────────────── ready    its code is imported
       │ join ────────────────────────►         rank 0 first
       │ ◄──────────────────────── listening    rank 0 has bound the rendezvous port; then the others are asked to join
       │ ◄─────────────────────────── joined    every rank
       │ run ─────────────────────────►         every rank, once a trial
       │ ◄───────────────── progress or beat    any number; beats from every rank, twice a second
       │ ◄────────────────────────── output    any number; `RankProcess` makes them of what the rank prints
       │ ◄───────────── result or failure       exactly one for each run, unless the rank dies
       │ abort ───────────────────────►         after another rank's failure: a thread of its own ends what it waits for
       │ ◄─────────────────────────── rested    what it holds when it has given back what it can of it

`measure` asks for a micro-benchmark where `run` asks for a trial. `describe` (answered by `described` or `failure`) needs no
`join`.
"""

import json
from enum import StrEnum
from typing import Any

Message = dict[str, Any]


class Kind(StrEnum):
    """The `kind` of a message."""

    READY = "ready"
    JOIN = "join"
    LISTENING = "listening"
    JOINED = "joined"
    RUN = "run"
    ABORT = "abort"
    MEASURE = "measure"
    PROGRESS = "progress"
    OUTPUT = "output"
    BEAT = "beat"
    RESTED = "rested"
    RESULT = "result"
    FAILURE = "failure"
    DESCRIBE = "describe"
    DESCRIBED = "described"


def encode(message: Message) -> bytes:
    """The message as it goes over the pipe.

    Raises:
        TypeError: a value is not plain data.
    """
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """The message from what `encode` gave."""
    return json.loads(data)  # type: ignore[no-any-return]
