"""Shorter samples and dropped tokens in the engine: what a step trains on, the same when it runs again, and what it keeps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from executor.batches import kept_tokens, through_kept
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession
from executor.parallel.model import Transformer, build_transformer
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec, Norm, Position
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="scheduled", family="llama", num_layers=5, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, sequence_length=64,
)  # fmt: skip
LEARNED = ModelSpec(
    name="learned", family="gpt2", num_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    ffn_hidden_size=48, vocab_size=64, sequence_length=64, norm=Norm.LAYERNORM, position=Position.LEARNED, gated_mlp=False,
    activation="gelu", tied_embeddings=True,
)  # fmt: skip
RUN = Workload(global_batch_size=2, sequence_length=64, training_steps=10)
CURRICULUM: dict[str, Value] = {"curriculum_start_length": 16, "curriculum_steps": 3}
RANDOM_LTD: dict[str, Value] = {"random_ltd_start_tokens": 16, "random_ltd_steps": 3}
CPU = torch.device("cpu")


@contextmanager
def session(spec: ModelSpec = SPEC, workload: Workload = RUN, **knobs: Value) -> Iterator[ParallelSession]:
    config = TrialConfig(micro_batch_size=2, precision="fp64").replace(knobs)
    made = NativeEngine().build(RankContext(rank=0, world_size=1, device=CPU), spec, config, workload)
    try:
        yield made
    finally:
        made.close()


def losses(made: ParallelSession, steps: int = 4) -> list[float]:
    found = []
    for step in range(steps):
        made.prepare(step)
        report = made.train_step()
        assert report.loss is not None
        found.append(report.loss)
    return found


def test_samples_grow_from_their_beginning() -> None:
    with session(**CURRICULUM) as made:
        seen = []
        for step in range(4):
            made.prepare(step)
            ((batch,), whole) = (made._batches, made.data.global_batch(step))
            assert torch.equal(batch["tokens"], whole["tokens"][:, : batch["tokens"].shape[1]])
            seen.append((batch["tokens"].shape, batch["labels"].shape))
            made.train_step()
        assert seen == [((2, length), (2, length)) for length in (16, 32, 48, 64)]


@pytest.mark.parametrize("spec", [SPEC, LEARNED], ids=("rotary", "learned positions"))
def test_a_shorter_sample_is_trained_on_as_by_a_model_of_that_length(spec: ModelSpec) -> None:
    short = build_transformer(spec, 16, RUN.seed, torch.float64)
    with session(spec, **CURRICULUM) as made:
        batch = {name: value[:, :16] for name, value in made.data.global_batch(0).items()}
        (first,) = losses(made, 1)
    assert first == pytest.approx(short(**batch).item(), abs=1e-12)


def test_a_session_may_stand_at_a_point_of_the_run() -> None:
    here = Workload(global_batch_size=2, sequence_length=64, training_steps=10, schedule_step=1)
    with session(workload=here, **CURRICULUM) as made:
        for step in range(3):
            made.prepare(step)
            assert made._batches[0]["tokens"].shape == (2, 32)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_layer_that_runs_again_sees_the_same_tokens(kind: str) -> None:
    with session(**RANDOM_LTD) as made:
        plain = losses(made)
    with session(**RANDOM_LTD, activation_checkpointing=kind) as made:
        assert losses(made) == pytest.approx(plain, abs=1e-12)
    with session() as made:
        assert losses(made)[:3] != pytest.approx(plain[:3], abs=1e-3)


def test_every_middle_layer_draws_tokens_of_its_own_in_every_step() -> None:
    config = TrialConfig().replace(RANDOM_LTD)
    first, again, second = (kept_tokens(config, RUN, SPEC, step, CPU) for step in (0, 0, 1))
    assert list(first) == ["1", "2", "3"]
    assert all(torch.equal(first[layer], again[layer]) for layer in first)
    assert all(len(kept) == 16 and torch.equal(kept, kept.unique()) for kept in first.values())
    drawn = {tuple(kept.tolist()[:16]) for kept in (*first.values(), *second.values())}
    assert len(drawn) == 6
    assert kept_tokens(config, RUN, SPEC, 3, CPU) == {}


def test_dropped_tokens_bypass_the_layer_and_kept_ones_look_at_kept_ones_alone() -> None:
    model = build_transformer(SPEC, 64, 0, torch.float64)
    kept = torch.tensor([3, 10, 11, 40])
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary = (model.rotary_cosines.double(), model.rotary_sines.double())
    block = model.layers()[1]
    result = through_kept(block, x, rotary, kept)
    others = torch.ones(64, dtype=torch.bool).index_fill(0, kept, False)
    assert torch.equal(result[:, others], x[:, others])
    alone: Tensor = block(x[:, kept], (rotary[0][kept], rotary[1][kept]))
    assert torch.equal(result[:, kept], alone)
    # Rotations are of places: kept tokens that stood together would look at each other otherwise.
    together: Tensor = block(x[:, kept], (rotary[0][:4], rotary[1][:4]))
    assert not torch.allclose(alone, together, atol=1e-6)
    assert not torch.allclose(alone, block(x, rotary)[:, kept], atol=1e-6)


def saved_bytes(run: Callable[[], Tensor], but: set[int]) -> int:
    """Bytes of what autograd keeps, each storage once, parameters and buffers left out."""
    storages: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in but:
            storages[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        kept = run()
    del kept
    return sum(storages.values())


def test_a_middle_layer_keeps_activations_of_the_tokens_that_it_sees() -> None:
    """A layer's bytes are linear in its tokens (attention keeps no scores): those of kept ones, and the places of these."""

    def of(kept: int) -> int:
        model = build_transformer(SPEC, 64, 0, torch.float32)
        if kept < 64:
            model.kept = {str(layer): torch.arange(kept) for layer in (1, 2, 3)}
        known = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        return saved_bytes(lambda: model(tokens, tokens), known)

    places = 8 * 3
    layer = (of(48) - of(16) - places * 32) // (3 * 32)
    assert of(32) == of(16) + (3 * layer + places) * 16
    width, queries = SPEC.hidden_size, SPEC.num_attention_heads * SPEC.head_dim
    least = 2 * 4 * (4 * width + 4 * queries + 3 * SPEC.ffn_hidden_size)
    """Two norms' inputs and results, queries, keys, values and what is mixed, and the three of the MLP's hidden layer."""
    assert least <= layer <= 1.5 * least


def test_transformers_of_other_engines_have_no_schedule() -> None:
    model = build_transformer(SPEC, 64, 0, torch.float32)
    assert isinstance(model, Transformer)
    assert model.kept == {}
    with patch.object(Transformer, "set_length", side_effect=AssertionError), session() as made:
        losses(made, 1)
