"""Ray for the module that needs it, a user's project with packages named like ours, and who is alive."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor.runners.runner import Runner

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # for `runner_contract`; ranks get it by PYTHONPATH, for `scripted`


SECRETS = ("AUTOTUNE_DB", "AUTOTUNE_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "TORCH_HUB_TOKEN", "MINE")


@pytest.fixture(scope="module", autouse=True)
def secrets() -> Iterator[None]:
    """What the environment of who starts ranks holds, and trials must not find."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, f"secret of {name}")
        yield


@pytest.fixture(scope="module")
def started_ray(secrets: None) -> Iterator[None]:
    """A Ray that the runners of a module find running. Not longer: its processes take a share of the machine all the time."""
    from executor.runners.ray.cluster import RayCluster

    cluster = RayCluster(None, 4)
    yield
    cluster.close()


@pytest.fixture(scope="module")
def runner(make_runner: Callable[[], Runner]) -> Iterator[Runner]:
    """The one runner of a module whose tests follow the contract.

    On a busy machine ranks that fail alike tell it, and come together again, later than it is worth waiting for elsewhere.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor.runners.verdict.CLEAN_GRACE_SECONDS", 60.0)
        patch.setattr("executor.runners.gang.REJOIN_SECONDS", 120.0)
        with make_runner() as runner:
            yield runner


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with its own `api`, `storage` and `executor`, imported at load and lazily."""
    for package in ("api", "storage", "executor"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("OWNER = 'theirs'\n")
        (folder / "errors.py").write_text("OWNER = 'theirs'\n")
    (tmp_path / "project.py").write_text(
        "import api\n"
        "import executor.errors\n"
        "def build():\n"
        "    import storage, storage.errors, executor\n"
        "    owners = {api.OWNER, executor.errors.OWNER, storage.OWNER, storage.errors.OWNER, executor.OWNER}\n"
        "    return owners.pop() if len(owners) == 1 else owners\n"
    )
    return tmp_path
