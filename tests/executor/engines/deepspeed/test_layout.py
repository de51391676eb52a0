"""What DeepSpeed is given of a user's module. Needs no DeepSpeed."""

import pytest
import torch
from torch import Tensor, nn

from executor.engines.deepspeed.engine import whole_module
from executor.errors import EngineRefusalError
from executor.parallel.checkpointing import CheckpointedForward
from search_spaces.models.model import FactoryModel
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORK = Workload(global_batch_size=4, sequence_length=8)
MODEL = FactoryModel(reference=f"{__name__}:factory", parameter_count=32)


class TwoTowers(nn.Module):
    """Two lists of layers, both of which repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.left, *self.right):
            x = layer(x)
        return x.square().mean()


def factory() -> tuple[nn.Module, object, dict[str, object]]:
    def batch(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 2, generator=generator)}

    return TwoTowers(), batch, {"blocks": "right"}


def test_the_blocks_that_the_plan_names_are_checkpointed() -> None:
    module, _ = whole_module(MODEL, TrialConfig(activation_checkpointing="full"), WORK, torch.float32)
    inside = [(name, inner) for name, inner in module.named_modules() if name]
    again = {name for name, inner in inside if isinstance(vars(inner).get("forward"), CheckpointedForward)}
    assert again == {"right.0", "right.1"}


def test_tensor_parallel_ranks_of_it_would_all_compute_the_whole() -> None:
    with pytest.raises(EngineRefusalError, match=r"factory-shape: .* use tensor_parallel_size=1, or the native engine"):
        whole_module(MODEL, TrialConfig(tensor_parallel_size=2), WORK, torch.float32)
