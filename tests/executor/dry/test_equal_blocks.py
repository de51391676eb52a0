"""Equal blocks that are derived once, compared with the same module of which every block computes."""

import pytest
from torch import nn

from executor.dry import module_profile
from executor.dry.equal_blocks import StandIns, choices_of_stand_ins
from executor.dry.module_profile import profile_module
from search_spaces.models.model import FactoryModel
from search_spaces.trial import Workload
from tests.sampling import sampled

WORKLOAD = Workload(global_batch_size=8, sequence_length=64)


def whole(monkeypatch: pytest.MonkeyPatch, name: str, precision: str) -> FactoryModel:
    with monkeypatch.context() as patched:
        patched.setattr(module_profile, "choices_of_stand_ins", lambda _, blocks: [StandIns(blocks, {})])
        return profile_module(f"benchmarks.prediction.plan_modules:{name}", WORKLOAD, (precision,))


@pytest.mark.prove
@pytest.mark.parametrize(("name", "precision"), sampled([("deep", "bf16"), ("unequal", "fp32")], every=2))
def test_every_moment_and_product_is_as_if_every_block_computed(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    mine = profile_module(f"benchmarks.prediction.plan_modules:{name}", WORKLOAD, (precision,)).profile
    other = whole(monkeypatch, name, precision).profile
    assert mine is not None and other is not None
    assert mine.trained == other.trained
    one, two = mine.traces[precision], other.traces[precision]
    assert one.moments == two.moments
    assert (one.outer, one.blocks, one.again) == (two.outer, two.blocks, two.again)


def test_blocks_that_differ_in_any_way_compute() -> None:
    def blocks(width: int = 8) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(9)))

    def standing_in(module: nn.Sequential) -> int:
        return len(choices_of_stand_ins(module, list(module))[0].representative)

    assert standing_in(blocks()) == 5  # the second has an attribute that equals its index
    hooked, shared, others, short = blocks(), blocks(), blocks(), blocks()[:5]
    for block in hooked:
        block.register_forward_hook(lambda *_: None)
    for block in shared:
        block[0].weight = shared[0][0].weight  # type: ignore[index, union-attr]
    for place, block in enumerate(others):
        block[1].p = place / 10  # type: ignore[index]
    assert [standing_in(module) for module in (hooked, shared, others, short)] == [0, 0, 0, 0]
