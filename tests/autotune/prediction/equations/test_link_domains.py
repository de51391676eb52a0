"""Clusters whose fast link joins several nodes: which groups use it, and which the network."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import (
    boundary_bandwidth,
    collective_seconds,
    crosses_domains,
    expert_group,
    group_of,
    tensor_group,
)
from autotune.prediction.equations.step import doubt
from autotune.prediction.fitting.trial_fit import hardware_key
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question, model_of, question_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

RATES = Coefficients()
RACK = resolve_cluster("gb200-nvl72:18")
NODES = dataclasses.replace(RACK, link_domain_size=None)
TWO_RACKS = resolve_cluster("gb200-nvl72:36")


def asked(cluster: ClusterSpec, batch: int = 576) -> Question:
    return question_of(model_of("llama-3-70b", None, None, None), cluster, global_batch_size=batch, sequence_length=4096)


def case(cluster: ClusterSpec, **knobs: object) -> Cases:
    question = asked(cluster)
    configs = [TrialConfig(precision="bf16", zero_stage=3).replace(knobs)]
    return cases_of(question.model, question.cluster, question.workload, configs, question.engine)


def all_reduce(cluster: ClusterSpec, ranks: int, stride: int) -> float:
    cases = case(cluster)
    group = group_of(cases, np.array([float(ranks)]), np.array([float(stride)]))
    return float(collective_seconds(cases, group, np.array([1e9]), np.ones(1), RATES)[0])


def test_tensor_ranks_of_two_nodes_use_the_link_of_their_domain() -> None:
    """Eight ranks on two nodes of four: within the rack they cost what they would within a node of eight."""
    wide = dataclasses.replace(NODES, nodes=9, devices_per_node=8)
    assert all_reduce(RACK, 8, 1) == all_reduce(wide, 8, 1)
    assert all_reduce(NODES, 8, 1) > 1.5 * all_reduce(RACK, 8, 1)
    assert all_reduce(RACK, 4, 1) == all_reduce(NODES, 4, 1)


def test_a_group_of_two_domains_uses_the_network_cards_of_its_ranks() -> None:
    """72 ranks at each side have the cards of 18 nodes: more than their link. One rank at each side has its own card."""
    cases = case(TWO_RACKS)
    wide = group_of(cases, np.array([144.0]), np.array([1.0]))
    assert (wide.in_domain[0], wide.sharing[0]) == (72.0, 4 / 72)
    single = group_of(cases, np.array([2.0]), np.array([72.0]))
    assert (single.in_domain[0], single.sharing[0]) == (1.0, 4.0)
    assert all_reduce(TWO_RACKS, 2, 72) > 10 * all_reduce(TWO_RACKS, 2, 36)


def test_stages_of_one_domain_are_joined_by_its_link() -> None:
    stages = {"pipeline_parallel_size": 4, "tensor_parallel_size": 2}
    assert not crosses_domains(case(RACK, **stages))[0]
    assert crosses_domains(case(NODES, **stages))[0]
    assert crosses_domains(case(TWO_RACKS, **stages))[0]
    assert boundary_bandwidth(case(RACK, **stages), RATES)[0] > 5 * boundary_bandwidth(case(NODES, **stages), RATES)[0]


def test_groups_of_a_layout_lie_in_a_domain() -> None:
    cases = case(RACK, tensor_parallel_size=8)
    assert tensor_group(cases).in_domain[0] == 8.0
    assert expert_group(cases).ranks[0] == expert_group(cases).in_domain[0]


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(["dgx-2:3", "aws-p4d:2", "dgx-h100:4"], every=3))
def test_a_domain_of_one_node_changes_nothing(name: str) -> None:
    cluster = resolve_cluster(name)
    explicit = dataclasses.replace(cluster, link_domain_size=cluster.devices_per_node)
    assert hardware_key(explicit) == hardware_key(cluster)
    assert "link_domain_size" not in hardware_key(cluster)
    one, other = (plan(asked(each, batch=96), PlanOptions()) for each in (cluster, explicit))
    assert [item.estimate for item in one.plans] == [item.estimate for item in other.plans]


def test_domains_are_hardware_of_their_own() -> None:
    assert hardware_key(RACK) != hardware_key(NODES)


def test_a_wide_tensor_group_is_faster_in_a_domain() -> None:
    config = TrialConfig(precision="bf16", zero_stage=3, tensor_parallel_size=8, sequence_parallel=True)
    linked, apart = (estimates(asked(cluster), [config])[0] for cluster in (RACK, NODES))
    assert linked.step_seconds.mean < 0.9 * apart.step_seconds.mean
    assert linked.peak_memory_bytes == apart.peak_memory_bytes
    assert (linked.is_modelled, apart.is_modelled) == (True, False)
    assert set(apart.doubts) - set(linked.doubts) == {"a tensor group crosses link domains"}


def test_the_band_is_wider_where_predictions_are_less_sure() -> None:
    layouts = ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 8})
    inside, beyond = (float(doubt(case(NODES, **knobs), RATES)[0]) for knobs in layouts)
    assert 1.6 <= inside < 1.7 < 5.0 < beyond
    slow_host = dataclasses.replace(RATES, kernel_seconds=0.1)
    assert float(doubt(case(NODES, tensor_parallel_size=4), slow_host)[0]) > 1.5 * inside
