"""torchtitan's settings over its versions: 0.1 compiles in `training`, 0.2 in a table; after 0.3 tokens are counted."""

from pathlib import Path

import pytest

from autotune.frameworks.check import legality
from autotune.frameworks.framework import LintCase, Surroundings
from autotune.frameworks.read import read_written
from autotune.recipes.lint import case_of
from autotune.recipes.recipe import rewritten
from search_spaces.clusters.presets import resolve_cluster

TOML = """[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 2
seq_len = 4096
{training}
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
{parallelism}
[activation_checkpoint]
{checkpoints}
"""
REGISTRY = """
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B", converters=[Float8LinearConverter.Config()]),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096{step}),
        parallelism=ParallelismConfig({parallelism}),
        activation_checkpoint={checkpoints},
    )
"""


def _toml(folder: Path, training: str = "", parallelism: str = "", checkpoints: str = 'mode = "full"', more: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(TOML.format(training=training, parallelism=parallelism, checkpoints=checkpoints) + more, encoding="utf-8")
    return path


def _python(folder: Path, parallelism: str = "", checkpoints: str = "FullAC.Config()", step: str = "") -> Path:
    path = folder / "config_registry.py"
    path.write_text(REGISTRY.format(parallelism=parallelism, checkpoints=checkpoints, step=step), encoding="utf-8")
    return path


def _case(path: Path) -> LintCase:
    return case_of(read_written(path)[0], Surroundings(cluster=resolve_cluster("dgx-h100:2")))


def test_the_first_version_compiles_with_a_setting_of_the_training_table(tmp_path: Path) -> None:
    asynchronous = "enable_async_tensor_parallel = true"
    case = _case(_toml(tmp_path, "compile = true", asynchronous))
    assert case.config.compile_blocks and case.config.async_tensor_parallel and not legality(case)
    (finding,) = legality(_case(_toml(tmp_path, "compile = false", asynchronous)))
    assert finding.fix == {"training.compile": True}


def test_settings_of_two_versions_are_refused_by_both(tmp_path: Path) -> None:
    case = _case(_toml(tmp_path, "compile = true", more="[compile]\nenable = true\n"))
    assert {finding.rule for finding in legality(case)} == {"two-versions"}


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ('mode = "selective"\nselective_ac_option = "op"', ("selective", 1)),
        ('mode = "selective"\nselective_ac_option = "3"', ("full", 3)),
        ('mode = "selective"', ("full", 2)),
        ('mode = "full"', ("full", 1)),
        ('mode = "none"', ("none", 1)),
    ],
)
def test_recomputation_of_some_layers_or_operators(checkpoints: str, expected: tuple[str, int], tmp_path: Path) -> None:
    case = _case(_toml(tmp_path, checkpoints=checkpoints))
    assert (case.config.activation_checkpointing, case.config.checkpoint_every_k) == expected
    for value in ("none", "selective", "full"):
        changed = case.changed(case.framework.write(case, "activation_checkpointing", value))
        assert changed.config.activation_checkpointing == value


def test_a_memory_budget_is_predicted_as_selective_and_says_so(tmp_path: Path) -> None:
    case = _case(_toml(tmp_path, checkpoints='mode = "memory_budget"\nmemory_budget = 0.3'))
    assert case.config.activation_checkpointing == "selective"
    assert "memory_budget=0.3: predicted as selective recomputation" in case.imported.notes


def test_tokens_are_read_as_samples(tmp_path: Path) -> None:
    case = _case(_python(tmp_path, "tensor_parallel_degree=2", step=", num_tokens_per_train_step=64 * 4096"))
    assert (case.config.micro_batch_size, case.tokens, case.batch, case.config.precision) == (2, 4096, 64, "fp8")
    assert case.model is not None and case.model.name == "llama-3-8b" and not legality(case)
    assert _case(_python(tmp_path, checkpoints="None")).config.activation_checkpointing == "none"


def test_passes_of_a_pipeline_multiply_the_samples_of_a_rank(tmp_path: Path) -> None:
    case = _case(_python(tmp_path, "pipeline_parallel_degree=2, num_pp_microbatches=4"))
    assert (case.config.micro_batch_size, case.imported.samples_per_rank) == (2, 8)


def test_fewer_micro_batches_than_stages_fail_whatever_the_ranks(tmp_path: Path) -> None:
    case = case_of(read_written(_toml(tmp_path, parallelism="pipeline_parallel_degree = 4"))[0], Surroundings())
    (finding,) = legality(case)
    assert finding.rule == "few-passes" and not legality(case.changed(finding.fix))


def test_a_step_that_is_no_multiple_is_mended_in_tokens(tmp_path: Path) -> None:
    case = _case(_python(tmp_path, "tensor_parallel_degree=2", step=", num_tokens_per_train_step=40 * 4096"))
    (finding,) = [finding for finding in legality(case) if finding.rule == "global-batch"]
    assert finding.fix == {"training.num_tokens_per_train_step": 48 * 4096}


@pytest.mark.parametrize("parallelism", ["tensor_parallel_degree=2", "pipeline_parallel_degree=2, num_pp_microbatches=2"])
def test_other_sizes_are_written_in_tokens(parallelism: str, tmp_path: Path) -> None:
    written = read_written(_python(tmp_path, parallelism))[0]
    case = _case(_python(tmp_path, parallelism))
    changes = {
        **case.framework.write(case, "micro_batch_size", 4),
        **case.sized(case.config.replace({"micro_batch_size": 4}), 64),
    }
    text = rewritten(written, {**case.imported.settings, **changes}, None, None)
    assert not text.anew and "local_batch_size" not in text.text
    (tmp_path / "config_registry.py").write_text(text.text, encoding="utf-8")
    again = _case(tmp_path / "config_registry.py")
    assert (again.config.micro_batch_size, again.batch) == (4, 64)
