"""The callbacks report losses and waits, driven by a stand-in of each Trainer."""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Reports = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reports:
    path = tmp_path / "report.jsonl"
    monkeypatch.setenv("AUTOTUNE_REPORT", str(path))
    return lambda: [*map(json.loads, path.read_text().splitlines())]


def callback(monkeypatch: pytest.MonkeyPatch, library: str, base: str, name: str) -> Any:
    stand_in = ModuleType(library)
    setattr(stand_in, base, object)
    monkeypatch.setitem(sys.modules, library.partition(".")[0], ModuleType(library.partition(".")[0]))
    monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.delitem(sys.modules, f"autotune.integrations.{name}", raising=False)
    return importlib.import_module(f"autotune.integrations.{name}").AutotuneCallback()


def slow(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.01)
        yield number


class Loader:
    def __iter__(self) -> Iterator[int]:
        return slow(3)


def test_the_trainer_of_hugging_face(monkeypatch: pytest.MonkeyPatch, reports: Reports) -> None:
    trainer = callback(monkeypatch, "transformers", "TrainerCallback", "transformers")
    args, state, control = SimpleNamespace(), SimpleNamespace(global_step=0), SimpleNamespace(should_log=False)
    loader = Loader()
    trainer.on_train_begin(args, state, control, train_dataloader=loader)
    for _ in loader:
        state.global_step += 1
        trainer.on_step_end(args, state, control)
        trainer.on_log(args, state, control, {"loss": 1.0 / state.global_step} if control.should_log else None)
    assert args.logging_nan_inf_filter is False
    assert [row["loss"] for row in reports() if "loss" in row] == [1.0, 1 / 2, 1 / 3]
    assert sum(row.get("waited", 0.0) for row in reports()) > 0.03


def test_the_trainer_of_lightning(monkeypatch: pytest.MonkeyPatch, reports: Reports) -> None:
    trainer = callback(monkeypatch, "lightning.pytorch", "Callback", "lightning")
    state = SimpleNamespace(global_step=0)
    loss = SimpleNamespace(detach=lambda: 0.5)
    for number in slow(4):
        trainer.on_train_batch_start(state, None, None, number)
        state.global_step += number % 2
        trainer.on_train_batch_end(state, None, {"loss": loss} if number else None, None, number)
    assert [row["loss"] for row in reports()] == [0.5, 0.5]
    assert [row["waited"] > 0.009 for row in reports()] == [True, True]
