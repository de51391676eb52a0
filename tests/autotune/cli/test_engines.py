"""`autotune engines`: the table on a terminal, and the page."""

import json

import pytest
from called import Command

from autotune.cli.engines import engines_page_markdown
from autotune.request import engines
from autotune.request.engines import CAPABILITIES
from search_spaces.knob_values import KNOBS


def test_it_shows_every_knob_schedule_and_refusal(command: Command) -> None:
    answer = command("engines")
    assert (answer.status, answer.err) == (0, "")
    for name in (*CAPABILITIES, *(name for name in KNOBS if name != "script"), *map(str, KNOBS["pipeline_schedule"].choices)):
        assert name in answer.out
    for engine in CAPABILITIES.values():
        assert all(item.rule in answer.out for item in engine.combinations)


def test_markdown_is_the_page(command: Command) -> None:
    answer = command("engines", "--markdown")
    assert (answer.status, answer.err, answer.out) == (0, "", engines_page_markdown())


@pytest.mark.prove
@pytest.mark.parametrize("version", [None, "0.19.8"])
def test_a_missing_package_is_told_here_and_by_the_doctor(
    command: Command, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(engines, "installed_version", lambda: version)
    line = "engine deepspeed: the package is not installed; pip install 'autotune-parallel[deepspeed]'\n"
    assert command("engines").out.endswith(line) == (version is None)
    told = [finding for finding in json.loads(command("doctor", "--json").out) if finding["name"] == "engine deepspeed"]
    assert [finding["good"] for finding in told] == ([True] if version is None else [])
