"""The two distributions: what is in them, that they are the same to the byte, and what the client does by itself."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import httpx2
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from autotune.installed import NOT_IN_CLIENT
from benchmarks.common.wheel_project import PACKAGES, ROOT, printed
from release.build import CLIENT, WHOLE, project_of
from tests.documents import check_document
from tests.ports import free_port

RELEASE_PYTHON = ROOT / ".venv-release" / "bin" / "python"
"""Made by `make client`, `make release` and `make nightly`."""
MOST_BYTES = 25_000_000
"""Of the client and what it needs besides NumPy and SciPy, without bytecode; of the client itself, with it."""


def test_every_package_and_dependency_is_in_one_of_them() -> None:
    tree = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    client, whole = (project_of(name) for name in (CLIENT, WHOLE))
    found = [
        {pattern for pattern in one["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in pattern}
        for one in (client, whole)
    ]
    assert found[0] | found[1] == {*PACKAGES}
    assert not found[0] & found[1]
    first, *rest = whole["project"]["dependencies"]
    assert first == f"{CLIENT}=={tree['version']}"
    assert sorted([*client["project"]["dependencies"], *rest]) == sorted(tree["dependencies"])
    assert {"postgresql", "deepspeed", "transformers", "exports", "mcp"} <= {*whole["project"]["optional-dependencies"]}


def test_what_the_client_lacks_is_named() -> None:
    """Every module of a dependency of `autotune` alone, and its package, lead to the line to type."""
    _, *rest = project_of(WHOLE)["project"]["dependencies"]
    lacking = {canonicalize_name(Requirement(line).name) for line in rest}
    modules = {
        module
        for module, owners in metadata.packages_distributions().items()
        if lacking & {canonicalize_name(owner) for owner in owners} and module.isidentifier() and not module.startswith("_")
    }
    direct = {*NOT_IN_CLIENT} - {"api"}
    assert direct <= modules
    assert modules - direct <= {"functorch", "torchgen", "opentelemetry", "yaml"}  # never imported by ours


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _released(tmp_path_factory.mktemp("dist"), {})


@pytest.fixture(scope="module")
def client(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the client and what it requires, and nothing else."""
    return _environment(made, tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def both(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has both, around them the packages of this one."""
    programs = _environment(made, tmp_path_factory.mktemp("both"))
    (_packages(programs) / "around.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    _pip(programs, "install", "--no-deps", "--no-index", str(next(made.glob("autotune_parallel-*.whl"))))
    return programs


@pytest.mark.nightly
def test_they_are_the_same_to_the_byte(made: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        again = _released(tmp_path / "another" / "folder", {"TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path), "LC_ALL": "C"})
    finally:
        os.umask(umask)
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (made, again))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.nightly
def test_no_file_is_in_both_wheels(made: Path) -> None:
    ours, theirs = (_files(next(made.glob(f"{name}-*.whl"))) for name in ("autotune_parallel", "autotune_client"))
    assert {name.partition("/")[0] for name in theirs if ".dist-info/" not in name} == {*PACKAGES} - {"api"}
    assert ours & theirs == set()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "autotune" / "schemas").rglob("*.json")} <= theirs
    with tarfile.open(next(made.glob("autotune_client-*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {name for name in theirs if ".dist-info/" not in name} <= inside


@pytest.mark.nightly
def test_checksums_and_sbom(made: Path) -> None:
    if not RELEASE_PYTHON.exists():
        pytest.skip("the SBOM needs .venv-release: make release")
    for line in (made / "SHA256SUMS").read_text("utf-8").splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    document = json.loads(next(made.glob("autotune_client-*.cdx.json")).read_text("utf-8"))
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", CLIENT)
    named = {component["name"]: component for component in document["components"]}
    assert {"numpy", "httpx2", "typer"} <= named.keys()
    assert not {"torch", "ray", "sqlalchemy"} & named.keys()
    assert named["httpx2"]["externalReferences"][0]["hashes"]


@pytest.mark.nightly
def test_the_client_is_small_and_plans(client: Path, tmp_path: Path) -> None:
    packages = _packages(client)
    files = [path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    besides = sum(
        path.stat().st_size for path in files if not path.relative_to(packages).parts[0].startswith(("numpy", "scipy"))
    )
    assert besides < MOST_BYTES
    ours = [path for name in PACKAGES for path in (packages / name).rglob("*") if path.is_file()]
    assert any(path.suffix == ".pyc" for path in ours)
    assert sum(path.stat().st_size for path in ours) < MOST_BYTES
    assert not [name for name in ("torch", "ray", "sqlalchemy", "optuna", "fastapi", "api") if (packages / name).exists()]
    plans = json.loads(_autotune(client, tmp_path, "plan", "llama-3-70b", "--cluster", "dgx-h100:8", "--json"))
    assert plans["plans"][0]["config"]["micro_batch_size"] >= 1
    predicted = json.loads(_autotune(client, tmp_path, "predict", "llama-3-8b", "--cluster", "dgx-h100:1", "--json"))
    assert predicted["predicted"]["samples_per_second"]["mean"] > 0
    recipe = tmp_path / "deepspeed.json"
    recipe.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    assert json.loads(_autotune(client, tmp_path, "lint", str(recipe), "--json", status=None))["files"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "sweep llama-tiny",
            "sqlalchemy: is needed for this, and is not part of autotune-client; pip install autotune-parallel",
        ),
        ("serve", "uvicorn: is needed for this, and is not part of autotune-client; pip install autotune-parallel"),
        ("dry-run llama-tiny", "torch: is needed for this, and is not part of autotune-client; pip install autotune-parallel"),
        ("mcp", "mcp: is not installed; pip install 'autotune-client[mcp]'"),
        (
            "jobs",
            f"url: is missing, and this client reads no database; give --url, set AUTOTUNE_URL, or pip install {WHOLE}",
        ),
    ],
)
def test_what_the_client_lacks_is_one_line(client: Path, tmp_path: Path, words: str, line: str) -> None:
    answer = _call(client, tmp_path, *words.split())
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", f"autotune: {line}\n")


@pytest.mark.nightly
def test_the_client_imports_little(client: Path, tmp_path: Path) -> None:
    script = "import sys; import autotune; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = printed(str(client / "python"), "-c", script, folder=tmp_path).split()
    assert not {"numpy", "scipy", "rich", "typer", "httpx2", "pydantic"} & {*loaded}


@pytest.mark.nightly
def test_the_client_of_a_service(client: Path, both: Path, tmp_path: Path) -> None:
    with _service(both, tmp_path) as url:
        place = ("--url", url)
        job = _autotune(client, tmp_path, "submit", "llama-tiny", *place, "--runner", "local", "--trials", "2",
                        "--confirm-repeats", "0", "--global-batch-size", "4").strip()  # fmt: skip
        _autotune(client, tmp_path, "watch", job, *place)
        assert json.loads(_autotune(client, tmp_path, "show", job, *place, "--json"))["job"]["state"] == "SUCCEEDED"
        assert json.loads(_autotune(client, tmp_path, "explain", job, *place, "--json"))["job"]
        assert "zero_optimization" in _autotune(client, tmp_path, "export", job, *place, "--format", "deepspeed")
        assert job in _autotune(client, tmp_path, "report", job, *place, "--format", "md")


@pytest.mark.nightly
def test_the_client_outlives_the_whole(both: Path, tmp_path: Path) -> None:
    """`autotune` removed by pip leaves every file of the client. The last test with this environment."""
    assert _autotune(both, tmp_path, "--version") == f"autotune {project_of(WHOLE)['project']['version']}\n"
    _pip(both, "uninstall", "--yes", "autotune")
    assert "llama-tiny" in _autotune(both, tmp_path, "space", "llama-tiny")
    answer = _call(both, tmp_path, "serve")
    assert (
        answer.stderr
        == "autotune: api: is needed for this, and is not part of autotune-client; pip install autotune-parallel\n"
    )


def _released(out: Path, further: Mapping[str, str]) -> Path:
    """Build in this process's tree; with SBOMs where the tool is there."""
    with_tool = RELEASE_PYTHON.exists()
    words = (str(RELEASE_PYTHON) if with_tool else sys.executable, "-m", "release.build", "--out", str(out))
    printed(*words, *(["--sbom"] if with_tool else []), folder=ROOT, environment={**os.environ, **further})
    return out


def _environment(made: Path, folder: Path) -> Path:
    printed(sys.executable, "-m", "venv", "--without-pip", str(folder))
    programs = folder / "bin"
    for name in _needed(project_of(CLIENT)["project"]["dependencies"]):
        _copy(metadata.distribution(name), _packages(programs))
    _pip(programs, "install", "--no-deps", "--no-index", str(next(made.glob("autotune_client-*.whl"))))
    return programs


def _needed(requirements: list[str]) -> set[str]:
    """Names of the distributions that satisfy the requirements, with theirs, as they are installed here."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(line) for line in metadata.requires(name) or ()]
    return found


def _copy(distribution: metadata.Distribution, packages: Path) -> None:
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


def _packages(programs: Path) -> Path:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(printed(str(programs / "python"), "-c", script).strip())


def _pip(programs: Path, *words: str) -> None:
    printed(sys.executable, "-m", "pip", "--python", str(programs / "python"), "--quiet", *words)


def _files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


def _call(programs: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(programs / "autotune"), *words], cwd=folder, env=_variables(folder), capture_output=True, text=True, timeout=300
    )


def _autotune(programs: Path, folder: Path, *words: str, status: int | None = 0) -> str:
    answer = _call(programs, folder, *words)
    assert status is None or answer.returncode == status, answer.stderr
    check_document(words, answer.stdout)
    return answer.stdout


def _variables(folder: Path) -> dict[str, str]:
    hidden = ("AUTOTUNE_DB", "AUTOTUNE_URL", "AUTOTUNE_API_KEY", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "XDG_DATA_HOME": str(folder / "data"), "NO_COLOR": "1"}


@contextlib.contextmanager
def _service(programs: Path, folder: Path) -> Iterator[str]:
    """The address of a service with a worker, started from the whole installation."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "serve.log"
    with log.open("w") as output:
        words = (str(programs / "autotune"), "serve", "--port", str(port), "--db", str(folder / "jobs.db"))
        process = subprocess.Popen(words, cwd=folder, env=_variables(folder), stdout=output, stderr=output)
        try:
            while not _answers(url):
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz").is_success
    except httpx2.TransportError:
        return False
