"""Every format against its golden files, and what holds for all of them."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.cli.jobs import FORMATS
from autotune.errors import ExportRefusedError, UnknownFormatError
from autotune.frameworks.exporters import EXPORTERS, Export, exporter
from search_spaces.knob import Value
from search_spaces.trial_config import KNOB_NAMES
from tests.sampling import sampled

GOLDEN = Path(__file__).parent / "golden"
NEW = tuple(name for name in EXPORTERS if name != "json")


@pytest.mark.parametrize(("name", "case"), cases.WRITTEN)
def test_the_file_is_golden(tmp_path: Path, name: str, case: str) -> None:
    """Write the files anew with AUTOTUNE_WRITE_GOLDEN=1."""
    folder = tmp_path / "small"  # the files name the model by its folder
    folder.mkdir()
    made = exporter(name)(cases.best(case, folder))
    path = GOLDEN / f"{name}-{case}.{cases.SUFFIXES[name]}"
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        path.write_text(made.text, encoding="utf-8")
    assert made.text == path.read_text(encoding="utf-8")
    assert all("\n" not in note for note in made.notes)


@pytest.mark.parametrize(("name", "case"), sorted(cases.REFUSED))
def test_a_layout_that_the_format_cannot_say_is_refused(tmp_path: Path, name: str, case: str) -> None:
    with pytest.raises(ExportRefusedError, match=r"format: .* no place for pipeline_parallel_size=2.*; use "):
        exporter(name)(cases.best(case, tmp_path))


def test_the_help_lists_the_formats() -> None:
    assert tuple(EXPORTERS) == FORMATS
    with pytest.raises(UnknownFormatError, match="use one of json, deepspeed, accelerate-fsdp"):
        exporter("nemo")


@pytest.mark.parametrize("name", NEW)
def test_whether_it_was_measured_there_is_told_last(tmp_path: Path, name: str) -> None:
    document = cases.best("ddp", tmp_path)
    assert exporter(name)(document).notes[-1].startswith("verified: native-only, measured by the engine native")
    told = exporter(name)(document | {"verified": "target"})
    assert told.notes[-1] == "verified: target, measured in this framework itself"
    if cases.SUFFIXES[name] != "json":
        assert f"# {told.notes[-1]}\n" in told.text


def test_an_engine_that_is_the_framework_has_measured_there(tmp_path: Path) -> None:
    best = exported.document(exported.small(tmp_path, engine="fsdp2"), zero_stage=3)
    measured = {name for name in NEW if exporter(name)(best).notes[-1].startswith("verified: target")}
    assert measured == {"torch"}


SHARDED: dict[str, Value] = {"zero_stage": 3}
PIPELINED: dict[str, Value] = {"pipeline_parallel_size": 2, "micro_batch_size": 1}
MOVES: dict[str, tuple[Value, dict[str, Value]]] = {
    "zero_stage": (2, {}),
    "micro_batch_size": (4, {}),
    "reduce_bucket_size": (3_000_000, {}),
    "allgather_bucket_size": (3_000_000, {"zero_stage": 2}),
    "prefetch_bucket_size": (3_000_000, SHARDED),
    "param_persistence_threshold": (3_000_000, SHARDED),
    "max_live_parameters": (3_000_000, SHARDED),
    "overlap_comm": (False, {}),
    "contiguous_gradients": (False, {}),
    "defer_gradient_reduction": (True, {"zero_stage": 2}),
    "reduce_dtype": ("bf16", {}),
    "hsdp_shard_size": (8, SHARDED),
    "reshard_after_forward": (False, SHARDED),
    "offload_optimizer": ("cpu", {"zero_stage": 2}),
    "offload_param": ("cpu", SHARDED),
    "offload_ratio": (0.5, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    "tensor_parallel_size": (2, {}),
    "sequence_parallel": (True, {"tensor_parallel_size": 2}),
    "pipeline_parallel_size": (2, {}),
    "virtual_stages": (4, PIPELINED | {"virtual_stages": 2, "pipeline_schedule": "looped_bfs"}),
    "pipeline_schedule": ("gpipe", PIPELINED),
    "pipeline_split": ("even", PIPELINED),
    "pipeline_layout": ("20-12", PIPELINED),
    "context_parallel_size": (2, {}),
    "expert_parallel_size": (2, {}),
    "expert_tensor_parallel_size": (1, {"tensor_parallel_size": 2}),
    "activation_checkpointing": ("full", {}),
    "checkpoint_every_k": (2, {"activation_checkpointing": "full"}),
    "precision": ("bf16", {}),
    "fp8_recipe": ("rowwise", {"precision": "fp8"}),
    "attention_backend": ("math", {}),
    "loss_chunk_size": (1024, {}),
    "fused_optimizer": (False, {}),
    "rank_order": ("tp-cp-pp-dp", PIPELINED),
    "expandable_segments": (True, {}),
    "recompute_modules": ("norms", {}),
    "compile_blocks": (True, {}),
    "accumulation_dtype": ("bf16", {"precision": "bf16"}),
    "optimizer": ("sgd", {}),
    "lora_rank": (8, {}),
    "lora_targets": ("mlp", {"lora_rank": 8}),
    "frozen_dtype": ("nf4", {"lora_rank": 8}),
    "environment": ("NCCL_PROTO=Simple", {}),
    "adapter_size": (64, {}),
    "prefix_length": (16, {}),
    "prompt_length": (16, {}),
    "context_parallel_method": ("ulysses", {"context_parallel_size": 2}),
    "attention_window": (256, {}),
    "attention_global_tokens": (4, {"attention_window": 256}),
    "gc_interval": (50, {}),
    "overlap_param_gather": (True, {"zero_stage": 1}),
    "offload_activations": (True, {}),
    "async_tensor_parallel": (True, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "shared_expert_overlap": (True, {"expert_parallel_size": 2}),
    "fused_kernels": ("liger", {}),
    "numa_binding": (True, {}),
    "cuda_graphs": (True, {}),
    "curriculum_start_length": (64, {"curriculum_steps": 100}),
    "curriculum_steps": (200, {"curriculum_start_length": 64, "curriculum_steps": 100}),
    "random_ltd_start_tokens": (64, {"random_ltd_steps": 100}),
    "random_ltd_steps": (200, {"random_ltd_start_tokens": 64, "random_ltd_steps": 100}),
    "gather_dtype": ("int8", SHARDED),
    "secondary_shard_size": (8, SHARDED),
    "pack_sequences": (True, {}),
    "mtp_layers": (1, {}),
    "mtp_loss_weight": (0.5, {"mtp_layers": 1}),
    "router_bias_update_rate": (0.001, {}),
    "onebit_warmup_steps": (50, {"optimizer": "onebit_adam"}),
}
"""Knob -> another value than where it stands, and what it needs beside it."""
OFFLOADED: dict[str, Value] = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}
FURTHER: list[tuple[str, Value, dict[str, Value]]] = [
    ("offload_param", "nvme", SHARDED),
    ("offload_param", "nvme", SHARDED | {"reshard_after_forward": False}),
    ("offload_optimizer", "nvme", OFFLOADED),
    ("offload_optimizer", "none", OFFLOADED),
    ("offload_optimizer", "none", OFFLOADED | {"reshard_after_forward": False}),
    ("attention_backend", "efficient", {"attention_backend": "cudnn"}),
    ("reduce_dtype", "bf16", SHARDED | {"precision": "bf16"}),
    ("reduce_dtype", "bf16", SHARDED | {"precision": "bf16", "reshard_after_forward": False}),
    ("reduce_dtype", "fp16", {"precision": "bf16"}),
    ("reduce_dtype", "int8", {"zero_stage": 2}),
    ("reduce_dtype", "int8", SHARDED),
    ("secondary_shard_size", 4, SHARDED | {"hsdp_shard_size": 8}),
    ("optimizer", "onebit_adam", {}),
    ("reduce_dtype", "bf16", SHARDED | {"precision": "fp64"}),
    ("precision", "fp64", {}),
    ("precision", "fp16", {}),
    ("precision", "fp16", {"zero_stage": 2, "precision": "bf16"}),
    ("precision", "fp8", {"precision": "bf16"}),
    ("precision", "fp8", SHARDED | {"precision": "bf16"}),
    ("accumulation_dtype", "bf16", {"precision": "bf16", "zero_stage": 2, "reduce_dtype": "bf16"}),
    *(("frozen_dtype", "nf4", {method: 16}) for method in ("adapter_size", "prefix_length", "prompt_length")),
    *(("optimizer", name, {}) for name in ("lamb", "muon", "adamw8bit")),
    *(("optimizer", name, SHARDED) for name in ("sgd", "lamb", "muon", "adamw8bit")),
    ("activation_checkpointing", "selective", SHARDED),
    ("offload_activations", True, {"activation_checkpointing": "full"}),
    ("offload_activations", True, PIPELINED),
    ("overlap_param_gather", True, {"zero_stage": 1, "overlap_comm": False}),
    ("cuda_graphs", True, {"zero_stage": 2}),
    ("async_tensor_parallel", True, {"tensor_parallel_size": 2}),
    ("async_tensor_parallel", True, {"tensor_parallel_size": 2, "compile_blocks": True}),
    ("fused_kernels", "transformer_engine", {}),
    ("fused_kernels", "liger", SHARDED),
    ("zero_stage", 1, {"tensor_parallel_size": 2}),
    ("pipeline_layout", "20f2-12", PIPELINED | {"pipeline_layout": "20-12"}),
    ("recompute_modules", "activations", {}),
    ("recompute_modules", "attention", {"recompute_modules": "norms+activations"}),
]
"""Other values of knobs that a format may carry in part: another one, where it stands, and what is beside it."""


@pytest.fixture(scope="module")
def session() -> Any:
    return exported.large()


def test_every_knob_is_moved() -> None:
    assert {*KNOB_NAMES} - {*MOVES} == {"script"}  # which is a command's alone


@pytest.mark.prove(every=11)
@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(
    ("knob", "value", "beside"),
    sampled([*((knob, value, beside) for knob, (value, beside) in MOVES.items()), *FURTHER], every=3),
    ids=lambda value: str(value).replace("'", ""),
)
def test_nothing_is_dropped_in_silence(session: Any, name: str, knob: str, value: Value, beside: dict[str, Value]) -> None:
    """A knob that moves changes the file, is told where it stands or where it stood, or is refused."""

    def made(**knobs: Value) -> Export | None:
        document = exported.document(session, **knobs)
        try:
            found = exporter(name)(document)
        except ExportRefusedError:
            return None
        second = exporter("deepspeed")(document).text if name == "accelerate-deepspeed" else ""
        return Export(text=found.text + second, notes=found.notes)

    before, after = made(**beside), made(**beside | {knob: value})
    if before is None or after is None:
        return
    stood, stands = (
        {note for note in export.notes if re.search(rf"\b{knob}=\w", note, re.IGNORECASE)} for export in (before, after)
    )
    assert stood != stands or body(after.text) != body(before.text), after.notes


@pytest.mark.parametrize(
    ("name", "precision", "reduces", "told"),
    [
        ("accelerate-fsdp", "bf16", "fp32", True), ("accelerate-fsdp", "bf16", "bf16", False),
        ("accelerate-fsdp", "fp32", "fp32", False), ("lightning", "bf16", "fp32", True), ("torch", "bf16", "fp32", False),
    ],
)  # fmt: skip
def test_a_target_that_reduces_as_it_computes_says_so(
    session: Any, name: str, precision: str, reduces: str, told: bool
) -> None:
    knobs: dict[str, Value] = {**SHARDED, "reshard_after_forward": False, "precision": precision, "reduce_dtype": reduces}
    notes = exporter(name)(exported.document(session, **knobs)).notes
    assert any(note.startswith(f"reduce_dtype={reduces}: ") for note in notes) is told


@pytest.mark.parametrize("name", ["accelerate-fsdp", "torchtitan"])
def test_a_copy_of_the_states_on_fewer_ranks_than_a_sequence_is_refused(session: Any, name: str) -> None:
    knobs: dict[str, Value] = {**SHARDED, "context_parallel_size": 4}
    assert exporter(name)(exported.document(session, hsdp_shard_size=8, **knobs)).text
    with pytest.raises(ExportRefusedError, match=r"format: .*hsdp_shard_size=2 is fewer; use "):
        exporter(name)(exported.document(session, hsdp_shard_size=2, **knobs))


def body(text: str) -> str:
    """The file without its comments."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))


@pytest.mark.parametrize("name", NEW)
def test_a_module_of_the_users_own(name: str) -> None:
    made = exporter(name)(exported.document(exported.unknown(), zero_stage=3, micro_batch_size=2))
    assert made.text
    assert "LlamaDecoderLayer" not in made.text


@pytest.mark.parametrize("name", NEW)
def test_a_script_of_the_users_own(name: str) -> None:
    made = exporter(name)(exported.document(exported.script(), zero_stage=3, micro_batch_size=2, script="workers=2"))
    assert "LlamaDecoderLayer" not in made.text
    assert "workers=2" in made.text + "".join(made.notes)
    assert made.notes[-1].startswith("verified: target, measured in your own script")


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "slurm", "torchrun"])
@pytest.mark.parametrize("case", cases.CASES)
def test_shell_scripts_are_bash(tmp_path: Path, name: str, case: str) -> None:
    script = tmp_path / "script.sh"
    script.write_text(exporter(name)(cases.best(case, tmp_path)).text)
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", ["lightning", "torch", "ray"])
@pytest.mark.parametrize("case", cases.CASES)
def test_python_texts_are_python(tmp_path: Path, name: str, case: str) -> None:
    if (name, case) not in cases.REFUSED:
        compile(exporter(name)(cases.best(case, tmp_path)).text, name, "exec")
