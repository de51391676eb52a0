"""What a DeepSpeed configuration says, key by key, and its notes."""

import json
from pathlib import Path
from typing import Any

import exported
import pytest

from autotune.frameworks.export import Export
from autotune.frameworks.exporters import EXPORTERS

REMARKS = ("checkpoints: ", "tune ", "verified: ", "not stated: ")


def export(folder: Path, stated: str | None = None, **knobs: Any) -> Export:
    """`stated`: the optimizer that the request states."""
    return EXPORTERS["deepspeed"](exported.document(exported.small(folder, optimizer=stated), **knobs))


def knob_notes(made: Export) -> list[str]:
    return [note for note in made.notes if not note.startswith(REMARKS)]


def test_stage_3(tmp_path: Path) -> None:
    made = export(
        tmp_path, zero_stage=3, micro_batch_size=2, reduce_bucket_size=20_000, prefetch_bucket_size=10_000,
        param_persistence_threshold=1_000, max_live_parameters=50_000, precision="bf16", activation_checkpointing="full",
    )  # fmt: skip
    content = json.loads(made.text)
    assert content["zero_optimization"] == {
        "stage": 3, "reduce_bucket_size": 20_000, "overlap_comm": True, "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": 10_000, "stage3_param_persistence_threshold": 1_000,
        "stage3_max_live_parameters": 50_000, "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [content[name] for name in batch] == [8, 2, 2]
    assert (content["bf16"], content["fp16"]) == ({"enabled": True}, {"enabled": False})
    (told,) = knob_notes(made)
    assert told.startswith("recomputation: the model switches on activation_checkpointing=full")


def test_stage_2(tmp_path: Path) -> None:
    made = export(
        tmp_path, "adamw", zero_stage=2, allgather_bucket_size=10_000, overlap_comm=False, defer_gradient_reduction=True,
        offload_optimizer="cpu", fused_optimizer=False,
    )  # fmt: skip
    content = json.loads(made.text)
    assert content["zero_optimization"].keys() == {
        "stage", "reduce_bucket_size", "overlap_comm", "contiguous_gradients", "offload_optimizer",
    }  # fmt: skip
    assert content["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert content["optimizer"]["params"]["torch_adam"] is True
    assert [note.split("=")[0] for note in knob_notes(made)] == ["allgather_bucket_size", "defer_gradient_reduction"]


def test_states_in_files(tmp_path: Path) -> None:
    made = export(tmp_path, zero_stage=3, offload_optimizer="nvme", precision="bf16")
    content = json.loads(made.text)
    assert content["zero_optimization"]["offload_optimizer"] == {
        "device": "nvme",
        "pipeline_read": True,
        "pipeline_write": True,
    }
    assert content["aio"] == {"block_size": 4 << 20, "thread_count": 4, "overlap_events": True}
    assert [note.split(":")[0] for note in knob_notes(made)] == ["nvme_path"]
    lower = export(tmp_path, zero_stage=2, offload_optimizer="nvme", precision="bf16")
    assert "offload_optimizer=nvme: DeepSpeed offloads to files at stage 3 alone, not at stage 2" in knob_notes(lower)


def test_the_folder_of_states_in_files_is_written(tmp_path: Path) -> None:
    document = exported.document(exported.small(tmp_path), zero_stage=3, offload_optimizer="nvme", precision="bf16")
    document["job"]["request"]["nvme_path"] = "/fast"
    made = EXPORTERS["deepspeed"](document)
    assert json.loads(made.text)["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/fast"
    assert knob_notes(made) == []


def test_stage_0_has_buckets_of_its_own(tmp_path: Path) -> None:
    made = export(tmp_path, reduce_bucket_size=20_000, overlap_comm=False)
    assert json.loads(made.text)["zero_optimization"] == {"stage": 0}
    assert [note.split("=")[0] for note in knob_notes(made)] == ["reduce_bucket_size", "overlap_comm"]


@pytest.mark.parametrize(("stage", "ratio"), [(2, None), (3, 0.5)])
def test_a_part_is_offloaded_at_stage_3_alone(tmp_path: Path, stage: int, ratio: float | None) -> None:
    made = export(tmp_path, "adamw", zero_stage=stage, offload_optimizer="cpu", offload_ratio=0.5, fused_optimizer=False)
    content = json.loads(made.text)
    assert content["zero_optimization"]["offload_optimizer"].get("ratio") == ratio
    # With torch's Adam DeepSpeed would stop.
    assert ("torch_adam" in content["optimizer"]["params"]) is (ratio is None)
    (told,) = knob_notes(made)
    assert told.startswith("fused_optimizer=False: " if ratio else "offload_ratio=0.5: ")


def test_copies_of_the_shards_are_the_nearest(tmp_path: Path) -> None:
    made = EXPORTERS["deepspeed"](exported.document(exported.small(tmp_path, ranks=4), zero_stage=3, hsdp_shard_size=2))
    assert json.loads(made.text)["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert knob_notes(made)[0].startswith("hsdp_shard_size=2: as zero_hpz_partition_size")


def test_tensor_parallelism_is_auto_tp(tmp_path: Path) -> None:
    made = export(tmp_path, tensor_parallel_size=2, loss_chunk_size=64)
    assert json.loads(made.text)["tensor_parallel"] == {"autotp_size": 2}
    assert "train_batch_size" not in json.loads(made.text)
    assert {note.split("=")[0] for note in knob_notes(made)} == {"tensor_parallel_size", "loss_chunk_size"}


def test_buckets_of_a_model_whose_size_is_not_known_are_not_clipped() -> None:
    made = EXPORTERS["deepspeed"](exported.document(exported.script(), zero_stage=2))
    assert json.loads(made.text)["zero_optimization"]["reduce_bucket_size"] == 40_000_000


def test_what_model_parallelism_needs_elsewhere_is_told() -> None:
    best = exported.document(
        exported.large(), zero_stage=3, reshard_after_forward=False, tensor_parallel_size=2, sequence_parallel=True,
        pipeline_parallel_size=2, virtual_stages=2, pipeline_schedule="zbv", pipeline_split="even", context_parallel_size=2,
        rank_order="tp-cp-pp-dp",
    )  # fmt: skip
    made = EXPORTERS["deepspeed"](best)
    assert "tensor_parallel" not in json.loads(made.text)
    for knob in (
        "tensor_parallel_size=2", "sequence_parallel=True", "pipeline_parallel_size=2", "virtual_stages=2",
        "pipeline_schedule=zbv", "pipeline_split=even", "context_parallel_size=2", "rank_order=tp-cp-pp-dp",
    ):  # fmt: skip
        (told,) = [note for note in made.notes if note.startswith(f"{knob}: ")]
        assert not told.endswith("it is left out")
    assert any("refuses stages 2 and 3" in note for note in made.notes)
    assert any("AutoTP hangs" in note for note in made.notes)


def test_json_is_the_document_itself() -> None:
    assert EXPORTERS["json"]({"schema_version": 1}).text == '{\n  "schema_version": 1\n}\n'


def test_fp16_is_told_how_its_loss_is_scaled(tmp_path: Path) -> None:
    content = json.loads(export(tmp_path, precision="fp16", accumulation_dtype="fp16", micro_batch_size=1).text)
    assert content["fp16"] == {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1,
        "min_loss_scale": 1,
    }  # fmt: skip
    assert content["data_types"] == {"grad_accum_dtype": "fp16"}
    assert "data_types" not in json.loads(export(tmp_path, precision="bf16").text)


@pytest.mark.parametrize(
    ("optimizer", "kind", "untested"),
    [
        ("adamw", "AdamW", False),
        ("sgd", "SGD", True),
        ("lamb", "Lamb", True),
        ("muon", "Muon", False),
        ("adamw8bit", None, True),
    ],
)
def test_an_optimizer_by_the_name_that_deepspeed_has_for_it(
    tmp_path: Path, optimizer: str, kind: str | None, untested: bool
) -> None:
    made = export(tmp_path, optimizer, optimizer=optimizer, zero_stage=3)
    content = json.loads(made.text)
    assert content.get("optimizer", {}).get("type") == kind
    assert content.get("zero_allow_untested_optimizer", False) is untested
    assert ("reduce_scatter" in content["zero_optimization"]) is (optimizer == "muon")
    told = any(note.startswith(f"optimizer={optimizer}: ") for note in made.notes)
    assert told is (optimizer not in ("adamw", "sgd"))


def test_schedules_of_the_data(tmp_path: Path) -> None:
    content = json.loads(export(tmp_path, curriculum_start_length=8, curriculum_steps=100).text)["data_efficiency"]
    metric = content["data_sampling"]["curriculum_learning"]["curriculum_metrics"]["seqlen_truncate"]
    assert (metric["min_difficulty"], metric["schedule_type"]) == (8, "fixed_linear")
    assert metric["schedule_config"] == {"total_curriculum_step": 100, "difficulty_step": 8}
    made = export(tmp_path, random_ltd_start_tokens=8, random_ltd_steps=100)
    dropped = json.loads(made.text)["data_efficiency"]["data_routing"]["random_ltd"]
    assert dropped["random_ltd_layer_id"] == [*range(1, dropped["total_layer_num"] - 1)]
    assert len(dropped["random_ltd_layer_id"]) == dropped["random_ltd_layer_num"]
    assert dropped["random_ltd_schedule"]["schedule_config"] == {"require_steps": 100, "seq_per_step": 8}
    (told,) = knob_notes(made)
    assert told.startswith("random_ltd_start_tokens=8 over random_ltd_steps=100: wrap the layers with convert_to_random_ltd")
    assert "data_efficiency" not in json.loads(export(tmp_path).text)
