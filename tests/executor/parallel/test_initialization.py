"""First values: the same to the bit however they are cut, and a rank makes what it keeps, once, where it keeps it."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engines.model_build_rank import build
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.parameter_shard import ranges
from executor.engines.native.zero import ShardedModel
from executor.engines.session import ParallelSession
from executor.engines.sources import DTYPES
from executor.engines.torch_engines import DdpEngine, Fsdp2Engine
from executor.parallel import initialization
from executor.parallel.initialization import INITIAL_DEVIATION, Given, Joined, Share, draw
from executor.parallel.model import build_transformer
from executor.trial.run import _build_bytes
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import configured
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

CPU = torch.device("cpu")
SPEC = ModelSpec(
    name="odd", family="llama", num_layers=4, hidden_size=18, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16, tied_embeddings=True,
)  # fmt: skip
EXPERTS = dataclasses.replace(SPEC, family="mixtral", num_layers=2, num_experts=4, experts_per_token=2, tied_embeddings=False)
WIDE = dataclasses.replace(SPEC, hidden_size=256, ffn_hidden_size=512, vocab_size=512)


def filled(values: Any, start: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((size,), 77, dtype=dtype)
    values.fill(out, start)
    return out


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), chunk=st.sampled_from([1, 3, 16, 1 << 18]), data=st.data())
def test_any_range_of_any_slice_is_that_of_the_whole(shape: list[int], chunk: int, data: st.DataObject) -> None:
    dimension = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[dimension] - 1))
    size = data.draw(st.integers(1, shape[dimension] - first))
    whole = filled(draw("w", shape, 3, torch.float32), 0, torch.Size(shape).numel()).view(shape)
    own = whole.narrow(dimension, first, size).flatten()
    start = data.draw(st.integers(0, own.numel() - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "CHUNK_ELEMENTS", chunk)
        part = filled(draw("w", shape, 3, torch.float32, dimension, first, size), start, own.numel() - start)
    assert torch.equal(part, own[start:])


def test_values_depend_on_seed_name_and_position_and_are_normal() -> None:
    size = 1 << 18
    ours, other, later = (
        filled(draw(name, [size], seed, torch.float32), 0, size) / INITIAL_DEVIATION
        for name, seed in (("a", 0), ("b", 0), ("a", 1))
    )
    # Five deviations of each figure of so many independent values.
    bound = 5 / size**0.5
    assert abs(ours.mean()) < bound
    assert abs(ours.var() - 1) < bound * 2**0.5
    assert abs((ours**4).mean() - 3) < bound * 96**0.5
    for another in (other, later, ours.roll(1), ours.roll(2), ours.roll(512)):
        assert abs((ours * another).mean()) < bound


def test_the_bits_of_a_parameter_stay_what_they_are() -> None:
    """Reference losses of stored jobs are those of these weights: on every processor and in every version."""
    values = filled(draw("blocks.0.mlp.up.weight", [4096, 4096], 7, torch.float32), 5_000_000, 4)
    assert (values * 2**26).tolist() == [1604796.0, 12911.0, 674046.0, -1123960.0]


def test_a_wider_type_has_the_values_of_the_parameters_own() -> None:
    drawn = draw("w", [1000], 0, torch.bfloat16)
    assert torch.equal(filled(drawn, 0, 1000), filled(drawn, 0, 1000, torch.bfloat16).float())


def test_a_position_that_would_come_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 4,294,967,296 elements"):
        draw("w", [1 << 17, 1 << 16], 0, torch.float32)
    with pytest.raises(ValueError, match="not within 4"):
        draw("w", [4], 0, torch.float32, 0, 3, 2)


def test_a_fused_parameter_is_its_named_parts_one_after_the_other() -> None:
    parts = [draw(name, [6, 5], 0, torch.float32, 0, 2, 2) for name in ("query", "key")]
    fused = torch.cat([filled(part, 0, 10) for part in parts])
    assert torch.equal(filled(Joined(parts), 7, 9), fused[7:16])


LAYOUTS: dict[str, tuple[int, ModelSpec, dict[str, Any]]] = {
    **{f"stage {stage}": (4, SPEC, {"zero_stage": stage}) for stage in range(4)},
    **{f"bf16, stage {stage}": (2, SPEC, {"zero_stage": stage, "precision": "bf16"}) for stage in (0, 1, 3)},
    "tensor and pipeline, stage 1": (8, SPEC, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
    "tensor, context, stage 3": (8, SPEC, {"tensor_parallel_size": 4, "context_parallel_size": 2, "zero_stage": 3}),
    "interleaved": (2, SPEC, {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"}),
    "hybrid": (4, SPEC, {"zero_stage": 3, "hsdp_shard_size": 2}),
    "experts, stage 0": (2, EXPERTS, {"expert_parallel_size": 2}),
    "experts, tensor, stage 3": (8, EXPERTS, {"expert_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3}),
    "whole experts, tensor, stage 1": (
        8,
        EXPERTS,
        {"expert_parallel_size": 4, "expert_tensor_parallel_size": 1, "tensor_parallel_size": 4, "zero_stage": 1},
    ),
    "offloaded": (2, SPEC, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_ratio": 0.6, "offload_param": "cpu"}),
    "blocks of 8 bits": (2, SPEC, {"zero_stage": 2, "optimizer": "adamw8bit"}),
    "adapters, stage 3": (2, SPEC, {"lora_rank": 4, "zero_stage": 3}),
    "adapters, tensor": (2, SPEC, {"lora_rank": 4, "tensor_parallel_size": 2}),
    "quantised, stage 3": (2, WIDE, {"lora_rank": 4, "frozen_dtype": "nf4", "zero_stage": 3}),
    "quantised": (1, WIDE, {"lora_rank": 4, "frozen_dtype": "int8"}),
    "compiled, checkpointed": (2, SPEC, {"zero_stage": 3, "compile_blocks": True, "activation_checkpointing": "full"}),
}


@contextmanager
def session_of(engine: Any, spec: ModelSpec, world: int, rank: int, config: TrialConfig) -> Iterator[ParallelSession]:
    """Built on a process group that sends nothing."""
    workload = Workload(global_batch_size=16, sequence_length=spec.sequence_length, seed=5)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        session = engine.build(RankContext(rank=rank, world_size=world, device=CPU), spec, config, workload)
        try:
            yield session
        finally:
            session.close()
    finally:
        dist.destroy_process_group()


def whole_of(spec: ModelSpec, config: TrialConfig) -> dict[str, Tensor]:
    module = build_transformer(configured(spec, config), spec.sequence_length, 5, DTYPES[config.precision])
    named = dict(module.named_parameters(remove_duplicate=False))
    return {name: value.detach() for name, value in named.items()}


def shards_of(replica: Any) -> tuple[ShardedModel, ...]:
    return (replica,) if isinstance(replica, ShardedModel) else replica._both


@pytest.mark.prove(every=7)
@pytest.mark.parametrize("name", sampled(LAYOUTS, every=3))
def test_every_rank_begins_with_its_part_of_the_same_weights(name: str) -> None:
    world, spec, knobs = LAYOUTS[name]
    config = TrialConfig().replace(knobs)
    whole, met = whole_of(spec, config), set()
    for rank in range(world):
        with session_of(NativeEngine(), spec, world, rank, config) as session:
            for replica, shards in ((shards, shards) for each in session.replicas for shards in shards_of(each)):
                master, tensor = shards.optimizer.full_master(), shards.tensor
                for slot in (*shards.layout.slots, *shards._frozen.slots, *shards._packed.slots):
                    dimension = shards.part.split.get(slot.name)
                    part = whole[slot.name]
                    part = part if dimension is None else part.chunk(tensor.size, dimension)[tensor.rank]
                    share = Share(Given(part), shards.own_row * slot.shard_elements, slot.shard_elements)
                    if slot.parameter.requires_grad:
                        own = master[slot.offset : slot.offset + slot.shard_elements]
                    else:
                        assert shards._shard is not None
                        own = shards._shard.read(ranges((slot,))).values
                    assert torch.equal(own, filled(share, 0, slot.shard_elements, own.dtype)), (rank, slot.name)
                    if config.zero_stage < 3:
                        assert torch.equal(slot.parameter, part), (rank, slot.name)
                    met.add(slot.name)
                for key, parameter in replica.module.named_parameters():
                    if not parameter.requires_grad and config.zero_stage < 3:
                        dimension = shards.part.split.get(key)
                        part = whole[key] if dimension is None else whole[key].chunk(tensor.size, dimension)[tensor.rank]
                        assert torch.equal(parameter, part), (rank, key)
                        met.add(key)
    # The output projection of a tied model goes by the table's name where both are on a rank.
    assert whole.keys() - met <= {"head.output.weight"}


@pytest.mark.prove
@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, tied_embeddings=False)], ids=["tied", "untied"])
def test_torchs_own_shardings_begin_with_the_same_weights(spec: ModelSpec) -> None:
    config = TrialConfig().replace({"precision": "bf16"})
    whole = whole_of(spec, config)
    with session_of(DdpEngine(), spec, 1, 0, config) as session:
        for name, parameter in session.replicas[0].bare.named_parameters():  # type: ignore[attr-defined]
            assert torch.equal(parameter, whole[name].float())
    for rank in range(4):
        with session_of(Fsdp2Engine(), spec, 4, rank, config.replace({"zero_stage": 3})) as session:
            module = session.replicas[0].module
            if spec.tied_embeddings:
                assert module.head.output.weight is module.embedding.tokens.weight  # type: ignore[union-attr]
            for name, parameter in module.named_parameters():
                rows = whole[name].float().chunk(4)
                own = parameter.to_local()  # type: ignore[attr-defined]
                assert torch.equal(own, rows[rank]) if rank < len(rows) else not own.numel(), (rank, name)


@pytest.mark.prove
@pytest.mark.parametrize(
    "knobs",
    [
        {"tensor_parallel_size": 2, "zero_stage": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1, "precision": "bf16"},
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_ratio": 1.0},
    ],
    ids=["tensor, stage 3", "pipeline, stage 1", "offloaded"],
)
def test_a_rank_makes_what_it_keeps_and_no_more(knobs: dict[str, Any]) -> None:
    spec = dataclasses.replace(WIDE, tied_embeddings=False)
    with pytest.MonkeyPatch.context() as patch:
        # In proportion to the model.
        patch.setattr(initialization, "CHUNK_ELEMENTS", 1 << 12)
        built = build(spec, 8, knobs, rank=7, follow=True)
    assert built.drawn == built.kept
    assert built.tensor_peak < 1.2 * built.kept_bytes


def test_a_trials_backstop_has_no_room_for_a_whole_model_of_ours() -> None:
    request = TrialRequest(
        attempt="a", model=SPEC, config=TrialConfig(), workload=Workload(global_batch_size=1, sequence_length=16), world_size=1
    )
    assert _build_bytes(request) == 0
    assert _build_bytes(dataclasses.replace(request, engine="deepspeed")) == 8 * SPEC.parameter_count
