"""Environment variables that rank processes may be started with: their names, values and device kinds.

They reach processes on other machines from files and over HTTP, where a loader variable (LD_PRELOAD, PYTHONPATH, …) would
execute the sender's code. So there is a list of allowed names, with values as documented by the library that reads them:

- NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
- CUDA: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
- GNU OpenMP, which torch is built with: https://gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html
- glibc's malloc: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from search_spaces.errors import KnobValueError

ENVIRONMENT = "environment"
"""Name of the knob, also in its errors."""
ENVIRONMENT_RULE = "environment-variables"
"""Name of the rule that refuses variables."""
MOST_SETTINGS = 4
"""Maximum settings of a job: each needs new processes."""
STANDARD = "standard"
"""Stands for the default settings of the device kind and the number of nodes."""
_ANY_CASE = re.IGNORECASE | re.ASCII
_ALGORITHM = r"(tree|ring|collnetdirect|collnetchain|nvls|nvlstree|pat)"
_ALGORITHMS = rf"\^?{_ALGORITHM}(,{_ALGORITHM})*"
_FUNCTION = r"(broadcast|reduce|allgather|reducescatter|allreduce)"
_ALGO = re.compile(rf"({_ALGORITHMS}|{_FUNCTION}:{_ALGORITHMS})(;{_FUNCTION}:{_ALGORITHMS})*", _ANY_CASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable that may be set."""

    values: str
    """Description of the allowed values."""
    holds: Callable[[str], object]
    """Whether a text is an allowed value."""
    device: str | None = None
    """Device kind that it affects; None: any, because it affects the host code."""


def _matching(pattern: re.Pattern[str], values: str, device: str | None = None) -> Variable:
    return Variable(values=values, holds=pattern.fullmatch, device=device)


def _between(least: int, most: int, unit: str = "", device: str | None = None) -> Variable:
    def holds(text: str) -> bool:
        return bool(re.fullmatch(r"0|[1-9][0-9]{0,14}", text)) and least <= int(text) <= most

    return Variable(values=f"a whole number{f' of {unit}' if unit else ''} from {least} to {most}", holds=holds, device=device)


VARIABLES: Mapping[str, Variable] = {
    "NCCL_ALGO": _matching(
        _ALGO,
        "names such as Ring, Tree, NVLS or PAT with commas between, after ^ those left out, or allreduce:tree;allgather:ring",
        "cuda",
    ),
    "NCCL_PROTO": _matching(
        re.compile(r"(LL|Simple)(,(LL|Simple))*|\^(LL|LL128|Simple)(,(LL|LL128|Simple))*", _ANY_CASE),
        "Simple, LL, or after ^ what is left out, as ^LL128: to force LL128 corrupts data where a platform lacks it",
        "cuda",
    ),
    "NCCL_NVLS_ENABLE": _between(0, 2, device="cuda"),
    "NCCL_MIN_NCHANNELS": _between(1, 64, "channels", "cuda"),
    "NCCL_MAX_NCHANNELS": _between(1, 64, "channels", "cuda"),
    "NCCL_MIN_CTAS": _between(1, 64, "blocks", "cuda"),
    "NCCL_MAX_CTAS": _between(1, 64, "blocks", "cuda"),
    "NCCL_BUFFSIZE": _between(2**16, 2**28, "bytes", "cuda"),
    "NCCL_NTHREADS": _matching(re.compile("64|128|256|512"), "64, 128, 256 or 512 threads", "cuda"),
    "NCCL_P2P_NET_CHUNKSIZE": _between(2**12, 2**26, "bytes", "cuda"),
    "NCCL_CROSS_NIC": _between(0, 2, device="cuda"),
    "NCCL_PXN_DISABLE": _between(0, 1, device="cuda"),
    "NCCL_IB_QPS_PER_CONNECTION": _between(1, 128, "queue pairs", "cuda"),
    "NCCL_IB_SPLIT_DATA_ON_QPS": _between(0, 1, device="cuda"),
    "NCCL_SOCKET_NTHREADS": _between(1, 16, "threads", "cuda"),
    "NCCL_NSOCKS_PERTHREAD": _between(1, 16, "sockets", "cuda"),
    "CUDA_DEVICE_MAX_CONNECTIONS": _between(1, 32, "queues", "cuda"),
    "OMP_WAIT_POLICY": _matching(re.compile(r"active|passive", _ANY_CASE), "active or passive"),
    "GOMP_SPINCOUNT": _between(0, 10**12, "turns"),
    "MALLOC_ARENA_MAX": _between(1, 1024, "arenas"),
    "MALLOC_MMAP_MAX_": _between(0, 2**30, "allocations"),
    "MALLOC_MMAP_THRESHOLD_": _between(4096, 2**25, "bytes"),
    "MALLOC_TRIM_THRESHOLD_": _between(4096, 2**40, "bytes"),
    "MALLOC_TOP_PAD_": _between(0, 2**34, "bytes"),
}
"""All allowed variables."""


def variables_of(text: str) -> dict[str, str]:
    """The variables in a text of NAME=VALUE pairs, sorted by name.

    Raises:
        KnobValueError: a word is not such a pair, a name is repeated or not in `VARIABLES`, or a value is not allowed.
    """
    variables: dict[str, str] = {}
    for word in text.split():
        pair = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(\S+)", word)
        if pair is None:
            raise _refused(f"{word!r} is not NAME=VALUE", "write for example NCCL_PROTO=Simple, with blanks between pairs")
        name, value = pair.groups()
        if name not in VARIABLES:
            raise _refused(f"{name} may not be set", f"use some of {', '.join(VARIABLES)}")
        if name in variables:
            raise _refused(f"{name} is set twice", "leave one of them out")
        if not VARIABLES[name].holds(value):
            raise _refused(f"{value!r} is not a value of {name}", f"give {VARIABLES[name].values}")
        variables[name] = value
    return dict(sorted(variables.items()))


def environment_text(text: str) -> str:
    """Canonical text of these variables: sorted, separated by blanks. Raises as `variables_of`."""
    return " ".join(f"{name}={value}" for name, value in variables_of(text).items())


def merged(base: str, setting: str) -> str:
    """The variables of a base setting overridden by another setting.

    Raises as `variables_of`.
    """
    variables = {**variables_of(base), **variables_of(setting)}
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items()))


def environment_problem(text: str, device: str) -> str | None:
    """Why these variables are invalid on this device kind; None: they are valid."""
    try:
        variables = variables_of(text)
    except KnobValueError as error:
        return error.problem
    for name in variables:
        if VARIABLES[name].device not in (None, device):
            return f"{name} acts on {VARIABLES[name].device} devices, and ranks have {device} here"
    return None


def standard_settings(device: str, nodes: int) -> tuple[str, ...]:
    """The settings of a job that does not name any (docs/performance.md has the reasons)."""
    if device != "cuda":
        keeps = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776"
        return (keeps, f"MALLOC_ARENA_MAX=1 {keeps}", "OMP_WAIT_POLICY=passive", "OMP_WAIT_POLICY=active")
    first = "NCCL_NVLS_ENABLE=0" if nodes == 1 else "NCCL_ALGO=Ring"
    return (first, "NCCL_PROTO=Simple", "NCCL_MAX_CTAS=8", "NCCL_BUFFSIZE=8388608")


def _refused(problem: str, remedy: str) -> KnobValueError:
    return KnobValueError(ENVIRONMENT, problem, remedy)
