"""Files of `accelerate config` as knobs."""

import json
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest

from autotune.errors import RequestError
from autotune.frameworks.exporters import exporter
from autotune.frameworks.imported import Imported
from autotune.frameworks.read import read_imported

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
    assert [note.partition(":")[0] for note in found.notes] == [
        "fsdp_config.fsdp_backward_prefetch=BACKWARD_PRE",
    ]


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
    assert read(tmp_path, text).knobs == {
        "zero_stage": 1, "tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2,
        "activation_checkpointing": "selective", "precision": "bf16",
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
