"""Checkpoints: saved under one layout, loaded under another, equal bit for bit; training goes on as if nothing had happened."""

import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.common.gang import Gang
from executor.engine import RankContext
from executor.engines.native.checkpoint import bytes_of, rectangles
from executor.engines.native.engine import NativeEngine, NativeSession
from executor.errors import CheckpointError, EngineRefusalError
from search_spaces.models.model import ModelSpec
from search_spaces.trial import CheckpointTimes, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

DENSE = ModelSpec(
    name="saved", family="llama", num_layers=4, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16, tied_embeddings=True,
)  # fmt: skip
SPARSE = ModelSpec(
    name="sparse", family="mixtral", num_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=24, vocab_size=64, sequence_length=16, num_experts=4, experts_per_token=2,
)  # fmt: skip
MODELS = {"dense": DENSE, "sparse": SPARSE}
WORKLOAD = Workload(global_batch_size=8, sequence_length=16, learning_rate=1e-2)
STEPS, FURTHER = 2, 3
Knobs = dict[str, Any]
OF_DENSE: tuple[Knobs, ...] = (
    {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "sequence_parallel": True}, {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"},
    {"zero_stage": 1, "offload_optimizer": "cpu", "offload_ratio": 0.5, "reduce_bucket_size": 300},
    {"zero_stage": 3, "context_parallel_size": 2}, {"zero_stage": 1, "overlap_param_gather": True},
)  # fmt: skip
OF_SPARSE: tuple[Knobs, ...] = (
    {"zero_stage": 1}, {"zero_stage": 3}, {"expert_parallel_size": 2, "zero_stage": 1}, {"expert_parallel_size": 2},
    {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2},
)  # fmt: skip
ON_FOUR: tuple[Knobs, ...] = (
    {"zero_stage": 3}, {"zero_stage": 3, "hsdp_shard_size": 2}, {"tensor_parallel_size": 2, "zero_stage": 1},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "zero_stage": 1},
    {"pipeline_parallel_size": 4},
)  # fmt: skip


def built(rank: int, ranks: int, model: str, knobs: Knobs) -> NativeSession:
    config = TrialConfig(precision="fp64", micro_batch_size=1).replace(knobs)
    context = RankContext(rank=rank, world_size=ranks, device=torch.device("cpu"))
    return NativeEngine().build(context, MODELS[model], config, WORKLOAD)


def trained(session: NativeSession, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        session.prepare(step)
        loss = session.train_step().loss
        losses.append(float("nan") if loss is None else loss)
    return losses


def carried(rank: int, model: str, before: Knobs, after: Knobs, folder: str) -> dict[str, Any]:
    """Train, save, go on; load under the other layout, save again, go on."""
    ranks, place = dist.get_world_size(), Path(folder)
    one = built(rank, ranks, model, before)
    trained(one, 0, STEPS)
    saved = one.save_checkpoint(place / "one")
    went_on = trained(one, STEPS, FURTHER)
    one.close()
    two = built(rank, ranks, model, after)
    seconds = two.load_checkpoint(place / "one")
    two.save_checkpoint(place / "two")
    again = trained(two, STEPS, FURTHER)
    two.close()
    return {"bytes": bytes_of(saved), "seconds": saved.seconds, "load": seconds, "losses": (went_on, again)}


def timed(rank: int, knobs: Knobs, folder: str) -> CheckpointTimes | None:
    """What a trial measures."""
    session = built(rank, dist.get_world_size(), "dense", knobs)
    trained(session, 0, 1)
    found = session.time_checkpoint(Path(folder))
    losses = trained(session, 1, 1)
    session.close()
    assert losses
    return found


def refused(rank: int, knobs: Knobs, damage: str, folder: str) -> str:
    """The message of a checkpoint that cannot be loaded, or saved."""
    place, ranks = Path(folder) / "one", dist.get_world_size()
    session = built(rank, ranks, "dense", {"zero_stage": 1})
    session.save_checkpoint(place)
    session.close()
    if rank == 0 and damage == "cut":
        for file in place.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    if rank == 0 and damage == "metadata":
        (place / ".metadata").write_bytes(b"damaged")
    dist.barrier()
    other = built(rank, ranks, "sparse" if damage == "model" else "dense", knobs)
    try:
        other.load_checkpoint(Path(folder) / "none" if damage == "missing" else place)
    except (CheckpointError, EngineRefusalError) as error:
        return str(error)
    finally:
        other.close()
    return "loaded"


def task(rank: int, asked: tuple[str, tuple[Any, ...]]) -> Any:
    what, arguments = asked
    return {"carried": carried, "refused": refused, "timed": timed}[what](rank, *arguments)


@pytest.fixture(scope="module")
def gang(forked_ranks: None) -> Iterator[Any]:
    with Gang(2, task) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four(forked_ranks: None) -> Iterator[Any]:
    with Gang(4, task) as ranks:
        yield ranks


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        dcp_to_torch_save(folder, Path(temporary) / "whole.pt")
        found: dict[str, torch.Tensor] = torch.load(Path(temporary) / "whole.pt", weights_only=True)
    return found


def pairs() -> list[tuple[str, Knobs, Knobs]]:
    """Every layout of a model, after every other one; 50 or more, in an order that mixes them."""
    found = [
        (model, before, after)
        for model, layouts in (("dense", OF_DENSE), ("sparse", OF_SPARSE))
        for before, after in itertools.permutations(layouts, 2)
    ]
    random.Random(0).shuffle(found)
    return found


def check(answers: list[dict[str, Any]], model: str, folder: Path) -> None:
    one, two = whole(folder / "one"), whole(folder / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    spec = MODELS[model]
    weights = [value for name, value in one.items() if name.startswith("model.")]
    assert sum(value.numel() for value in weights) == spec.parameter_count
    assert one["optimizer.steps"].item() == STEPS
    for answer in answers:
        assert answer["bytes"] == sum(value.nbytes for value in one.values())  # every state once
        assert answer["seconds"] > 0 and answer["load"] > 0
    before, after = ([loss for answer in answers for loss in answer["losses"][half] if loss == loss] for half in (0, 1))
    assert before and after
    # Ranks without the last stage report none, and others the loss of their own samples.
    means = [torch.tensor(losses, dtype=torch.float64).view(-1, FURTHER).mean(0) for losses in (before, after)]
    assert torch.allclose(means[0], means[1], rtol=0, atol=1e-9), (before, after)


@pytest.mark.prove
@pytest.mark.parametrize(("model", "before", "after"), sampled(pairs()[:70], 71), ids=str)
def test_what_one_layout_saves_another_loads(gang: Any, tmp_path: Path, model: str, before: Knobs, after: Knobs) -> None:
    check(gang.run(("carried", (model, before, after, str(tmp_path)))), model, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(ON_FOUR, 2))[::3], ids=str)
def test_on_four_ranks(four: Any, tmp_path: Path, before: Knobs, after: Knobs) -> None:
    check(four.run(("carried", ("dense", before, after, str(tmp_path)))), "dense", tmp_path)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("knobs", "damage", "message"),
    [
        ({"zero_stage": 3}, "missing", "none: is not a checkpoint, .metadata is missing; name a folder that a trial has saved"),
        ({"zero_stage": 3}, "cut", "one: cannot be loaded ("),
        ({"zero_stage": 3}, "metadata", "one: cannot be loaded ("),
        ({"zero_stage": 1}, "model", "one: cannot be loaded (ValueError: model."),
        (
            {"optimizer": "sgd"},
            "",
            "checkpoint-optimizer: checkpoints hold the states of adamw, not of sgd; use ",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_one_line(gang: Any, tmp_path: Path, knobs: Knobs, damage: str, message: str) -> None:
    for said in gang.run(("refused", (knobs, damage, str(tmp_path)))):
        assert message in said and "\n" not in said


@pytest.mark.prove
def test_a_trial_times_a_checkpoint_and_leaves_nothing(gang: Any, tmp_path: Path) -> None:
    for found in gang.run(("timed", ({"zero_stage": 2}, str(tmp_path)))):
        # fp64: master and two moments of 8 bytes, and the counter of steps.
        assert found.bytes == DENSE.parameter_count * 3 * 8 + 4
        assert found.save_seconds > 0 and found.load_seconds > 0
    assert list(tmp_path.iterdir()) == []
    assert gang.run(("timed", ({"optimizer": "sgd"}, str(tmp_path)))) == [None, None]


@pytest.mark.parametrize(("start", "count"), [(0, 12), (0, 3), (1, 2), (2, 9), (3, 8), (5, 1), (4, 4)])
def test_rectangles_cover_a_range_of_rows(start: int, count: int) -> None:
    whole_tensor = torch.arange(6 * 8).view(6, 8)
    part = whole_tensor[2:5, 4:8].reshape(-1)  # three rows of four
    found = torch.full((6, 8), -1)
    pieces = list(rectangles("x", part[start : start + count], start, (3, 4), (6, 8), (2, 4)))
    assert len(pieces) <= 3
    for piece in pieces:
        row, column = piece.offsets
        rows, columns = piece.values.shape
        assert (found[row : row + rows, column : column + columns] == -1).all()
        found[row : row + rows, column : column + columns] = piece.values
    written = found[found != -1]
    assert torch.equal(written, part[start : start + count].sort().values)
    assert torch.equal(found[found != -1], whole_tensor[found != -1])
