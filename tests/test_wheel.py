"""The wheel: what is in it, and that it works in a project with packages named like ours."""

import json
import os
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.common.wheel_project import PACKAGES, PARAMETERS, REFERENCE, ROOT, build_wheel, install, printed, write_project
from tests.documents import check_document

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `autotune` command of an environment that has the wheel."""
    return install(wheel, tmp_path_factory.mktemp("environment")) / "autotune"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*PACKAGES}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    for part in ("autotune/schemas/best-config.schema.json", "search_spaces/presets/models.toml", "storage/migrations/env.py"):
        assert part in names
    for folder, ending in (
        ("search_spaces/presets", ".toml"), ("autotune/schemas", ".json"), ("autotune/frameworks/templates", ".txt"),
        ("storage/migrations", ".py"), ("api/page", ".html"), ("api/page", ".css"), ("api/page", ".mjs"), ("api/page", ".txt"),
    ):  # fmt: skip
        ours = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(f"*{ending}")}
        assert ours
        assert ours <= set(names)


def test_it_is_the_wheel_that_runs(installed: Path, project: Path) -> None:
    assert _autotune(installed, project, "--version") == f"autotune {_version()}\n"
    assert "llama-tiny" in _autotune(installed, project, "space", "llama-tiny")


@pytest.mark.parametrize("runner", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_project_with_packages_of_our_names(installed: Path, project: Path, runner: str) -> None:
    chosen = () if runner == "ray" else ("--runner", runner)
    further = ("--trials", "2", "--confirm-repeats", "0", "--trial-seconds", "0.1", "--global-batch-size", "4", "--json")
    found = json.loads(_autotune(installed, project, "sweep", REFERENCE, *chosen, *further))
    assert found["state"] == "SUCCEEDED"
    assert found["best_config"]["model"]["parameter_count"] == PARAMETERS
    assert found["best_config"]["job"]["request"]["runner"] == runner
    assert found["best_config"]["baseline"] is not None  # the trials were measured, not failed
    assert (project / "forward").exists()


def test_the_client_beside_packages_of_our_names(installed: Path, project: Path) -> None:
    script = (
        "import api, executor, storage\n"
        "from autotune import Client\n"
        "client = Client('http://127.0.0.1:1')\n"
        "assert {api.OWNER, executor.OWNER, storage.OWNER} == {'theirs'}\n"
        "print(Client.__module__, client)\n"
    )
    told = printed(
        str(installed.parent / "python"), "-c", script, folder=project, environment={**os.environ, "PYTHONPATH": str(project)}
    )
    assert told == "autotune.client.client Client('http://127.0.0.1:1')\n"


def _autotune(installed: Path, project: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(project), "AUTOTUNE_DB": str(project / "jobs.db"), "NO_COLOR": "1"}
    output = printed(str(installed), *words, folder=project, environment=environment)
    check_document(words, output)
    return output


def _version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
