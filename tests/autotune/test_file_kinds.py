"""A file of the wrong kind, wherever one is read: the refusal says what it is, and what to give."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.frameworks.best_config import read_best_config
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_imported, read_written
from autotune.recipes.lint import case_of
from autotune.request.rows import read_config_file, request_from_fields
from autotune.session.baselines import read_baseline
from search_spaces.clusters.presets import read_cluster_file, resolve_cluster
from search_spaces.file_kinds import kind_of_file
from search_spaces.models.huggingface import read_model_config, resolve_model
from search_spaces.spaces import resolve_space
from search_spaces.trial import Workload

FILES = {
    "config.json": '{"model_type": "llama", "hidden_size": 8}',
    "best-config.json": '{"schema_version": 1, "best": {"config": {}}, "job": {}}',
    "ds.json": '{"zero_optimization": {"stage": 2}}',
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n",
    "cluster.toml": 'device = "a100-80gb"\ndevices_per_node = 8\n',
    "space.toml": "[domains]\nzero_stage = [0, 1]\n",
    "sweep.toml": 'model = "llama-tiny"\ntrials = 3\n',
    "train.py": "import torch\n",
    # Of programs that are not read, with settings that a format that is read spells the same.
    "neox.yml": "pipe_parallel_size: 2\nzero_optimization: {stage: 1}\nfp16: {enabled: true, fp16: true}\n",
    "neox-train.yml": "synchronize_each_layer: true\nzero_optimization: {stage: 1}\n",
    "nanotron.yaml": "parallelism: {dp: 2, tp: 2}\ntokens: {micro_batch_size: 3}\nmodel: {dtype: bfloat16}\n",
    "olmo.yaml": "model: {d_model: 256}\nfsdp: {precision: mixed}\ndevice_train_microbatch_size: 4\n",
    "foundry.yaml": "model: {name: mpt_causal_lm}\ntrain_loader: {name: text}\ndevice_train_microbatch_size: 4\n",
    "mcli.yaml": "image: an-image\ncommand: composer train.py\nparameters: {max_seq_len: 2048}\n",
    "primus.yaml": "workspace: ./output\nmodules: {pre_trainer: {framework: megatron}}\n",
    "neuronx.yaml": "trainer: {devices: 32}\nexp_manager: {}\ndistributed_strategy: {zero1: true}\nmodel: {}\n",
    "nemo.yaml": "trainer: {devices: 8}\nmodel: {tensor_model_parallel_size: 2}\n",
}
KINDS = {
    "config.json": "a Hugging Face config.json", "best-config.json": "a best-config.json",
    "ds.json": "a DeepSpeed configuration", "accelerate.yaml": "a file of `accelerate config`",
    "cluster.toml": "a description of a cluster", "space.toml": "a description of a space",
    "sweep.toml": "a request (--config)", "train.py": "Python source",
    **{name: f"a {what}, which is not read" for name, what in {
        "neox.yml": "configuration of GPT-NeoX", "neox-train.yml": "configuration of GPT-NeoX",
        "nanotron.yaml": "configuration of Nanotron", "olmo.yaml": "configuration of OLMo",
        "foundry.yaml": "configuration of LLM Foundry", "mcli.yaml": "run of LLM Foundry",
        "primus.yaml": "configuration of Primus", "neuronx.yaml": "configuration of NeuronX Distributed Training",
        "nemo.yaml": "configuration of NeMo 1",
    }.items()},
}  # fmt: skip


def read_space(path: Path) -> Any:
    work = Workload(global_batch_size=8, sequence_length=16)
    return resolve_space(str(path), resolve_model("llama-tiny"), resolve_cluster("2x24GB"), work)


def read_linted(path: Path) -> Any:
    return [case_of(one, Surroundings()) for one in read_written(path)]


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "best-config": (read_best_config, ("config.json", "ds.json", "accelerate.yaml", "cluster.toml", "train.py")),
    "model": (read_model_config, ("best-config.json", "ds.json", "sweep.toml", "train.py")),
    "cluster": (read_cluster_file, ("config.json", "best-config.json", "sweep.toml", "space.toml")),
    "space": (read_space, ("best-config.json", "cluster.toml", "sweep.toml")),
    "request": (read_config_file, ("best-config.json", "config.json", "cluster.toml", "space.toml")),
    "baseline": (read_baseline, ("config.json", "ds.json")),
    "from": (read_imported, ("config.json",)),
    "lint": (read_linted, ("config.json", "best-config.json", *(name for name, kind in KINDS.items() if "not read" in kind))),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_file_is_known_by_its_content(files: Path) -> None:
    assert {name: kind_of_file(files / name) for name in FILES} == KINDS
    (files / "other.json").write_text(json.dumps({"nothing": "known"}))
    assert kind_of_file(files / "other.json") == kind_of_file(files / "none.json") == ""


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, (_, names) in READERS.items() for name in names])
def test_a_file_of_the_wrong_kind_is_named_as_what_it_is(files: Path, reader: str, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        READERS[reader][0](files / name)
    assert f"is {KINDS[name]}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_a_request_may_write_parameters_as_the_command_line_does() -> None:
    command = {"arguments": ["python", "train.py"], "parameter_count": "125M"}
    request = request_from_fields({"command": command})
    assert request.command is not None
    assert request.command.parameter_count == 125_000_000
    with pytest.raises(ValueError, match="'many' is not a number of parameters; write 125M or 7B"):
        request_from_fields({"command": command | {"parameter_count": "many"}})
