"""What a killed DeepSpeed leaves on its host is found and removed. Needs no DeepSpeed."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import process_tree


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of temporary files and of shared memory; `next_process` ends the process that this test is."""
    monkeypatch.setattr(process_tree, "_locked_folders", {})
    monkeypatch.setattr(process_tree, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    next_process()


def next_process() -> None:
    """Let go of what this process holds, as the system does when it ends, however it ends."""
    while process_tree._locked_folders:
        os.close(process_tree._locked_folders.popitem()[1])


def test_processes_that_live_at_once_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = process_tree.extensions_folder()
    assert process_tree.extensions_folder() == folder
    with monkeypatch.context() as other:
        other.setattr(process_tree, "_locked_folders", {})
        assert process_tree.extensions_folder() != folder
        next_process()


def test_a_lock_of_a_killed_process_is_removed_with_what_it_guarded() -> None:
    folder = process_tree.extensions_folder()
    for name in ("whole", "half"):
        (folder / name).mkdir()
        (folder / name / "module.so").touch()
    (folder / "half" / "lock").touch()
    next_process()
    assert process_tree.extensions_folder() == folder
    assert sorted(path.name for path in folder.iterdir()) == ["whole"]


def test_a_finished_build_with_a_lock_is_not_built_again() -> None:
    folder = process_tree.extensions_folder()
    for name, output in (("whole", "module.so"), ("half", "module.o")):
        (folder / name).mkdir()
        (folder / name / ".ninja_log").write_text(f"# ninja log v7\n0\t9\t1\t{output}\tab12\n")
        (folder / name / "lock").touch()
    assert process_tree.extensions_folder() == folder
    assert sorted(str(path.relative_to(folder)) for path in folder.glob("**/*")) == ["whole", "whole/.ninja_log"]


def test_a_lock_of_a_script_that_this_process_has_killed_is_removed_too() -> None:
    folder = process_tree.extensions_folder()
    (folder / "half").mkdir()
    (folder / "half" / "lock").touch()
    assert list(process_tree.extensions_folder().iterdir()) == []


def shared(host: Path, port: int, user: int = os.getuid()) -> Path:
    path = host / f"deepspeed_allreduce_buffer_{user}_127.0.0.1_{port}_0"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    return path


def test_shared_memory_of_a_trial_is_removed_by_its_port(host: Path) -> None:
    files = [shared(host, port) for port in (2345, 23456)]
    process_tree.remove_shared_memory("127.0.0.1", 2345)
    assert [file.exists() for file in files] == [False, True]


def test_shared_memory_that_nobody_maps_is_removed(host: Path) -> None:
    used, left, others = shared(host, 1), shared(host, 2), shared(host, 3, user=os.getuid() + 1)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert process_tree.remove_orphaned_memory() == [left.name]
    assert used.exists()
    assert others.exists()
    assert process_tree.remove_orphaned_memory() == [used.name]
