"""The findings against the frameworks' own classes: they refuse what lint says is refused, and take what it lets pass."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from lint_recipes import ACCELERATE_CASES, RECIPES, RecipeCase

from autotune.frameworks.accelerate import OPTIONS
from autotune.frameworks.torchtitan_checks import KNOWN
from autotune.recipes.outlook import STOPS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate reads its environment."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            monkeypatch.delenv(name)


def test_the_fields_of_accelerate() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    fields = set(config_args.ClusterConfig.__dataclass_fields__)
    known = {option.key.partition(".")[0] for option in OPTIONS}
    assert known - fields == {"fp16", "dynamo_backend"}, "what process_config converts"
    assert fields <= known
    launch = pytest.importorskip("accelerate.commands.launch")
    options = {action.dest for action in launch.launch_command_parser()._actions}
    assert {name for name in options if name.startswith("fsdp_")} - {"fsdp_config"} <= {
        option.key.partition(".")[2] for option in OPTIONS
    }


def _accelerate_takes(content: Mapping[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what `accelerate launch` and the Accelerator do with the file's tables."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    load_config_from_file(str(path))
    fsdp = dict(content.get("fsdp_config") or {})
    for name, value in fsdp.items():
        monkeypatch.setenv(name.upper(), str(value))
    mesh = {
        name.removeprefix("parallelism_config_"): value for name, value in (content.get("parallelism_config") or {}).items()
    }
    if mesh:
        config = ParallelismConfig(**mesh)
        version_2 = str(fsdp.get("fsdp_version", 1)) == "2"
        accelerator = type("Accelerator", (), {
            "multi_device": False, "is_fsdp2": version_2, "num_processes": content["num_processes"],
            "distributed_type": content["distributed_type"], "is_main_process": False,
        })  # fmt: skip
        config._validate_accelerator(accelerator())
    if fsdp:
        try:
            FullyShardedDataParallelPlugin()
        except RuntimeError as error:  # it has checked everything else by then
            assert "no available devices" in str(error)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("case", ACCELERATE_CASES, ids=lambda case: case.file)
def test_accelerate_agrees(case: RecipeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    path = RECIPES / case.file
    refused = any(finding.effect in STOPS for finding in case.linted().findings)
    if "beside" in case.fault:
        pytest.skip("needs DeepSpeed's plugin, which needs a GPU")
    problem: Exception | None = None
    try:
        _accelerate_takes(yaml.safe_load(path.read_text()), path, monkeypatch)
    except (ValueError, KeyError) as error:
        problem = error
    assert (problem is not None) is refused, problem


def test_the_fields_of_torchtitan() -> None:
    configs = pytest.importorskip("torchtitan.config.configs")
    tables = {"training": configs.TrainingConfig, "parallelism": configs.ParallelismConfig, "compile": configs.CompileConfig}
    for name, kind in tables.items():
        assert {f"{name}.{field.name}" for field in dataclasses.fields(kind)} <= KNOWN


DIMS: tuple[tuple[dict[str, int], int], ...] = tuple(
    ({"dp_shard": shard, "tp": tensor, "cp": context, "pp": pipeline, "ep": experts}, 64)
    for shard in (-1, 4, 8)
    for tensor in (1, 2, 8)
    for context in (1, 2)
    for pipeline in (1, 4)
    for experts in (1, 8, 64)
)


def test_torchtitan_agrees_about_degrees(tmp_path: Path) -> None:
    parallel_dims = pytest.importorskip("torchtitan.distributed.parallel_dims")
    takes: Callable[..., Any] = parallel_dims.ParallelDims
    wrong = []
    for degrees, ranks in DIMS:
        try:
            dims = takes(dp_replicate=1, world_size=ranks, **degrees)
            # 0.3.0 divides the ranks of a stage among experts when it builds its meshes; later versions check it here.
            accepted = dims.dp_shard * dims.cp * dims.tp % dims.ep == 0
        except (AssertionError, ValueError):
            accepted = False
        if _lint_accepts(tmp_path, degrees, ranks) is not accepted:
            wrong.append((degrees, accepted))
    assert wrong == []


def _lint_accepts(folder: Path, degrees: Mapping[str, int], ranks: int) -> bool:
    from autotune.frameworks.check import legality
    from autotune.frameworks.framework import Surroundings
    from autotune.frameworks.read import read_written
    from autotune.recipes.lint import case_of

    names = {"dp_shard": "data_parallel_shard", "tp": "tensor_parallel", "cp": "context_parallel", "pp": "pipeline_parallel",
             "ep": "expert_parallel"}  # fmt: skip
    text = "".join(f"{names[name]}_degree = {value}\n" for name, value in degrees.items())
    path = folder / "dims.toml"
    # Enough micro-batches and tokens for any of the layouts, so that only the degrees can be refused.
    path.write_text(f"[training]\nlocal_batch_size = 64\nseq_len = 8192\n[parallelism]\n{text}[model]\nname = 'own'\n")
    (one,) = read_written(path)
    return not legality(case_of(one, Surroundings(ranks=ranks)))
