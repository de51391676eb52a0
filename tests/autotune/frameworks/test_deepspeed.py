"""DeepSpeed configurations as knobs."""

import json
from pathlib import Path
from typing import Any

import exported
import pytest

from autotune.errors import RequestError
from autotune.frameworks.exporters import exporter
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_imported, read_written
from autotune.recipes.lint import case_of
from search_spaces.deepspeed import KEEP_ALL
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial_config import TrialConfig

PRESENT: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 5e7, "stage3_prefetch_bucket_size": "auto", "overlap_comm": False,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "torch_adam": True}},
    "communication_data_type": "bfp16",
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
}  # fmt: skip


def read(folder: Path, content: Any, name: str = "ds.json") -> Any:
    path = folder / name
    path.write_text(json.dumps(content))
    return read_imported(path)


def test_what_is_a_knob_and_what_is_not(tmp_path: Path) -> None:
    found = read(tmp_path, PRESENT)
    assert found.knobs == {
        "zero_stage": 3, "micro_batch_size": 4, "reduce_bucket_size": 50_000_000, "overlap_comm": False, "reduce_dtype": "bf16",
        "reshard_after_forward": True, "offload_optimizer": "cpu", "precision": "bf16", "fused_optimizer": False,
    }  # fmt: skip
    assert (found.global_batch_size, found.samples_per_rank) == (64, 8)
    assert found.hyperparameters.values() == {"lr": 3e-5, "clip": 0.5, "optimizer": "adamw"}
    assert [note.partition(":")[0] for note in found.notes] == [
        "zero_optimization.stage3_prefetch_bucket_size=auto", "fp16.enabled=auto",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save=true",
        "zero_optimization.offload_optimizer.pin_memory=true", "steps_per_print=10",
    ]  # fmt: skip


def test_all_of_it_may_be_auto(tmp_path: Path) -> None:
    automatic = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    }  # fmt: skip
    found = read(tmp_path, automatic)
    assert found.knobs == {"zero_stage": 2, "overlap_comm": False}
    assert set(found.of_hidden_size) == {"reduce_bucket_size"}
    assert (found.global_batch_size, found.samples_per_rank) == (None, None)
    assert len(found.notes) == 7


@pytest.mark.parametrize(("stage", "overlaps"), [(0, None), (1, False), (2, False), (3, None)])
def test_what_deepspeed_does_where_nothing_is_said(tmp_path: Path, stage: int, overlaps: bool | None) -> None:
    found = read(tmp_path, {"zero_optimization": {"stage": stage}})
    assert found.knobs.get("overlap_comm") is overlaps
    assert [note.partition(":")[0] for note in found.notes] == (
        ["zero_optimization.stage3_max_reuse_distance=1e+09"] if stage == 3 else []
    )


@pytest.mark.parametrize(
    ("zero", "knobs", "told"),
    [
        ({"stage": 0, "reduce_bucket_size": 1_000, "overlap_comm": False}, {}, ["reduce_bucket_size", "overlap_comm"]),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, {}, ["offload_optimizer"]),
        ({"stage": 2, "overlap_comm": True, "allgather_bucket_size": 2e8}, {"overlap_comm": True}, ["allgather_bucket_size"]),
        ({"stage": 2, "overlap_comm": True, "offload_param": {"device": "cpu"}}, {"overlap_comm": True}, ["offload_param"]),
        (
            {"stage": 1, "contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}},
            {"overlap_comm": False, "offload_optimizer": "cpu"},
            ["contiguous_gradients"],
        ),
    ],
)
def test_what_deepspeed_ignores_is_no_part_of_what_people_have(
    tmp_path: Path, zero: dict[str, Any], knobs: dict[str, Any], told: list[str]
) -> None:
    found = read(tmp_path, {"zero_optimization": zero})
    bucket = {"reduce_bucket_size": 500_000_000} if zero["stage"] else {}  # DeepSpeed's own, where the file is silent
    assert found.knobs == {"zero_stage": zero["stage"], **bucket, **knobs}
    assert [note.partition("=")[0] for note in found.notes] == told


@pytest.mark.parametrize(("distance", "reshards", "notes"), [(0, True, 0), (KEEP_ALL, False, 0), (5e8, None, 1)])
def test_how_far_ahead_deepspeed_looks(tmp_path: Path, distance: float, reshards: bool | None, notes: int) -> None:
    found = read(tmp_path, {"zero_optimization": {"stage": 3, "max_reuse_distance": distance}})
    assert (found.knobs.get("reshard_after_forward"), len(found.notes)) == (reshards, notes)


def test_older_names_and_what_is_off(tmp_path: Path) -> None:
    older = {"train_batch_size": 8, "bfloat16": {"enabled": True}, "tensor_parallel": {"autotp_size": 0}}
    found = read(tmp_path, older)
    assert (found.knobs, found.notes) == ({"precision": "bf16", "reduce_dtype": "bf16"}, ())


@pytest.mark.parametrize(
    ("stated", "reduces"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "fp32"),
        ({"bf16": {"enabled": "auto"}}, None),
    ],
)
def test_deepspeed_reduces_in_the_type_that_it_computes_in(tmp_path: Path, stated: dict[str, Any], reduces: str | None) -> None:
    assert read(tmp_path, {"train_batch_size": 8, **stated}).knobs.get("reduce_dtype") == reduces


def test_torchs_optimizer_is_fused_where_it_says_so(tmp_path: Path) -> None:
    for told, fused in (({}, None), ({"torch_adam": True}, False), ({"torch_adam": True, "fused": True}, True)):
        found = read(tmp_path, {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": told}})
        assert found.knobs.get("fused_optimizer") is fused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"zero_optimization": {"stage": 4}},
            r"zero_optimization.stage: 4 in ds.json is not in the domain of zero_stage; give 0",
        ),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "zero_optimization.reduce_bucket_size: 0.5 in ds.json"),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": -1}},
            "stage3_max_reuse_distance: -1 in ds.json is not a valid number; give a number of at least 0",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2.5}},
            "tensor_parallel.autotp_size: 2.5 in ds.json is not a whole number; give a whole",
        ),
        ({"train_batch_size": "many"}, "train_batch_size: 'many' in ds.json is not a whole number; give a whole number"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled: 'perhaps' in ds.json is not a boolean; give true or false"),
        ({"communication_data_type": "int8"}, "communication_data_type: 'int8' in ds.json is not known; use one of fp32"),
    ],
)
def test_a_value_that_cannot_be_names_its_key(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as found:
        read(tmp_path, {"train_micro_batch_size_per_gpu": 1, **change})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.json", None, "from: .*none.json cannot be read"),
        ("list.json", "[]", "from: .*list.json does not hold a table"),
        ("words.json", "{words", "from: .*words.json is neither JSON nor YAML"),
        ("words.yaml", "a: [", "from: .*words.yaml is neither JSON nor YAML"),
        (
            "other.json",
            '{"model_type": "llama"}',
            "from: .*other.json is a Hugging Face config.json; give a DeepSpeed configuration",
        ),
    ],
)
def test_a_file_that_is_neither(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=says) as found:
        read_imported(tmp_path / name)
    assert "\n" not in str(found.value)


LAYOUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"micro_batch_size": 2, "zero_stage": 1, "reduce_bucket_size": 30_000},
    {"zero_stage": 2, "overlap_comm": False, "precision": "bf16", "reduce_dtype": "bf16", "fused_optimizer": False},
    {
        "zero_stage": 3, "prefetch_bucket_size": 9_000, "param_persistence_threshold": 50, "max_live_parameters": 60_000,
        "offload_optimizer": "cpu", "offload_ratio": 0.5, "offload_param": "cpu",
    },
    {"zero_stage": 3, "reshard_after_forward": False, "offload_optimizer": "cpu"},
    {"tensor_parallel_size": 2, "zero_stage": 1},
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_exported_comes_back(tmp_path: Path, layout: dict[str, Any]) -> None:
    """As the configuration that stands for it: a bucket that holds the whole model is as good as any larger one."""
    stated = {"lr": 3e-4, "weight_decay": 0.05, "clip": 0.5, "optimizer": "adamw"}
    session = exported.small(tmp_path, **stated)
    path = tmp_path / "ds_config.json"
    path.write_text(exporter("deepspeed")(exported.document(session, **layout)).text)
    found = read_imported(path)
    canonical = session.space.canonical
    assert canonical(TrialConfig().replace(found.knobs)) == canonical(TrialConfig(**layout))
    assert {name: found.knobs[name] for name in layout} == layout
    assert found.hyperparameters.values() == stated
    if "tensor_parallel_size" in layout:
        assert (found.global_batch_size, found.samples_per_rank) == (None, 8)
    else:
        assert found.global_batch_size == session.request.global_batch_size


def test_sizes_that_the_trainer_takes_from_the_model(tmp_path: Path) -> None:
    sizes = {"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": 7}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **sizes}}))
    (written,) = read_written(path)
    model = resolve_model("llama-3-8b")
    config = case_of(written, Surroundings(model=model)).config
    assert (config.reduce_bucket_size, config.param_persistence_threshold) == (4096 * 4096, 40960)
    assert config.prefetch_bucket_size == 7
    assert "reduce_bucket_size" not in case_of(written, Surroundings()).imported.knobs


def test_older_switches_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": False}}))
    found = read_imported(path)
    assert (found.knobs["offload_optimizer"], found.keys["offload_optimizer"]) == ("cpu", "zero_optimization.cpu_offload")
    assert "offload_param" not in found.knobs


def test_a_legal_value_that_trials_do_not_have_hides_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "max_live_parameters": 0}}))
    found = read_imported(path)
    assert (found.knobs["zero_stage"], found.knobs["precision"]) == (3, "bf16")
    assert (
        "zero_optimization.max_live_parameters=0: no value of max_live_parameters, which was left at the default" in found.notes
    )
