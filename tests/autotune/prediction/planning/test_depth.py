"""Where models of fewer layers may stand for the whole one."""

import dataclasses
from pathlib import Path

import pytest
import table

from autotune.errors import RequestError
from autotune.prediction.planning import depth
from autotune.prediction.planning.depth import correlation, require_same_order
from autotune.request.engines import capability_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel
from search_spaces.space import SearchSpace
from search_spaces.spaces import resolve_space
from search_spaces.training.fewer import fewer_layers
from search_spaces.trial import Fidelity, Workload


def space_of(model: str = "llama-2-7b") -> SearchSpace:
    cluster, work = resolve_cluster("dgx-a100"), Workload(global_batch_size=64, sequence_length=2048)
    return resolve_space("parallel", resolve_model(model), cluster, work, capability_of("native"), {})


@pytest.mark.prove
def test_a_deep_model_may_be_ranked_by_shallower_ones() -> None:
    require_same_order(space_of(), 8, "native")


@pytest.mark.prove
def test_the_extrapolated_order_without_pipelines_is_nearly_the_whole_models() -> None:
    space = space_of()
    drawn = [config for config in depth._drawn(space) if config.pipeline_parallel_size == 1]
    configs = [config for config in drawn if fewer_layers(config, space.model, 8)][:20]
    found = correlation(space, configs, 8, "native")
    assert len(configs) >= 10
    assert found is not None
    assert 0.97 < found <= 1.0


@pytest.mark.prove
def test_a_ranking_that_does_not_carry_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "correlation", lambda *_: 0.8)
    with pytest.raises(RequestError, match=r"fidelity.most_layers: .* \(rank correlation 0.80\)"):
        require_same_order(space_of(), 8, "native")


@pytest.mark.prove
def test_what_saves_nothing_or_has_no_layers_is_refused() -> None:
    with pytest.raises(RequestError, match="shallow enough"):
        require_same_order(space_of(), 31, "native")
    own = dataclasses.replace(space_of(), model=FactoryModel(reference="m:f", parameter_count=1))
    with pytest.raises(RequestError, match="a module of one's own"):
        require_same_order(own, 8, "native")


def test_the_objective_memory_is_not_extrapolated(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"fidelity\.most_layers: extrapolates memory"):
        table.request(tmp_path, objective="memory", fidelity=Fidelity(most_layers=4))
