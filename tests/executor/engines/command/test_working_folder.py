"""The folder of a trial: what is linked, copied, made anew and left out."""

from pathlib import Path

import pytest

from executor.engines.command import launchers
from executor.engines.command.launchers import make_working_folder
from executor.errors import EngineRefusalError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launchers, "SMALL_BYTES", 10)
    monkeypatch.setattr(launchers, "MOST_ENTRIES", 3)
    monkeypatch.setattr(launchers, "MOST_COPIED_BYTES", 20_000)
    source = tmp_path / "user"
    for name, size in {"train.py": 5, "data.bin.gz": 50, "out/last.pt": 50, "out/log": 5, ".git/x": 5}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"0" * size)
    (source / "images").mkdir()
    for number in range(4):
        (source / "images" / str(number)).touch()
    return source


def test_a_folder_of_links(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    make_working_folder(source, folder, "link")
    links = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()}
    assert links == {"data.bin.gz", "images", ".git"}
    assert [path.name for path in (folder / "out").iterdir()] == ["log"]
    (folder / "out" / "last.pt").write_text("of a trial")
    (folder / "out" / "log").write_text("of a trial")
    assert (source / "out" / "last.pt").stat().st_size == 50
    assert (source / "out" / "log").read_text() == "00000"


def test_a_copy_has_everything_unless_it_is_too_large(source: Path, tmp_path: Path) -> None:
    make_working_folder(source, tmp_path / "trial", "copy")
    assert {path.relative_to(tmp_path / "trial") for path in (tmp_path / "trial").rglob("*")} == {
        path.relative_to(source) for path in source.rglob("*")
    }
    (source / "data").write_bytes(b"0" * 30_000)
    with pytest.raises(EngineRefusalError, match="too much to copy for every trial; use --trial-folder link"):
        make_working_folder(source, tmp_path / "other", "copy")
