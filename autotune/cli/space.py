"""`autotune space`: count the configurations of a space, and show what each rule refuses and why."""

from dataclasses import dataclass

from rich.table import Table

from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.prediction.planning.question import WORKLOAD, assumptions, default_workload
from autotune.prediction.planning.question_space import layouts_of
from autotune.question.assumption import assumed_document, assumed_lines
from autotune.ray_cluster import asked_cluster
from autotune.request.engines import capability_of
from autotune.session.feasible import require_positions
from autotune.text.console import Console
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob_values import KNOBS, domain_text
from search_spaces.models.huggingface import is_factory_reference, resolve_model
from search_spaces.rules.table import check_config
from search_spaces.space import SearchSpace
from search_spaces.spaces import parse_pins, resolve_space
from search_spaces.trial import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceOptions:
    """Parsed options of the command."""

    model: str | None
    cluster: str | None
    ray_address: str | None
    ranks: int | None
    space: str
    global_batch_size: int | None
    sequence_length: int | None
    memory_limit: int | None
    pins: tuple[str, ...]
    engine: str
    json: bool


def space_command(options: SpaceOptions) -> Status:
    """Print the counts and the reasons of refusals."""
    space = _resolve(options)
    census = space.census()
    examples = {rule: _why(space, rule) for rule in census.refused}
    workload = space.context.workload
    unstated = [name for name in WORKLOAD if getattr(options, name) is None]
    assumed = assumptions(space.model, space.cluster, unstated, {name: getattr(workload, name) for name in WORKLOAD})
    if options.json:
        document = {
            "space": space.name, "hash": space.hash, "domains": {knob: list(values) for knob, values in space.domains.items()},
            "raw": census.raw, "legal": census.legal, "merged": census.merged,
            "refused": {rule: {"count": count, "example": examples[rule]} for rule, count in census.refused.items()},
            "assumed": assumed_document(assumed),
        }  # fmt: skip
        write_document(document)
        return Status.OK if census.legal else Status.NOTHING_FEASIBLE
    for line in assumed_lines(assumed):
        Console().print(line, soft_wrap=True, highlight=False)
    _print(space, examples)
    return Status.OK if census.legal else Status.NOTHING_FEASIBLE


def knobs_command(as_json: bool) -> Status:
    """Print every knob with its domain.

    Raises:
        RequestError: as a document, which a service has.
    """
    if as_json:
        raise RequestError("json", "is not available with --knobs", "leave one of them out, or ask a service: GET /v1/knobs")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("knob", "unit", "domain", "default", "what it does"):
        table.add_column(name, overflow="fold")
    for knob in KNOBS.values():
        table.add_row(knob.name, knob.unit, domain_text(knob), str(knob.default), knob.description)
    Console().print(table)
    return Status.OK


def _resolve(options: SpaceOptions) -> SearchSpace:
    if not options.model:
        raise RequestError("model", "is missing", "give a preset or a config.json")
    if is_factory_reference(options.model):
        raise RequestError(
            "model", "a factory has no known shape, so its space cannot be counted", "use `autotune sweep`, or give a preset"
        )
    model = resolve_model(options.model)
    name, live = asked_cluster(options.cluster, options.ray_address)
    ranks = options.ranks or (2 if name == "local" else None)
    cluster = resolve_cluster(name, ranks, options.memory_limit, live)
    pins = parse_pins(options.pins)
    batch, length = default_workload(model, cluster, pins)
    workload = Workload(global_batch_size=options.global_batch_size or batch, sequence_length=options.sequence_length or length)
    require_positions(model, workload.sequence_length)
    capability = None if options.engine == "any" else capability_of(options.engine)
    layouts = None if options.engine == "any" else layouts_of(options.engine)
    return resolve_space(options.space, model, cluster, workload, capability, pins, layouts=layouts)


def _why(space: SearchSpace, rule: str) -> str:
    example = space.refused_example(rule)
    refusals = [refusal for refusal in check_config(example, space.context) if refusal.rule == rule] if example else []
    return f"{refusals[0].message}; {refusals[0].remedy}" if refusals else ""


def _print(space: SearchSpace, examples: dict[str, str]) -> None:
    console, census = Console(), space.census()
    console.print(
        f"space {space.name} for {space.model.name} ({space.model.parameter_count:,} parameters) on {space.cluster.name} with "
        f"{space.world_size} ranks, global batch {space.context.workload.global_batch_size}",
        soft_wrap=True,
    )
    for knob, values in space.domains.items():
        console.print(f"  {knob}: {', '.join(map(str, values))}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("configurations", justify="right")
    table.add_column("")
    table.add_row(f"{census.raw:,}", "combinations of all values")
    for rule, count in census.refused.items():
        table.add_row(f"- {count:,}", f"refused by {rule}, for example: {examples[rule]}")
    table.add_row(f"- {census.merged:,}", "equivalent to another one: a knob without effect, or a size larger than the model")
    table.add_row(f"{census.legal:,}", "legal", style="bold")
    console.print(table)
