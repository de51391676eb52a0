"""Files of `accelerate config` as knobs."""

import json
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.errors import RequestError
from autotune.frameworks.accelerate_checks import SAGEMAKER
from autotune.frameworks.check import legality
from autotune.frameworks.exporters import exporter
from autotune.frameworks.framework import LintCase, Surroundings
from autotune.frameworks.imported import Imported
from autotune.frameworks.read import read_imported, read_written
from autotune.recipes.lint import case_of
from search_spaces.errors import Effect

START = """compute_environment: LOCAL_MACHINE
debug: false
machine_rank: 0
main_training_function: main
num_machines: {machines}
num_processes: {processes}
rdzv_backend: static
same_network: true
use_cpu: false
"""


def read(folder: Path, text: str, machines: int = 1, processes: int = 8) -> Imported:
    path = folder / "accelerate.yaml"
    path.write_text(START.format(machines=machines, processes=processes) + text)
    return read_imported(path)


def test_fsdp_version_1(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """distributed_type: FSDP
mixed_precision: bf16
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
""",
        machines=2,
        processes=16,
    )
    assert found.knobs == {
        "zero_stage": 3, "hsdp_shard_size": 8, "offload_optimizer": "cpu", "offload_param": "cpu", "precision": "bf16",
        "activation_checkpointing": "full", "reduce_dtype": "bf16",
    }  # fmt: skip
    assert (found.ranks, found.global_batch_size) == (16, None)
    assert [note.partition(":")[0] for note in found.notes] == ["fsdp_config.fsdp_backward_prefetch=BACKWARD_PRE"]
    assert found.assumed["micro_batch_size"] == 1
    assert set(found.knobs) - {"reduce_dtype"} <= set(found.keys)


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", 2),
        ("fsdp_sharding_strategy: 3", 0),
        ("fsdp_reshard_after_forward: FULL_SHARD", 3),
    ],
)
def test_its_strategies_are_stages(tmp_path: Path, strategy: str, stage: int) -> None:
    found = read(tmp_path, f"distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n  {strategy}\n")
    assert found.knobs == {"zero_stage": stage, "precision": "fp32"}


FSDP = "distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n  "


def test_what_the_strategy_says_is_a_legal_baseline(tmp_path: Path) -> None:
    """Copies on a part of the ranks, and parameters in main memory, are stage 3's alone."""
    kept = read(tmp_path, f"{FSDP}fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n", machines=2, processes=4)
    assert kept.knobs == {"zero_stage": 3, "reshard_after_forward": False, "hsdp_shard_size": 2, "precision": "fp32"}
    offloads = f"{FSDP}fsdp_offload_params: true\n  fsdp_sharding_strategy: "
    second, none = read(tmp_path, f"{offloads}SHARD_GRAD_OP\n"), read(tmp_path, f"{offloads}NO_SHARD\n")
    assert second.knobs == {"zero_stage": 2, "offload_optimizer": "cpu", "precision": "fp32"}
    assert none.knobs == {"zero_stage": 0, "precision": "fp32"}
    for found in (second, none):
        assert any(note.startswith("fsdp_config.fsdp_offload_params=true: at stage ") for note in found.notes)


def test_fsdp_version_2(tmp_path: Path) -> None:
    for switch in ("false", "'false'"):
        found = read(tmp_path, f"{FSDP}fsdp_version: 2\n  fsdp_reshard_after_forward: {switch}\n")
        assert found.knobs == {"zero_stage": 3, "reshard_after_forward": False, "precision": "fp32"}


@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_a_strategy_that_it_has_not_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(RequestError, match=r"fsdp_config.fsdp_sharding_strategy: 'FULLSHARD' .* use one of full_shard, "):
        read(tmp_path, f"{FSDP}{key}: FULLSHARD\n")


def test_deepspeed_within(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """distributed_type: DEEPSPEED
mixed_precision: fp16
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
""",
    )
    assert found.knobs == {
        "zero_stage": 2, "overlap_comm": False, "offload_optimizer": "cpu", "precision": "fp16", "reduce_dtype": "fp16",
        "reduce_bucket_size": 500_000_000,
    }  # fmt: skip
    assert any(note.startswith("gradient_accumulation_steps=4") for note in found.notes)


def test_a_deepspeed_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 32, "zero_optimization": {"stage": 1}}))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
    found = read(tmp_path, text)
    # DeepSpeed's own bucket, which the file leaves out, is not that of this project.
    knobs = {"zero_stage": 1, "overlap_comm": False, "reduce_bucket_size": 500_000_000}
    assert (found.knobs, found.global_batch_size, found.ranks) == (knobs, 32, 8)
    with pytest.raises(RequestError, match=r"from: .*none.json cannot be read"):
        read(tmp_path, text.replace("ds.json", "none.json"))


def test_plain_data_parallelism(tmp_path: Path) -> None:
    assert read(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: bf16\n").knobs == {
        "zero_stage": 0,
        "precision": "bf16",
    }


def test_megatron_within(tmp_path: Path) -> None:
    text = """distributed_type: MEGATRON_LM
mixed_precision: bf16
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
"""
    knobs = {
        "zero_stage": 1, "tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2, "precision": "bf16",
    }  # fmt: skip
    found = read(tmp_path, text)
    # Accelerate never hands recompute_activations to Megatron-LM, and its plug-in has defaults of its own.
    assert found.knobs == {**knobs, "activation_checkpointing": "full", "context_parallel_size": 2}
    assert sum("the plug-in of Accelerate 1.15.0 takes" in note for note in found.notes) == 2
    stated = "  megatron_lm_context_parallel_size: 1\n  megatron_lm_recompute_granularity: selective\n"
    assert read(tmp_path, text + stated).knobs == {
        **knobs, "activation_checkpointing": "selective", "context_parallel_size": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "distributed_type: FSDP\nmixed_precision: fp12\n",
            "mixed_precision: 'fp12' in accelerate.yaml is not known; use one of no",
        ),
        ("distributed_type: FSDP\nnum_processes: many\n", "num_processes: 'many' in accelerate.yaml is not a whole number"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 9\n",
            "deepspeed_config.zero_stage: 9 .* give 0, 1, 2 or 3",
        ),
    ],
)
def test_a_value_that_cannot_be_names_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        read(tmp_path, text)


def test_sequences_that_deepspeed_divides(tmp_path: Path) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(sizes))
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\nparallelism_config:\n  "
    found = linted(tmp_path, text + "parallelism_config_sp_size: 4\n  parallelism_config_sp_backend: deepspeed\n")
    assert (found.config.context_parallel_size, found.config.context_parallel_method) == (4, "ulysses")
    assert (found.replicas, found.batch) == (2, 12)


def test_fp8_is_a_precision(tmp_path: Path) -> None:
    found = read(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n")
    assert found.knobs["precision"] == "fp8"


def linted(folder: Path, text: str) -> LintCase:
    path = folder / "accelerate.yaml"
    path.write_text(START.format(machines=1, processes=8) + text)
    (written,) = read_written(path)
    return case_of(written, Surroundings())


FSDP_2 = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
NESTED = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  "
MEGATRON = "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n  "
REFUSED = {
    "a type in lower case": ("distributed_type: fsdp\n", "type", "distributed_type"),
    "a precision that is none": ("distributed_type: MULTI_GPU\nmixed_precision: tf32\n", "precision", "mixed_precision"),
    "a no that YAML reads as false": ("distributed_type: MULTI_GPU\nmixed_precision: no\n", "precision", "mixed_precision"),
    "one GPU for all processes": ("distributed_type: MULTI_GPU\ngpu_ids: '3'\n", "one-gpu", "gpu_ids"),
    "a number of a GPU": ("distributed_type: FSDP\ngpu_ids: 3\n", "gpu-text", "gpu_ids"),
    "a field that it has not": ("distributed_type: MULTI_GPU\nnum_nodes: 1\n", "unknown-key", "num_nodes"),
    "a strategy that FSDP has not": (
        f"{FSDP}fsdp_sharding_strategy: FULL\n", "strategy", "fsdp_config.fsdp_sharding_strategy",
    ),
    "a version that FSDP has not": (FSDP_2.replace("2\n", "3\n", 1), "version", "fsdp_config.fsdp_version"),
    "a switch that is none": (f"{FSDP_2}  fsdp_offload_params: cpu\n", "switch", "fsdp_config.fsdp_offload_params"),
    "weights on one rank, not sent": (
        f"{FSDP_2}  fsdp_sync_module_states: false\n", "loading-needs-sync", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    ),
    "inputs offloaded without recomputation": (
        f"{FSDP_2}  fsdp_activation_checkpointing_offload: true\n", "offloaded-inputs",
        "fsdp_config.fsdp_activation_checkpointing_offload",
    ),
    "a mesh without shards": (
        f"{FSDP_2}parallelism_config:\n  parallelism_config_tp_size: 8\n", "mesh-without-shards",
        "parallelism_config.parallelism_config_dp_shard_size",
    ),
    "a degree that is none": (
        f"{FSDP_2}parallelism_config:\n  parallelism_config_dp_shard_size: half\n", "whole-number",
        "parallelism_config.parallelism_config_dp_shard_size",
    ),
    "a stage that is none": (NESTED.replace("2", "5"), "stage", "deepspeed_config.zero_stage"),
    "a device that is none": (
        f"{NESTED}offload_optimizer_device: disk\n", "device", "deepspeed_config.offload_optimizer_device",
    ),
    "a text for DeepSpeed's table": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: ds.json\n", "table-of-deepspeed", "deepspeed_config",
    ),
    "a text for a switch of Megatron-LM": (
        f"{MEGATRON}megatron_lm_sequence_parallelism: all\n", "switch", "megatron_lm_config.megatron_lm_sequence_parallelism",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_is_refused(tmp_path: Path, name: str) -> None:
    text, rule, key = REFUSED[name]
    found = [one for one in legality(linted(tmp_path, text)) if one.effect is Effect.REFUSED]
    assert [(one.rule, one.key) for one in found] == [(rule, key)]


@pytest.mark.parametrize("environment", ["MANY_MACHINES", "AMAZON_SAGEMAKER"])
def test_a_file_for_another_environment(tmp_path: Path, environment: str) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(START.format(machines=2, processes=16).replace("LOCAL_MACHINE", environment) + "distributed_type: 'NO'\n")
    (written,) = read_written(path)
    keys = {one.key for one in legality(case_of(written, Surroundings())) if one.effect is Effect.REFUSED}
    assert ("compute_environment" in keys, "num_processes" in keys) == (environment != SAGEMAKER, environment == SAGEMAKER)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{NESTED}overlap_comm: true\n", "deepspeed_config.overlap_comm"),
        (f"{NESTED}fp16:\n    enabled: true\n", "deepspeed_config.fp16.enabled"),
        (f"{MEGATRON}megatron_lm_recompute_activations: true\n", "megatron_lm_config.megatron_lm_recompute_activations"),
        (f"{MEGATRON}megatron_lm_cp_degree: 2\n", "megatron_lm_config.megatron_lm_cp_degree"),
    ],
)
def test_what_it_copies_and_never_reads_is_ignored(tmp_path: Path, text: str, key: str) -> None:
    assert [(one.key, one.effect) for one in legality(linted(tmp_path, text))] == [(key, Effect.IGNORED)]


@pytest.mark.parametrize(
    ("launcher", "said"),
    [("", True), ("  deepspeed_multinode_launcher: standard\n", False), ("  deepspeed_hostfile: hosts\n", False)],
)
def test_machines_that_deepspeed_does_not_know(tmp_path: Path, launcher: str, said: bool) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(START.format(machines=2, processes=16) + NESTED.rstrip(" ") + launcher)
    (written,) = read_written(path)
    rules = [one.rule for one in legality(case_of(written, Surroundings()))]
    assert rules == ["machines-without-hosts"] * said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"zero_optimization": {"stage": 2}}', []),
        ('{"bf16": {"enabled": true}}', ["file-without-zero"]),
        ('{"zero_optimization": {"stage": 2},}', ["plain-json"]),
        ('{"zero_optimization": {"stages": 2, "stage": 1}}', ["unknown-key"]),
    ],
)
def test_the_deepspeed_file_that_it_names(tmp_path: Path, content: str, said: list[str]) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "ds.json").write_text(content)
    # The path is that from the folder in which Accelerate is started.
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: configs/ds.json\n"
    case = linted(folder, text)
    assert [one.rule for one in legality(case) if one.effect is Effect.REFUSED] == said
    assert case.imported.beside is not None


def test_what_is_exported_comes_back(tmp_path: Path) -> None:
    layout: dict[str, Any] = {
        "zero_stage": 3, "hsdp_shard_size": 4, "tensor_parallel_size": 2, "reshard_after_forward": False, "precision": "bf16",
        "reduce_dtype": "bf16", "activation_checkpointing": "full",
    }  # fmt: skip
    path = tmp_path / "fsdp.yaml"
    path.write_text(exporter("accelerate-fsdp")(exported.document(exported.large(), **layout)).text)
    assert read_imported(path).knobs == layout
    best = cases.best("zero-3", tmp_path)
    (tmp_path / "ds_config.json").write_text(exporter("deepspeed")(best).text)
    path.write_text(exporter("accelerate-deepspeed")(best).text)
    found = read_imported(path)
    assert (found.knobs["zero_stage"], found.knobs["prefetch_bucket_size"], found.ranks) == (3, 20_000_000, 16)
