"""The wheel: what is in it, and that it works in a project with packages named like ours."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"api", "autotune", "executor", "search_spaces", "storage"}
BUILT_FROM = (*sorted(ROOMS), "tests", "benchmarks", "examples", "docs")

MODEL = '''\
import api                  # at load
import storage.rows
from pathlib import Path

import torch


def theirs(*modules):
    """Every module must be the project's own."""
    here = Path(__file__).parent
    for module in modules:
        assert module.OWNER == "theirs" and Path(module.__file__).is_relative_to(here), module


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        import executor.errors      # lazily, with a name that ours has too
        from storage import sql     # lazily, a sub-module of a package that is loaded already

        theirs(api, executor, executor.errors, storage.rows, sql)
        (Path(__file__).parent / "forward").touch()
        return self.inner(x).square().mean()


def batch(micro_batch_size, generator):
    import api.routes

    import autotune                 # ours, as installed

    theirs(api.routes)
    assert "site-packages" in autotune.__file__, autotune.__file__
    return {"x": torch.randn(micro_batch_size, 8, generator=generator)}


def build():
    import executor

    theirs(executor)
    return Net(), batch
'''


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `autotune` command of an environment that has the wheel, and beside it what this environment has installed."""
    environment = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python = environment / "bin" / "python"
    packages = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path from a .pth file is not searched for .pth files itself: an editable install of ours there stays without effect.
    (packages / "around.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    return environment / "bin" / "autotune"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with its own `api`, `storage` and `executor`."""
    for name in ("api/__init__", "api/routes", "storage/__init__", "storage/rows", "storage/sql", "executor/__init__",
                 "executor/errors"):  # fmt: skip
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("OWNER = 'theirs'\n")
    (tmp_path / "mymodel.py").write_text(MODEL)
    return tmp_path


def test_what_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS
    assert {f"{room}/py.typed" for room in ROOMS} <= set(names)
    for part in ("autotune/schemas/best-config.schema.json", "search_spaces/presets/models.toml", "storage/migrations/env.py"):
        assert part in names
    for folder, ending in (
        ("search_spaces/presets", ".toml"), ("autotune/schemas", ".json"), ("autotune/exports/templates", ".txt"),
        ("storage/migrations", ".py"),
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
    found = json.loads(_autotune(installed, project, "sweep", "mymodel:build", *chosen, *further))
    assert found["state"] == "SUCCEEDED"
    assert found["best_config"]["model"]["parameter_count"] == 72
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
    told = _run(str(installed.parent / "python"), "-c", script, cwd=project, env={**os.environ, "PYTHONPATH": str(project)})
    assert told == "autotune.client.client Client('http://127.0.0.1:1')\n"


def _autotune(installed: Path, project: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(project), "AUTOTUNE_DB": str(project / "jobs.db"), "NO_COLOR": "1"}
    return _run(str(installed), *words, cwd=project, env=environment)


def _version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def _run(*words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    answer = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, f"{' '.join(words)}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout
