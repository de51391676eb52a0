"""The dashboard and the alert rules use the metrics and labels that the service exports, and values that exist."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import Metrics, ProcessMetrics
from search_spaces.outcome import JobState, Outcome
from storage.records import BestRate, DurationHistogram, Figures

FOLDER = Path(__file__).parents[2] / "examples/deploy/monitoring"
FOREIGN = frozenset({"up"})
"""Metrics of Prometheus itself."""


class OneOfEach:
    """A store whose counts have one of each kind."""

    def __init__(self) -> None:
        self.overviews = self.workers = self

    def figures(self) -> Figures:
        durations = DurationHistogram(count=1, seconds=2.0, within={5.0: 1})
        best = {"job": BestRate(submitter="", samples_per_second=1.0)}
        return Figures(jobs={"QUEUED": 1}, trials={"OK": 1}, longest_wait=1.0, durations={"OK": durations}, best=best)

    def alive(self) -> list[None]:
        return [None]


class Traffic:
    """Connections and streams of a process."""

    count = streams = failed = 1

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Sample name -> its labels, as the service writes them."""
    store: Any = OneOfEach()
    traffic: Any = Traffic()
    metrics = Metrics(store, ProcessMetrics(traffic, {"events": traffic}))
    metrics.note("GET", "/v1/jobs", 200, 0.1)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "grafana.json").read_text("utf-8")))


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    return list(group["rules"])


EXPRESSIONS = [
    *((f"panel {panel['title']}", target["expr"]) for panel in dashboard()["panels"] for target in panel["targets"]),
    *((rule["alert"], rule["expr"]) for rule in rules()),
]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(autotune_\w+|up)\b(?=[{\[)\s]|$)", expression))


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS, ids=[place for place, _ in EXPRESSIONS])
def test_every_expression_is_about_what_is_exported(place: str, expression: str, exported: dict[str, set[str]]) -> None:
    names = names_in(expression)
    assert names, "reads no metric"
    assert names - FOREIGN <= exported.keys()
    for name, selected in re.findall(r"(autotune_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)=", selected)) <= exported[name]
    labels = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
    assert labels <= set().union(*(exported.get(name, set()) for name in names))
    for label, known in (("outcome", Outcome), ("state", JobState)):
        for values in re.findall(rf'\b{label}=~?"([^"]*)"', expression):
            assert set(values.split("|")) <= set(map(str, known))


def test_the_check_finds_a_wrong_name(exported: dict[str, set[str]]) -> None:
    assert not names_in("max(autotune_worker)") - FOREIGN <= exported.keys()


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    def family(name: str) -> str:
        return re.sub(r"_(bucket|count|sum|created)$", "", name)

    shown = {family(name) for place, text in EXPRESSIONS if place.startswith("panel") for name in names_in(text)}
    assert {family(name) for name in exported} - {"autotune_http_request_seconds_created"} <= shown


def test_panels_do_not_overlap_and_legends_have_labels(exported: dict[str, set[str]]) -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        taken.update(
            (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
        )
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert all(re.search(rf"by \([^)]*\b{label}\b", target["expr"]) for label in labels)
    assert set(taken.values()) == {1}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_the_rules() -> None:
    ran = subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yaml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
