"""One number for one thing: what names the same figure of one job is equal in the command line, its JSON, REST, the page, the
report and Python."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from autotune.client import Client
from autotune.text.rows import rate_text
from search_spaces.plain import to_plain
from search_spaces.quantities import ratio_text
from search_spaces.trial import Interval
from storage.store import open_store
from tests.autotune.served import COMMAND
from tests.page.conftest import EVERY_OUTCOME, Open, served
from tests.page.place import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service of its own: an explanation learns from the trials of all jobs, and one service may have cached it before those
    of other tests."""
    yield from served(tmp_path_factory.mktemp("one_number"))


@pytest.fixture(scope="module")
def finished(place: Place) -> str:
    """A job that has ended, with every outcome among its trials."""
    return place.finished(**EVERY_OUTCOME)


def command(place: Place, *words: str) -> str:
    environment = os.environ | {"AUTOTUNE_DB": place.database, "NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.run([*COMMAND, *words], env=environment, capture_output=True, text=True, check=True).stdout


def interval_text(rate: dict[str, float]) -> str:
    return rate_text(Interval(**rate))


@pytest.mark.prove
def test_every_way_to_the_answer_has_the_same_numbers(place: Place, finished: str, open_page: Open) -> None:
    with Client(place.url) as client:
        verdict = to_plain(client.points(finished).best)
        document, explanation = client.best(finished), client.explanation(finished)
        summary, (overview,) = client.job(finished), client.overviews([finished])
        (entry,) = [item for item in client.leaderboard().items if item.job == finished]
        drawn = client.figure(finished, "throughput_memory").tables[0]
        markdown = client.report(finished, "md").replace("\\", "")
        trials = {trial.number: trial for trial in client.trials(finished)}
    answer: dict[str, Any] = {name: value for name, value in verdict.items() if name not in ("standings", "goodput")}
    standings = {standing["trial"]: standing for standing in verdict["standings"]}
    rate, gain = answer["rate"], answer["gain"]

    # Python and REST: the answer is one document.
    assert {name: document["decision"][name] for name in answer} == answer
    assert document["decision"]["standings"] == verdict["standings"]
    assert {name: to_plain(summary.answer)[name] for name in answer} == answer
    assert (overview.best_rate, to_plain(overview.gain)) == (rate["mean"], gain)
    assert (entry.trial, to_plain(entry.rate), to_plain(entry.gain)) == (answer["trial"], rate, gain)
    assert standings[answer["trial"]]["rate"] == document["best"]["measured"]["samples_per_second"] == rate
    bounds = {name: gain[name] for name in ("mean", "low", "high")}
    assert standings[answer["trial"]]["over_baseline"] == explanation["gain"] == bounds
    columns = {column.name: column.values for column in drawn.columns}
    for number, value in zip(columns["trial"], columns["samples_per_second"], strict=True):
        if number in standings:
            assert value == pytest.approx(standings[number]["rate"]["mean"], rel=1e-6)

    # The command line's JSON.
    shown = json.loads(command(place, "show", finished, "--json"))
    configurations = {item["trial"]: item for item in shown["configurations"] if item["is_compared"]}
    for number, standing in standings.items():
        assert {name: configurations[number][name] for name in standing} == standing
        assert configurations[number]["peak_memory_bytes"] == (trials[number].result or {})["peak_memory_bytes"]
    assert shown["best_config"]["decision"] == document["decision"]
    (listed,) = [job for job in json.loads(command(place, "jobs", "--json")) if job["id"] == finished]
    assert listed["gain"] == bounds

    # Texts: rates have four digits, and gains one form.
    text = command(place, "show", finished, "--top", "64")
    for standing in standings.values():
        cells = interval_text(standing["rate"]), str(standing["repeats"]), ratio_text(standing["over_baseline"]["mean"])
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells
    gain_text = ratio_text(*bounds.values())
    for told in (text, markdown, command(place, "explain", finished)):
        assert gain_text in told
    assert interval_text(rate) in markdown
    assert ratio_text(gain["mean"]) in command(place, "jobs")

    # The page.
    page = open_page(f"#/jobs/{finished}")
    region = page.get_by_role("region", name="Change this")
    expect(region).to_contain_text(f"{interval_text(rate)} samples/s, {gain_text} the baseline")
    for name, value in {"Best": interval_text(rate), "Gain over the baseline": ratio_text(gain["mean"])}.items():
        expect(page.locator(".figure").filter(has=page.get_by_text(name, exact=True))).to_contain_text(value)
    page.get_by_label("Purpose").select_option("search")
    page.get_by_label("Outcome").select_option("OK")
    table = page.get_by_role("region", name="Trials of this job")
    for number, standing in standings.items():
        row = table.get_by_role("row").filter(has=page.get_by_role("link", name=str(number), exact=True))
        for cell in (interval_text(standing["rate"]), ratio_text(standing["over_baseline"]["mean"])):
            expect(row).to_contain_text(cell)
    page.goto("/#/")
    expect(page.get_by_role("listitem").filter(has_text=finished)).to_contain_text(f"{ratio_text(gain['mean'])} the baseline")

    # The best of all jobs, and jobs and trials beside each other.
    page.goto("/#/best")
    best_link = f'a[href="#/jobs/{finished}/trials/{answer["trial"]}"]'
    row = page.get_by_role("region", name="The fastest answers").get_by_role("row").filter(has=page.locator(best_link))
    for cell in (interval_text(rate), ratio_text(gain["mean"])):
        expect(row).to_contain_text(cell)
    page.goto(f"/#/compare?jobs={finished}")
    for table_name, figures in {
        "Jobs beside each other": {"best samples/s": interval_text(rate), "gain over the baseline": gain_text},
        "Trials beside each other": {"samples/s": interval_text(rate)},
    }.items():
        table = page.get_by_role("region", name=table_name)
        for name, value in figures.items():
            header = page.get_by_role("rowheader", name=name, exact=True)
            expect(table.get_by_role("row").filter(has=header)).to_contain_text(value)

    # On paper, and for somebody who has only a link.
    page.goto(f"/#/jobs/{finished}")
    page.emulate_media(media="print")
    require_answer(page, f"{interval_text(rate)} samples/s, {gain_text} the baseline")
    with closing(Sharing(place.folder)) as sharing:
        sharing.serve()
        with Client(sharing.url, sharing.key) as client:
            token = client.share(finished).token
        with Client(sharing.url, token) as client:
            linked = client.best(finished)
            assert (linked["decision"], linked["best"]) == (document["decision"], document["best"])
            assert client.explanation(finished) == explanation
            assert to_plain(client.points(finished).best) == verdict
        page = open_page(f"#/jobs/{finished}?link={token}", at=sharing)
        require_answer(page, f"{interval_text(rate)} samples/s, {gain_text} the baseline")


class Sharing(Place):
    """A service that asks for keys and makes links, on the database of another."""

    options = ("--keys", "--share-days", "30")

    def serve(self) -> None:
        with open_store(self.database) as store:
            self.key = store.keys.create("operator", {"read", "submit", "admin"})[1]
        super().serve()


def require_answer(page: Page, text: str) -> None:
    region = page.get_by_role("region", name="Change this")
    expect(region).to_be_visible()
    expect(region).to_contain_text(text)


@pytest.mark.prove
def test_the_pareto_line_never_falls(place: Place, finished: str) -> None:
    with Client(place.url) as client:
        points = client.points(finished)
    assert points.best is not None
    rates = {standing.trial: standing.rate.mean for standing in points.best.standings}
    line = sorted((points.columns.peak[number], rates[number]) for number in points.front)
    assert [rate for _, rate in line] == sorted(rate for _, rate in line)
