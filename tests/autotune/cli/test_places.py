"""AUTOTUNE_URL and every command: each works on the service, or says that it cannot, or is about no job at all."""

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from pathlib import Path

import pytest
import served
from called import COMMANDS, Command
from served import Request

from storage.store import open_store


class Place(Enum):
    """Where a command looks when AUTOTUNE_URL is set and --db is not given."""

    SERVICE = auto()
    DATABASE = auto()
    """It has no counterpart on a service, and refuses."""
    HERE = auto()
    """It is about files, predictions or this machine, or is the service itself: no job is named."""


JOB = "20261121-120000-abcd"
PLACES: Mapping[str, tuple[Place, list[str]]] = {
    "sweep": (Place.DATABASE, ["llama-tiny"]),
    "scale": (Place.DATABASE, ["llama-tiny"]),
    "submit": (Place.SERVICE, ["llama-tiny"]),
    "jobs": (Place.SERVICE, []),
    "watch": (Place.SERVICE, [JOB]),
    "show": (Place.SERVICE, []),
    "logs": (Place.SERVICE, [JOB, "0"]),
    "explain": (Place.SERVICE, []),
    "report": (Place.SERVICE, ["--format", "md"]),
    "export": (Place.SERVICE, []),
    "pause": (Place.SERVICE, [JOB]),
    "resume": (Place.SERVICE, [JOB]),
    "stop": (Place.SERVICE, [JOB]),
    "cancel": (Place.SERVICE, [JOB]),
    "clone": (Place.SERVICE, [JOB]),
    "extend": (Place.SERVICE, [JOB, "--trials", "9"]),
    "label": (Place.SERVICE, [JOB, "--note", "mine"]),
    "share": (Place.SERVICE, [JOB]),
    "study export": (Place.SERVICE, ["--storage", "sqlite:///study.db"]),
    "reproduce": (Place.HERE, []),
    "verify": (Place.HERE, []),
    "check": (Place.HERE, ["--", "python", "train.py"]),
    "space": (Place.HERE, []),
    "models": (Place.HERE, []),
    "clusters": (Place.HERE, []),
    "engines": (Place.HERE, []),
    "profile": (Place.HERE, []),
    "predict": (Place.HERE, []),
    "plan": (Place.HERE, []),
    "fit": (Place.HERE, []),
    "calibrate": (Place.HERE, []),
    "dry-run": (Place.HERE, []),
    "serve": (Place.HERE, []),
    "worker": (Place.HERE, []),
    "lint": (Place.HERE, []),
    "mcp": (Place.HERE, []),
    "guard": (Place.HERE, []),
    "challenge": (Place.SERVICE, [JOB, "--predict-only"]),
    "carry": (Place.SERVICE, [JOB, "--to", "dgx-h100:2"]),
    "weights": (Place.HERE, []),
    "doctor": (Place.HERE, []),
    "keys create": (Place.DATABASE, ["ada"]),
    "keys list": (Place.DATABASE, []),
    "keys quota": (Place.DATABASE, ["ada"]),
    "audit": (Place.DATABASE, []),
    "keys revoke": (Place.DATABASE, ["none"]),
    "db export": (Place.DATABASE, []),
    "db import": (Place.DATABASE, ["job.jsonl"]),
    "db check": (Place.DATABASE, []),
    "db backup": (Place.DATABASE, []),
    "db restore": (Place.DATABASE, ["all.jsonl"]),
    "db prune": (Place.DATABASE, ["--days", "1"]),
    "cluster": (Place.DATABASE, []),
    "clean": (Place.DATABASE, ["--all", "--yes"]),
}


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """What AUTOTUNE_URL was asked, which refuses everything; the local database has a job, which nobody means."""
    found: list[Request] = []

    def answer(request: Request) -> served.Answer:
        found.append(request)
        return 401, served.PROBLEM, b'{"title": "Unauthorized", "status": 401, "detail": "a key is needed"}'

    with open_store(str(folder / "jobs.db")) as store:
        store.jobs.create({"model": "llama-tiny"})
    with served.answering(answer) as url:
        monkeypatch.setenv("AUTOTUNE_URL", url)
        yield found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_decided(name: str) -> None:
    """A new command is entered above; one that takes a job, or --url, is not about this machine alone."""
    place = PLACES[name][0]
    options = {item.name for item in COMMANDS[name].params}
    assert ("url" in options) == (place is Place.SERVICE)
    assert "job" not in options or place is not Place.HERE
    assert "db" in options or place is Place.HERE


@pytest.mark.prove(every=12)
@pytest.mark.parametrize("name", [name for name, (place, _) in PLACES.items() if place is not Place.HERE])
def test_no_command_falls_back_on_the_local_database(name: str, command: Command, asked: list[Request], folder: Path) -> None:
    place, words = PLACES[name]
    before = sorted(path.name for path in folder.iterdir())
    answer = command(*name.split(), *words)
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    if place is Place.SERVICE:
        assert len(asked) == 1
        assert "asks for an API key" in answer.err
    else:
        assert asked == []
        assert answer.err.startswith(f"autotune: {name}: needs a database, but AUTOTUNE_URL names a service; ")
        assert answer.err.endswith("give --db, or unset AUTOTUNE_URL\n")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_option_names_the_database_all_the_same(command: Command, asked: list[Request], folder: Path) -> None:
    database = folder / "jobs.db"
    assert command("clean", "--all", "--db", database).status == 0
    assert command("keys", "list", "--db", database).status == 0
    assert command("explain", "--db", database).status != 0
    assert asked == []
