"""The model's modules in a step of the winner: parameters, FLOPs, time, memory of the model states."""

from collections.abc import Sequence

from autotune.explain.explanation.evidence import Evidence
from autotune.explain.figures.figure import Unit, column, table
from autotune.explain.figures.model_parts import ModulePart, parts_of_model
from autotune.explain.figures.source import Source
from autotune.explain.figures.units import flops_text, share_text
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.compute import micro_batch
from autotune.prediction.planning.estimate import Estimate, estimates
from autotune.prediction.planning.question import Question
from autotune.wire.figures import Figure
from search_spaces.models.model import FactoryModel
from search_spaces.training.adapters import configured

NAME, TITLE = "module_tree", "Modules of the model"
STATES = ("parameters", "gradients", "optimizer_state")


def module_tree(source: Source) -> Figure:
    """Computed from the model's shape; `autotune profile` measures the modules on one rank."""
    evidence = source.evidence
    if source.unpredicted:
        return Figure(name=NAME, title=TITLE, summary=f"{source.unpredicted} `autotune profile` measures modules.")
    if evidence is None or evidence.question is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    question = evidence.question
    if isinstance(question.model, FactoryModel):
        summary = "The model is the user's module, whose parts are not predicted one by one. `autotune profile` measures them."
        return Figure(name=NAME, title=TITLE, summary=summary)
    estimate = estimates(question, [evidence.config])[0]
    parts = parts_of_model(configured(question.shape, evidence.config), question.sequence_length)
    seconds = _seconds(evidence, question, parts, estimate)
    bytes_per_parameter = _bytes_per_parameter(estimate, question)
    flops = [part.flops_per_token * question.tokens for part in parts]
    names = _names(parts)
    modules = table(
        "modules",
        "a module, or all that are alike, with what is inside",
        [
            column("name", "path", names),
            column("label", "module", [part.label for part in parts]),
            column("kind", "kind", [part.kind for part in parts]),
            column("depth", "depth", [part.depth for part in parts]),
            column("count", "modules", [part.count for part in parts]),
            column("parameters", "parameters", [part.parameters for part in parts], Unit.ELEMENTS),
            column("flops", "FLOPs of a step", flops, Unit.FLOPS),
            column("share", "share of the FLOPs", [count / flops[0] for count in flops], Unit.SHARE),
            column("seconds", "time of a step", seconds, Unit.SECONDS),
            column("memory_bytes", "states on a rank", [part.parameters * bytes_per_parameter for part in parts], Unit.BYTES),
        ],
    )
    leaves = [place for place, part in enumerate(parts) if _is_leaf(parts, place)]
    largest = max(leaves, key=lambda place: flops[place])
    summary = (
        f"{parts[0].parameters:,} parameters and {flops_text(flops[0])} a step; the largest part, "
        f"{share_text(flops[largest] / flops[0])}, is in {names[largest]}."
    )
    return Figure(
        name=NAME,
        title=TITLE,
        summary=summary,
        tables=(modules,),
        notes=(
            "FLOPs are those of all ranks, forward and backward, without recomputation.",
            "Time is predicted for the ranks that hold a module; inside a layer it is divided in proportion to FLOPs.",
            "States are parameters, gradients and optimizer state, predicted, on a rank that holds the module.",
        ),
    )


def _seconds(evidence: Evidence, question: Question, parts: Sequence[ModulePart], estimate: Estimate) -> list[float]:
    """Seconds for all micro-batches of a rank, scaled down if the measured step is shorter than the predicted one."""
    config = evidence.config
    cases = cases_of(question.model, question.cluster, question.workload, [config], question.engine)
    batch = micro_batch(cases, question.rates)
    scale = min(1.0, evidence.step_seconds / estimate.step_seconds.mean) * float(cases.layouts.accumulation[0])
    whole = {
        "embedding": float(batch.embedding[0]) * scale,
        "layer": float((batch.layer + batch.layer_communication)[0]) * question.shape.num_layers * scale,
        "head": float((batch.head + batch.head_communication)[0]) * scale,
    }
    tops = [part for part in parts if part.depth == 1]
    found = []
    for part in parts:
        if part.kind == "model":
            found.append(sum(whole.values()))
            continue
        alike = [top for top in tops if top.kind == part.kind]
        flops = sum(top.flops_per_token for top in alike)
        # Lookup tables have no FLOPs: their time is divided in proportion to their size.
        share = part.flops_per_token / flops if flops else part.parameters / max(sum(top.parameters for top in alike), 1)
        found.append(whole[part.kind] * share)
    return found


def _bytes_per_parameter(estimate: Estimate, question: Question) -> float:
    """Bytes of model states per parameter, summed over the ranks of one pipeline, each of which holds its part of the model."""
    states = sum(rank.by_tag.get(tag, 0.0) for rank in estimate.ranks for tag in STATES)
    return states / question.model.parameter_count


def _names(parts: Sequence[ModulePart]) -> list[str]:
    """`layers.attention.query`."""
    path: list[str] = []
    found = []
    for part in parts:
        path = [*path[: max(part.depth - 1, 0)], part.label] if part.depth else []
        found.append(".".join(path) or part.label)
    return found


def _is_leaf(parts: Sequence[ModulePart], place: int) -> bool:
    return place + 1 == len(parts) or parts[place + 1].depth <= parts[place].depth
