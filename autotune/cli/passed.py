"""`--pass-environment`: environment variables of this process that are passed to trials."""

import os
import re
from collections.abc import Sequence

from autotune.errors import RequestError
from executor.runners.rank_process import PASSED_VARIABLE, passed_names


def pass_environment(names: Sequence[str]) -> None:
    """Pass these variables to trials of this process, and of a worker that it starts.

    Raises:
        RequestError: a name is invalid, or is not set here.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RequestError("pass_environment", f"{name!r} is not a variable name", "give the name without its value")
        if name not in os.environ:
            raise RequestError("pass_environment", f"{name} is not set here", "set it, or leave it out")
    if names:
        os.environ[PASSED_VARIABLE] = " ".join(dict.fromkeys([*passed_names(os.environ), *names]))
