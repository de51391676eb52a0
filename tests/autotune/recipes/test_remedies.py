"""Remedies are changes that were predicted to fit, in the order in which people try them; verdicts hang on what is assumed."""

import re
from pathlib import Path

import pytest
from lint_recipes import RECIPES

from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.prediction.planning.estimate import StepEstimate
from autotune.recipes.assumed import surroundings_with
from autotune.recipes.candidates import certain_gain
from autotune.recipes.lint import Linted, lint
from autotune.recipes.outlook import GIB, fits, outlook
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import Effect
from search_spaces.models.huggingface import resolve_model


def linted(path: Path, cluster: str, model: str = "", tokens: int | None = None, assume: tuple[str, ...] = ()) -> Linted:
    around = Surroundings(
        model=resolve_model(model) if model else None, cluster=resolve_cluster(cluster), sequence_length=tokens
    )  # fmt: skip
    return lint(read_written(path)[0], surroundings_with(around, assume))


def memory_remedy(found: Linted) -> str:
    (finding,) = (finding for finding in found.findings if finding.rule == "memory")
    return finding.remedy


@pytest.mark.parametrize(
    ("file", "cluster", "model", "starts"),
    [
        ("titan-llama3-70b.toml", "dgx-h100:1", "", "set training.enable_cpu_offload=true"),
        ("megatron-llama3-8b.sh", "dgx-a100-40gb:1", "", "set --tensor-model-parallel-size=4"),
        ("megatron-mixtral.sh", "dgx-a100-40gb:4", "", "set --recompute-granularity=full"),
    ],
)
def test_a_remedy_fits_with_its_figure(file: str, cluster: str, model: str, starts: str) -> None:
    found = linted(RECIPES / file, cluster, model, 2048 if model else None)
    (finding,) = (finding for finding in found.findings if finding.rule == "memory")
    assert finding.remedy.startswith(starts), finding.remedy
    changed = outlook(found.case.changed(finding.fix))
    assert isinstance(changed, StepEstimate) and fits(changed)
    assert finding.remedy.endswith(f": {changed.fullest.needed / GIB:.0f} GiB")


def test_more_devices_have_their_number_and_divide_the_states() -> None:
    found = linted(RECIPES / "titan-llama3-405b.toml", "dgx-h100:1")
    match = re.fullmatch(r"(?:.* and )?use (\d+) devices \((\d+) nodes\): (\d+) GiB", memory_remedy(found))
    assert match is not None, memory_remedy(found)
    there = linted(RECIPES / "titan-llama3-405b.toml", f"dgx-h100:{match[2]}").outlook
    assert isinstance(there, StepEstimate) and fits(there)
    assert f"{there.fullest.needed / GIB:.0f}" == match[3]
    fewer = linted(RECIPES / "titan-llama3-405b.toml", f"dgx-h100:{int(match[2]) // 2}").outlook
    assert isinstance(fewer, StepEstimate) and not fits(fewer)


@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO"])
def test_replicas_are_sharded_or_need_a_smaller_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(f"distributed_type: '{kind}'\nmixed_precision: bf16\nnum_processes: {8 if kind == 'MULTI_GPU' else 1}\n")
    remedy = memory_remedy(linted(path, "dgx-h100:1", "llama-3-8b", 2048))
    assert "distributed_type=FSDP" in remedy and "devices" not in remedy
    alone = memory_remedy(linted(path, "dgx-h100:128", "llama-3.1-405b", 2048))
    assert "use" not in alone or "a smaller model" in alone


def test_it_is_certain_only_if_no_plausible_value_fits(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}')
    found = linted(path, "dgx-h100:1", "qwen2.5-7b", 16384)
    (finding,) = found.findings
    assert finding.effect is Effect.MAY_NOT_FIT and "fits if activation_checkpointing=full (" in finding.problem
    stated = linted(path, "dgx-h100:1", "qwen2.5-7b", 16384, ("activation_checkpointing=none", "micro_batch_size=1"))
    assert [finding.effect for finding in stated.findings] == [Effect.DOES_NOT_FIT]
    good = linted(path, "dgx-h100:1", "qwen2.5-7b", 16384, ("activation_checkpointing=full", "micro_batch_size=1"))
    assert good.findings == () and isinstance(good.outlook, StepEstimate)
    assert f"activation_checkpointing=full ({good.outlook.fullest.needed / GIB:.3g} GiB)" in finding.problem


def test_a_certainly_faster_layout_is_offered_with_its_rate() -> None:
    found = linted(RECIPES / "titan-llama3-70b.toml", "dgx-h100:8")
    (note,) = (note for note in found.case.imported.notes if note.startswith("faster by prediction: "))
    settings = dict(re.findall(r"set ([\w.]+)=(\d+)", note))
    better = outlook(found.case.changed({key: int(value) for key, value in settings.items()}))
    assert isinstance(better, StepEstimate) and isinstance(found.outlook, StepEstimate) and fits(better)
    assert better.samples_per_second.mean >= found.outlook.samples_per_second.mean * certain_gain(found.case)
    assert f"{better.tflops_per_device:.0f} instead of {found.outlook.tflops_per_device:.0f} TFLOP/s" in note
    leading = linted(RECIPES / "titan-llama3-8b.toml", "dgx-h100:1")
    assert not any("faster" in note for note in leading.case.imported.notes)
