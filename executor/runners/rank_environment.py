"""Filters the environment of trial processes: they get the variables on an allow list, never all variables of their parent.

A trial runs the code of whoever submitted it. The environment of the worker that starts it contains the database address with
its password, API keys, and cloud tokens.

This file imports only the standard library: Ray actors carry it by value to workers where our packages are not importable.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

PASSED_VARIABLE = "AUTOTUNE_PASS_ENVIRONMENT"
"""Further names for trials, separated by spaces; set by the worker's `--pass-environment`."""
NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR",
    "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS",
    "MAX_JOBS", "GOMP_CPU_AFFINITY", "ROCM_PATH", "ROCM_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "ftp_proxy", "all_proxy", "no_proxy", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT",
    "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE", "GROUP_RANK", "NODE_RANK", "AUTOTUNE_PLUGINS",
))  # fmt: skip
"""Variables that trials inherit from their parent."""
PREFIXES = (
    "LC_", "XDG_", "PYTHON", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "IBV_", "MLX5_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "MALLOC_", "TORCH", "PYTORCH_", "TRITON_",
    "NVTE_", "NVSHMEM_", "FLASH_ATTENTION_", "DS_", "DEEPSPEED_", "ACCELERATE_", "FSDP_", "HIP_", "HSA_", "ROCR_", "RCCL_",
    "MIOPEN_", "SLURM_",
)  # fmt: skip
"""Prefixes of further inherited names: settings of libraries that trials use."""
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|JWT", re.IGNORECASE)
"""A name that contains one of these words is not passed for its prefix, only if it is listed by name."""


def is_listed(name: str) -> bool:
    """Whether trials inherit a variable of this name."""
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))


def passed_names(environment: Mapping[str, str]) -> list[str]:
    """Return the further names that the operator of the worker passes to trials."""
    return environment.get(PASSED_VARIABLE, "").split()


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return these variables with their values, for processes that are not children of this one."""
    return {name: environment[name] for name in passed_names(environment) if name in environment}


def for_trials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that trials inherit."""
    listed = {name: value for name, value in environment.items() if is_listed(name)}
    return listed | passed_variables(environment)


_KEPT = ("AUTOTUNE_PASS_ENVIRONMENT", "RAY_", "PG")
"""Prefixes that stay visible besides: settings of Ray, and of database connections that may be opened meanwhile."""


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """Hide all other variables from processes started inside the block, for a library that passes on the whole environment."""
    shown = for_trials(os.environ)
    hidden = {name: value for name, value in os.environ.items() if name not in shown and not name.startswith(_KEPT)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
