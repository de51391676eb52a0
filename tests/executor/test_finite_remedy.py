"""What is advised where a loss is not finite: only what the user can change."""

import pytest

from executor.trial.run import finite_remedy
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, Model
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

OWN = FactoryModel(reference="m:f", parameter_count=1)
PRESET = resolve_model("llama-tiny")


@pytest.mark.parametrize(
    ("model", "precision", "step", "remedy"),
    [
        (PRESET, "bf16", 0, "use --pin precision=fp32"),
        (PRESET, "fp16", 2, "use --pin precision=fp32, or lower lr"),
        (PRESET, "fp32", 1, "lower lr"),
        (OWN, "fp32", 0, "check the module's loss and the values of its batch"),
        (OWN, "bf16", 0, "use --pin precision=fp32, or check the module's loss and the values of its batch"),
    ],
)
def test_the_remedy_is_one_that_can_help_here(model: Model, precision: str, step: int, remedy: str) -> None:
    request = TrialRequest(
        attempt="a", model=model, config=TrialConfig(precision=precision), world_size=1,
        workload=Workload(global_batch_size=4, sequence_length=16),
    )  # fmt: skip
    assert finite_remedy(request, step) == remedy
