"""The folder of a trial: what is linked, copied, made anew and left out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executor.engines.command import launchers
from executor.engines.command.launchers import checkpoints_in, file_states, make_working_folder, working_path
from executor.engines.command.observed import install_probe
from executor.errors import EngineRefusalError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launchers, "SMALL_BYTES", 10)
    monkeypatch.setattr(launchers, "MOST_ENTRIES", 15)
    monkeypatch.setattr(launchers, "MOST_COPIED_BYTES", 20_000)
    source = tmp_path / "user"
    for name, size in {"train.py": 5, "data.bin.gz": 50, "out/last.pt": 50, "out/log": 5, ".git/x": 5}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"0" * size)
    (source / "images").mkdir()
    for number in range(12):
        (source / "images" / str(number)).touch()
    (source / "env").mkdir()
    (source / "env" / "pyvenv.cfg").touch()
    return source


def test_a_folder_of_links(source: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    root = tmp_path / "trials" / "1"
    make_working_folder(source, root, "link", ["out/log"])
    folder = working_path(source, root)
    assert folder == root / tmp_path.name / "user"
    links = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()}
    assert links == {"data.bin.gz", "images", ".git", "env", "out/last.pt"}
    assert not (folder / "out" / "log").exists()
    assert checkpoints_in(folder) == ["out/last.pt"]
    assert (folder / "../data").is_dir()
    assert (folder / ".." / ".." / tmp_path.name).is_dir()
    (folder / "train.py").write_text("of a trial")
    assert (source / "train.py").read_text() == "00000"
    assert file_states(folder).keys() == {"train.py"}


def test_a_directory_that_is_a_checkpoint_is_left_out_as_a_whole(source: Path, tmp_path: Path) -> None:
    (source / "out" / "last.ckpt" / "shards").mkdir(parents=True)
    (source / "out" / "last.ckpt" / "shards" / "0.pt").write_text("0")
    names = [name for name in checkpoints_in(source) if "last.ckpt" in name]
    assert names == ["out/last.ckpt"]
    make_working_folder(source, tmp_path / "trial", "link", names)
    assert not (working_path(source, tmp_path / "trial") / "out" / "last.ckpt").exists()


@pytest.mark.parametrize(("limit", "links"), [("MOST_ENTRIES", {"out"}), ("MOST_SMALL_BYTES", {"train.py", "out/log"})])
def test_above_the_limits_links_stand_for_the_rest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, links: set[str]
) -> None:
    monkeypatch.setattr(launchers, limit, 4)
    make_working_folder(source, tmp_path / "trial", "link")
    folder = working_path(source, tmp_path / "trial")
    assert links <= {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()}


def test_a_copy_has_everything_unless_it_is_too_large(source: Path, tmp_path: Path) -> None:
    make_working_folder(source, tmp_path / "trial", "copy")
    folder = working_path(source, tmp_path / "trial")
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {path.relative_to(source) for path in source.rglob("*")}
    (source / "data").write_bytes(b"0" * 30_000)
    with pytest.raises(EngineRefusalError, match="too much to copy for every trial; use --trial-folder link"):
        make_working_folder(source, tmp_path / "other", "copy")


@pytest.mark.parametrize(
    ("statement", "content"),
    [
        ("open(name, 'w').write('of a trial')", "of a trial"),
        ("pathlib.Path(name).open('a').write('+')", "of the user+"),
        ("f = io.open(name, mode='r+'); f.write('O')", "Of the user"),
        ("torch.save(0, name)", None),
        ("open(name).read(); open(0, 'r', closefd=False)", "of the user"),
    ],
)
def test_a_file_of_the_user_is_not_written_through_its_link(tmp_path: Path, statement: str, content: str | None) -> None:
    user, folder = tmp_path / "user", tmp_path / "trial"
    folder.mkdir()
    user.write_text("of the user")
    (folder / "state").symlink_to(user)
    text = f"import io, pathlib, {'torch' if 'torch' in statement else 'os'}; name = 'state'; {statement}"
    environment = {**os.environ, **install_probe(tmp_path, None, folder)}
    subprocess.run([sys.executable, "-c", text], cwd=folder, env=environment, check=True)
    assert user.read_text() == "of the user"
    assert content is None or (folder / "state").read_text() == content
    assert (folder / "state").is_symlink() is (content == "of the user")
