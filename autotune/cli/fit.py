"""`autotune fit`: which ways of fine-tuning a model fit on some cards, with which batch, how fast, and how long they take."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.fields import read_fields
from autotune.cli.options import SweepOfWays, WantedFile
from autotune.cli.predict import asked_question, question_document
from autotune.cli.status import Status, print_note, write_document, write_export
from autotune.errors import RequestError
from autotune.prediction.planning.conditional import Conditions, fitted
from autotune.prediction.planning.consequences import Verdict, verdict_of
from autotune.prediction.planning.estimate import StepEstimate
from autotune.prediction.planning.fit import Fit, Remedy, SetupAnswer, hours_of
from autotune.prediction.planning.largest import Dimension
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.training_setups import question_fields
from autotune.question.question import PlanningFields
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from search_spaces.models.model import ModelSpec
from search_spaces.quantities import number_text
from search_spaces.trial import Interval


def fit_command(
    options: Mapping[str, Any],
    database: str | None,
    *,
    recipe: Path | None,
    file: WantedFile | None,
    sweep: SweepOfWays | None,
    every: bool,
    json: bool,
) -> Status:
    """Resolve the question, find what fits and print it, or write its file, or measure it; with `cards` for each of these
    machines.

    `recipe`: a file that states what the options leave open.
    """
    fields = read_fields(options)
    if recipe is not None:
        # Imported on demand: most questions name no recipe, and its readers take time to load.
        from autotune.recipes.fit_recipe import fields_of_recipe

        cards = fields.get("cards", ())
        cluster = _card_of(cards[0], None)[0] if cards else fields.get("cluster")
        of_recipe, notes = fields_of_recipe(recipe, cluster)
        fields = of_recipe | fields
        for note in notes:
            print_note(f"{recipe.name}: {note}")
    inputs = PlanningFields(**fields)
    if inputs.max is not None and inputs.max not in list(Dimension):
        raise RequestError("max", f"{inputs.max!r} is not known", f"use one of {', '.join(Dimension)}")
    for name, value in (("price", inputs.price), ("epochs", inputs.epochs)):
        if value is not None and not 0 < value < math.inf:
            raise RequestError(name, f"{value:g} is not a positive number", "leave it out, or give one")
    if inputs.cards:
        if file is not None or sweep is not None:
            raise RequestError("cards", "compares machines, and a file or a sweep is for one", "give --on one of them instead")
        return _compare(inputs, database, json=json)
    if file is not None:
        # Imported on demand, as above.
        from autotune.recipes.fit_recipe import with_program

        inputs = with_program(inputs, file.format)
    result, conditions = _answer(inputs, database)
    if sweep is not None:
        from autotune.cli.fit_sweep import measured_fit

        if not json:
            _print_fit(result, conditions, inputs, Console(stderr=True), every=every)
        return measured_fit(result, inputs, sweep, file, database, json=json)
    if file is not None:
        return _write(result, conditions, inputs, file)
    if json:
        write_document({**question_document(result.question, conditions), **result.document()})
    else:
        _print_fit(result, conditions, inputs, Console(), every=every)
    certain = not any(item.changes_verdict for item in conditions.results)
    return Status.NOTHING_FEASIBLE if not result.fitting and certain else Status.OK


def _answer(inputs: PlanningFields, database: str | None) -> tuple[Fit, Conditions]:
    return fitted(asked_question(question_fields(inputs), database), inputs)


def _write(result: Fit, conditions: Conditions, inputs: PlanningFields, file: WantedFile) -> Status:
    # Imported on demand, as above.
    from autotune.recipes.fit_recipe import fastest_file

    answer, exported = fastest_file(result, inputs, file.format, file.dataset)
    way = f"{setup_text(answer)}, {_sizes_text(answer.estimate)}"
    rate = f"  {_rate_text(answer.estimate)}{_hours_text(result, answer.estimate, inputs.price)}"
    _print_lines((*conditions.lines(), way, rate), Console(stderr=True))
    exported = exported.named(file.out)
    write_export(exported.text, exported.notes, file.out)
    return Status.OK


def setup_text(answer: SetupAnswer) -> str:
    """A way in words: `QLoRA on one card, activations recomputed`."""
    setup = answer.setup
    recomputed = ", activations recomputed" if setup.recomputes else ""
    return f"{setup.method.title} {'on' if setup.sharding.name == 'one card' else 'with'} {setup.sharding.name}{recomputed}"


def _print_lines(lines: Iterable[str], console: Console, style: str = "") -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _print_fit(result: Fit, conditions: Conditions, inputs: PlanningFields, console: Console, *, every: bool) -> None:
    _print_lines((*conditions.lines(), _question_text(result.question)), console)
    _print_lines((*_headlines(result, conditions, inputs), ""), console, "bold")
    console.print_table(_table(result, every=every), "host", "longest", "most", "batch", "hours")
    program = "with Transformers, PEFT, bitsandbytes, DeepSpeed and FSDP" if result.question.simple else "with its engine"
    source = (
        f"  predicted {program} by {result.question.calibration_source}; nothing was run. Fits: with a probability of "
        f"{result.probability:.0%} or more; intervals hold nine times in ten{_bands_text(result)}"
    )
    _print_lines((*_that_do_not_fit(result, every=every), source), console, "dim")


def _bands_text(result: Fit) -> str:
    rates = [answer.estimate.samples_per_second for answer in result.fitting]
    if not rates:
        return ""
    low, high = min(rate.low / rate.mean for rate in rates), max(rate.high / rate.mean for rate in rates)
    return f", all rates within {low:.2f} and {high:.2f} times those of the table"


def _headlines(result: Fit, conditions: Conditions, inputs: PlanningFields) -> Iterator[str]:
    fastest, leanest = result.fastest, result.leanest
    assumed = "as assumed, " * any(item.changes_verdict for item in conditions.results)
    if fastest is None or leanest is None:
        nearest = result.nearest
        fitting = {item.assumption.name: item for item in conditions.results if item.changes_verdict}
        alternatives = " or ".join(item.assumption.words(item.value) for item in fitting.values())
        condition = f" as assumed, but with {alternatives} something does" if fitting else ""
        yield f"nothing fits{condition}: the nearest is {setup_text(nearest)}, which {lacks_text(nearest)}"
        remedies = "; or ".join(remedy_text(remedy, value) for remedy, value in result.remedies.items())
        yield f"possible remedies: {remedies}" if remedies else "none of the tried remedies suffices; choose a smaller model"
        return
    mean = fastest.estimate.samples_per_second.mean
    surely = "surely " * any(answer.estimate.samples_per_second.mean > mean for answer in result.fitting)
    yield f"{assumed}{surely}fastest that fits: {setup_text(fastest)}, {_sizes_text(fastest.estimate)}"
    yield f"  {_rate_text(fastest.estimate)}{_hours_text(result, fastest.estimate, inputs.price)}"
    bands = [answer.estimate.samples_per_second.high / answer.estimate.samples_per_second.low for answer in result.fitting]
    rate = fastest.estimate.samples_per_second
    if rate.high / rate.low > 1.05 * min(bands):
        kind = "its interval is wider than others'" if fastest.estimate.is_modelled else "not modelled"
        yield f"  {kind}: {'; '.join(fastest.estimate.doubts)}"
    if leanest is not fastest:
        yield f"least memory: {setup_text(leanest)}, {_sizes_text(leanest.least)}"
        yield f"  {_rate_text(leanest.least)}{_hours_text(result, leanest.least, inputs.price)}"
    if inputs.max is not None:
        yield _largest_text(result, inputs.max)


def _largest_text(result: Fit, dimension: str) -> str:
    """What `--max` asks for."""
    if dimension == Dimension.SEQUENCE_LENGTH:
        longest = max(result.fitting, key=lambda answer: answer.sequence_length or 0)
        return f"longest samples: {longest.sequence_length or 0:,} tokens, {setup_text(longest)}, one at a time"
    if dimension == Dimension.MICRO_BATCH_SIZE:
        most = max(result.fitting, key=lambda answer: answer.micro_batch_size)
        return f"largest micro-batch: {most.micro_batch_size:,} samples, {setup_text(most)}"
    model = result.question.model
    return f"largest model that fits: {model.parameter_count:,} parameters ({model.name})"


def _sizes_text(estimate: StepEstimate) -> str:
    limit, needed, host = estimate.memory_limit_bytes, estimate.fullest.needed, estimate.host_memory_bytes
    main = f" and {bytes_text(host)} of main memory" if host else ""
    size = estimate.config.micro_batch_size
    return (
        f"micro-batch {size}: {bytes_text(needed)} of {bytes_text(limit)} per card{main}, with a probability of "
        f"{_probability_text(estimate.fit_probability)}"
    )


def _probability_text(probability: float) -> str:
    return "over 99 %" if probability > 0.995 else f"{math.floor(100 * probability)} %"


def _rate_text(estimate: StepEstimate) -> str:
    tokens = estimate.token_rate
    return f"{_interval_text(tokens or estimate.samples_per_second)} {'tokens' if tokens else 'samples'}/s"


def _interval_text(interval: Interval) -> str:
    return f"{_number(interval.mean)} [{_number(interval.low)}, {_number(interval.high)}]"


def _hours_text(result: Fit, estimate: StepEstimate, price: float | None) -> str:
    if result.amount is None:
        return ""
    hours = hours_of(result.amount, estimate)
    cost = ""
    if price is not None:
        cards = result.question.cluster.world_size
        factor = price * cards
        at = Interval(mean=hours.mean * factor, low=hours.low * factor, high=hours.high * factor)
        cost = f", price {_interval_text(at)}"
    return f"; {result.amount.text}: {_interval_text(hours)} hours{cost}"


def may_fit(answer: SetupAnswer) -> bool:
    """Whether it neither fits nor does not fit with the required probability."""
    return verdict_of(answer.least) is Verdict.MAY_FIT


def lacks_text(answer: SetupAnswer) -> str:
    """Why a way does not fit: `lacks 3.1 GiB per card`, with the margin for an uncertain prediction."""
    lacks = (("per card", answer.lacks_card), ("of main memory", answer.lacks_host))
    return f"lacks {' and '.join(f'{bytes_text(count)} {resource}' for resource, count in lacks if count)}"


def remedy_text(remedy: Remedy, value: int) -> str:
    """Text of a remedy."""
    match remedy:
        case Remedy.SHORTER_SAMPLES:
            return f"samples of at most {value:,} tokens"
        case Remedy.CARD_MEMORY:
            return f"cards of {bytes_text(value)}"
        case Remedy.HOST_MEMORY:
            return f"{bytes_text(value)} of main memory per node"
        case Remedy.NODES:
            return f"{value} such nodes"


def _question_text(question: Question) -> str:
    model, cluster = question.model, question.cluster
    is_shape = isinstance(model, ModelSpec)
    samples = f"samples of {question.sequence_length:,} tokens" if is_shape else "samples as its factory makes them"
    return (
        f"{model.name} ({model.parameter_count:,} parameters) on {cluster.name}: {cluster.world_size} x "
        f"{bytes_text(cluster.device.memory_bytes)}, {bytes_text(cluster.host_memory_bytes)} of main memory per node, "
        f"{samples}, {question.global_batch_size:,} a step"
    )


def _table(result: Fit, *, every: bool) -> Table:
    """Of all ways, or of the fastest of each method and the leanest; memory of a way that does not fit is at micro-batch 1."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("trained", no_wrap=True)
    table.add_column("how", overflow="fold")
    is_shape = isinstance(result.question.model, ModelSpec)
    rate = "tokens/s" if is_shape else "samples/s"
    for name in ("GiB/card", "host", "batch", "most", *(("longest",) if is_shape else ()), rate):
        table.add_column(name, justify="right", no_wrap=True)
    if result.amount:
        table.add_column("hours", justify="right", no_wrap=True)
    for answer in result.answers if every else _shown(result):
        setup, estimate = answer.setup, answer.estimate if answer.fits else answer.least
        host = estimate.host_memory_bytes
        figures = {
            "batch": str(estimate.config.micro_batch_size),
            "most": f"{answer.micro_batch_size:,}",
            **({"longest": f"{answer.sequence_length or 0:,}"} if is_shape else {}),
            "rate": _number(estimate.tokens_per_second or estimate.samples_per_second.mean),
            **({"hours": _number(hours_of(result.amount, estimate).mean)} if result.amount else {}),
        }
        table.add_row(
            setup.method.name or "as made",
            f"{setup.sharding.name}{', recomputed' if setup.recomputes else ''}",
            f"{estimate.fullest.needed / 2**30:.1f}",
            f"{host / 2**30:.1f}" if host else "-",
            *(figures.values() if answer.fits else ("may fit" if may_fit(answer) else "-", *("-",) * (len(figures) - 1))),
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number_text(value, 3)


def _shown(result: Fit) -> Sequence[SetupAnswer]:
    methods = dict.fromkeys(answer.setup.method.name for answer in result.answers)
    best = [result.best_of(name) for name in methods]
    shown = [answer for answer in best if answer.fits]
    if result.leanest is not None and result.leanest not in shown:
        shown.append(result.leanest)
    return shown or [result.nearest]


def _that_do_not_fit(result: Fit, *, every: bool) -> Iterator[str]:
    """A line for each way that may fit, and for each method of which none may."""
    if every or not result.fitting:
        return
    for name in dict.fromkeys(answer.setup.method.name for answer in result.answers):
        best = result.best_of(name)
        possible = [answer for answer in result.answers if answer.setup.method.name == name and may_fit(answer)]
        for answer in possible:
            rate = _rate_text(answer.least)
            yield f"  may fit ({_probability_text(answer.least.fit_probability)}): {setup_text(answer)}, micro-batch 1, {rate}"
        if not (best.fits or possible):
            yield f"  does not fit: {setup_text(best)} {lacks_text(best)}"


def _compare(inputs: PlanningFields, database: str | None, *, json: bool) -> Status:
    """The fastest way that fits on each of the machines."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in ("on", "fastest that fits"):
        table.add_column(name, overflow="fold")
    for name in ("batch", "per card", "per second", "hours", "price"):
        table.add_column(name, justify="right", no_wrap=True)
    documents, lines, fits = [], [], False
    for text in inputs.cards:
        name, price = _card_of(text, inputs.price)
        result, conditions = _answer(dataclasses.replace(inputs, cluster=name, cards=(), price=price), database)
        documents.append({**question_document(result.question, conditions), **result.document(), "price": price})
        lines += [line for line in conditions.lines() if line not in lines]
        best, fits = result.fastest, fits or bool(result.fitting)
        if best is None:
            table.add_row(name, f"nothing: {setup_text(result.nearest)} {lacks_text(result.nearest)}", *("-",) * 5)
            continue
        hours = None if result.amount is None else hours_of(result.amount, best.estimate)
        cost = None if hours is None or price is None else hours.mean * price * result.question.cluster.world_size
        table.add_row(
            name, setup_text(best) + (f"; {_largest_text(result, inputs.max)}" if inputs.max is not None else ""),
            str(best.estimate.config.micro_batch_size), bytes_text(best.estimate.fullest.needed),
            _interval_text(best.estimate.token_rate or best.estimate.samples_per_second),
            "-" if hours is None else _interval_text(hours), "-" if cost is None else number_text(cost),
        )  # fmt: skip
    if json:
        write_document({"cards": documents})
    else:
        console = Console()
        _print_lines(lines, console)
        console.print_table(table, "price", "hours", "batch", "per card")
    return Status.OK if fits else Status.NOTHING_FEASIBLE


def _card_of(text: str, price: float | None) -> tuple[str, float | None]:
    """`1x4090=0.4`: the machine and the price of a device and hour."""
    name, equals, number = text.partition("=")
    try:
        cost = float(number) if equals else price
    except ValueError:
        cost = math.nan
    if not name or (cost is not None and not 0 < cost < math.inf):
        problem = f"{text!r} is not a machine with a price of a device and hour"
        raise RequestError("cards", problem, "write for example 1x4090=0.4,1xa100=1.9")
    return name, cost
