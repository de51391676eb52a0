"""`autotune capacity`: the ZeRO stage and offloading that a model needs on a cluster, and the sizes that fit."""

import dataclasses
from dataclasses import dataclass

from autotune.cli.capacity_table import print_capacity
from autotune.cli.documents import write_document
from autotune.cli.predict import asked_model, question_document, with_calibration
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import asked_cluster
from autotune.prediction.planning.capacity import capacity
from autotune.prediction.planning.question import cluster_of, question_of
from autotune.prediction.planning.room import PROBABILITY
from autotune.text.console import Console
from search_spaces.spaces import parse_pins


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOptions:
    """Parsed options of the command."""

    model: str | None
    cluster: str | None
    ray_address: str | None
    ranks: int | None
    sequence_length: int | None
    memory_limit: int | None
    host_memory: int | None
    """Bytes of a node's main memory; None: as in the cluster's description."""
    fit_probability: float | None
    pins: tuple[str, ...]
    engine: str
    lora_rank: int | None
    lora_targets: str | None
    frozen_bits: int | None
    database: str | None
    json: bool


def capacity_command(options: CapacityOptions) -> Status:
    """Resolve the question, compute the capacity and print it."""
    name, live = asked_cluster(options.cluster, options.ray_address)
    cluster = cluster_of(name, options.ranks, options.memory_limit, live)
    if options.host_memory is not None:
        cluster = dataclasses.replace(cluster, host_memory_bytes=options.host_memory)
    pins = parse_pins(options.pins)
    question = question_of(
        asked_model(options, cluster, pins),
        cluster,
        sequence_length=options.sequence_length,
        engine=options.engine,
        pins=pins,
    )
    probability = PROBABILITY if options.fit_probability is None else options.fit_probability
    found = capacity(with_calibration(question, options.database), probability)
    if options.json:
        write_document({**question_document(found.question), **found.document()})
    else:
        print_capacity(found, Console())
    return Status.OK if found.needed else Status.NOTHING_FEASIBLE
