"""`autotune capacity`: the ZeRO stage and offloading that a model needs on a cluster, and the sizes that fit."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from autotune.cli.fields import read_fields
from autotune.cli.predict import asked_question, question_document
from autotune.cli.status import Status, write_document
from autotune.prediction.planning.capacity import Capacity, Remedy, ShardingLevel, ShardingLevelAnswer, Way, capacity
from autotune.prediction.planning.conditional import Conditions, capacity_conditions
from autotune.prediction.planning.consequences import Consequence
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.question.question import PlanningFields
from autotune.text.console import Console
from autotune.text.prediction_table import trained_text
from autotune.text.rows import bytes_text
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig


def capacity_command(options: Mapping[str, Any], database: str | None, *, json: bool) -> Status:
    """Resolve the question, compute the capacity and print it."""
    inputs = PlanningFields(**read_fields(options))
    probability = PROBABILITY if inputs.fit_probability is None else inputs.fit_probability
    question = asked_question(inputs, database)
    result = capacity(question, probability)
    conditions = capacity_conditions(question, result)
    if json:
        write_document({**question_document(result.question, conditions), **result.document()})
    else:
        print_capacity(result, conditions, Console())
    certain = not any(item.changes_verdict for item in conditions.results)
    return Status.NOTHING_FEASIBLE if result.needed is None and certain else Status.OK


def print_capacity(result: Capacity, conditions: Conditions, console: Console) -> None:
    """Print the answers, followed by a table of every level."""

    def print_line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    for line in conditions.lines():
        print_line(line)
    print_line(_question_text(result))
    for line in _answers(result, conditions):
        print_line(line, "bold")
    print_line("")
    console.print(_table(result), highlight=False)
    print_line(
        f"  predicted by {result.question.calibration_source}; nothing was run. Fits: with a probability of "
        f"{result.probability:.0%} or more, and with gradients summed over micro-batches; what is lacking includes the margin "
        "for that probability",
        "dim",
    )


def savings_text(config: TrialConfig) -> str:
    """The memory savings of a configuration: `full recomputation, loss in chunks`."""
    savings = (
        (f"{config.activation_checkpointing} recomputation", config.activation_checkpointing != "none"),
        ("loss in chunks", config.loss_chunk_size > 0),
        ("small buckets", config.reduce_bucket_size < TrialConfig().reduce_bucket_size),
    )
    return ", ".join(text for text, active in savings if active)


def config_text(config: TrialConfig) -> str:
    """A level with its savings: `ZeRO 2, optimizer offloaded, loss in chunks`."""
    level = ShardingLevel(
        zero_stage=config.zero_stage,
        offload_optimizer=config.offload_optimizer != "none",
        offload_param=config.offload_param != "none",
    )
    level_text = f"ZeRO {level.zero_stage}{f', {_offloaded(level)} offloaded' if level.offloaded else ''}"
    return ", ".join(filter(None, (level_text, savings_text(config))))


def lacks_text(answer: ShardingLevelAnswer) -> str:
    """Why a level does not fit: `lacks 3.1 GiB per card`, with the margin for an uncertain prediction."""
    lacks = (("per card", answer.lacks_card), ("of main memory", answer.lacks_host))
    return f"lacks {' and '.join(f'{bytes_text(count)} {resource}' for resource, count in lacks if count)}"


def way_text(alternative: Way) -> str:
    """Text of a remedy."""
    match alternative.remedy:
        case Remedy.SHORTER_SAMPLES:
            return f"samples of at most {alternative.value:,} tokens"
        case Remedy.CARD_MEMORY:
            return f"cards of {bytes_text(alternative.value)}"
        case Remedy.HOST_MEMORY:
            return f"{bytes_text(alternative.value)} of main memory per node"
        case Remedy.NODES:
            return f"{alternative.value} such nodes"
        case Remedy.ADAPTERS:
            return f"low-rank adapters (--lora-rank {alternative.value})"
        case Remedy.FROZEN_BITS:
            return f"base weights in {alternative.value} bits (--frozen-bits {alternative.value})"


def _question_text(result: Capacity) -> str:
    question = result.question
    model, cluster = question.model, question.cluster
    adapters, bits = trained_text(model) or ", all trained", ""
    if isinstance(model, ModelSpec) and model.lora_rank and model.frozen_bits != 16:
        bits = f", base in {model.frozen_bits} bits"
    samples = (
        f"samples of {question.sequence_length:,} tokens"
        if isinstance(model, ModelSpec)
        else "samples as its factory makes them"
    )
    return (
        f"{model.name} ({model.parameter_count:,} parameters{adapters}{bits}) on {cluster.name}: {cluster.world_size} x "
        f"{bytes_text(cluster.device.memory_bytes)}, {bytes_text(cluster.host_memory_bytes)} of main memory per node, "
        f"{question.engine} engine, {samples}"
    )


def _answers(result: Capacity, conditions: Conditions) -> list[str]:
    needed, most, longest = result.needed, result.most_samples, result.longest
    if needed is None:
        nearest = result.nearest
        remedies = "; or ".join(way_text(remedy) for remedy in result.ways_out)
        fitting = {item.assumption.name: item for item in sorted(conditions.results, key=_size) if item.changes_verdict}
        alternatives = " or ".join(item.assumption.words(item.value) for item in fitting.values())
        condition = f" as assumed, but with {alternatives} something does" if fitting else ""
        return [
            f"nothing fits{condition}: the nearest is {config_text(nearest.estimate.config)}, which {lacks_text(nearest)}",
            f"possible remedies: {remedies}" if remedies else "none of the tried remedies suffices; choose a smaller model",
        ]
    limit, host = needed.estimate.memory_limit_bytes, needed.estimate.host_memory_bytes
    assumed = "as assumed, " * any(item.changes_verdict for item in conditions.results)
    requirement = (
        f"{assumed}needs {config_text(needed.estimate.config)}: {bytes_text(needed.needed)} of {bytes_text(limit)} per card, "
        f"{1 - needed.needed / limit:.0%} left free{f', and {bytes_text(host)} of main memory per node' if host else ''}"
    )
    lines = [requirement]
    if most is not None and most.micro_batch is not None:
        samples = "1 sample" if most.micro_batch_size == 1 else f"{most.micro_batch_size:,} samples"
        lines.append(f"largest micro-batch: {samples} per card, with {config_text(most.micro_batch)}")
    if longest is not None and longest.sequence_config is not None:
        size = f"{longest.sequence_length:,} tokens at micro-batch {result.micro_batch_size}"
        lines.append(f"longest samples: {size}, with {config_text(longest.sequence_config)}")
    return lines


def _size(item: Consequence) -> float:
    return item.value if isinstance(item.value, int | float) else 0.0


def _table(result: Capacity) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("ZeRO", justify="right")
    table.add_column("offloaded")
    for name in ("per card", "main memory", "micro-batch", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("with")
    for answer in result.levels:
        host = answer.estimate.host_memory_bytes
        savings = savings_text(answer.estimate.config)
        table.add_row(
            str(answer.level.zero_stage),
            _offloaded(answer.level) or "-",
            bytes_text(answer.needed),
            bytes_text(host) if host else "-",
            f"{answer.micro_batch_size:,}" if answer.micro_batch_size else "-",
            f"{answer.sequence_length:,}" if answer.sequence_length else "-",
            savings if answer.fits else lacks_text(answer),
        )
    return table


def _offloaded(level: ShardingLevel) -> str:
    names = (("optimizer", level.offload_optimizer), ("parameters", level.offload_param))
    return " and ".join(name for name, offloaded in names if offloaded)
