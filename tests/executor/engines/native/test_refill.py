"""Updated parameters that come beside the next forward: when they are sent, and who finds them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.common.gang import Gang
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.refill import IN_FLIGHT, RefillBesideForward
from executor.engines.native.zero import ShardedModel
from executor.engines.session import ParallelSession
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.nightly  # `make oldest` runs them too

LAYERS = 4
SPEC = ModelSpec(
    name="late", family="llama", num_layers=LAYERS, hidden_size=16, num_attention_heads=4, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16, learning_rate=1e-2)
STEPS = 2


def built(rank: int, late: bool, knobs: dict[str, Any]) -> ParallelSession:
    config = TrialConfig(precision="fp64", micro_batch_size=2, overlap_param_gather=late).replace(knobs)
    context = RankContext(rank=rank, world_size=2, device=torch.device("cpu"))
    return NativeEngine().build(context, SPEC, config, WORKLOAD)


def trained(session: ParallelSession) -> list[float | None]:
    losses = []
    for step in range(STEPS):
        session.prepare(step)
        losses.append(session.train_step().loss)
    return losses


def weights(session: ParallelSession) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in session.replicas[0].module.named_parameters()}


def evaluated(session: ParallelSession) -> float:
    """Of a batch that is not trained on, by the module itself, as an evaluation between steps runs it."""
    session.prepare(STEPS)
    with torch.no_grad():
        return float(session.replicas[0].module(**session._batches[0]))


def between_steps(rank: int, knobs: dict[str, Any]) -> dict[str, bool]:
    """How training with gathers beside forward stands to training with gathers at the end of a step."""
    late, early = built(rank, True, knobs), built(rank, False, knobs)
    losses = trained(late) == trained(early)
    stale = weights(late)
    master = late.full_parameters()
    same = {
        "losses": losses,
        "stale": not torch.equal(stale["head.output.weight"], weights(early)["head.output.weight"]),
        "checkpoint": all(torch.equal(value, master[name]) for name, value in early.full_parameters().items()),
        "evaluation": evaluated(late) == evaluated(early),
        "weights": all(torch.equal(value, weights(late)[name]) for name, value in weights(early).items()),
    }
    late.close()
    early.close()
    return same


def order_of_a_step(rank: int, knobs: dict[str, Any]) -> list[str]:
    """Gathers that are sent and units that run, in the first forward after an update."""
    session = built(rank, True, knobs)
    trained(session)
    replica = session.replicas[0]
    assert isinstance(replica, ShardedModel)
    assert isinstance(replica.refill, RefillBesideForward)
    assert not replica.refill._sent  # between steps nothing is on its way
    met: list[str] = []
    send = replica.group.all_gather

    def sent(*arguments: Any) -> Any:
        met.append("gather")
        return send(*arguments)

    replica.group.all_gather = sent  # type: ignore[method-assign]
    for unit in replica.part.units:
        unit.register_forward_pre_hook(lambda *_: met.append("run"))
    session.prepare(STEPS)
    session.train_step()
    session.close()
    return met


def task(rank: int, asked: tuple[str, dict[str, Any]]) -> Any:
    what, knobs = asked
    return between_steps(rank, knobs) if what == "between steps" else order_of_a_step(rank, knobs)


@pytest.fixture(scope="module")
def gang(forked_ranks: None) -> Iterator[Any]:
    with Gang(2, task) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "knobs",
    [
        {"zero_stage": 1},
        {"zero_stage": 2, "allgather_bucket_size": 300},
        {"zero_stage": 1, "offload_optimizer": "cpu", "offload_ratio": 0.5},
        {"zero_stage": 2, "activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_whoever_looks_between_steps_finds_what_was_trained(gang: Any, knobs: dict[str, Any]) -> None:
    for told in gang.run(("between steps", knobs)):
        assert told == dict.fromkeys(("losses", "stale", "checkpoint", "evaluation", "weights"), True)


def test_the_next_units_are_on_their_way_while_one_runs(gang: Any) -> None:
    for met in gang.run(("order", {"zero_stage": 1})):
        units = LAYERS + 2
        first = met[: 2 * units]
        assert first[:IN_FLIGHT] == ["gather"] * IN_FLIGHT
        sent = [first[: place + 1].count("gather") for place, what in enumerate(first) if what == "run"]
        assert sent == [min(unit + 1 + IN_FLIGHT, units) for unit in range(units)]
        assert "gather" not in met[2 * units :]  # other micro-batches find everything there
