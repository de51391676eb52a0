"""Write the lock files anew from pyproject.toml and constraints.txt: `make lock`. Needs uv, and an index that tells hashes.

pip takes what they list and nothing else (`--require-hashes`). They name no index. torch has files of its own: the builds for
CPUs and for CUDA differ in what they need: one of the two goes with the other file.
"""

import argparse
import hashlib
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Collection
from pathlib import Path

from release.build import CLIENT, project_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "locks"
PYTHON = "3.11"
"""The oldest Python that is supported: hashes are those of all files of a version."""
WHOLE = {"container": ("--extra", "postgresql", "--extra", "ray-node"), "development": ("--extra", "dev")}
TESTED_WITH = ("hypothesis", "numpy", "psutil", "pytest", "pytest-xdist", "scipy")
"""What tests of the engines and `make gpu` need beside torch."""
RELEASED_WITH = ("build", "cyclonedx-bom", "setuptools")
"""What `make client` and `make release` need."""
HEAD = "# Written by `make lock`. pip install --require-hashes -r locks/{name}.txt{beside}\n"


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--cpu-wheel", type=Path, action="append", default=[], help="A wheel of torch for CPUs, for its hash.")
    given = parser.parse_args()
    torch = next(line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("torch=="))
    with_cuda = compiled(given.uv, "-", (), torch)
    of_cuda = {name: text for name, text in with_cuda.items() if re.match(r"torch$|triton$|nvidia-|cuda-", name)}
    for name, extras in WHOLE.items():
        found = compiled(given.uv, "pyproject.toml", extras)
        write("build", {"setuptools": found["setuptools"]}, "")
        write(name, {package: text for package, text in found.items() if package not in of_cuda}, " -r locks/torch-….txt")
    write("torch-cuda", of_cuda, " -r locks/….txt")
    write("torch-oldest", compiled_oldest(given.uv, [*of_cuda, "setuptools"]), "")
    write("client", compiled(given.uv, "-", (), "\n".join(project_of(CLIENT)["project"]["dependencies"])), "")
    write("release", compiled(given.uv, "-", (), "\n".join(RELEASED_WITH)), "")
    if given.cpu_wheel:
        hashes = sorted(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in given.cpu_wheel)
        lines = " \\\n".join([f"{torch}+cpu", *(f"    --hash=sha256:{digest}" for digest in hashes)])
        write("torch-cpu", {"torch": lines + "\n"}, " -r locks/….txt")


def compiled_oldest(uv: str, free: Collection[str]) -> dict[str, str]:
    """The oldest torch that pyproject.toml allows, and what its tests need. `free`: packages whose version torch chooses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (least,) = (text.removeprefix("torch>=") for text in project["dependencies"] if text.startswith("torch>="))
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        file.writelines(f"{line}\n" for line in lines if line.partition("==")[0] not in free)
        file.flush()
        return compiled(uv, "-", (), "\n".join([f"torch=={least}.0", *TESTED_WITH]), file.name)


def compiled(
    uv: str, source: str, options: tuple[str, ...], text: str = "", constraints: str = "constraints.txt"
) -> dict[str, str]:
    """Package -> its lines, with the hashes of all its files."""
    command = [
        uv, "pip", "compile", source, *options, "--constraint", constraints, "--generate-hashes", "--universal",
        "--python-version", PYTHON, "--no-annotate", "--no-header", "--no-emit-index-url", "--quiet",
    ]  # fmt: skip
    made = subprocess.run(command, cwd=ROOT, input=text, text=True, stdout=subprocess.PIPE, check=True).stdout
    return {part.partition("==")[0]: part for part in re.split(r"^(?=[a-z0-9])", made, flags=re.MULTILINE) if "==" in part}


def write(name: str, packages: dict[str, str], beside: str) -> None:
    """Write a file of these packages."""
    text = HEAD.format(name=name, beside=beside) + "".join(packages.values())
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
