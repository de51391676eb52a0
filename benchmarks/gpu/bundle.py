"""Collects the wheels that `autotune sweep --runner local` needs besides torch, NumPy and SciPy, for use elsewhere.

    python -m benchmarks.gpu.bundle [--out build/gpu-bundle]

Part `sweep` of the GPU proofs runs the command line. A machine with a GPU may have no package index, so the wheels are
copied along with the checkout. Versions and hashes are those of the lock; the wheels are for Python 3.12 on Linux, x86-64.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "locks" / "container.txt"
FOLDER = ROOT / "build" / "gpu-bundle"
MOST_BYTES = 64 << 20
"""Largest size of the folder: it is copied along with a checkout."""
PACKAGES = (
    "alembic", "annotated-doc", "annotated-types", "anyio", "cffi", "cryptography", "h11", "httpcore2", "httpx2", "idna",
    "mako", "markdown-it-py", "markupsafe", "mdurl", "platformdirs", "pycparser", "pydantic", "pydantic-core", "pygments",
    "pyyaml", "rich", "shellingham", "sqlalchemy", "truststore", "typer", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""Packages that the sweep imports, with their dependencies. Ray and Optuna are not among them: guided search uses neither."""
TARGET = ("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312", "--abi", "abi3", "--abi", "none")
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)))
MISSING = "not built; build it with `make gpu-bundle` and copy it along"


def locked(names: tuple[str, ...] = PACKAGES, lock: Path = LOCK) -> str:
    """The lock's lines of these packages.

    Raises:
        KeyError: a package is not in the lock.
    """
    parts = re.split(r"^(?=[a-z0-9])", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {part.partition("==")[0]: part for part in parts if "==" in part}
    return "".join(known[name] for name in names)


def build(folder: Path) -> int:
    """Download the wheels into an empty `folder`; return their total bytes.

    Raises:
        CalledProcessError: pip finds no wheel of a locked version, or a hash differs.
        ValueError: the folder is larger than `MOST_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(locked(), encoding="utf-8")
        platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes",
            "--only-binary=:all:", *TARGET, *platforms, "--dest", str(folder), "--requirement", str(requirements),
        ]  # fmt: skip
        subprocess.run(command, check=True)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MOST_BYTES:
        raise ValueError(f"{folder} holds {size:,} bytes, more than {MOST_BYTES:,}; leave packages out")
    return size


def unpack(folder: Path, target: Path) -> Path:
    """Unpack the wheels of `folder` into `target`, to be put on `sys.path`: compiled modules cannot be imported from a zip.

    Raises:
        FileNotFoundError: `folder` holds no wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"the bundle {folder} is {MISSING}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    size = build(folder)
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
