"""What all tests share: small collections of garbage, a database to copy, and a process that ranks are forked from."""

import gc
import os
import random
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, LoadScopeScheduling

from tests.forked_ranks import ForkServer

HERE = Path(__file__).parent
# Small models gain nothing from threads, which wait for each other where another process of the tests computes. torch and NumPy
# read this when they are imported, here and in processes that tests start. Ranks have as many threads as their runner says:
# those do not compute while they wait.
os.environ |= {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
# Predictions on this machine would start ranks to measure it: the tests of that switch it on.
os.environ["AUTOTUNE_QUICK_CALIBRATION"] = "off"
# No test reads or writes the database of whoever runs it.
_data_home = tempfile.TemporaryDirectory(prefix="autotune-data-")
os.environ["XDG_DATA_HOME"] = _data_home.name
# How long an example takes is the machine's business: beside other work some would miss any deadline. `make prove` asks for
# the large profile.
settings.register_profile("small", deadline=None, max_examples=20)
settings.register_profile("large", deadline=None, max_examples=100)
settings.load_profile("small")
# While tests are imported nothing becomes garbage, but a fifth of that time goes to looking for it.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the modules, and the tests of each, in the random order of this seed"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the modules of which the run takes no test: those with a mark for all tests that `-m` excludes."""
    excluded = re.findall(r"not (\w+)", config.option.markexpr)
    if not excluded or " or " in config.option.markexpr or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.*)", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if marks and set(re.findall(r"mark\.(\w+)", marks[1])) & set(excluded) else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How each test that failed is run alone."""
    failed = [report for state in ("failed", "error") for report in terminalreporter.stats.get(state, ())]
    for report in failed:
        terminalreporter.write_line(f"run alone: python -m pytest {shlex.quote(report.nodeid)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest chains first, Ray's and the stores'; then the long modules of this folder. Short ones fill the end.

    Of the cases of a test with the mark `prove(every=N)`, every N-th is run by `make test` too. A class names in `proves` the
    tests of a contract that have the mark for it alone.
    """
    for item in items:
        if getattr(item, "originalname", "") in getattr(getattr(item, "cls", None), "proves", ()):
            item.add_marker("prove")
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("prove")
        if mark is not None and "every" in mark.kwargs:
            function = item.nodeid.partition("[")[0]
            if cases[function] % mark.kwargs["every"] == 0:
                item.own_markers.remove(mark)
            cases[function] += 1
    modules_of = {item: item.nodeid.partition("::")[0] for item in items}
    items.sort(key=lambda item: 0 if _chain(modules_of[item]) != modules_of[item] else 1 if item.path.parent == HERE else 2)
    if seed := config.getoption("shuffle"):
        # A module's tests stay together, since its fixtures keep ranks and services.
        modules: dict[Path, list[pytest.Item]] = {}
        for item in items:
            modules.setdefault(item.path, []).append(item)
        draw = random.Random(seed)
        for tests in modules.values():
            draw.shuffle(tests)
        items[:] = [item for path in draw.sample(list(modules), len(modules)) for item in modules[path]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """How tests are shared out over processes, where there are several (`--numprocesses`)."""
    return ByModule(config, log)


class ByModule(LoadFileScheduling):  # type: ignore[misc]
    """One process has all tests of a module, whose fixtures keep ranks and services, and one those of a chain of modules."""

    def _split_scope(self, nodeid: str) -> str:
        return _chain(super()._split_scope(nodeid))


@cache
def _chain(module: str) -> str:
    """The modules that one process runs: all that start Ray, since a driver joins the cluster that it finds on its machine; all
    of the stores, since each process would start its own PostgreSQL; or this module alone."""
    if "pytest.mark.ray" in (HERE.parent / module).read_text(encoding="utf-8"):
        return "ray"
    return "storage" if module.startswith("tests/storage/") else module


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Set aside what is there when a module begins: with torch and Ray imported, each full collection would take half a second.

    Services collect when they start, and measurements before they measure. Nothing stays set aside that a test may wait for:
    the garbage of earlier modules is collected first.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def one_seed() -> None:
    """Weights that a test draws without a seed of its own are the same in every run."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that has its tables, to be copied: to make them takes longer than most tests."""
    from storage.store import open_store

    path = tmp_path_factory.mktemp("migrated") / "jobs.db"
    open_store(str(path)).close()
    return path


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The process that ranks are forked from."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks of this module's local runners are forked, where that can be done; see `tests.forked_ranks`."""
    if sys.platform != "linux":
        yield
        return
    server: ForkServer = request.getfixturevalue("fork_server")
    with patch("executor.runners.rank_process.subprocess", server.as_subprocess()):
        yield
