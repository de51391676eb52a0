"""`autotune predict`: predict time and memory of one configuration."""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from autotune.cli.fields import import_folders, read_fields
from autotune.cli.status import Status, print_note, write_document, write_export
from autotune.installed import WHOLE, has
from autotune.prediction.planning.conditional import Conditions, predicted
from autotune.prediction.planning.question import Question, cluster_of, described_model, precisions_of, question_about
from autotune.question.question import PlanningFields
from autotune.ray_cluster import asked_cluster
from autotune.request.field_forms import with_loads
from autotune.text.console import Console
from autotune.text.prediction_table import print_estimate
from search_spaces.models.model import without_profile
from search_spaces.plain import to_plain
from storage.private_files import has_default_database

if TYPE_CHECKING:
    from autotune.prediction.planning.calibrated import Borrowed
    from storage.store import Store


def predict_command(
    options: Mapping[str, Any], database: str | None, *, stages: bool, json: bool, export: str | None = None
) -> Status:
    """Resolve the question, predict and print; with `stages` also the memory of every pipeline rank.

    `export`: print the configuration in this format instead.
    """
    question = asked_question(PlanningFields(**read_fields(options)), database)
    answer = predicted(question)
    if export is not None:
        return print_export({**question_document(question, answer.conditions), "plans": [answer.estimate.document()]}, export)
    if json:
        write_document({**question_document(question, answer.conditions), **answer.estimate.document()})
    else:
        print_estimate(question, answer, Console(), stages=stages)
    return Status.OK


def print_export(document: Mapping[str, Any], format_name: str) -> Status:
    """Print the first of a document's plans in the format, and notes on standard error."""
    # Imported on demand: most predictions are not exported.
    from autotune.cli.show import document_of_plan
    from autotune.frameworks.exporters import exporter

    exported = exporter(format_name)(document_of_plan(document, "plan"))
    write_export(exported.text, exported.notes)
    return Status.OK


def asked_question(asked: PlanningFields, database: str | None) -> Question:
    """The question of a command: what its words name on this machine, with what the database and `knowledge` measured.

    A user's module is described in the precisions that the pins allow.
    """
    name, live = asked_cluster(asked.cluster, asked.ray_address)
    cluster = cluster_of(name, asked.ranks, asked.memory_limit, live)
    if asked.host_memory is not None:
        cluster = dataclasses.replace(cluster, host_memory_bytes=asked.host_memory)
    model = described_model(
        asked.model, asked.lora_rank, asked.lora_targets, asked.frozen_bits, sequence_length=asked.sequence_length,
        precisions=precisions_of(cluster, asked.engine, asked.pins), device_kind=cluster.device.kind,
        python_path=import_folders(),
    )  # fmt: skip
    question = question_about(asked, with_loads(model, asked.expert_loads), cluster)
    return with_calibration(question, database, None if asked.knowledge is None else str(asked.knowledge))


def with_calibration(question: Question, database: str | None, knowledge: str | None = None) -> Question:
    """The question with coefficients from the calibrations and trials of the database, and from measurements by others.

    Without a database, or without what reads one, only these count. A database is created only for this machine's CPUs, which
    are measured first.
    """
    if database is None and knowledge is None and not has("sqlalchemy"):
        if has_default_database():
            print_note(f"calibrations of your database are not used: pip install {WHOLE}")
        return question
    has_database = database is not None or has_default_database()
    if not has_database and knowledge is None and question.cluster.device.kind != "cpu":
        return question
    # Imported on demand: what reads a database takes longer to load than an answer without one to compute.
    from autotune.session.calibrate import calibrate_quickly, may_calibrate

    has_database = has_database or may_calibrate(question.cluster)
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
    return learned_from(collected.measurements, store, question.cluster, question.engine, question.model)


def question_document(question: Question, conditions: Conditions) -> Mapping[str, Any]:
    """The question, with the keys of a best-config.json, and what was assumed for its answer."""
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
        "assumed": conditions.document(),
        "origins": to_plain(question.origins),
        "calibration_source": question.calibration_source,
    }
