"""The grid keeps exactly the configurations that the space enumerates, and its cases are those of the configurations."""

import dataclasses
import random

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.cases.grid import ConfigGrid
from autotune.prediction.cases.grid_cases import GridCases, Products
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.pipeline import split_layers
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.scan import uniform_parts
from autotune.request.engines import CAPABILITIES
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import SpaceTooLargeError
from search_spaces.models import pipeline
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.spaces import resolve_space
from search_spaces.trial import Workload
from tests.sampling import sampled

STANDING = {  # their defaults, which engines take that have no such knob
    "reduce_bucket_size": "4e7", "allgather_bucket_size": "5e8", "prefetch_bucket_size": "5e7", "max_live_parameters": "1e9",
    "param_persistence_threshold": "1e5", "overlap_comm": "true", "contiguous_gradients": "true",
}  # fmt: skip
SPACES = {
    "zero": ("llama-3-8b", "dgx-h100", "zero", "native", {}),
    "one-configuration": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "zero_stage": 1, "micro_batch_size": 1, "activation_checkpointing": "none",
    }),
    "buckets": ("llama-3-8b", "dgx-h100", "zero-buckets", "native", {
        "zero_stage": "2,3", "micro_batch_size": "1,4", "reduce_bucket_size": "1e6,5e8", "prefetch_bucket_size": "0,1e7",
    }),
    "3d": ("llama-3-8b", "dgx-h100", "3d", "native", {"virtual_stages": "1,2"}),
    "3d-any-engine": ("gpt2", "dgx-h100", "3d", None, {"zero_stage": "0,3"}),
    "fsdp2": ("llama-3-8b", "dgx-h100:2", "parallel", "fsdp2", STANDING | {"checkpoint_every_k": 1, "micro_batch_size": "1,2"}),
    "ddp": ("gpt2", "dgx-h100", "full", "ddp", {"reduce_bucket_size": "1e6,5e8"}),
    "experts": ("mixtral-8x7b", "dgx-h100", "parallel", None, STANDING | {
        "checkpoint_every_k": 1, "virtual_stages": 1, "offload_param": "none", "pipeline_schedule": "1f1b",
        "context_parallel_size": "1,2",
    }),
    "loads": ("mixtral-8x7b", "dgx-h100", "parallel", None, STANDING | {
        "checkpoint_every_k": 1, "virtual_stages": 1, "offload_param": "none", "pipeline_schedule": "1f1b",
        "context_parallel_size": 1, "micro_batch_size": "1,2", "expert_parallel_size": "1,4,8",
    }),
    "hybrid": ("llama-3-8b", "dgx-h100:2", "full", "native", {
        "tensor_parallel_size": "1,8", "pipeline_parallel_size": "1,2", "pipeline_schedule": "1f1b,zbv",
        "virtual_stages": "1,2", "micro_batch_size": "1,2", "reduce_bucket_size": "5e8", "allgather_bucket_size": "5e8",
        "prefetch_bucket_size": "5e7", "max_live_parameters": "1e9", "param_persistence_threshold": "1e5",
        "overlap_comm": "true", "checkpoint_every_k": 1,
        "contiguous_gradients": "true", "attention_backend": "best", "fused_optimizer": "true", "loss_chunk_size": 0,
        "expandable_segments": "true", "activation_checkpointing": "none", "context_parallel_size": "1,2",
        "sequence_parallel": "false", "offload_ratio": "0.5,1.0", "gc_interval": 0, "overlap_param_gather": "false",
        "offload_activations": "false", "numa_binding": "false", "async_tensor_parallel": "false", "cuda_graphs": "false",
    }),
    "sums beside products": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "tensor_parallel_size": "1,2,8", "sequence_parallel": "all", "async_tensor_parallel": "all",
    }),
    "fused kernels": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "fused_kernels": "all", "loss_chunk_size": "0,1024", "tensor_parallel_size": "1,8", "micro_batch_size": "1,4",
    }),
    "graphs": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "cuda_graphs": "all", "expandable_segments": "all", "overlap_param_gather": "all", "offload_activations": "all",
    }),
    "late gathers": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "overlap_param_gather": "all", "overlap_comm": "all", "offload_activations": "all",
    }),
    "optimizers": ("llama-3-8b", "dgx-h100", "zero", "native", {
        "optimizer": "adamw,sgd,muon", "accumulation_dtype": "fp32,bf16", "micro_batch_size": "1,4", "fused_optimizer": "all",
        "offload_optimizer": "none,cpu",
    }),
    "compressed": ("llama-3-8b", "dgx-h100:2", "zero", "native", {
        "optimizer": "adamw,onebit_adam", "reduce_dtype": "fp32,bf16,int8", "gather_dtype": "all", "micro_batch_size": "1",
        "secondary_shard_size": "0,2,8", "reshard_after_forward": "all", "activation_checkpointing": "none",
        "hsdp_shard_size": "0,8",
    }),
    "nothing-legal": ("llama-3-8b", "dgx-h100", "zero", "ddp", {"activation_checkpointing": "none,full"}),
}  # fmt: skip


def made(name: str) -> tuple[SearchSpace, ModelSpec, str]:
    preset, cluster, space, engine, pins = SPACES[name]
    model, capability = resolve_model(preset), CAPABILITIES[engine] if engine else None
    workload = Workload(global_batch_size=32, sequence_length=1024)
    if name == "loads":
        model = dataclasses.replace(model, expert_loads=((3.0, *(1.0,) * 7),))
    if name == "nothing-legal":  # pins that leave nothing are told of before; here a base that the engine refuses
        base = resolve_space("zero", model, resolve_cluster(cluster), workload, CAPABILITIES["native"]).base
        space = SearchSpace(
            model=model, cluster=resolve_cluster(cluster), workload=workload, world_size=8, capability=capability,
            domains={"activation_checkpointing": ("none", "full")}, base=base.replace({"zero_stage": 2}),
        )  # fmt: skip
        return space, model, "ddp"
    return resolve_space(space, model, resolve_cluster(cluster), workload, capability, pins), model, engine or "native"


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(SPACES, every=6))
def test_grid_and_products_are_the_enumeration(name: str) -> None:
    space, _, _ = made(name)
    grid = ConfigGrid(space)
    found = [config for rows in grid.blocks(500) for config in grid.configs(rows)]
    assert len(found) == len(set(found))
    every = set(space.enumerate())
    assert set(found) == every
    assert (len(found) == 0) is (name == "nothing-legal")
    products, found = Products(space), []
    for product in products.blocks(500):
        assert 0 < product.count <= np.prod(product.shape) <= 500
        assert np.count_nonzero(product.legal) == product.count
        found += [products.config_of(codes) for codes in products.codes_at(product, np.nonzero(product.legal))]
    assert len(found) == len(set(found)) == products.count
    assert set(found) == every


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(sorted(SPACES), every=5))
def test_a_product_predicts_what_rows_predict(name: str) -> None:
    space, model, engine = made(name)
    for part in uniform_parts(space):
        grid, products, expected = ConfigGrid(part), Products(part), {}
        for rows in grid.blocks(2000):
            found = predict(GridCases(part, model, engine, grid).of(rows), rates_for(space.cluster, engine))
            shape = (rows.count, grid.sides.count)
            columns = [np.broadcast_to(values, shape).ravel() for values in (found.seconds, found.memory.needed)]
            expected |= dict(zip(grid.configs(rows), zip(*columns, strict=True), strict=True))
        for product in products.blocks(2000):
            found = predict(GridCases(part, model, engine, products).of(product), rates_for(space.cluster, engine))
            at = np.nonzero(product.legal)
            columns = [np.broadcast_to(values, product.shape)[at] for values in (found.seconds, found.memory.needed)]
            for codes, *values in zip(products.codes_at(product, at), *columns, strict=True):
                assert tuple(values) == expected.pop(products.config_of(codes))
        assert not expected


def test_blocks_are_bounded() -> None:
    space, _, _ = made("3d")
    grid = ConfigGrid(space)
    assert grid.sides.count == 3
    assert max(rows.count for rows in grid.blocks(300)) <= 200  # parts of at most 100 rows, joined until there are 100


def test_asking_the_rules_is_bounded() -> None:
    space, _, _ = made("3d")
    bounded = SearchSpace(
        model=space.model, cluster=space.cluster, workload=space.workload, world_size=8, domains=space.domains, base=space.base,
        capability=space.capability, most_steps=50,
    )  # fmt: skip
    with pytest.raises(SpaceTooLargeError, match="more than 50 steps"):
        list(ConfigGrid(bounded).blocks())


@pytest.mark.prove(every=6)
@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("nothing-legal", "ddp")])
def test_cases_of_the_grid_are_those_of_its_configurations(name: str) -> None:
    space, model, engine = made(name)
    rates = rates_for(space.cluster, engine)
    grid = ConfigGrid(space)
    rows = next(grid.blocks(2000))
    configs = list(grid.configs(rows))
    on_grid = predict(GridCases(space, model, engine, grid).of(rows), rates)
    listed = predict(cases_of(model, space.cluster, space.workload, configs, engine), rates)
    shape = (rows.count, grid.sides.count)
    for ours, theirs in [
        (on_grid.seconds, listed.seconds),
        (on_grid.memory.total, listed.memory.total),
        (on_grid.memory.host, listed.memory.host),
    ]:
        np.testing.assert_allclose(np.broadcast_to(ours, shape).ravel(), np.broadcast_to(theirs, len(configs)), rtol=1e-12)


@pytest.mark.prove
@pytest.mark.parametrize("preset", sampled(["gpt2-xl", "llama-3-8b", "llama-3.1-405b"], every=3))
def test_layers_of_ranks_are_those_that_the_ranks_hold(preset: str) -> None:
    model, generator = resolve_model(preset), random.Random(0)
    space = resolve_space(
        "full", model, resolve_cluster("dgx-h100:16"), Workload(global_batch_size=512, sequence_length=1024),
        CAPABILITIES["native"], {
            "reduce_bucket_size": 5e8, "pipeline_parallel_size": "2,4,16", "zero_stage": 1, "offload_optimizer": "none",
        },
    )  # fmt: skip
    configs = [space.sample(generator) for _ in range(100)]
    split = split_layers(cases_of(model, space.cluster, space.workload, configs, "native"))
    for place, config in enumerate(configs):
        held = pipeline.split_layers(model, config, 1024)
        ranks = [pipeline.stages_of_rank(config, rank) for rank in range(config.pipeline_parallel_size)]
        layers = [sum(len(held[stage]) for stage in stages) for stages in ranks]
        head = next(rank for rank, stages in enumerate(ranks) if len(held) - 1 in stages)
        others = [count for rank, count in enumerate(layers) if rank != head]
        assert (split.first[place], split.last[place], split.most[place]) == (layers[0], layers[head], max(others)), config
        first_fullest = next(rank for rank, count in enumerate(layers) if rank != head and count == max(others))
        assert split.pipeline_rank[place] in (first_fullest, max(first_fullest, 1)), config


def test_a_configuration_is_in_one_part() -> None:
    """On CPUs torch's own choice among the kernels is the flash kernel: naming it makes no other configuration."""
    work, cluster = Workload(global_batch_size=4, sequence_length=64), resolve_cluster("local", ranks=2)
    pins = {"attention_backend": "all", "lora_rank": "0,4", "lora_targets": "attention,mlp"}
    space = resolve_space("zero", resolve_model("llama-tiny"), cluster, work, CAPABILITIES["native"], pins)
    grids = [ConfigGrid(part) for part in uniform_parts(space)]
    found = [config.hash for grid in grids for rows in grid.blocks() for config in grid.configs(rows)]
    assert len(set(found)) == len(found) == space.count()
