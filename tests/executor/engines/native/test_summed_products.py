"""Products that add to the sums of gradients: the same training without tensors for the gradients of weights."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from executor.engine import RankContext
from executor.engines.native import buckets
from executor.engines.native.engine import NativeEngine
from executor.engines.native.zero import ShardedModel
from executor.measurement.flop_counter import FlopCounter
from executor.parallel import summed_products
from executor.parallel.summed_products import can_add
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
SPEC = ModelSpec(
    name="small", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=16,
)  # fmt: skip
BIASED = dataclasses.replace(SPEC, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
TIED = dataclasses.replace(SPEC, tied_embeddings=True)
EXPERTS = dataclasses.replace(SPEC, num_experts=2, experts_per_token=1)
WORKLOAD = Workload(global_batch_size=4, sequence_length=16, gradient_clipping=0.1)
STEPS = 2
CASES: dict[str, tuple[ModelSpec, dict[str, Any], int]] = {
    "stage 0": (SPEC, {}, 15),
    "stage 1": (SPEC, {"zero_stage": 1}, 15),
    "stage 2": (SPEC, {"zero_stage": 2}, 15),
    "stage 3": (SPEC, {"zero_stage": 3, "param_persistence_threshold": 0}, 15),
    "small buckets": (SPEC, {"reduce_bucket_size": 500}, 15),
    "one micro-batch": (SPEC, {"micro_batch_size": 4}, 15),
    "biases": (BIASED, {}, 15),
    "recomputed": (SPEC, {"activation_checkpointing": "full"}, 15),
    "recomputed selectively": (SPEC, {"activation_checkpointing": "selective"}, 15),
    "tied": (TIED, {}, 14),
    "chunks of the loss": (SPEC, {"loss_chunk_size": 5}, 14),
    "experts": (EXPERTS, {}, 9),
    "adapters": (SPEC, {"lora_rank": 2}, 0),
    "gradients apart": (SPEC, {"contiguous_gradients": False}, 0),
    "host memory": (SPEC, {"offload_optimizer": "cpu", "offload_activations": True}, 15),
}  # fmt: skip
"""Model, knobs, and number of weights to whose sums products add."""


@dataclasses.dataclass
class Trained:
    weights: dict[str, Tensor]
    norms: list[float]
    flops: float | None
    summed: int


def train(spec: ModelSpec, counts: bool = True, **knobs: Any) -> Trained:
    """`counts`: FLOPs are counted, for which compiled blocks run eagerly."""
    config = TrialConfig(precision="fp64").replace(knobs)
    session = NativeEngine().build(ALONE, spec, config, WORKLOAD)
    try:
        (replica,) = session.replicas
        assert isinstance(replica, ShardedModel)
        norms, flops = [], None
        for step in range(STEPS):
            session.prepare(step)
            with FlopCounter() if counts else contextlib.nullcontext() as counter:
                norms.append(session.train_step().gradient_norm or 0.0)
            flops = counter.total if counter is not None else None
        return Trained(session.full_parameters(), norms, flops, len(replica.reducer.summed))
    finally:
        session.close()


def require_equal(summed: Trained, apart: Trained, bound: float) -> None:
    assert apart.summed == 0
    assert summed.norms == pytest.approx(apart.norms, rel=bound)
    for name, weight in summed.weights.items():
        torch.testing.assert_close(weight, apart.weights[name], rtol=bound, atol=bound)


@pytest.mark.prove(every=4)
@pytest.mark.parametrize("case", CASES)
def test_a_model_trains_as_with_gradients_of_its_weights(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, knobs, count = CASES[case]
    summed = train(spec, **knobs)
    monkeypatch.setattr(buckets, "can_add", lambda *_: False)
    apart = train(spec, **knobs)
    require_equal(summed, apart, 0.0 if case == "one micro-batch" else 1e-12)
    assert summed.summed == count
    assert summed.flops == apart.flops, "no product runs more often"
    assert not summed_products._SUMS


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_compiled_blocks_stay_one_graph(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = {"compile_blocks": True, "precision": "fp32", "activation_checkpointing": checkpointing}
    results = []
    for adds in (can_add, lambda *_: False):
        monkeypatch.setattr(buckets, "can_add", adds)
        torch._dynamo.utils.counters.clear()
        results.append(train(BIASED, counts=False, **knobs))
        assert not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [result.summed for result in results] == [15, 0]
    summed, apart = results
    require_equal(summed, apart, 1e-5)
