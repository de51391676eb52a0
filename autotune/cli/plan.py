"""`autotune plan`: the predicted best configurations of a space, and why."""

from dataclasses import dataclass
from typing import Any

from autotune.cli.documents import write_document
from autotune.cli.plan_table import print_largest, print_plans
from autotune.cli.predict import asked_model, question_document, with_calibration
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import asked_cluster
from autotune.goodput.terms import parse_terms
from autotune.prediction.planning.largest import largest
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import cluster_of, question_of
from autotune.prediction.planning.room import PROBABILITY
from autotune.request.documents_field import read_lengths
from autotune.request.loads_field import read_loads, with_loads
from autotune.text.console import Console
from search_spaces.spaces import parse_pins


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommandOptions:
    """Parsed options of the command."""

    model: str | None
    cluster: str | None
    ray_address: str | None
    ranks: int | None
    space: str
    top: int
    ties: bool
    """Whether configurations that tie with each plan are shown too."""
    simple: str | None
    """The framework whose export expresses every plan without loss; None: any plan."""
    objective: str
    most: str | None
    """The dimension to maximize; None: none."""
    fit_probability: float | None
    share: float | None
    price: float | None
    rate: float | None
    goodput: tuple[str, ...]
    """Texts NAME=VALUE."""
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
    nvme_path: str | None
    database: str | None
    json: bool


def plan_command(options: PlanCommandOptions) -> Status:
    """Resolve the question, rank the configurations and print them."""
    plan_options = PlanOptions(
        objective=options.objective,  # type: ignore[arg-type]  # PlanOptions checks the name
        top=options.top,
        fit_probability=PROBABILITY if options.fit_probability is None else options.fit_probability,
        share=options.share,
        price=options.price,
        rate=options.rate,
        goodput=parse_terms(options.goodput) if options.goodput else None,
    )
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
        space=options.space,
        pins=pins,
        nvme_path=options.nvme_path,
        simple=options.simple,
    )
    question = with_calibration(question, options.database, options.knowledge)
    biggest = largest(question, options.most, plan_options.fit_probability) if options.most else None
    question = biggest.question if biggest else question
    plans = plan(question, plan_options)
    if options.json:
        document: dict[str, Any] = {
            **question_document(question),
            "space": question.space,
            "objective": plan_options.objective.value,
        }
        if biggest:
            document["max"] = {"dimension": biggest.dimension.value, "value": biggest.value, "next": biggest.next}
        write_document(document | plans.document())
        return Status.OK
    console = Console()
    if biggest:
        print_largest(biggest, console)
    print_plans(question, plans, plan_options, console, options.ties)
    return Status.OK
