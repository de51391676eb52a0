"""`autotune predict`: time and memory of one configuration, before anything is run."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from autotune.cli.prediction_table import print_estimate
from autotune.cli.status import Status
from autotune.prediction.estimate import Estimate, estimates
from autotune.prediction.question import Question, cluster_of, model_of, question_of
from search_spaces.plain import to_plain
from search_spaces.spaces import parse_pins


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """What the command line gave."""

    model: str | None
    cluster: str
    ranks: int | None
    pins: tuple[str, ...]
    global_batch_size: int | None
    sequence_length: int | None
    memory_limit: int | None
    engine: str
    lora_rank: int | None
    lora_targets: str | None
    frozen_bits: int | None
    stages: bool
    """Whether every rank of the pipeline is shown."""
    json: bool


def predict_command(options: PredictOptions) -> Status:
    """Resolve, check, predict."""
    question = question_of(
        model_of(options.model, options.lora_rank, named(options.lora_targets), options.frozen_bits),
        cluster_of(options.cluster, options.ranks, options.memory_limit),
        global_batch_size=options.global_batch_size,
        sequence_length=options.sequence_length,
        engine=options.engine,
        pins=parse_pins(options.pins),
    )
    estimate = estimates(question, [question.config()])[0]
    if options.json:
        sys.stdout.write(json.dumps(prediction_document(question, estimate), indent=2) + "\n")
    else:
        print_estimate(question, estimate, Console(), stages=options.stages)
    return Status.OK


def named(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between them; None: none was given."""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def prediction_document(question: Question, estimate: Estimate) -> dict[str, Any]:
    """The one document of `--json`."""
    return {**asked_document(question), **estimate.document()}


def asked_document(question: Question) -> Mapping[str, Any]:
    """What was asked, by the names of a best-config.json."""
    return {
        "model": {
            "name": question.model.name,
            "parameter_count": question.model.parameter_count,
            "spec": to_plain(question.model),
        },
        "cluster": to_plain(question.cluster),
        "engine": question.engine,
        "world_size": question.cluster.world_size,
        "global_batch_size": question.global_batch_size,
        "sequence_length": question.sequence_length,
    }
