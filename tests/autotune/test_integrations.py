"""The callbacks count the samples that were in the batches, driven by a stand-in of each Trainer."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Reports = Callable[[], list[float]]


class Loader:
    """Batches with these numbers of rows."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.batch_size = rows, max(rows)

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": [SimpleNamespace(shape=(rows, 3))]} for rows in self.rows])


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reports:
    path = tmp_path / "report.jsonl"
    monkeypatch.setenv("AUTOTUNE_REPORT", str(path))
    return lambda: [row["samples"] for row in map(json.loads, path.read_text().splitlines()) if "samples" in row]


def callback(monkeypatch: pytest.MonkeyPatch, library: str, base: str, name: str) -> Any:
    stand_in = ModuleType(library)
    setattr(stand_in, base, object)
    monkeypatch.setitem(sys.modules, library.partition(".")[0], ModuleType(library.partition(".")[0]))
    monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.delitem(sys.modules, f"autotune.integrations.{name}", raising=False)
    return importlib.import_module(f"autotune.integrations.{name}").AutotuneCallback()


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 2, "accelerator_config": None}
    return SimpleNamespace(**{**fields, "parallelism_config": None, **changes})


def train(trainer: Any, args: SimpleNamespace, loader: Loader, size: int, accumulation: int) -> None:
    """As the Trainer: it takes the batches of a step from its loader, then ends the step."""
    state = SimpleNamespace(train_batch_size=size, global_step=9)
    trainer.on_train_begin(args, state, SimpleNamespace(), train_dataloader=loader)
    for number, _ in enumerate(loader, 1):
        if number % accumulation == 0 or number == len(loader.rows):
            trainer.on_step_end(args, state, SimpleNamespace())


@pytest.mark.parametrize(
    ("rows", "size", "changes", "samples"),
    [
        ((4, 4, 4, 4), 4, {}, [16, 16]),
        ((2, 2, 2, 2), 2, {}, [8, 8]),  # auto_find_batch_size has halved it
        ((2, 2, 2, 2), 4, {"accelerator_config": SimpleNamespace(split_batches=True)}, [8, 8]),
        ((4, 4, 4), 4, {}, [16, 8]),  # the epoch ends within an accumulation
        ((4, 4, 4, 3), 4, {}, [16, 14]),
        ((1, 1, 1, 1), 4, {}, [16, 16]),  # a collator packs the samples of a batch into one row
        ((4, 4), 4, {"parallelism_config": SimpleNamespace(tp_size=2, cp_size=1, sp_size=None)}, [8]),
    ],
)
def test_the_trainer_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch,
    reports: Reports,
    rows: tuple[int, ...],
    size: int,
    changes: dict[str, Any],
    samples: list[float],
) -> None:
    trainer = callback(monkeypatch, "transformers", "TrainerCallback", "transformers")
    train(trainer, arguments(**changes), Loader(*rows), size, 2)
    assert reports() == samples


def test_a_trainer_whose_loader_was_replaced_counts_what_its_state_says(
    monkeypatch: pytest.MonkeyPatch, reports: Reports
) -> None:
    trainer = callback(monkeypatch, "transformers", "TrainerCallback", "transformers")
    trainer.on_step_end(arguments(), SimpleNamespace(train_batch_size=2, global_step=9), SimpleNamespace())
    assert reports() == [8]


def test_the_trainer_of_lightning(monkeypatch: pytest.MonkeyPatch, reports: Reports) -> None:
    trainer = callback(monkeypatch, "lightning.pytorch", "Callback", "lightning")
    loader = Loader(4, 4, 4, 3)
    state = SimpleNamespace(
        global_step=0, world_size=4, train_dataloader=loader, distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}
    )
    for number, batch in enumerate(loader):
        state.global_step += number % 2
        trainer.on_train_batch_end(state, None, None, batch, number)
    assert reports() == [16, 14]
