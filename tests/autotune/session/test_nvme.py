"""The folder for states in files: what a job refuses of it, and what it tells, before a trial starts."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import executor.files.rank_file as file_rates
from autotune.errors import RequestError
from autotune.loop.trials import PlannedTrial, refusal
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_fields, request_from_row, request_to_row
from autotune.session.feasible import speed_warning
from autotune.session.resolve import prepare
from autotune.session.trial_requests import trial_request
from executor.errors import EngineRefusalError
from search_spaces.errors import IllegalConfigError
from search_spaces.outcome import Outcome, Purpose
from search_spaces.training.states import file_bytes
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig

FILES = TrialConfig(zero_stage=1, offload_optimizer="nvme")


def request(**fields: Any) -> JobRequest:
    return request_from_fields({"model": "llama-tiny", "runner": "local", "ranks": 2, **fields})


def test_the_folder_is_absolute_and_survives_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fast").mkdir()
    session = prepare(request(nvme_path="fast"))
    assert session.request.nvme_path == str(tmp_path / "fast")
    assert request_from_row(request_to_row(session.request)).workload.nvme_path == str(tmp_path / "fast")
    assert trial_request(session, "attempt", FILES, ()).workload.nvme_path == str(tmp_path / "fast")


def test_a_folder_that_ranks_cannot_write_to_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"nvme_path: .*gone does not exist; name a folder .* \(--nvme-path\)"):
        prepare(request(nvme_path=str(tmp_path / "gone")))
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match=r"nvme_path: .*file is not a folder"):
        prepare(request(nvme_path=str(tmp_path / "file")))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RequestError, match="cannot be written to"):
        prepare(request(nvme_path=str(tmp_path)))
    with pytest.raises(RequestError, match="is not a name"):
        request(nvme_path=7)


def test_files_are_searched_only_where_a_folder_is_named(tmp_path: Path) -> None:
    assert prepare(request(space="full")).space.domains["offload_optimizer"] == ("none", "cpu")
    session = prepare(request(space="full", nvme_path=str(tmp_path)))
    assert session.space.domains["offload_optimizer"] == ("none", "cpu", "nvme")
    with pytest.raises(IllegalConfigError, match="no folder is given for them; name a folder with --nvme-path"):
        prepare(request(pins={"offload_optimizer": "nvme", "zero_stage": 1}))


def test_a_full_file_system_is_told_with_the_bytes_that_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepare(request(nvme_path=str(tmp_path), pins={"offload_optimizer": ["none", "nvme"]}))
    want = PlannedTrial(config=FILES, purpose=Purpose.SEARCH, fidelity=Fidelity())
    assert refusal(session, want) is None
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    needed = file_bytes(FILES, session.model, 2)
    assert needed == 12 * session.model.parameter_count
    refused = refusal(session, want)
    assert refused is not None
    assert (refused.outcome, refused.rule) == (Outcome.INVALID, "nvme-space")
    assert refused.message.startswith(f"its states need {needed:,} bytes in files on {tmp_path}, which has 1,000,000 left; ")
    assert refusal(session, dataclasses.replace(want, config=TrialConfig(zero_stage=1))) is None


def test_a_slow_folder_is_told_with_its_measured_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(nvme_path=str(tmp_path))
    monkeypatch.setattr(file_rates, "quick_rate", lambda _: (9e7, False))
    told = speed_warning(asked)
    assert told is not None
    assert told.startswith(f"nvme_path: {tmp_path} moves 0.09 GB/s, without direct I/O, which its file system refuses; ")
    monkeypatch.setattr(file_rates, "quick_rate", lambda _: (9e9, True))
    assert speed_warning(asked) is None
    monkeypatch.setattr(file_rates, "quick_rate", lambda _: (9e9, False))
    assert str(speed_warning(asked)).endswith(
        "moves 9 GB/s, without direct I/O, which its file system refuses: through the page cache"
    )
    assert speed_warning(request()) is None

    def full(_: Path) -> tuple[float, bool]:
        raise EngineRefusalError("nvme-space", "a rank needs 64 bytes")

    monkeypatch.setattr(file_rates, "quick_rate", full)
    assert speed_warning(asked) == "a rank needs 64 bytes"


def test_a_real_folder_has_a_figure(tmp_path: Path) -> None:
    rate, _ = file_rates.quick_rate(tmp_path)
    assert 1e5 < rate < 1e12
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ratio", [0.25, 1.0])
@pytest.mark.parametrize("world_size", [2, 8])
def test_bytes_in_files_are_of_the_whole_model_however_it_is_divided(ratio: float, world_size: int) -> None:
    model = prepare(request()).model
    config = FILES.replace({"offload_ratio": ratio, "tensor_parallel_size": 2})
    assert file_bytes(config, model, world_size) == int(ratio * 12 * model.parameter_count)
    assert file_bytes(config.replace({"offload_optimizer": "cpu"}), model, world_size) == 0
