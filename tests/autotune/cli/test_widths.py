"""Tables fit terminals of 60, 80 and 120 columns: nothing is cut off, and no word is broken."""

import re
from pathlib import Path

import pytest
import table
from called import Command

from autotune.loop.loop import run_job
from autotune.request.rows import request_to_row
from storage.store import open_store

COMMANDS = (
    ("models",),
    ("clusters",),
    ("space", "llama-3-8b", "--cluster", "dgx-h100", "--space", "3d"),
    ("predict", "llama-3-8b", "--cluster", "dgx-h100"),
    ("plan", "llama-3-8b", "--cluster", "dgx-h100", "--top", "2"),
    ("fit", "llama-3-8b", "--on", "1x4090", "--sequence-length", "2k"),
    ("fit", "llama-3-8b", "--cards", "1x4090=0.3,8xh100=2.5", "--epochs", "3", "--dataset-rows", "52000"),
    ("jobs",),
    ("show",),
    ("show", "--all"),
    ("explain",),
)


@pytest.mark.prove
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_tables_fit(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    if words[0] in ("jobs", "show", "explain"):
        (folder / "m").mkdir()
        (folder / "config.json").rename(folder / "m" / "config.json")
        session = table.session(folder / "m", trials=12, strategy="random")
        with open_store(str(folder / "jobs.db")) as store:
            job = store.jobs.create(request_to_row(session.request))
            run_job(session, store, job.id, table.runner(table.measured))
    printed: dict[int, set[str]] = {}
    for width in (60, 80, 120, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        answer = command(*words)
        assert answer.status == 0, answer.err
        assert not [line for line in answer.out.splitlines() if line.rstrip().endswith("…") and not line.endswith("; …")]
        printed[width] = {word for word in answer.out.split() if not re.fullmatch(r"[\d.]+", word)}
    for width, shown in printed.items():
        broken = shown - printed[400]
        assert not {word for word in broken if not set(word) <= set("█▏▎▍▌▋▊▉░")}, width
