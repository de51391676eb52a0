"""`autotune predict`: predict time and memory of one configuration."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from autotune.cli.fields import import_folders
from autotune.cli.status import Status, print_note, write_document
from autotune.cluster.ray_cluster import asked_cluster
from autotune.installed import WHOLE, has
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question, cluster_of, described_model, precisions_of, question_of
from autotune.request.field_forms import read_lengths, read_loads, with_loads
from autotune.text.console import Console
from autotune.text.prediction_table import print_estimate
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import FactoryModel, ModelSpec, without_profile
from search_spaces.plain import to_plain
from search_spaces.spaces import Pin, parse_pins
from storage.private_files import has_default_database

if TYPE_CHECKING:
    from autotune.prediction.planning.calibrated import Borrowed
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Parsed options of the command."""

    model: str | None
    cluster: str | None
    ray_address: str | None
    ranks: int | None
    pins: tuple[str, ...]
    global_batch_size: int | None
    sequence_length: int | None
    training_steps: int | None
    document_lengths: str | None
    expert_loads: str | None
    memory_limit: int | None
    engine: str
    lora_rank: int | None
    lora_targets: str | None
    frozen_bits: int | None
    knowledge: str | None
    """Measurements to learn from; None: only those of the database."""
    stages: bool
    """Whether every pipeline rank is shown."""
    nvme_path: str | None
    database: str | None
    json: bool


def predict_command(options: PredictOptions) -> Status:
    """Resolve the question, predict and print."""
    name, live = asked_cluster(options.cluster, options.ray_address)
    cluster, pins = cluster_of(name, options.ranks, options.memory_limit, live), parse_pins(options.pins)
    question = question_of(
        with_loads(asked_model(options, cluster, pins), read_loads(options.expert_loads)),
        cluster,
        global_batch_size=options.global_batch_size,
        sequence_length=options.sequence_length,
        training_steps=options.training_steps,
        document_lengths=read_lengths(options.document_lengths),
        engine=options.engine,
        pins=pins,
        nvme_path=options.nvme_path,
    )
    question = with_calibration(question, options.database, options.knowledge)
    estimate = estimates(question, [question.config()])[0]
    if options.json:
        write_document({**question_document(question), **estimate.document()})
    else:
        print_estimate(question, estimate, Console(), stages=options.stages)
    return Status.OK


class ModelOptions(Protocol):
    """The options that name a model."""

    @property
    def model(self) -> str | None: ...
    @property
    def sequence_length(self) -> int | None: ...
    @property
    def engine(self) -> str: ...
    @property
    def lora_rank(self) -> int | None: ...
    @property
    def lora_targets(self) -> str | None: ...
    @property
    def frozen_bits(self) -> int | None: ...


def asked_model(options: ModelOptions, cluster: ClusterSpec, pins: Mapping[str, Pin]) -> ModelSpec | FactoryModel:
    """The model that the options name; a user's module is described in the precisions that the pins allow."""
    return described_model(
        options.model, options.lora_rank, named(options.lora_targets), options.frozen_bits,
        sequence_length=options.sequence_length, precisions=precisions_of(cluster, options.engine, pins),
        python_path=import_folders(),
    )  # fmt: skip


def with_calibration(question: Question, database: str | None, knowledge: str | None = None) -> Question:
    """The question with coefficients from the calibrations and trials of the database, and from measurements by others.

    Without a database, or without what reads one, only these count. A database is created only for this machine's CPUs, which
    are measured first.
    """
    if database is None and knowledge is None and not has("sqlalchemy"):
        if has_default_database():
            print_note(f"calibrations of your database are not used: pip install {WHOLE}")
        return question
    from autotune.session.calibrate import calibrate_quickly, may_calibrate

    has_database = database is not None or has_default_database() or may_calibrate(question.cluster)
    if not has_database and knowledge is None:
        return question
    from autotune.prediction.planning.calibrated import asked_here
    from storage.address import default_database_url
    from storage.store import open_store

    with open_store(database or default_database_url()) if has_database else nullcontext() as store:
        if store is not None:
            calibrate_quickly(store, question.cluster)
        borrowed = None if knowledge is None else _borrowed(question, store, knowledge, database)
        return asked_here(store, question, borrowed)


def _borrowed(question: Question, store: "Store | None", knowledge: str, database: str | None) -> "Borrowed":
    from autotune.knowledge.learning import learned_from
    from autotune.knowledge.read import read_knowledge

    source = read_knowledge(knowledge, database)
    collected = source.measurements()
    for note in (*source.notes, *collected.lines(knowledge)):
        print_note(note)
    return learned_from(collected.measurements, store, question.cluster, question.engine)


def named(text: str | None) -> tuple[str, ...] | None:
    """Split comma-separated names; None: none given."""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def question_document(question: Question) -> Mapping[str, Any]:
    """The question, with the keys of a best-config.json."""
    return {
        "model": {
            "name": question.model.name,
            "parameter_count": question.model.parameter_count,
            "spec": to_plain(without_profile(question.model)),
        },
        "cluster": to_plain(question.cluster),
        "engine": question.engine,
        "world_size": question.cluster.world_size,
        "global_batch_size": question.global_batch_size,
        "sequence_length": question.sequence_length,
        "assumed": list(question.assumed),
        "rests_on": question.rests_on,
    }
