"""The mesh: groups partition the ranks, and neighbours are the ranks that talk most."""

import dataclasses
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from search_spaces.mesh import CONTEXT, DATA, DIMENSIONS, PIPELINE, TENSOR, Mesh, make_mesh
from search_spaces.trial_config import TrialConfig

ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")
sizes = st.sampled_from((1, 2, 3, 4))


def divisors_of(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any mesh of a few ranks along each dimension, with a shard group that divides data x context."""
    mesh = Mesh(
        tensor=draw(sizes), context=draw(sizes), data=draw(sizes), pipeline=draw(sizes), order=draw(st.sampled_from(ORDERS))
    )
    divisors = [0, *divisors_of(mesh.zero_ranks)]
    return Mesh(
        tensor=mesh.tensor, context=mesh.context, data=mesh.data, pipeline=mesh.pipeline, order=mesh.order,
        shard=draw(st.sampled_from(divisors)),
    )  # fmt: skip


@given(meshes(), st.lists(st.sampled_from(DIMENSIONS), min_size=1, unique=True))
def test_groups_partition_the_ranks(mesh: Mesh, dimensions: list[str]) -> None:
    groups = mesh.groups(dimensions)
    size = 1
    for dimension in dimensions:
        size *= mesh.size(dimension)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {size}


@given(meshes(), st.lists(st.sampled_from(DIMENSIONS), min_size=1, unique=True))
def test_ranks_of_a_group_differ_in_its_dimensions_alone(mesh: Mesh, dimensions: list[str]) -> None:
    for group in mesh.groups(dimensions):
        places = [mesh.coordinates(rank) for rank in group]
        for dimension in set(DIMENSIONS) - set(dimensions):
            assert len({place[dimension] for place in places}) == 1
        assert places == sorted(places, key=lambda place: [place[name] for name in reversed(dimensions)])


@given(meshes())
def test_coordinates_name_each_rank_once(mesh: Mesh) -> None:
    places = [tuple(mesh.coordinates(rank)[name] for name in DIMENSIONS) for rank in range(mesh.world_size)]
    assert set(places) == set(product(*(range(mesh.size(name)) for name in DIMENSIONS)))


@given(meshes(), st.data())
def test_expert_groups_cross_those_of_ranks_with_the_same_experts(mesh: Mesh, data: st.DataObject) -> None:
    """The ranks of a stage are a grid of tensor x context x data, and one of slices x experts x copies of experts."""
    slices = data.draw(st.sampled_from(divisors_of(mesh.tensor)))
    ranks = data.draw(st.sampled_from(divisors_of(mesh.tensor // slices * mesh.zero_ranks)))
    mesh = dataclasses.replace(mesh, expert=ranks, expert_tensor=slices)
    different, alike, sliced = mesh.expert_groups(), mesh.expert_data_groups(), mesh.expert_tensor_groups()
    assert mesh.expert_slices * mesh.expert * mesh.expert_data * mesh.pipeline == mesh.world_size
    for groups, size in ((different, ranks), (alike, mesh.expert_data), (sliced, slices)):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {size}
    for one, other in (*product(different, alike), *product(different, sliced), *product(alike, sliced)):
        assert len({*one} & {*other}) <= 1
    for group in (*different, *alike):
        assert len({mesh.coordinates(rank)[PIPELINE] for rank in group}) == 1
        assert len({mesh.coordinates(rank)[TENSOR] % slices for rank in group}) == 1
    for group in sliced:
        assert group == list(range(group[0], group[0] + slices))


def test_expert_groups_are_folded_over_tensor_and_context_ranks_before_data() -> None:
    """Two data, two context and four tensor ranks: experts on the eight nearest ranks, whole or in pairs."""
    whole = Mesh(tensor=4, context=2, data=2, expert=8, expert_tensor=1)
    assert whole.expert_groups() == [[*range(8)], [*range(8, 16)]]
    assert whole.expert_data_groups() == [[rank, rank + 8] for rank in range(8)]
    pairs = dataclasses.replace(whole, expert=4, expert_tensor=2)
    assert pairs.expert_groups()[:2] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert pairs.expert_tensor_groups()[:2] == [[0, 1], [2, 3]]
    as_tensor = dataclasses.replace(whole, expert=4, expert_tensor=0)
    assert as_tensor.expert_groups()[0] == [0, 4, 8, 12]
    assert as_tensor.expert_data == 1


@given(meshes())
def test_tensor_ranks_are_neighbours(mesh: Mesh) -> None:
    for group in mesh.groups((TENSOR,)):
        assert group == list(range(group[0], group[0] + mesh.tensor))


@given(meshes())
def test_shards_and_replicas_partition_the_ranks_and_meet_once(mesh: Mesh) -> None:
    shards, replicas = mesh.shard_groups(), mesh.replica_groups()
    for groups, size in ((shards, mesh.shard_ranks), (replicas, mesh.zero_ranks // mesh.shard_ranks)):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {size}
    assert all(len(set(shard) & set(replica)) <= 1 for shard in shards for replica in replicas)


@given(meshes())
def test_a_shard_group_is_of_one_tensor_and_pipeline_place(mesh: Mesh) -> None:
    for group in mesh.shard_groups():
        assert len({(mesh.coordinates(rank)[TENSOR], mesh.coordinates(rank)[PIPELINE]) for rank in group}) == 1


@pytest.mark.parametrize(
    ("order", "data", "pipeline"),
    [("tp-cp-dp-pp", [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
     ("tp-cp-pp-dp", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]])],
)  # fmt: skip
def test_the_order_says_who_is_near(order: str, data: list[list[int]], pipeline: list[list[int]]) -> None:
    mesh = Mesh(tensor=2, data=2, pipeline=2, order=order)
    assert (mesh.groups((DATA,)), mesh.groups((PIPELINE,))) == (data, pipeline)


def test_shard_groups_take_context_ranks_first() -> None:
    mesh = Mesh(context=2, data=2, shard=2)
    assert mesh.shard_groups() == [[0, 1], [2, 3]]
    assert mesh.replica_groups() == [[0, 2], [1, 3]]


@given(sizes, sizes, sizes, sizes, st.sampled_from(ORDERS))
def test_a_configuration_fills_the_world(tensor: int, pipeline: int, context: int, data: int, order: str) -> None:
    world = tensor * pipeline * context * data
    assume(world <= 64)
    config = TrialConfig(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, context_parallel_size=context, rank_order=order,
        hsdp_shard_size=context, zero_stage=3,
    )  # fmt: skip
    mesh = make_mesh(config, world)
    assert (mesh.world_size, mesh.data, mesh.zero_ranks) == (world, data, config.zero_ranks(world))
    assert (mesh.size(CONTEXT), mesh.shard_ranks) == (context, context)
    assert make_mesh(config.replace({"zero_stage": 2}), world).shard_ranks == mesh.zero_ranks
