"""A user's baseline from a file."""

from pathlib import Path

import pytest

from autotune.errors import RequestError
from autotune.session.baselines import read_baseline
from search_spaces.errors import SearchSpaceError


def test_a_baseline_is_read_from_either_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"zero_stage": 2}')
    assert read_baseline(path) == {"zero_stage": 2}
    path.write_text('{"best": {"config": {"zero_stage": 3}}}')
    assert read_baseline(path) == {"zero_stage": 3}


@pytest.mark.parametrize("content", ["[1]", "{", '{"zero_stag": 1}', '{"zero_stage": 9}'])
def test_a_bad_baseline_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises((RequestError, SearchSpaceError)):
        read_baseline(path)
