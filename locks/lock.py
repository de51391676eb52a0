"""Write the lock files anew from pyproject.toml and constraints.txt: `make lock`. Needs uv, and an index that tells hashes.

pip takes what they list and nothing else (`--require-hashes`). They name no index. torch has files of its own: the builds for
CPUs and for CUDA differ in what they need: one of the two goes with the other file.
"""

import argparse
import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "locks"
PYTHON = "3.11"
"""The oldest Python that is supported: hashes are those of all files of a version."""
WHOLE = {"container": ("--extra", "postgresql", "--extra", "ray-node"), "development": ("--extra", "dev")}
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
    if given.cpu_wheel:
        hashes = sorted(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in given.cpu_wheel)
        lines = " \\\n".join([f"{torch}+cpu", *(f"    --hash=sha256:{digest}" for digest in hashes)])
        write("torch-cpu", {"torch": lines + "\n"}, " -r locks/….txt")


def compiled(uv: str, source: str, options: tuple[str, ...], text: str = "") -> dict[str, str]:
    """Package -> its lines, with the hashes of all its files."""
    command = [
        uv, "pip", "compile", source, *options, "--constraint", "constraints.txt", "--generate-hashes", "--universal",
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
