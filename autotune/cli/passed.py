"""`--pass-environment`: variables of this process that trials find."""

import os
import re
from collections.abc import Sequence

from autotune.errors import RequestError
from executor.runners.rank_environment import PASSED_VARIABLE, passed_names


def pass_environment(names: Sequence[str]) -> None:
    """Let trials of this process, and of a worker that it starts, find these variables.

    Raises:
        RequestError: one is no name, or is not set here.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RequestError("pass_environment", f"{name!r} is no variable's name", "give the name without its value")
        if name not in os.environ:
            raise RequestError("pass_environment", f"{name} is not set here", "set it, or leave it out")
    if names:
        os.environ[PASSED_VARIABLE] = " ".join(dict.fromkeys([*passed_names(os.environ), *names]))
