"""`precision=fp8` in every layout, on processors, beneath the rule that keeps searches off them: each trains as others do.

Ranks that share nothing of a matrix compute the same products, so that their losses part by bf16's rounding alone. Tensor
ranks and micro-batches of other sizes have scales of their own.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.gang import Gang
from benchmarks.common.static_buffers import StaticBuffers
from executor.engine import RankContext
from executor.engines.capabilities import version_refusals
from executor.engines.native.engine import NativeEngine
from executor.errors import EngineRefusalError
from search_spaces.knob import Value
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly  # `make oldest` runs them too

RANKS, STEPS = 2, 4
SPEC = ModelSpec(
    name="float8", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=32,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=32, learning_rate=3e-3)
DOCUMENTS = dataclasses.replace(WORKLOAD, document_lengths=(5, 9, 11, 17, 23, 32))
ALIKE, FLOAT8 = 2.0**-9, 2.0**-7
"""Relative, of each loss: bf16's rounding, and that of other scales. A loss falls by 0.1 of itself in these steps."""
STAGE_3: Mapping[str, Value] = {"zero_stage": 3, "param_persistence_threshold": 0}
FOLDED: Mapping[str, Value] = {"pipeline_parallel_size": 2, "virtual_stages": 2, "micro_batch_size": 2}
TENSOR: Mapping[str, Value] = {"tensor_parallel_size": 2, "sequence_parallel": True}


def train(rank: int, knobs: Mapping[str, Value], workload: Workload = WORKLOAD) -> list[float]:
    """The loss of every step, as the mean over the ranks that know it. Graphs are those of a stand-in for CUDA's."""
    context = RankContext(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    config = TrialConfig(precision="fp8", micro_batch_size=4).replace(knobs)
    session = (NativeEngine(StaticBuffers) if config.cuda_graphs else NativeEngine()).build(context, SPEC, config, workload)
    known = torch.zeros(STEPS, 2, dtype=torch.float64)
    for step in range(STEPS):
        session.prepare(step)
        loss = session.train_step().loss
        if loss is not None:
            known[step] = torch.tensor([loss, 1.0], dtype=torch.float64)
    session.close()
    dist.all_reduce(known)
    losses: list[float] = (known[:, 0] / known[:, 1]).tolist()
    return losses


def train_documents(rank: int, knobs: Mapping[str, Value]) -> list[float]:
    return train(rank, knobs, DOCUMENTS)


def skip_where_older(knobs: Mapping[str, Value]) -> None:
    for refusal in version_refusals(torch.__version__, TrialConfig(precision="fp8").replace(knobs), "cpu"):
        pytest.skip(refusal.message)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(RANKS, train, seconds_limit=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def documents() -> Iterator[Gang]:
    with Gang(RANKS, train_documents, seconds_limit=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def plain(gang: Gang) -> list[float]:
    """Of data-parallel ranks at stage 0."""
    return gang.run({})[0]


@pytest.mark.parametrize(
    "knobs",
    [
        {"zero_stage": 2},
        STAGE_3,
        {**STAGE_3, "offload_param": "cpu", "offload_optimizer": "cpu"},
        {**STAGE_3, "activation_checkpointing": "selective"},
        {**STAGE_3, "activation_checkpointing": "full"},
        {"offload_activations": True},
    ],
    ids=str,
)
def test_layouts_that_cut_no_product_train_alike(gang: Gang, plain: list[float], knobs: Mapping[str, Value]) -> None:
    assert gang.run(knobs)[0] == pytest.approx(plain, rel=ALIKE)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tensor_parallel_size": 2},
        {**TENSOR, "micro_batch_size": 8, "activation_checkpointing": "selective"},
        {"context_parallel_size": 2},
        {"fp8_recipe": "rowwise"},
        {**TENSOR, "fp8_recipe": "rowwise"},
        {**STAGE_3, "fp8_recipe": "rowwise_with_gw_hp", "activation_checkpointing": "full"},
        {**FOLDED, "pipeline_schedule": "interleaved_1f1b"},
        {**FOLDED, "pipeline_schedule": "zbv", "activation_checkpointing": "selective"},
        {**STAGE_3, "gather_dtype": "int8"},
    ],
    ids=str,
)
def test_layouts_with_other_scales_train_as_well(gang: Gang, plain: list[float], knobs: Mapping[str, Value]) -> None:
    skip_where_older(knobs)
    losses = gang.run(knobs)[0]
    assert losses == pytest.approx(plain, rel=FLOAT8)
    assert losses != plain
    assert losses[-1] < 0.97 * losses[0]


def test_schedules_that_part_backward_compute_the_same(gang: Gang) -> None:
    """Zero-bubble schedules ask for the gradients of inputs and of weights apart."""
    skip_where_older({**FOLDED, "pipeline_schedule": "dualpipev"})
    whole = gang.run({**FOLDED, "pipeline_schedule": "interleaved_1f1b"})[0]
    for schedule in ("interleaved_zero_bubble", "dualpipev"):
        assert gang.run({**FOLDED, "pipeline_schedule": schedule})[0] == pytest.approx(whole, rel=ALIKE)


def test_frozen_matrices_are_multiplied_so_beside_their_adapters(gang: Gang) -> None:
    narrow, wide = (gang.run({"lora_rank": 4, "precision": precision})[0] for precision in ("fp8", "bf16"))
    assert narrow == pytest.approx(wide, rel=FLOAT8)
    assert narrow != wide


@pytest.mark.parametrize("knobs", [{"zero_stage": 0}, {"zero_stage": 2, "micro_batch_size": 2}], ids=str)
def test_graphs_replay_the_same_products(gang: Gang, knobs: Mapping[str, Value]) -> None:
    """Scales are of the values of each replay, not of those that were captured."""
    assert gang.run({**knobs, "cuda_graphs": True})[0] == gang.run(knobs)[0]


@pytest.mark.parametrize("knobs", [{}, STAGE_3, {"tensor_parallel_size": 2}], ids=str)
def test_packed_documents_train_as_in_bf16(documents: Gang, knobs: Mapping[str, Value]) -> None:
    narrow, wide = (
        documents.run({**knobs, "pack_sequences": True, "precision": precision})[0] for precision in ("fp8", "bf16")
    )
    assert narrow == pytest.approx(wide, rel=FLOAT8)
    assert narrow != wide


def build(model: ModelSpec | FactoryModel) -> None:
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    NativeEngine().build(context, model, TrialConfig(precision="fp8", micro_batch_size=8), WORKLOAD)


def test_a_module_of_the_users_own_is_refused() -> None:
    with pytest.raises(EngineRefusalError, match="has its own matrix products; use precision=bf16") as caught:
        build(FactoryModel(reference="module:factory", parameter_count=10))
    assert caught.value.rule == "float8-model"


def test_other_types_than_nvidias_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(EngineRefusalError, match="use precision=bf16") as caught:
        build(SPEC)
    assert caught.value.rule == "float8-device"
