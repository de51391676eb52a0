"""What each optimizer keeps and sends, on two real ranks, against closed forms; numbers in 8 bits against trying every code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from two_ranks import RANKS, Measure, measuring

from benchmarks.correctness.reference_optimizers import quantised
from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.optimizers import block_matrices
from executor.engines.native.optimizers.device_optimizer import QuantisedVector, codes, share_block
from executor.engines.native.optimizers.muon import assign_owners, flops, orthogonalized
from executor.engines.native.parameter_shard import make_layout
from executor.errors import EngineRefusalError
from executor.measurement.flop_counter import FlopCounter
from executor.parallel.replica import ModelPart
from search_spaces.models.model import ModelSpec
from search_spaces.optimizers import LEAST_QUANTISED, OPTIMIZERS, QUANTISED_BLOCK
from search_spaces.trial import TrialResult, Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly  # `make oldest` runs them too

SPEC = ModelSpec(
    name="kept", family="llama", num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=96, vocab_size=256, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)
H, F, L = SPEC.hidden_size, SPEC.ffn_hidden_size, SPEC.num_layers
P = SPEC.parameter_count
TABLE = SPEC.vocab_size * H
NORMS = (2 * L + 1) * H
MATRICES = P - 2 * TABLE - NORMS
LARGE = 2 * TABLE + L * (2 * H * H + 3 * H * F)
"""Elements of parameters that are quantised: tables, queries, outputs and MLPs; keys and values have 2048 each."""
SMALL_ONES = L * 2 + 2 * L + 1
STEP_COUNTER = 4
BOOKS = 2 * 4 * (256 + 255)
"""Bytes of the codes of both moments and what lies between them."""


@pytest.fixture(scope="module")
def measure(forked_ranks: None) -> Iterator[Measure]:
    with measuring(SPEC, WORKLOAD, prefetch_bucket_size=0, param_persistence_threshold=0) as run:
        yield run


STATES = {
    "sgd": 4 * P,
    "lamb": 8 * P,
    "muon": 4 * MATRICES + 8 * (P - MATRICES),
    "adamw8bit": 8 * (P - LARGE) + 2 * LARGE + 2 * 4 * LARGE // QUANTISED_BLOCK,
}
COUNTERS = {"muon": STEP_COUNTER * (2 + 2 * L + 1), "adamw8bit": STEP_COUNTER * SMALL_ONES + BOOKS}
"""Bytes that no rank shares."""


@pytest.mark.parametrize("optimizer", STATES)
@pytest.mark.parametrize("stage", [3, 0])
def test_states_equal_the_closed_form(measure: Measure, optimizer: str, stage: int) -> None:
    """At stage 0 in fp32 the parameters are the master copy; above each rank has its share of that too."""
    held = measure(zero_stage=stage, optimizer=optimizer).ranks[0].tag_peak_bytes["optimizer_state"]
    whole = STATES[optimizer] + (4 * P if stage else 0)
    assert held == (whole // RANKS if stage else whole) + COUNTERS.get(optimizer, 0)


@pytest.mark.parametrize("optimizer", STATES)
def test_a_dry_run_finds_the_same(optimizer: str) -> None:
    config = TrialConfig(micro_batch_size=4, zero_stage=1, optimizer=optimizer, precision="fp16")
    rank = dry_run(SPEC, config, WORKLOAD, RANKS)
    assert rank.tag_peak_bytes["optimizer_state"] == (STATES[optimizer] + 4 * P) // RANKS + COUNTERS.get(optimizer, 0)


def _sent(result: TrialResult) -> dict[str, tuple[int, int]]:
    return {count.operation: (count.count, count.bytes) for count in result.ranks[0].collectives}


def test_what_the_update_sends_besides(measure: Measure) -> None:
    """lamb two numbers a parameter; muon each matrix of the blocks to its owner and back in bf16; the others nothing."""
    plain = _sent(measure(zero_stage=1))
    assert _sent(measure(zero_stage=1, optimizer="sgd")) == plain
    assert _sent(measure(zero_stage=1, optimizer="adamw8bit")) == plain
    count, size = plain["all_reduce"]
    norms = {"all_reduce": (count + 1, size + 2 * 4 * (3 + 9 * L))}
    assert _sent(measure(zero_stage=1, optimizer="lamb")) == {**plain, **norms}
    muon = measure(zero_stage=1, optimizer="muon")
    assert {name: sent for name, sent in _sent(muon).items() if name != "all_to_all"} == plain
    exchanges = [count for rank in muon.ranks for count in rank.collectives if count.operation == "all_to_all"]
    assert [one.count for one in exchanges] == [2] * RANKS
    assert sum(one.bytes for one in exchanges) == 2 * 2 * MATRICES


def test_matrices_are_dealt_out_evenly_and_completely() -> None:
    shapes = [(64, 64), (64, 32), (96, 64)] * 8
    layout = make_layout(
        [(str(n), nn.Parameter(torch.empty(shape, device="meta"))) for n, shape in enumerate(shapes)], 3, 10**9
    )
    owned = assign_owners(layout.slots, 3)
    assert sorted(slot.name for slots in owned for slot in slots) == sorted(slot.name for slot in layout.slots)
    loads = [sum(flops(*slot.shape) for slot in slots) for slots in owned]
    assert max(loads) - min(loads) <= flops(96, 64)
    assert [len(slots) for slots in assign_owners(layout.slots[:1], 3)] == [1, 0, 0]


def test_sums_in_the_precision_take_two_bytes_instead_of_four(measure: Measure) -> None:
    """Stage 1 holds full gradients over the micro-batches; stage 2 shares, which become fp32 for the update."""
    knobs: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 2, "reduce_bucket_size": 1}
    for stage, saved in ((1, 2 * P), (2, 0)):
        wide, narrow = (
            measure(**knobs, zero_stage=stage, accumulation_dtype=kind).ranks[0].tag_peak_bytes["gradients"]
            for kind in ("fp32", "bf16")
        )
        assert abs(wide - narrow - saved) <= 4 * TABLE  # a bucket on its way is held in both types


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("kind", "width"), [("fp32", 4), ("bf16", 2)])
def test_between_micro_batches_gradients_are_held_in_the_type_of_their_sums(stage: int, kind: str, width: int) -> None:
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    config = TrialConfig(precision="bf16", micro_batch_size=4, zero_stage=stage, accumulation_dtype=kind)
    session = NativeEngine().build(context, SPEC, config, WORKLOAD)
    held = []
    (replica,) = session.replicas
    end = replica.end_micro_batch

    def look() -> None:
        end()
        storages = {value.untyped_storage().data_ptr(): value.nbytes for value in replica.reducer.held_tensors()}  # type: ignore[attr-defined]
        held.append(sum(storages.values()))

    replica.end_micro_batch = look  # type: ignore[method-assign]
    session.prepare(0)
    session.train_step()
    session.close()
    assert held == [width * P, 4 * P]


def test_a_module_without_blocks_is_no_case_for_muon() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.only(x).square().mean()

    part = ModelPart(module=Flat(), blocks=[], units=[])
    with pytest.raises(
        EngineRefusalError,
        match=r"the blocks of this module are unknown; name them in the factory's plan, or use optimizer=adamw",
    ):
        block_matrices(part)


@given(elements=st.integers(1, 3 * QUANTISED_BLOCK), signed=st.booleans(), seed=st.integers(0, 1000))
def test_a_number_in_8_bits_is_the_nearest_code(elements: int, signed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator) * 10.0 ** torch.randint(-9, 3, (elements,), generator=generator)
    values = values if signed else values.abs()
    vector = QuantisedVector(elements, signed, torch.device("cpu"))
    assert not vector.read(0, elements, torch.float32).any()
    vector.write(0, values)
    assert torch.equal(vector.read(0, elements, torch.float32), quantised(values, signed))


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_between_two_codes_is_the_nearer(signed: bool) -> None:
    """The number nearest to each middle, and those on both sides of it."""
    codebook = torch.tensor(codes(signed))
    middles = (codebook[1:] + codebook[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, way)) for way in (-2.0, 2.0)]
    for values in (middles, *beside):
        vector = QuantisedVector(256, signed, torch.device("cpu"))
        vector.write(0, torch.cat([values, torch.ones(1)]))
        kept = vector.read(0, 255, torch.float32)
        assert torch.equal(kept, quantised(torch.cat([values, torch.ones(1)]), signed)[:255])
        off = (kept.double() - values.double()).abs()
        assert bool((off <= (codebook[1:].double() - values.double()).abs()).all())
        assert bool((off <= (codebook[:-1].double() - values.double()).abs()).all())


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_reach_from_nothing_to_one(signed: bool) -> None:
    codebook = codes(signed)
    assert len({*codebook}) == 256
    assert codebook == sorted(codebook)
    assert (codebook[-1], 0.0 in codebook) == (1.0, True)
    assert codebook[0] == pytest.approx(-0.993, abs=1e-3) if signed else codebook[0] == 0.0


@given(elements=st.integers(1, 20_000), ranks=st.integers(1, 8))
def test_shares_of_what_is_quantised_begin_where_blocks_do(elements: int, ranks: int) -> None:
    parameter = nn.Parameter(torch.empty(elements, device="meta"))
    (slot,) = make_layout([("one", parameter)], ranks, 10**9, share_block).slots
    assert slot.shard_elements * ranks >= elements
    if ranks > 1 and elements >= LEAST_QUANTISED:
        assert slot.shard_elements % QUANTISED_BLOCK == 0
        assert slot.shard_elements * ranks - elements < ranks * QUANTISED_BLOCK
    else:
        assert slot.shard_elements == -(-elements // ranks)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16)])
def test_a_matrix_becomes_nearly_orthogonal_in_the_stated_flops(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    with FlopCounter() as counter:
        result = orthogonalized(matrix)
    assert counter.total == flops(*shape)
    singular = torch.linalg.svdvals(result.float())
    assert float(singular.min()) > 0.3
    assert float(singular.max()) < 1.4


def test_every_optimizer_has_a_closed_form() -> None:
    assert {*STATES, "adamw", "onebit_adam", "adamw_bf16"} == set(OPTIMIZERS)  # test_compressed.py, test_stochastic_rounding.py
