"""Every export read by its target's own parser, and a training step with it where the target runs on CPUs.

The targets are the extra `exports`; each check runs in a process of its own, since their imports warn. Where a package is
absent its check skips.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import export_cases as cases
import exported
import pytest
import table

from autotune.frameworks.exporters import exporter
from autotune.frameworks.optuna import write_study
from autotune.loop.loop import run_job
from autotune.request.rows import request_to_row
from search_spaces.trial_config import TrialConfig
from storage.store import Store

STATED: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "clip": 1.0, "optimizer": "adamw"}
CHECKS = Path(__file__).parent / "checks"


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} of the extra `exports` is not installed")


def checked(check: str, *words: object, **environment: str) -> dict[str, Any]:
    """What a check prints as JSON on its last line."""
    answer = subprocess.run(
        [sys.executable, CHECKS / f"{check}.py", *map(str, words)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def written(folder: Path, name: str, best: dict[str, Any], file: str = "") -> Path:
    path = folder / (file or f"{name}.{cases.SUFFIXES[name].split('.')[0]}")
    path.write_text(exporter(name)(best).text)
    return path


@needs("deepspeed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_reads_the_configuration_and_trains_a_step(tmp_path: Path, stage: int) -> None:
    """By DeepSpeed's own class, and by `initialize` as rank 0 of 8 over a process group that sends nothing."""
    session = exported.small(tmp_path, ranks=8, global_batch_size=32, **STATED)
    best = exported.document(
        session, zero_stage=stage, micro_batch_size=2, reduce_bucket_size=20_000, prefetch_bucket_size=10_000,
        param_persistence_threshold=1_000, precision="bf16", fused_optimizer=False,
    )  # fmt: skip
    made = checked("deepspeed_config", written(tmp_path, "deepspeed", best), 8)
    assert made["stage"] == made["ran_stage"] == stage
    assert (made["train_batch_size"], made["micro_batch"], made["accumulation"]) == (32, 2, 2)
    assert made["reduce_bucket_size"] == (20_000 if stage else 500_000_000)
    assert made["bf16"]
    if stage == 3:
        assert (made["prefetch_bucket_size"], made["param_persistence_threshold"]) == (10_000, 1_000)
    assert made["updates"] == 1


@needs("deepspeed")
@pytest.mark.parametrize("case", cases.CASES)
def test_deepspeed_reads_every_golden_file(tmp_path: Path, case: str) -> None:
    best = cases.best(case, tmp_path)
    ranks = TrialConfig(**best["best"]["config"]).data_parallel_size(best["launch"]["world_size"])
    made = checked("deepspeed_config", written(tmp_path, "deepspeed", best), ranks, "parse")
    assert made["stage"] == {"ddp": 0, "zero-3": 3, "3d": 1}[case]


@needs("accelerate")
@pytest.mark.parametrize("case", ["ddp", "zero-3"])
def test_accelerate_reads_the_fsdp_file(tmp_path: Path, case: str) -> None:
    made = checked("accelerate_file", written(tmp_path, "accelerate-fsdp", cases.best(case, tmp_path)))
    if case == "ddp":
        assert (made["distributed_type"], made["num_processes"], made["use_fsdp"]) == ("MULTI_CPU", 2, False)
        return
    assert (made["distributed_type"], made["num_processes"], made["num_machines"]) == ("FSDP", 16, 2)
    assert (made["fsdp"]["version"], made["fsdp"]["reshard"], made["fsdp"]["checkpointing"]) == (2, True, True)
    assert made["fsdp"]["layers"] == ["LlamaDecoderLayer"]


@needs("accelerate")
def test_accelerate_reads_a_mesh(tmp_path: Path) -> None:
    best = exported.document(
        exported.large(), zero_stage=3, hsdp_shard_size=4, tensor_parallel_size=2, reshard_after_forward=False, precision="bf16"
    )
    made = checked("accelerate_file", written(tmp_path, "accelerate-fsdp", best))
    assert made["mesh"] == {"dp_replicate": 2, "dp_shard": 4, "tp": 2, "cp": 1}
    assert made["fsdp"]["reshard"] is False


@needs("accelerate", "deepspeed")
def test_accelerate_reads_the_deepspeed_file(tmp_path: Path) -> None:
    best = cases.best("zero-3", tmp_path)
    written(tmp_path, "deepspeed", best, "ds_config.json")
    made = checked("accelerate_file", written(tmp_path, "accelerate-deepspeed", best))
    assert (made["distributed_type"], made["deepspeed"]["stage"], made["deepspeed"]["micro_batch"]) == ("DEEPSPEED", 3, 2)


@needs("accelerate")
def test_accelerate_trains_a_step(tmp_path: Path) -> None:
    path = written(tmp_path, "accelerate-fsdp", cases.best("ddp", tmp_path))
    made = checked("accelerate_step", path)
    assert made == {"processes": 2, "distributed_type": "MULTI_CPU", "equal_weights": True}


@needs("transformers", "accelerate")
def test_transformers_trains_a_step(tmp_path: Path) -> None:
    best = exported.document(
        exported.small(tmp_path, ranks=1, **STATED), micro_batch_size=2, activation_checkpointing="full", fused_optimizer=False
    )
    made = checked("transformers_arguments", written(tmp_path, "transformers", best), tmp_path)
    assert (made["micro_batch"], made["accumulation"], made["checkpointing"], made["optim"]) == (2, 4, True, "adamw_torch")
    assert made["steps"] == 1


@needs("transformers", "accelerate", "deepspeed")
@pytest.mark.parametrize("stated", [{}, STATED], ids=["left to the Trainer", "stated"])
def test_transformers_reads_deepspeed_arguments(tmp_path: Path, stated: dict[str, Any]) -> None:
    best = exported.document(
        exported.small(tmp_path, ranks=1, **stated), zero_stage=2, micro_batch_size=2, fused_optimizer=False
    )
    made = checked("transformers_arguments", written(tmp_path, "transformers", best), tmp_path)
    assert (made["deepspeed_stage"], made["steps"]) == (2, 1)


@needs("torchtitan")
@pytest.mark.parametrize("case", cases.CASES)
def test_torchtitan_reads_the_command_line(tmp_path: Path, case: str) -> None:
    made = checked("torchtitan_arguments", written(tmp_path, "torchtitan", cases.best(case, tmp_path)))
    expected = {
        "ddp": [2, 1, 1, 1, "none", "float32"],
        "zero-3": [1, 16, 1, 1, "full", "bfloat16"],
        "3d": [1, 2, 4, 2, "selective", "bfloat16"],
    }[case]
    assert [made[name] for name in ("replicate", "shard", "tensor", "pipeline", "checkpointing", "precision")] == expected
    if case == "3d":
        assert (made["schedule"], made["micro_batch"], made["local_batch"]) == ("Interleaved1F1B", 2, 32)
        assert len(made["parts"]) == 4
        assert sum(module.startswith("layers.") for part in made["parts"] for module in part) == 32


@needs("lightning")
def test_lightning_trains_a_step(tmp_path: Path) -> None:
    made = checked("lightning_strategy", written(tmp_path, "lightning", cases.best("ddp", tmp_path)), "fit")
    assert made == {"strategy": "DDPStrategy", "steps": 1, "ranks": 2}


@needs("lightning", "transformers")
def test_lightning_makes_sharded_strategies(tmp_path: Path) -> None:
    fsdp = exported.document(exported.large(), zero_stage=3, reshard_after_forward=False, activation_checkpointing="full")
    assert checked("lightning_strategy", written(tmp_path, "lightning", fsdp))["strategy"] == "FSDPStrategy"
    tensor = exported.document(exported.large(), zero_stage=3, tensor_parallel_size=4)
    assert checked("lightning_strategy", written(tmp_path, "lightning", tensor))["strategy"] == "ModelParallelStrategy"


@needs("lightning", "deepspeed")
def test_lightning_makes_a_deepspeed_strategy(tmp_path: Path) -> None:
    path = written(tmp_path, "lightning", cases.best("zero-3", tmp_path))
    assert checked("lightning_strategy", path) == {"strategy": "DeepSpeedStrategy", "accumulation": 2, "stage": 3}


@needs("optuna_dashboard")
def test_optuna_dashboard_reads_a_study(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=5, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner())
    storage = f"sqlite:///{tmp_path}/studies.db"
    write_study(storage, "mine", store.jobs.get(job.id), store.trials.of(job.id))
    made = checked("dashboard_study", storage, "mine")
    assert (made["directions"], made["states"]) == (["maximize"], ["Complete"] * 5)
    assert {"zero_stage", "micro_batch_size"} <= {*made["parameters"]}


@needs("pandas", "pyarrow")
@pytest.mark.ray
def test_ray_train_places_the_ranks(tmp_path: Path) -> None:
    path = written(tmp_path, "ray", cases.best("ddp", tmp_path))
    assert checked("ray_train", path)["returned"] == {"rank": 0, "world_size": 2}
