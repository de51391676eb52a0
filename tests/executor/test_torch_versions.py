"""What older torch refuses: the declaration, the refusal, and the page that is made from it."""

from pathlib import Path

import pytest
import torch

from benchmarks.engines.torch_versions import Figures, declaration, figures_of, newest, oldest, page
from executor.engine import RankContext
from executor.engines.capabilities import NEWER, RULE, release, version_refusals
from executor.errors import EngineRefusalError
from executor.trial.run import ENGINES
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

PAGE = Path(__file__).parents[2] / "docs" / "results" / "torch-versions.md"
REFUSED: tuple[dict[str, Value], ...] = (
    {"compile_blocks": True, "precision": "fp64"},
    *(
        {"precision": "fp8", "pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": schedule}
        for schedule in sorted(ZERO_BUBBLE_SCHEDULES)
    ),
)


@pytest.mark.parametrize("knobs", REFUSED, ids=str)
def test_the_oldest_refuses_and_the_newest_does_not(knobs: dict[str, Value]) -> None:
    config = TrialConfig().replace(knobs)
    (refusal,) = version_refusals(f"{oldest()}.0+cu130", config, "cpu")
    assert refusal.rule == RULE
    assert refusal.message.endswith(f"this needs torch 2.13, here is {oldest()}.0+cu130")
    assert version_refusals(newest(), config, "cpu") == []
    assert version_refusals(f"{oldest()}.0", TrialConfig(), "cpu") == []


def test_every_entry_is_between_the_two_ends() -> None:
    assert all(release(oldest()) < release(item.since) <= release(newest()) for item in NEWER)


def test_an_engine_asks_its_own_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(
        name="tiny", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        ffn_hidden_size=32, vocab_size=64, sequence_length=8,
    )  # fmt: skip
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    config = TrialConfig().replace(REFUSED[0])
    with pytest.raises(EngineRefusalError, match=r"this needs torch 2\.13, here is 2\.11\.0") as told:
        ENGINES["native"].build(context, spec, config, Workload(global_batch_size=1, sequence_length=8))
    assert told.value.rule == RULE


def test_the_page_is_the_declarations() -> None:
    assert declaration() in PAGE.read_text("utf-8"), "make oldest"


def test_figures_are_those_of_the_run(tmp_path: Path) -> None:
    results = tmp_path / "engines.xml"
    results.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="0" skipped="2"><testcase><properties>'
        '<property name="parity" value="31"/></properties></testcase><testcase><properties><property name="parity" value="11"/>'
        "</properties></testcase></testsuite></testsuites>",
        encoding="utf-8",
    )
    assert figures_of(results) == Figures(passed=6, skipped=2, parity_cases=42)
    assert "6 tests pass and 2 are skipped" in page(figures_of(results))
