"""Which Ray a job runs on, and whether it has what the job wants."""

import dataclasses

import pytest

from autotune.errors import RequestError
from autotune.ray_cluster import (
    address_of,
    asked_cluster,
    named_address,
    require_devices,
    require_here,
    run_by,
    with_address,
)
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_fields
from search_spaces.clusters.cluster import ClusterSpec, NodeGroup, mixed_cluster
from search_spaces.clusters.devices import device_preset
from search_spaces.clusters.presets import resolve_cluster

GPUS = {"CPU": 64.0, "GPU": 8.0}
CORES = {"CPU": 4.0}


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOTUNE_RAY_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_given_wins_over_the_environment_and_ours_over_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "theirs:6379")
    assert named_address() == "theirs:6379"
    monkeypatch.setenv("AUTOTUNE_RAY_ADDRESS", "ours:6379")
    assert (named_address(), named_address("given:6379")) == ("ours:6379", "given:6379")


def test_a_named_address_means_its_cluster_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_from_fields({"model": "gpt2", "ray_address": "a:1"}).cluster == "ray"
    assert request_from_fields({"model": "gpt2", "ray_address": "a:1", "cluster": "dgx-a100"}).cluster == "dgx-a100"
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    assert with_address({"model": "gpt2"}) == {"model": "gpt2", "ray_address": "a:1"}
    assert with_address({"model": "gpt2", "runner": "local"}) == {"model": "gpt2", "runner": "local"}
    assert with_address({"ray_address": "b:1"}) == {"ray_address": "b:1"}


def test_ranks_join_the_cluster_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    request = JobRequest(model="gpt2")
    assert address_of(request) is None
    assert address_of(dataclasses.replace(request, cluster="ray")) == "auto"
    assert address_of(dataclasses.replace(request, ray_address="a:1")) == "a:1"
    assert address_of(dataclasses.replace(request, runner="local")) is None
    monkeypatch.setenv("RAY_ADDRESS", "b:1")
    assert address_of(dataclasses.replace(request, cluster="ray")) == "b:1"


def test_a_stored_request_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = JobRequest(model="gpt2", cluster="ray", ray_address="a:1")
    assert run_by(stored, None, None).ray_address == "a:1"
    assert run_by(stored, None, "b:1").ray_address == "b:1"
    here = run_by(stored, "local", None)
    assert (here.runner, here.cluster, here.ray_address) == ("local", "local", None)


def test_what_is_predicted_for_is_looked_at_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.runners.ray.nodes.describe_cluster", _at)
    monkeypatch.setenv("RAY_ADDRESS", "environment:1")
    assert asked_cluster(None, None) == ("local", None)
    assert asked_cluster("dgx-a100:2", None) == ("dgx-a100:2", None)
    for name, address, asked in (("ray", None, "environment:1"), ("ray", "a:1", "a:1"), (None, "auto", "auto")):
        found, live = asked_cluster(name, address)
        assert found == "ray"
        assert live is not None
        assert live.name == asked
    monkeypatch.delenv("RAY_ADDRESS")
    assert asked_cluster("ray", None)[1] == _at("auto")
    with pytest.raises(RequestError, match=r"^ray_address: nothing runs there, and local is described already; use --cluster"):
        asked_cluster("local", "a:1")


def _at(address: str) -> ClusterSpec:
    return dataclasses.replace(resolve_cluster("dgx-a100"), name=address)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"ray_address": ""}, "ray_address: '' is not a name"),
        ({"ray_address": "a:1", "runner": "local"}, "runner: local does not support a Ray cluster; use ray"),
        ({"cluster": "ray", "runner": "local"}, "runner: local does not support a Ray cluster; use ray"),
    ],
)
def test_what_cannot_be_reached_is_refused(fields: dict[str, str], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        request_from_fields({"model": "gpt2", **fields})


@pytest.mark.parametrize(
    ("cluster", "nodes", "told"),
    [
        ("dgx-h100:2", [GPUS, GPUS, CORES], None),
        ("dgx-h100:2", [GPUS, CORES], "cluster: dgx-h100:2 is 2 x 8 GPUs, and Ray at a:1 has 8 on 2 nodes; start Ray on nodes"),
        ("dgx-h100:1", [CORES], "cluster: dgx-h100:1 is 1 x 8 GPUs, and Ray at a:1 has no GPU; start Ray on nodes that have"),
        ("dgx-h100:1", [{"GPU": 4.0}, {"GPU": 4.0}], "dgx-h100:1 is 1 x 8 GPUs, and Ray at a:1 has 8 on 2 nodes"),
        ("local", [CORES], None),
        ("local", [{"CPU": 1.0}], "cluster: local has 2 ranks, and Ray at a:1 has 1 CPUs; add nodes"),
    ],
)
def test_devices_that_are_missing_are_told(cluster: str, nodes: list[dict[str, float]], told: str | None) -> None:
    wanted = resolve_cluster(cluster, 2 if cluster == "local" else None)
    if told is None:
        require_devices(wanted, nodes, "a:1")
    else:
        with pytest.raises(RequestError, match=told):
            require_devices(wanted, nodes, "a:1")


def nodes_that_differ(**resources: str) -> ClusterSpec:
    groups = [
        NodeGroup(
            nodes=count, device=device_preset(name), intra_node_bandwidth=1e11, inter_node_bandwidth=1e10,
            host_memory_bytes=10**12, cores_per_node=64, ray_resource=resources.get(name.partition("-")[0], ""),
        )
        for name, count in (("h100", 1), ("a100-40gb", 2))
    ]  # fmt: skip
    return mixed_cluster("both", 8, groups)


FAST, SLOW = {"GPU": 8.0, "accelerator_type:H100": 1.0}, {"GPU": 8.0, "accelerator_type:A100-40G": 1.0}


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([FAST, SLOW, SLOW], None),
        ([FAST, FAST, SLOW], "both has 2 nodes with accelerator_type:A100-40G, and Ray at a:1 has 1; start Ray on them"),
        ([SLOW, SLOW, SLOW], "both has 1 nodes with accelerator_type:H100, and Ray at a:1 has 0"),
    ],
)
def test_every_kind_of_nodes_that_differ_must_be_there(nodes: list[dict[str, float]], told: str | None) -> None:
    wanted = nodes_that_differ(h100="accelerator_type:H100", a100="accelerator_type:A100-40G")
    assert wanted.node_kinds == (("accelerator_type:H100", 8), ("accelerator_type:A100-40G", 16))
    if told is None:
        require_devices(wanted, nodes, "a:1")
    else:
        with pytest.raises(RequestError, match=told):
            require_devices(wanted, nodes, "a:1")


def test_kinds_that_ray_cannot_tell_apart_are_refused() -> None:
    for resources in ({}, {"h100": "GPU", "a100": "GPU"}):
        with pytest.raises(RequestError, match=r"how Ray distinguishes each kind; give each \[\[nodes\]\] table"):
            require_devices(nodes_that_differ(**resources), [FAST, SLOW, SLOW], "a:1")


def test_nodes_that_differ_are_not_this_machine() -> None:
    with pytest.raises(RequestError, match="cluster: both has nodes that differ, and the ranks of this machine are alike"):
        require_here(nodes_that_differ())
