"""One job, looked at through every door: command line, `--json`, REST, client, page, report and Python say the same."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from autotune.client import Client
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.session.resolve import session_of
from autotune.tuning import result_of
from storage.store import open_store
from tests.autotune.served import start
from tests.documents import check_document
from tests.page.conftest import EVERY_OUTCOME, Open, served
from tests.page.place import Place

pytestmark = pytest.mark.nightly

DIGITS = 2e-3
"""Relative error of what is written for people, in four digits."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service of its own: an explanation learns from the trials of all jobs, and is kept until its job changes."""
    yield from served(tmp_path_factory.mktemp("doors"))


@pytest.fixture(scope="module")
def finished(place: Place) -> str:
    """A job that has ended, with every outcome among its trials."""
    return place.finished(**EVERY_OUTCOME)


def command(place: Place, *words: str) -> str:
    """What the command writes on standard output."""
    process: subprocess.Popen[str] = start(place.folder, *words)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    check_document(words, out)
    return out


def rest(place: Place, path: str) -> Any:
    with urllib.request.urlopen(f"{place.url}{path}", timeout=60) as answer:
        return json.loads(answer.read())


def numbers(text: str) -> list[float]:
    """The numbers of a text, in order."""
    return [float(found.replace(",", "")) for found in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", text)]


@pytest.fixture(scope="module")
def told(place: Place, finished: str) -> dict[str, Any]:
    """The answer by Python: the document that everything else is held against."""
    with open_store(place.database) as store:
        job = store.jobs.get(finished)
        session, snapshot = session_of(job), read_snapshot(store, finished)
        result = result_of(session, snapshot)
        assert result.best_config is not None and result.best is not None
        assert result.best.values() == result.best_config["best"]["config"]
        assert result.gain is not None and result.gain.mean == result.best_config["decision"]["gain"]["mean"]
        assert result.best_config["decision"] == build_best_config(session, snapshot)["decision"]
        return result.best_config | {"seconds": job.active_seconds, "count": len(result.trials)}


def test_json_rest_and_the_client(place: Place, finished: str, told: dict[str, Any]) -> None:
    decision = told["decision"]
    summary = {name: value for name, value in decision.items() if name != "standings"}
    shown = json.loads(command(place, "show", finished, "--json"))
    [listed] = [one for one in json.loads(command(place, "jobs", "--json")) if one["id"] == finished]
    remote = json.loads(command(place, "show", finished, "--json", "--url", place.url))
    job, points = rest(place, f"/v1/jobs/{finished}"), rest(place, f"/v1/jobs/{finished}/points")
    best, (overview,) = rest(place, f"/v1/jobs/{finished}/best"), rest(place, f"/v1/overviews?job={finished}")["items"]
    with Client(place.url) as client:
        answer = client.job(finished).answer
    assert shown["best_config"]["decision"] == remote["best_config"]["decision"] == best["decision"] == decision
    without_goodput = {"goodput": None}  # a document has it only if it is the objective, the wire always
    assert points["best"] == decision | without_goodput
    assert job["answer"] == summary | without_goodput
    assert answer is not None and (answer.trial, answer.rate.mean) == (decision["trial"], decision["rate"]["mean"])
    assert best["best"]["measured"]["samples_per_second"] == decision["rate"]
    assert best["best"]["trial"] == decision["trial"] == decision["standings"][0]["trial"]
    assert best["baseline"]["gain"] == decision["gain"] == overview["gain"]
    assert listed["gain"] == {name: value for name, value in decision["gain"].items() if name != "of"}
    assert (overview["best_rate"], overview["keeps_baseline"]) == (decision["rate"]["mean"], decision["keeps_baseline"])
    assert len(shown["trials"]) == points["count"] == told["count"]
    assert points["front"] == [entry["trial"] for entry in best["alternatives"]]
    assert int(shown["job"]["active_seconds"]) == job["active_seconds"] == int(told["seconds"])
    explained = json.loads(command(place, "explain", finished, "--json"))
    assert explained == rest(place, f"/v1/jobs/{finished}/explanation")
    gain = {name: value for name, value in decision["gain"].items() if name != "of"}
    assert (explained["winner"], explained["gain"]) == (decision["trial"], gain)


def test_what_people_read(place: Place, finished: str, told: dict[str, Any], open_page: Open) -> None:
    decision = told["decision"]
    rate, gain = decision["rate"], decision["gain"]
    interval = pytest.approx([rate["mean"], rate["low"], rate["high"]], rel=DIGITS)
    ratio = pytest.approx([gain["mean"], gain["low"], gain["high"]], rel=DIGITS)
    text = command(place, "show", finished)
    best = next(line for line in text.splitlines() if line.startswith("  best "))
    assert numbers(best)[:3] == interval
    gained = next(line for line in text.splitlines() if "gain over the baseline" in line)
    assert numbers(gained)[:3] == ratio
    assert sum(line.split()[:2] == ["★", str(decision["trial"])] for line in text.splitlines()) == 1
    command(place, "report", finished, "--out", "report.md")
    report = (place.folder / "report.md").read_text(encoding="utf-8")
    assert f"Trial {decision['trial']} is the best" in report
    assert numbers(next(line for line in report.splitlines() if "over the baseline" in line and "[" in line))[:3] == ratio
    page = open_page(f"#/jobs/{finished}")
    figures = page.locator("dl.figures")
    expect(figures).to_contain_text(f"trial {decision['trial']}")
    values = {card.locator("dt").inner_text(): card.inner_text() for card in figures.locator(".figure").all()}
    assert numbers(values["Best"])[:3] == interval
    assert numbers(values["Gain over the baseline"]) == ratio
    assert "Probability of being the best" in values
    expect(page.locator("tr.best")).to_contain_text(str(decision["trial"]))
