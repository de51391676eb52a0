"""The lock files: every package by one version and hashes, as it is tested, and no index."""

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.engines.torch_versions import oldest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "locks").glob("*.txt"))
_NAME = re.compile(r"[-_.]+")


def canonical(name: str) -> str:
    return _NAME.sub("-", name).lower()


def locked(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Package -> version and hashes."""
    found = {}
    for part in re.split(r"\n(?=[a-z0-9])", path.read_text("utf-8")):
        if match := re.match(r"([a-z0-9][a-z0-9._-]*)==(\S+)", part):
            found[canonical(match[1])] = match[2], re.findall(r"--hash=sha256:([0-9a-f]{64})\b", part)
    return found


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def test_all_are_there() -> None:
    assert [path.stem for path in FILES] == [
        "build", "client", "container", "development", "release", "torch-cpu", "torch-cuda", "torch-oldest",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_package_has_hashes_and_the_version_that_is_tested(path: Path) -> None:
    tested = pinned() if path.stem != "torch-oldest" else {}
    for name, (version, hashes) in locked(path).items():
        assert hashes, name
        assert version.partition("+")[0] == tested.get(name, version.partition("+")[0]), f"{name}: write it anew, make lock"
    text = path.read_text("utf-8")
    assert "://" not in text and "index" not in text, "it names an index"
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert all("==" in line for line in lines)


@pytest.mark.parametrize(("path", "extra"), [("container", "postgresql"), ("container", "ray-node"), ("development", "dev")])
def test_what_is_asked_for_is_locked(path: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"][extra]
    names = {canonical(re.match(r"[A-Za-z0-9._-]+", text)[0]) for text in wanted} - {"autotune-parallel", "torch"}  # type: ignore[index]
    assert names <= locked(ROOT / f"locks/{path}.txt").keys(), "make lock"
    assert "torch" not in locked(ROOT / f"locks/{path}.txt"), "it has files of its own"
    for kind in ("cpu", "cuda"):
        assert "torch" in locked(ROOT / f"locks/torch-{kind}.txt")


def test_the_oldest_torch_is_the_one_that_is_asked_for_at_least() -> None:
    assert locked(ROOT / "locks/torch-oldest.txt")["torch"][0] == f"{oldest()}.0", "make lock"
