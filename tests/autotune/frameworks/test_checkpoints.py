"""Whether checkpoints of the baseline load, as every kind of checkpoint has it."""

from pathlib import Path
from typing import Any

import exported
import pytest

from autotune.frameworks.export import layout_changes
from autotune.frameworks.exporters import exporter
from search_spaces.trial_config import TrialConfig

KINDS = {"deepspeed": "deepspeed", "torch": "distributed", "megatron": "megatron"}


def note(format_name: str, folder: Path, before: dict[str, Any], after: dict[str, Any], ranks: int = 4) -> str:
    made = exporter(format_name)(exported.document(exported.small(folder, ranks=ranks), before, **after))
    (found,) = [line for line in made.notes if line.startswith("checkpoints: ")]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_the_same_layout_loads_unchanged(tmp_path: Path, name: str) -> None:
    same = {"zero_stage": 2, "micro_batch_size": 1}
    assert "load unchanged" in note(name, tmp_path, same, same | {"micro_batch_size": 2, "reduce_bucket_size": 10_000})


@pytest.mark.parametrize(
    ("name", "before", "after", "says"),
    [
        ("torch", {"zero_stage": 2}, {"zero_stage": 3}, "zero_stage 2 -> 3: torch.distributed.checkpoint loads them unchanged"),
        ("torch", {}, {"zero_stage": 3}, "torch_to_dcp"),
        ("torch", {"zero_stage": 3}, {"zero_stage": 3, "tensor_parallel_size": 2}, "tensor_parallel_size 1 -> 2"),
        ("deepspeed", {"zero_stage": 1}, {"zero_stage": 3}, "ds_to_universal.py"),
        ("deepspeed", {}, {"zero_stage": 3}, "mp_rank_00_model_states.pt"),
        ("deepspeed", {"zero_stage": 3}, {}, "zero_to_fp32.py"),
        ("megatron", {}, {"pipeline_parallel_size": 2}, "tools/checkpoint/convert.py --model-type GPT"),
        ("megatron", {}, {"pipeline_parallel_size": 2}, "--target-pipeline-parallel-size 2"),
        ("megatron", {"zero_stage": 1}, {"zero_stage": 3}, "fsdp_dtensor"),
    ],
)
def test_another_layout_names_its_tool(
    tmp_path: Path, name: str, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    assert says in note(name, tmp_path, before, after)


def test_without_a_baseline_nothing_is_claimed(tmp_path: Path) -> None:
    best = exported.document(exported.small(tmp_path)) | {"baseline": None}
    assert any("no baseline was measured" in line for line in exporter("deepspeed")(best).notes)


def test_what_moves_the_states() -> None:
    def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        return layout_changes(TrialConfig(**before), TrialConfig(**after), 8)

    assert changes({}, {"micro_batch_size": 4, "activation_checkpointing": "full"}) == []
    assert changes({"zero_stage": 1}, {"zero_stage": 1, "context_parallel_size": 2}) == []
    assert changes({"zero_stage": 1}, {"zero_stage": 1, "tensor_parallel_size": 2}) == [
        "tensor_parallel_size 1 -> 2", "ranks that divide the states 8 -> 4",
    ]  # fmt: skip
    folded = {"pipeline_parallel_size": 2, "virtual_stages": 2}
    assert changes(folded | {"pipeline_schedule": "looped_bfs"}, folded | {"pipeline_schedule": "interleaved_1f1b"}) == []
    assert changes(folded | {"pipeline_schedule": "looped_bfs"}, folded | {"pipeline_schedule": "zbv"}) == [
        "pipeline_schedule looped_bfs -> zbv"
    ]
