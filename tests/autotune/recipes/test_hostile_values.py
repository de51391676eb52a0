"""Settings with values of the wrong type or size: a finding or one line, never a traceback."""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from lint_recipes import CASES, RECIPES

from autotune.errors import AutotuneError
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.imported import flat, nested, one_file
from autotune.frameworks.read import Written, read_written
from autotune.recipes.lint import lint
from search_spaces.errors import SearchSpaceError

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**9, 2.5, float("nan"), "", "two", "auto", [], [1, "x"], {}, {"a": 1}, "none", "full",
)  # fmt: skip
FILES = sorted({case.file for case in CASES if not case.refusal})


@pytest.mark.prove(every=10)
@pytest.mark.parametrize("file", FILES)
def test_a_wrong_value_is_a_finding_or_a_line(file: str) -> None:
    draw = random.Random(file)
    around = Surroundings(ranks=16)  # no cluster: predictions would dominate the time
    for one in read_written(RECIPES / file):
        settings = dict(flat(one.content))
        for _ in range(6):
            key = draw.choice(sorted(settings))
            changed = {**settings, key: draw.choice(VALUES)}
            written = Written(format=one.format, name=one.name, path=one.path, content=changed)
            try:
                lint(written, around)
            except (AutotuneError, SearchSpaceError) as error:
                assert "\n" not in str(error), f"{key}={changed[key]!r}"


SFT = "--model_name_or_path Qwen/Qwen3-4B --output_dir out --per_device_train_batch_size 1"
TRAINER = {"model_name_or_path": "Qwen/Qwen3-4B", "output_dir": "out", "per_device_train_batch_size": 1}
MODEL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
         "intermediate_size": 128}  # fmt: skip
NAMING = [
    *(("yaml", json.dumps({**TRAINER, key: "FILE"})) for key in ("deepspeed", "fsdp_config", "launcher.config_file")),
    *(("yaml", json.dumps({**TRAINER, "launcher": {key: "FILE"}})) for key in ("config_file", "accelerate_config")),
    ("json", json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "FILE"}})),
    ("sh", "llamafactory-cli train FILE"), ("sh", "accelerate launch t.py FILE"), ("sh", f"python t.py {SFT} --config FILE"),
    ("sh", f"trl sft {SFT} --accelerate_config FILE"), ("sh", f"deepspeed t.py {SFT} --deepspeed=FILE"),
    ("sh", "torchrun -m torchtitan.train --job.config-file FILE --training.seq_len 8"),
]  # fmt: skip
LOOKING = [
    ("sh", f"source FILE\n[ -f FILE ] && X=1\nX=$(cat FILE)\ntorchrun t.py {SFT} --x $X"),
    *(("yaml", json.dumps({**TRAINER, "model_name_or_path": name})) for name in (
        "FOLDER", "~", "./~", "~nobody/m", "hf:FOLDER", "hf:~", "own/model", "below", "a" * 300,
    )),
]  # fmt: skip


@pytest.mark.parametrize("file", ["FOLDER/config.json", "~/config.json", "../config.json"])
def test_a_text_of_a_stranger_opens_no_file(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, touched = tmp_path / "secret", list[object]()
    for name in ("config.json", "below/config.json", "hub/models--own--model/snapshots/1/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(MODEL))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.chdir(folder)
    for module, name in ((io, "open"), (os, "stat"), (os, "scandir"), (os, "listdir")):
        monkeypatch.setattr(module, name, _noting(getattr(module, name), touched))
    path = tmp_path / "texts" / "recipe"
    path.parent.mkdir()
    for refused, texts in ((True, NAMING), (False, LOOKING)):
        for language, text in texts:
            recipe = path.with_suffix(f".{language}")
            recipe.write_text(text.replace("FILE", file).replace("FOLDER", str(folder)))
            with one_file():
                if refused:
                    with pytest.raises(AutotuneError, match="names another file"):
                        [lint(written, Surroundings(ranks=8)) for written in read_written(recipe)]
                else:
                    assert [lint(written, Surroundings(ranks=8)) for written in read_written(recipe)]
            assert not [name for name in touched if "config" in str(name) or "secret" in str(name)], text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.json", '{"train_batch_size": 8, "\\ud800": 1}'), ("own.yaml", 'train_batch_size: "\\ud800"\nbf16: {}'),
        ("own.sh", "python t.py model.tensor_model_parallel_size=2 'model.x=\"\\ud800\"'"),
        ("own.py", "def f():\n    return Config(training=T(seq_len=1, dataset='\\ud800'))\n"),
    ],
)  # fmt: skip
def test_a_text_that_is_not_unicode_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(AutotuneError, match="not Unicode"):
        read_written(tmp_path / name)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("titan-llama3-8b.toml", "activation_checkpoint.selective_ac_option", "9" * 5000),
        ("titan-llama3-8b.toml", "activation_checkpoint.selective_ac_option", "²"),
        ("titan-stage-layers.toml", "parallelism.pipeline_parallel_first_stage_less_layers", "x"),
        ("titan-llama3-8b.toml", "optimizer.lr", 10**400),
        ("titan-llama3-8b.toml", "parallelism.tensor_parallel_degree", 10**400),
        ("megatron-gpt3-175b.sh", "--num-layers", 10**9),
        ("megatron-gpt3-175b.sh", "launcher.nproc_per_node", 0),
    ],
)
def test_a_value_without_bounds_is_a_finding_or_a_line(file: str, key: str, value: Any) -> None:
    (written,) = read_written(RECIPES / file)
    changed = Written(format=written.format, name=file, path=written.path, content={**dict(flat(written.content)), key: value})
    try:
        assert lint(changed, Surroundings(ranks=16)).case.imported.ranks != 0
    except AutotuneError as error:
        assert "\n" not in str(error)


def test_what_is_set_within_no_table_replaces_it() -> None:
    settings: dict[str, Any] = {"a": True, "a.b": 1, "c": None, "c.d.e": 2, "f": {}, "f.g": 3}
    assert nested(settings) == {"a": {"b": 1}, "c": {"d": {"e": 2}}, "f": {"g": 3}} and settings["f"] == {}


def _noting(function: Any, touched: list[object]) -> Any:
    """The function, which notes the names that it is called with."""

    def noted(name: object = ".", *arguments: Any, **further: Any) -> Any:
        touched.append(name)
        return function(name, *arguments, **further)

    return noted
