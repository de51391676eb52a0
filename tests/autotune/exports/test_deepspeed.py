"""The DeepSpeed export against a golden file, and its notes."""

from pathlib import Path
from typing import Any

import table

from autotune.exports import EXPORTERS
from autotune.jobs.request import request_to_row
from search_spaces.trial_config import TrialConfig

GOLDEN = Path(__file__).parent / "golden"


def document(folder: Path, **knobs: Any) -> dict[str, Any]:
    """As much of a best-config document as the exporter reads."""
    session = table.session(folder)
    return {
        "job": {"request": request_to_row(session.request)},
        "model": {"parameter_count": session.model.parameter_count},
        "best": {"config": TrialConfig(**knobs).values()},
        "launch": {"world_size": session.world_size},
    }


def test_stage_3_is_the_golden_file(tmp_path: Path) -> None:
    best = document(
        tmp_path, zero_stage=3, micro_batch_size=2, reduce_bucket_size=20_000, prefetch_bucket_size=10_000,
        param_persistence_threshold=1_000, max_live_parameters=50_000, precision="bf16", activation_checkpointing="full",
    )  # fmt: skip
    export = EXPORTERS["deepspeed"](best)
    assert export.text == (GOLDEN / "deepspeed-stage-3.json").read_text(encoding="utf-8")
    assert len(export.notes) == 1
    assert export.notes[0].startswith("activation_checkpointing=full")


def test_stage_2_is_the_golden_file(tmp_path: Path) -> None:
    best = document(
        tmp_path, zero_stage=2, allgather_bucket_size=10_000, overlap_comm=False, defer_gradient_reduction=True,
        offload_optimizer="cpu", fused_optimizer=False,
    )  # fmt: skip
    export = EXPORTERS["deepspeed"](best)
    assert export.text == (GOLDEN / "deepspeed-stage-2.json").read_text(encoding="utf-8")
    assert [note.split("=")[0] for note in export.notes] == ["allgather_bucket_size", "defer_gradient_reduction"]


def test_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    export = EXPORTERS["deepspeed"](document(tmp_path, tensor_parallel_size=2, loss_chunk_size=64))
    assert {note.split("=")[0] for note in export.notes} == {"tensor_parallel_size", "loss_chunk_size"}


def test_what_model_parallelism_needs_elsewhere_is_told(tmp_path: Path) -> None:
    best = document(
        tmp_path, zero_stage=3, tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2, virtual_stages=2,
        pipeline_schedule="zbv", pipeline_split="even", context_parallel_size=2, rank_order="tp-cp-pp-dp",
    )  # fmt: skip
    notes = EXPORTERS["deepspeed"](best).notes
    for knob in (
        "tensor_parallel_size=2", "sequence_parallel=True", "pipeline_parallel_size=2", "virtual_stages=2",
        "pipeline_schedule=zbv", "pipeline_split=even", "context_parallel_size=2", "rank_order=tp-cp-pp-dp",
    ):  # fmt: skip
        (told,) = [note for note in notes if note.startswith(f"{knob}: ")]
        assert not told.endswith("it is left out")
    assert any("refuses stages 2 and 3" in note for note in notes)
    assert any("AutoTP hangs" in note for note in notes)


def test_json_is_the_document_itself(tmp_path: Path) -> None:
    assert EXPORTERS["json"]({"schema_version": 1}).text == '{\n  "schema_version": 1\n}\n'
