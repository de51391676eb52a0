"""The example scripts as their users run them, under torch alone, the Trainer of Hugging Face, and DeepSpeed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from executor.runners.local import LocalRunner
from search_spaces.models.command import CommandModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

ROOT = Path(__file__).parents[4]
BRIEF = Fidelity(min_steps=5, max_steps=8, max_warmup_steps=8)


def run(runner: LocalRunner, example: str, *words: str, launcher: str = "torchrun", **fields: object) -> TrialResult:
    script = ROOT / "examples" / example / "train.py"
    assert sum("# (" in line for line in script.read_text().splitlines()) == 2  # lines that are ours
    given: dict[str, object] = {
        "attempt": "a", "engine": "command",
        "model": CommandModel(arguments=("python", str(script), *words), launcher=launcher),
        "config": TrialConfig(micro_batch_size=2), "workload": Workload(global_batch_size=8, sequence_length=64),
        "world_size": 2, "fidelity": BRIEF, "timeout_seconds": 240.0,
    }  # fmt: skip
    result = runner.run(TrialRequest(**{**given, **fields}))
    assert result.outcome is Outcome.OK, result.traceback or result.message
    assert (result.peak_memory_bytes or 0) > 50_000_000
    assert "global batch" not in result.message  # it trains on the batch that it was told
    return result


@pytest.mark.prove
def test_a_plain_torch_script(runner: LocalRunner) -> None:
    words = ("--batch", "{micro_batch_size}", "--accumulate", "{gradient_accumulation_steps}")
    result = run(runner, "torch_script", *words)
    assert len(result.losses) == 3
    assert 1.5 < result.losses[0] < 3.5  # log 10, about


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (extra transformers)")
def test_a_trainer_of_hugging_face(runner: LocalRunner, tmp_path: Path) -> None:
    words = (
        "--output_dir", str(tmp_path), "--per_device_train_batch_size", "{micro_batch_size}", "--report_to", "none",
        "--gradient_accumulation_steps", "{gradient_accumulation_steps}", "--use_cpu", "true",
    )  # fmt: skip
    result = run(runner, "hf_trainer", *words)
    assert len(result.losses) == 3  # logged for the first steps, whatever logging_steps says
    assert all((rank.data_wait_seconds or 0.0) > 0 for rank in result.ranks)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (extra transformers)")
def test_a_trainer_that_splits_its_batches_is_reported(runner: LocalRunner, tmp_path: Path) -> None:
    words = (
        "--output_dir", str(tmp_path), "--per_device_train_batch_size", "{micro_batch_size}", "--report_to", "none",
        "--gradient_accumulation_steps", "{gradient_accumulation_steps}", "--use_cpu", "true",
        "--accelerator_config", '{"split_batches": true}',
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"a step has 4 samples, 2 times 1 on 2 ranks, not 8: it divides"):
        run(runner, "hf_trainer", *words)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_deepspeed_script(runner: LocalRunner, stage: int) -> None:
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    files = (("config.json", json.dumps(config)),)
    words = ("--deepspeed", "--deepspeed_config", "{config}")
    # The first script of an environment compiles DeepSpeed's shared-memory operator, which takes minutes.
    fields: dict[str, object] = {"files": files, "config": TrialConfig(zero_stage=stage), "timeout_seconds": 900.0}
    run(runner, "deepspeed_script", *words, launcher="deepspeed", **fields)
