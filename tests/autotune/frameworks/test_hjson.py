"""DeepSpeed's language of configurations."""

from pathlib import Path

import pytest

from autotune.errors import RequestError
from autotune.frameworks.hjson import HjsonReader
from autotune.frameworks.read import read_imported, read_written

TEXTS = {
    '{"a": 1, "b": [1, 2,],}': {"a": 1, "b": [1, 2]},
    "// top\n{\n  a: true # end\n  /* two\n lines */ b: 5e8\n  c: null,\n}": {"a": True, "b": 5e8, "c": None},
    "a: 1\nb: words, with a comma\n": {"a": 1, "b": "words, with a comma"},
    "{a: {b: 'it\\'s'}, c: 5 apples\n}": {"a": {"b": "it's"}, "c": "5 apples"},
    "{a: [1\n2\n3], b: 01\n}": {"a": [1, 2, 3], "b": "01"},
    "{a: '''\n  one\n  two\n  '''}": {"a": "one\ntwo"},
    '{"a": "tab\\tquote\\""}': {"a": 'tab\tquote"'},
}
BROKEN = ("{a: 1", "{a 1}", "{a: }", '{"a": "open', "{a: 1}}", "[1, 2", "{a: 1,,}")


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_read_as_people_write_it(text: str) -> None:
    assert HjsonReader(text).content == TEXTS[text]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_broken_says_where(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 1: expected"):
        HjsonReader(text)


@pytest.mark.parametrize("text", [*TEXTS, *BROKEN])
def test_it_agrees_with_the_library(text: str) -> None:
    hjson = pytest.importorskip("hjson")
    try:
        expected = hjson.loads(text)
    except ValueError:
        with pytest.raises(ValueError, match="expected"):
            HjsonReader(text)
    else:
        assert HjsonReader(text).content == expected


SIZES = "{\n  # four GPUs\n  train_micro_batch_size_per_gpu: 2,\n  zero_optimization: {stage: 3},\n}\n"


@pytest.mark.parametrize("name", ["ds.conf", "ds.hjson", "ds.json", "ds", "ds.txt", "ds.yaml"])
def test_a_file_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(SIZES)
    assert read_imported(path).knobs["zero_stage"] == 3


@pytest.mark.parametrize(
    ("name", "text", "format_name"),
    [
        ("launcher.conf", "distributed_type: MULTI_GPU\nnum_processes: 2\n", "accelerate"),
        ("recipe.cfg", "[training]\nlocal_batch_size = 2\n", "torchtitan"),
        ("recipe.yaml", "[training]\nlocal_batch_size = 2\n", "torchtitan"),
        ("run.sh", "#!/bin/bash\npython pretrain_gpt.py --num-layers 8 --micro-batch-size 2\n", "megatron"),
    ],
)
def test_a_suffix_is_only_a_hint(tmp_path: Path, name: str, text: str, format_name: str) -> None:
    (tmp_path / name).write_text(text)
    assert [one.format for one in read_written(tmp_path / name)] == [format_name]


def test_a_broken_table_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "ds.conf").write_text("{\n  train_batch_size 8\n}\n")
    with pytest.raises(RequestError, match="line 2: expected :"):
        read_written(tmp_path / "ds.conf")


def test_keys_that_are_stated_twice(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 8, "bf16": {"enabled": true, "enabled": false}, "train_batch_size": 4}'
    )
    (written,) = read_written(tmp_path / "ds.json")
    assert written.repeated == ("enabled", "train_batch_size")
    assert written.content["train_batch_size"] == 4
