"""What is installed of the product: the whole (`autotune-parallel`), or the client (`autotune-client`), without some packages.

`[tool.autotune.client]` in pyproject.toml declares what the client has. Both distributions have the same version.
"""

from contextlib import suppress
from importlib import metadata, util

WHOLE, CLIENT = "autotune-parallel", "autotune-client"
NOT_IN_CLIENT = frozenset(
    {
        "alembic", "api", "cryptography", "fastapi", "fastapi_standalone_docs", "httptools", "jinja2", "opentelemetry",
        "optuna", "prometheus_client", "ray", "re2", "sqlalchemy", "torch", "uvicorn", "uvloop",
    }
)  # fmt: skip
"""Modules that `autotune-parallel` brings, and the client does not."""


def version() -> str | None:
    """The version of the product; None: it is used without being installed."""
    for distribution in (WHOLE, CLIENT):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def has(module: str) -> bool:
    """Whether a module is installed. It is not imported."""
    return util.find_spec(module) is not None


def missing_line(error: ModuleNotFoundError) -> str | None:
    """The line for a module that only the whole installation has, with what to type; None: it is another module."""
    module = (error.name or "").partition(".")[0]
    if module not in NOT_IN_CLIENT or has(module):
        return None
    return f"{module}: is needed for this, and is not part of {CLIENT}; pip install {WHOLE}"


def install_line(extra: str) -> str:
    """What to type for an extra; the client is not replaced by the whole product for one that both have."""
    with suppress(metadata.PackageNotFoundError):
        metadata.distribution(WHOLE)
        return f"pip install '{WHOLE}[{extra}]'"
    with suppress(metadata.PackageNotFoundError):
        if extra in (metadata.distribution(CLIENT).metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{CLIENT}[{extra}]'"
    return f"pip install '{WHOLE}[{extra}]'"
