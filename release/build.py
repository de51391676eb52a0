"""Build the two distributions from this tree: `make client`, `make release`. Needs git, build and setuptools.

`autotune-client` has the packages that `[tool.autotune.client]` of pyproject.toml names, and their dependencies.
`autotune-parallel` has the other packages and all other dependencies, and requires the client of the same version. No file
belongs to both, so pip can remove `autotune-parallel` without damage to the client.

The files are the same to the byte for the same commit, wherever and whenever they are built: times are SOURCE_DATE_EPOCH (by
default the commit's), modes and orders are fixed.
"""

import argparse
import copy
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHOLE, CLIENT = "autotune-parallel", "autotune-client"
LOCKS = {WHOLE: ("container", "torch-cuda"), CLIENT: ("client",)}
"""Distribution -> the lock files with everything that it needs, for its SBOM."""
BESIDE = ("README.md", "LICENSE")
SUMS = "SHA256SUMS"


def main() -> None:
    """Build into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{WHOLE} or {CLIENT}. [default: both]")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--sbom", action="store_true", help="Also write SBOMs and checksums.")
    given = parser.parse_args()
    if unknown := {*given.names} - {*LOCKS}:
        parser.error(f"{unknown.pop()!r} is not a distribution: use {WHOLE} or {CLIENT}")
    made = [path for name in given.names or LOCKS for path in build(name, given.out)]
    if given.sbom:
        made += [write_sbom(name, given.out) for name in given.names or LOCKS]
        made.append(write_sums(made, given.out / SUMS))
    for path in made:
        sys.stdout.write(f"{path}\n")


def project_of(name: str, root: Path = ROOT) -> dict[str, Any]:
    """The contents of pyproject.toml of one of the two distributions, derived from the tree's."""
    tree = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    split, project, tools = tree["tool"]["autotune"]["client"], copy.deepcopy(tree["project"]), tree["tool"]["setuptools"]
    in_client = {
        line for line in project["dependencies"] if re.split(r"[^\w.-]", line, maxsplit=1)[0] in {*split["dependencies"]}
    }
    if len(in_client) != len(split["dependencies"]):
        raise ValueError("tool.autotune.client: dependencies: one is not a dependency of the project; name it there too")
    packages = [package for package in tools["packages"]["find"]["include"] if "." not in package]
    extras = project.pop("optional-dependencies")
    if name == CLIENT:
        packages = split["packages"]
        project |= {"name": CLIENT, "description": split["description"]}
        project["dependencies"] = [line for line in project["dependencies"] if line in in_client]
        extras = {extra: extras[extra] for extra in split["extras"]}
    else:
        packages = [package for package in packages if package not in split["packages"]]
        rest = [line for line in project["dependencies"] if line not in in_client]
        project["dependencies"] = [f"{CLIENT}=={project['version']}", *rest]
        del project["scripts"]  # the client's
        del extras["dev"]
    data = {package: patterns for package, patterns in tools["package-data"].items() if package in packages}
    find = {"include": [pattern for package in packages for pattern in (package, f"{package}.*")]}
    return {
        "build-system": tree["build-system"],
        "project": {**project, "optional-dependencies": extras},
        "tool": {"setuptools": {"packages": {"find": find}, "package-data": data}},
    }


def build(name: str, out: Path) -> list[Path]:
    """Build the sdist, and from it the wheel.

    Raises:
        subprocess.CalledProcessError: git or the build failed; its output is on standard error.
    """
    project = project_of(name)
    epoch = source_date_epoch()
    with tempfile.TemporaryDirectory(prefix="autotune-release-") as folder:
        source, made = Path(folder, "source"), Path(folder, "made")
        _stage(project, source)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
        words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)]
        # The umask decides the modes of the files that the build itself writes.
        answer = subprocess.run(
            words, env=environment, umask=0o022, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if answer.returncode:
            sys.stderr.write(answer.stdout)
            answer.check_returncode()
        (sdist,) = made.glob("*.tar.gz")
        sdist.write_bytes(_normalised(sdist, epoch))
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(path, out)) for path in sorted(made.iterdir())]


def source_date_epoch() -> int:
    """SOURCE_DATE_EPOCH, else the time of the newest commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given) if given else int(_git("log", "-1", "--format=%ct"))


def write_sbom(name: str, out: Path) -> Path:
    """Write the CycloneDX document of a distribution and of the locked files that it needs."""
    project = project_of(name)
    path = out / f"{name.replace('-', '_')}-{project['project']['version']}.cdx.json"
    with tempfile.TemporaryDirectory() as folder:
        needed, described = Path(folder, "requirements.txt"), Path(folder, "pyproject.toml")
        ours = f"{CLIENT}=={project['project']['version']}\n" if name == WHOLE else ""
        needed.write_text(ours + "".join((ROOT / "locks" / f"{lock}.txt").read_text("utf-8") for lock in LOCKS[name]), "utf-8")
        described.write_text(_toml({"project": {**project["project"], "readme": ""}}), "utf-8")
        words = [
            "requirements",
            str(needed),
            "--pyproject",
            str(described),
            "--output-reproducible",
            "--output-file",
            str(path),
        ]
        # The lock files say what is needed, not by what: the tool warns that it does not know.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source_date_epoch()), "PYTHONWARNINGS": "ignore"}
        subprocess.run([sys.executable, "-m", "cyclonedx_py", *words], env=environment, check=True)
    return path


def write_sums(paths: Iterable[Path], target: Path) -> Path:
    """Write the SHA-256 of each file, as `sha256sum --check` reads them."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(paths)]
    target.write_text("".join(lines), "utf-8")
    return target


def _stage(project: Mapping[str, Any], source: Path) -> None:
    """Copy what belongs to the distribution, of the files that git knows, with modes that do not depend on the machine."""
    packages = [pattern for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in pattern]
    for name in (*_git("ls-files", "--", *packages).splitlines(), *BESIDE):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(0o644)
    (source / "pyproject.toml").write_text(_toml(project), "utf-8")


def _normalised(sdist: Path, epoch: int) -> bytes:
    """The same archive without what depends on the machine and the moment: times, owners, modes, order."""
    plain = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            new.addfile(member, content)
    return gzip.compress(plain.getvalue(), mtime=epoch)


def _toml(tables: Mapping[str, Any]) -> str:
    return "\n".join(_toml_lines(tables, ())) + "\n"


def _toml_lines(table: Mapping[str, Any], path: Sequence[str]) -> Iterator[str]:
    """Lines of a table whose values are strings, lists of strings and tables. TOML reads strings as JSON writes them."""
    if path:
        yield f"[{'.'.join(map(json.dumps, path))}]"
    for name, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{json.dumps(name)} = {json.dumps(value, ensure_ascii=False)}"
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, name))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
