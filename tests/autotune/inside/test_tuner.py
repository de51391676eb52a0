"""A run that tunes itself trains what an untuned run trains, survives out of memory, and remembers its answer."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import RequestError
from autotune.inside.memory import RunMemory
from autotune.inside.tuner import InRunTuner
from benchmarks.inside.models import Language, full_weights, make_batches, plain_loop
from benchmarks.inside.random_changes import RandomlyTuned, compare
from storage.store import open_store


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def loop(tuner: InRunTuner, model: Any, optimizer: Any, batches: Iterable[Any]) -> list[int]:
    trained: list[int] = []
    attempt: list[int] = []
    for batch in tuner.batches(batches):
        if tuner.is_first_part:
            attempt = []
        with tuner:
            attempt += batch["ids"].tolist()
            tuner.backward(model(batch["input_ids"], batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
        if tuner.step_ends and not tuner.has_failed:
            trained += attempt
    return trained


def untuned(batches: list[Any], per_step: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Language()
    plain_loop(model, torch.optim.AdamW(model.parameters(), 1e-3), batches, per_step, lambda _: None)
    return full_weights(model)


def made() -> tuple[Language, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Language()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_leave_losses_and_weights_as_they_are(seed: int) -> None:
    result = compare(seed, "none")
    assert result["in_order"]
    assert result["losses"] < 1e-9
    assert result["weights"] < 1e-9


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_a_step_that_runs_out_of_memory_is_trained_again(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(8, 6, 1, ragged=True)
    model, optimizer = made()
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("planted")

    if phase == "forward":
        model.layers[1].register_forward_pre_hook(fail)
    elif phase == "backward":
        model.layers[1].register_full_backward_hook(fail)
    else:
        monkeypatch.setattr(torch.Tensor, "addcdiv_", planted(torch.Tensor.addcdiv_, fail))
    tuner = RandomlyTuned(model, optimizer, global_batch_size=12)
    trained = loop(tuner, model, optimizer, batches)
    assert calls >= 3
    monkeypatch.undo()
    assert trained == [number for batch in batches for number in batch["ids"].tolist()]
    for weights, expected in zip(full_weights(model), untuned(batches, 2), strict=True):
        assert float((weights - expected).detach().abs().max()) < 1e-9


def planted(original: Any, fail: Any) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        fail()
        return original(*arguments, **keywords)

    return call


def test_an_evaluation_that_runs_out_of_memory_comes_in_halves() -> None:
    model, optimizer = made()
    tuner = InRunTuner(model, optimizer)
    sizes = []
    for batch in tuner.evaluation(make_batches(1, 8, 1, ragged=False)):
        with tuner:
            if len(batch["ids"]) > 2:
                raise torch.OutOfMemoryError("planted")
            sizes.append(len(batch["ids"]))
    assert sizes == [2, 2, 2, 2]


def test_other_errors_are_the_users() -> None:
    model, optimizer = made()
    tuner = InRunTuner(model, optimizer)
    with pytest.raises(ValueError, match="own"):
        for _ in tuner.batches(make_batches(1, 2, 1, ragged=False)):
            with tuner:
                raise ValueError("own")


def test_a_backward_pass_that_the_tuner_does_not_know_is_refused() -> None:
    model, optimizer = made()
    tuner = InRunTuner(model, optimizer)
    with pytest.raises(RuntimeError, match=r"call tuner\.backward"):
        for batch in tuner.batches(make_batches(1, 2, 1, ragged=False)):
            model(batch["input_ids"], batch["labels"]).backward()
            optimizer.step()


def test_what_depends_on_the_micro_batch_is_left_out_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tuner = InRunTuner(model, optimizer)
    for batch in tuner.batches([torch.ones(4, 3)]):
        with tuner:
            tuner.backward(model(batch).sum())
            optimizer.step()
    assert "normalises" in tuner.left_out["micro_batch_size"]


def test_the_share_is_checked() -> None:
    with pytest.raises(RequestError, match="share"):
        InRunTuner(torch.nn.Linear(1, 1), None, share=1.5)


def test_the_next_run_starts_from_the_answer(tmp_path: Path) -> None:
    batches, file = make_batches(60, 4, 1, ragged=False), tmp_path / "runs.json"
    model, optimizer = made()
    loop(InRunTuner(model, optimizer, remember=file, knobs=(), steps=60), model, optimizer, batches)
    (record,) = RunMemory(file).records().values()
    model, optimizer = made()
    lines: list[str] = []
    tuner = InRunTuner(model, optimizer, remember=file, knobs=(), steps=60, report=lines.append)
    loop(tuner, model, optimizer, batches[:1])
    assert "an earlier run" in lines[0]
    assert tuner.setting == record.answer.setting


def with_jobs(batches: list[Any], url: str, recorded: list[str]) -> Iterator[Any]:
    """The batches, and before the last one what jobs there are."""
    yield from batches[:-1]
    deadline = time.monotonic() + 60.0
    while not recorded and time.monotonic() < deadline:
        time.sleep(0.1)
        with open_store(url) as store:
            recorded += [job.id for job in store.jobs.newest(10) if job.state == "SUCCEEDED"]
    yield batches[-1]


def test_a_run_is_a_job(tmp_path: Path) -> None:
    model, optimizer = made()
    url = f"sqlite:///{tmp_path}/runs.db"
    tuner = InRunTuner(model, optimizer, remember=url, knobs=(), steps=60)
    recorded: list[str] = []
    loop(tuner, model, optimizer, with_jobs(make_batches(60, 4, 1, ragged=False), url, recorded))
    tuner.close()
    with open_store(url) as store:
        job = store.jobs.get(tuner.job_id)
        assert recorded == [job.id]  # before the run ended
        assert job.state == "SUCCEEDED"
        assert [trial.outcome for trial in store.trials.of(job.id)].count("OK") >= 1


def test_an_update_of_a_proven_setting_that_stops_in_the_middle_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls == 2 * len([*model.parameters()]) + 3:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.Tensor, "addcdiv_", planted(torch.Tensor.addcdiv_, fail))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        loop(InRunTuner(model, optimizer, knobs=()), model, optimizer, make_batches(5, 2, 1, ragged=False))
