"""What DeepSpeed leaves on a host, and how the engine says that its package is missing. Needs no DeepSpeed."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from executor.engine import RankContext
from executor.engines.deepspeed import package
from executor.engines.deepspeed.capability import unusable
from executor.engines.deepspeed.engine import DeepSpeedEngine
from executor.engines.deepspeed.host import SHARED_PREFIX, extensions_folder, remove_orphaned_memory
from executor.errors import EngineRefusalError
from executor.runners.failures import classify
from search_spaces.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def test_processes_that_live_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    first, held = extensions_folder(tmp_path)
    second, also_held = extensions_folder(tmp_path)
    assert first != second
    os.close(also_held)
    os.close(held)


def test_a_lock_of_a_killed_process_is_removed_with_what_it_guarded(tmp_path: Path) -> None:
    folder, held = extensions_folder(tmp_path)
    for name in ("whole", "half"):
        (folder / name).mkdir()
        (folder / name / "module.so").touch()
    (folder / "half" / "lock").touch()
    os.close(held)  # as the system does when a process ends, however it ends
    again, held = extensions_folder(tmp_path)
    assert again == folder
    assert sorted(path.name for path in folder.iterdir()) == ["whole"]
    os.close(held)


def test_shared_memory_that_nobody_maps_is_removed(tmp_path: Path) -> None:
    used, left, others = (tmp_path / f"{SHARED_PREFIX}_{user}_{name}" for user, name in (
        (os.getuid(), "127.0.0.1_1_0"), (os.getuid(), "127.0.0.1_2_0"), (os.getuid() + 1, "127.0.0.1_3_0"),
    ))  # fmt: skip
    for path in (used, left, others):
        path.write_bytes(b"\0" * mmap.PAGESIZE)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_orphaned_memory(tmp_path) == [left.name]
    assert used.exists()
    assert others.exists()
    assert remove_orphaned_memory(tmp_path) == [used.name]


@pytest.mark.parametrize(
    ("version", "rule", "told"),
    [
        (None, "deepspeed-installed", "engine deepspeed: the package is not installed; pip install autotune[deepspeed]"),
        (
            "0.16.2",
            "deepspeed-version",
            "engine deepspeed: the package is 0.16.2, and 0.19 is the oldest that is supported; pip ",
        ),
    ],
)
def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, version: str | None, rule: str, told: str) -> None:
    monkeypatch.setattr(package, "installed_version", lambda: version)
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    work = Workload(global_batch_size=1, sequence_length=8)
    with pytest.raises(EngineRefusalError) as refused:
        DeepSpeedEngine().build(context, resolve_model("llama-tiny"), TrialConfig(), work)
    failure = classify(refused.value)
    assert (failure.outcome, failure.rule, failure.traceback) == (Outcome.INVALID, rule, None)
    assert failure.message.startswith(told)
    assert "\n" not in failure.message


def test_versions_that_are_supported() -> None:
    assert [unusable(version) for version in ("0.19.0", "0.19.8", "0.20.1+cu128", "1.0")] == [None] * 4
