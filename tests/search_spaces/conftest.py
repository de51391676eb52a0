"""Small contexts and spaces that the tests of this package share."""

from collections.abc import Callable
from typing import Any

import pytest

from search_spaces.capability import Capability, SpaceContext
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import Model
from search_spaces.space import SearchSpace
from search_spaces.trial import Workload

Make = Callable[..., SpaceContext]
MakeSpace = Callable[..., SearchSpace]


def _context(
    model: str | Model = "llama-tiny",
    cluster: str | ClusterSpec = "dgx-a100",
    batch: int = 32,
    sequence: int = 128,
    capability: Capability | None = None,
    training_steps: int | None = None,
    documents: tuple[int, ...] = (),
) -> SpaceContext:
    where = resolve_cluster(cluster) if isinstance(cluster, str) else cluster
    return SpaceContext(
        model=resolve_model(model) if isinstance(model, str) else model,
        cluster=where,
        workload=Workload(
            global_batch_size=batch, sequence_length=sequence, training_steps=training_steps, document_lengths=documents
        ),
        world_size=where.world_size,
        capability=capability,
    )


def _space(domains: dict[str, Any], base: Any = None, **context: Any) -> SearchSpace:
    known = _context(**context)
    more = {} if base is None else {"base": base}
    return SearchSpace(
        model=known.model,
        cluster=known.cluster,
        workload=known.workload,
        world_size=known.world_size,
        capability=known.capability,
        domains=domains,
        **more,
    )


@pytest.fixture(scope="session")
def make_context() -> Make:
    """Makes a context: llama-tiny on 8 devices, a batch of 32, sequences of 128, unless told otherwise."""
    return _context


@pytest.fixture(scope="session")
def make_space() -> MakeSpace:
    """Makes a space of the given domains in such a context."""
    return _space
