"""How the engine says that its package is missing. Needs no DeepSpeed."""

import pytest
import torch

from executor.engine import RankContext
from executor.engines.deepspeed import package
from executor.engines.deepspeed.capability import unusable
from executor.engines.deepspeed.engine import DeepSpeedEngine
from executor.errors import EngineRefusalError
from executor.runners.verdict import classify
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import Outcome
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


@pytest.mark.parametrize(
    ("version", "rule", "told"),
    [
        (
            None,
            "deepspeed-installed",
            "engine deepspeed: the package is not installed; pip install 'autotune-parallel[deepspeed]'",
        ),
        (
            "0.16.2",
            "deepspeed-version",
            "engine deepspeed: the package is 0.16.2, but 0.19 is the oldest supported version; pip ",
        ),
    ],
)
def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, version: str | None, rule: str, told: str) -> None:
    monkeypatch.setattr(package, "installed_version", lambda: version)
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    work = Workload(global_batch_size=1, sequence_length=8)
    with pytest.raises(EngineRefusalError) as refused:
        DeepSpeedEngine().build(context, resolve_model("llama-tiny"), TrialConfig(), work)
    failure = classify(refused.value)
    assert (failure.outcome, failure.rule, failure.traceback) == (Outcome.INVALID, rule, None)
    assert failure.message.startswith(told)
    assert "\n" not in failure.message


def test_versions_that_are_supported() -> None:
    assert [unusable(version) for version in ("0.19.0", "0.19.8", "0.20.1+cu128", "1.0")] == [None] * 4
