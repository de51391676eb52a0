"""What runners receive about the cluster."""

import pytest

import executor.runners.ray.runner
from autotune.session.trial_requests import start_ranks


@pytest.mark.parametrize("across", [False, True])
def test_ray_is_told_that_the_fast_link_joins_its_nodes(monkeypatch: pytest.MonkeyPatch, across: bool) -> None:
    received: list[dict[str, object]] = []
    monkeypatch.setattr(executor.runners.ray.runner, "RayRunner", lambda _ranks, **options: received.append(options))
    start_ranks("ray", 8, "cuda", tensor_across_nodes=across)
    assert [options["tensor_across_nodes"] for options in received] == [across]
