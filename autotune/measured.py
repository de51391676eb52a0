"""`autotune.report`: how a training program of the user's own tells what it measured."""

import json
import os
import time
from pathlib import Path
from typing import Any


def report(**values: Any) -> None:
    """Append one JSON line with `values` and the time to the file that AUTOTUNE_REPORT names.

    Does nothing where the variable is not set, so that the call can stay in a program that runs without autotune.

    Raises:
        TypeError: a value is not JSON.
        OSError: the file cannot be written.
    """
    path = os.environ.get("AUTOTUNE_REPORT")
    if not path:
        return
    line = json.dumps({"time": time.time(), **values})
    # One write of a whole line in append mode: lines of several ranks do not mix.
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
