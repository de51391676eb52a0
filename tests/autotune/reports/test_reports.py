"""Reports: one file that needs nothing else, in which every text of a user's is text and every figure has its numbers."""

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import table
from swept import swept, waiting

from autotune.explain.figures import NAMES
from autotune.notebook import figures
from autotune.reports.markdown import code, escaped, markdown_of
from autotune.reports.page import coded, page_of, script_json
from autotune.reports.report import Report, report_of
from search_spaces.outcome import Outcome
from storage.errors import UnknownJobError
from storage.store import Store, open_store

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}<a href='https://evil.example'>`|*_"
MOST_BYTES = 1_500_000


class Reader(HTMLParser):
    """Elements with their attributes, and text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Report:
    folder = tmp_path_factory.mktemp("report")
    with open_store(str(shutil.copy(migrated, folder / "jobs.db"))) as store:
        return report_of(store, swept(folder, store))


def test_a_page_needs_nothing_from_anywhere(report: Report) -> None:
    page = page_of(report)
    assert len(page.encode()) < MOST_BYTES
    found = read(page)
    assert [(tag, name) for tag, attributes in found.elements for name in attributes if name.startswith("on")] == []
    addresses = [
        value for _, attributes in found.elements for name, value in attributes.items() if name in ("href", "src", "style")
    ]
    assert [address for address in addresses if not (address or "").startswith("#")] == []
    assert {tag for tag, _ in found.elements} & {"link", "iframe", "img", "object", "form"} == set()
    policy = next(attributes["content"] for tag, attributes in found.elements if "http-equiv" in attributes) or ""
    assert policy.startswith("default-src 'none'")
    assert re.findall(r"script-src ([^;]*)", policy)[0].count("sha256-") == 1
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy


def test_every_figure_has_a_plot_and_its_numbers(report: Report) -> None:
    found = read(page_of(report))
    shown = [attributes["data-figure"] for tag, attributes in found.elements if "data-figure" in attributes]
    assert shown == [name for name in NAMES if name != "pipeline_schedule"]
    captions = " ".join(found.text)
    for figure in report.figures:
        assert figure.summary.replace("`", "") in captions.replace("\n", " ") or "`" in figure.summary
        for told in figure.tables:
            assert f"Each row is {told.title}" in captions
    cells = sum(tag == "td" for tag, _ in found.elements)
    assert cells >= sum(len(told) * len(told.columns) for figure in report.figures for told in figure.tables)
    assert "no pipeline" in captions


def test_texts_of_users_are_text(report: Report) -> None:
    hostile = dataclasses.replace(
        report, title=HOSTILE, headline=HOSTILE, facts=(("state", HOSTILE),), commands=(HOSTILE,), assumed=(HOSTILE,)
    )
    figures = tuple(dataclasses.replace(figure, summary=HOSTILE, notes=(HOSTILE,)) for figure in report.figures)
    page = page_of(dataclasses.replace(hostile, figures=figures))
    found = read(page)
    assert sum(tag == "script" for tag, _ in found.elements) == 2
    assert "img" not in {tag for tag, _ in found.elements}
    assert "{{ 7 * 7 }}" in " ".join(found.text)
    assert script_json({"a": HOSTILE}).count("<") == 0
    assert json.loads(script_json({"a": HOSTILE}))["a"] == HOSTILE
    assert str(coded("a `<b>` c")) == "a <code>&lt;b&gt;</code> c"


def test_markdown_says_the_same(report: Report) -> None:
    text = markdown_of(report)
    for figure in report.figures:
        assert f"## {figure.title}" in text
    assert "█" in text
    assert "## How to measure it again" in text
    hostile = markdown_of(dataclasses.replace(report, title=HOSTILE, job=HOSTILE, assumed=(HOSTILE,)))
    assert "<script>" not in hostile.replace("\\<script\\>", "").replace(code(HOSTILE), "")
    assert escaped("a|b\n<c>") == "a\\|b \\<c\\>"
    assert code("a`b") == "``a`b``"


def test_a_notebook_shows_figures_in_a_frame(tmp_path: Path, store: Store) -> None:
    job, database = swept(tmp_path, store, trials=4), f"sqlite:///{tmp_path / 'jobs.db'}"
    shown = figures(job[:-1], "time_breakdown", "timeline", database=database)
    assert [line.partition(":")[0] for line in repr(shown).splitlines()] == ["Where a step goes", "Trials on nodes"]
    ((tag, frame),) = read(shown._repr_html_()).elements
    assert (tag, frame["sandbox"]) == ("iframe", "allow-scripts")
    drawn = [attributes.get("data-figure") for _, attributes in read(frame["srcdoc"] or "").elements]
    assert [name for name in drawn if name] == ["time_breakdown", "timeline"]
    light = figures(job, "time_breakdown", database=database)._repr_html_()
    assert len(light) < 200_000, "the chart library is in it"
    assert "no trial has started" in repr(figures(waiting(tmp_path, store), "best_so_far", database=database))
    with pytest.raises(UnknownJobError):
        figures("nothing", database=database)


def test_a_report_lists_what_nobody_stated(report: Report, tmp_path: Path, store: Store) -> None:
    assumed = report_of(store, waiting(tmp_path, store, resolved_defaults=("sequence_length",)))
    assert assumed.assumed == ("sequence_length=128 (--sequence-length)",)
    assert "sequence_length=128 (--sequence-length)" in " ".join(read(page_of(assumed)).text)
    assert "- sequence\\_length=128 (--sequence-length)" in markdown_of(assumed)
    assert all("Assumed" not in text for text in (page_of(report), markdown_of(report)))


def test_jobs_without_an_answer_have_reports(tmp_path: Path, store: Store) -> None:
    queued = report_of(store, waiting(tmp_path, store))
    assert "no trial has started" in queued.headline
    lost = report_of(store, swept(tmp_path, store, lambda _: table.ended(Outcome.FAILED, HOSTILE), trials=3))
    assert "3 FAILED" in lost.headline
    for report in (queued, lost):
        assert report.results == ()
        assert "img" not in {tag for tag, _ in read(page_of(report)).elements}
        assert report.headline.split(":")[0] in markdown_of(report)
