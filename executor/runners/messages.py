"""The protocol between the parent and its rank processes: JSON objects with a `kind`, nothing pickled.

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
       │ ◄─────────────────────────── rested    what the rank still holds after releasing what it can

`measure` asks for a micro-benchmark where `run` asks for a trial. `describe` (answered by `described` or `failure`) needs no
`join`.
"""

import json
from enum import StrEnum
from typing import Any

Message = dict[str, Any]


class MessageKind(StrEnum):
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
    """Encode a message for the pipe.

    Raises:
        TypeError: a value that is not plain data.
    """
    return json.dumps(message).encode()


def decode(data: bytes) -> Message:
    """Decode a message that `encode` has encoded."""
    return json.loads(data)  # type: ignore[no-any-return]
