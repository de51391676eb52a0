"""What the processes of trials find in their environment: what is on a list, never all that their parent has.

A trial runs code of whoever submitted it. The worker that starts it has the address of the database with its password, API
keys, and tokens of clouds in its environment.

This file imports the standard library alone: the Ray actors carry it by value to workers where nothing of ours is importable.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

PASSED_VARIABLE = "AUTOTUNE_PASS_ENVIRONMENT"
"""Further names for trials, with blanks between: what `--pass-environment` of the worker sets."""
NAMES = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR",
    "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS",
    "MAX_JOBS", "GOMP_CPU_AFFINITY", "ROCM_PATH", "ROCM_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy",
    "ftp_proxy", "all_proxy", "no_proxy", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT",
    "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE", "GROUP_RANK", "NODE_RANK",
))  # fmt: skip
"""Variables that trials find as their parent has them."""
PREFIXES = (
    "LC_", "XDG_", "PYTHON", "CUDA_", "CUDNN_", "CUBLAS", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "IBV_", "MLX5_",
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "MALLOC_", "TORCH", "PYTORCH_", "TRITON_",
    "NVTE_", "NVSHMEM_", "FLASH_ATTENTION_", "DS_", "DEEPSPEED_", "ACCELERATE_", "FSDP_", "HIP_", "HSA_", "ROCR_", "RCCL_",
    "MIOPEN_", "SLURM_",
)  # fmt: skip
"""What the other names begin with: settings of libraries that trials use."""
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|JWT", re.IGNORECASE)
"""A name with one of these words is passed where it is named, whatever it begins with."""


def is_listed(name: str) -> bool:
    """Whether trials find a variable of this name."""
    return name in NAMES or (name.startswith(PREFIXES) and not _SECRET.search(name))


def passed_names(environment: Mapping[str, str]) -> list[str]:
    """The further names that who runs the worker lets trials find."""
    return environment.get(PASSED_VARIABLE, "").split()


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The same with their values: for processes whose parent is not this one."""
    return {name: environment[name] for name in passed_names(environment) if name in environment}


def for_trials(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that trials find."""
    listed = {name: value for name, value in environment.items() if is_listed(name)}
    return listed | passed_variables(environment)


_KEPT = ("AUTOTUNE_PASS_ENVIRONMENT", "RAY_", "PG")
"""Besides what trials find: what Ray is set up by, and what a connection to the database may be opened by meanwhile."""


@contextlib.contextmanager
def hidden_from_children() -> Iterator[None]:
    """Inside it, processes that are started do not inherit the rest: for a library that passes on all there is."""
    shown = for_trials(os.environ)
    hidden = {name: value for name, value in os.environ.items() if name not in shown and not name.startswith(_KEPT)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
