"""Reference tables of engines and knobs: docs/engines.md, docs/knobs.md, `autotune engines`."""

import itertools
import sys
from collections.abc import Iterable

from rich.table import Table

from autotune.cli.status import Status
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.text.console import Console
from search_spaces.capability import Capability, Combination
from search_spaces.knob import Knob, Numerics, Value
from search_spaces.knob_values import KNOBS, domain_text, value_text
from search_spaces.rules.table import RULES
from search_spaces.spaces import CUDA_DEFAULTS
from search_spaces.trial_config import SCRIPT, TrialConfig

Row = tuple[str, ...]


def engines_page_markdown() -> str:
    """The whole page docs/engines.md."""
    introduction = """\
# Engines

Generated from `executor/engines/*/capability.py` by `autotune engines --markdown`.

`native` is the sharded engine of this project and the default; `ddp` and `fsdp2` are torch's engines, for cross-checks, and
`deepspeed` is [DeepSpeed itself](deepspeed.md). Select one with `--engine`. A cell lists the values of the knob that the engine
honours: `any` is every number of its domain (see [knobs](knobs.md)), `only` means that the engine supports only this value. The
rule `engine-honours` refuses other values before any process starts. The rules for all engines are listed with the
[knobs](knobs.md#rules).

`command` runs your training script: it honours the knobs that the script's [placeholders](bring-your-own-script.md) pass on.
"""
    knobs = markdown_table(knob_head(), ((f"`{name}`", *cells) for name, *cells in knob_rows()))
    schedules = markdown_table(schedule_head(), ((f"`{name}`", *cells) for name, *cells in schedule_rows()))
    refused = markdown_table(refused_head(), ((engine, f"`{rule}`", *cells) for engine, rule, *cells in refused_rows()))
    return (
        f"{introduction}\n{knobs}\n## Pipeline schedules\n\n"
        "`yes`: supported with all other honoured values; `unless`: the named rule below refuses it with some of them.\n"
        f"\n{schedules}\n## Combinations that are refused\n\n"
        f"Values that an engine honours individually but refuses in combination, before any process starts.\n\n{refused}"
    )


def knob_head() -> Row:
    """Column names of `knob_rows`."""
    return ("knob", *CAPABILITIES)


def knob_rows() -> list[Row]:
    """One row per knob, one column per engine: the values that it honours."""
    names = [name for name in KNOBS if name != SCRIPT]
    return [(name, *(_honoured_text(engine, name) for engine in CAPABILITIES.values())) for name in names]


def schedule_head() -> Row:
    """Column names of `schedule_rows`."""
    return ("pipeline_schedule", *CAPABILITIES)


def schedule_rows() -> list[Row]:
    """One row per pipeline schedule, one column per engine: yes, no, or the rules that may refuse it."""
    schedules = [str(schedule) for schedule in KNOBS["pipeline_schedule"].choices]
    return [(name, *(_schedule_text(engine, name) for engine in CAPABILITIES.values())) for name in schedules]


def refused_head() -> Row:
    """Column names of `refused_rows`."""
    return ("engine", "rule", "knobs", "why", "remedy")


def refused_rows() -> list[Row]:
    """One row per combination that an engine refuses."""
    return [
        (engine.engine, item.rule, ", ".join(item.reads), item.problem, item.remedy)
        for engine in CAPABILITIES.values()
        for item in engine.combinations
    ]


def _honoured_text(engine: Capability, name: str) -> str:
    knob, honoured = KNOBS[name], engine.honoured(name)
    if honoured is None:
        return ", ".join(map(value_text, knob.choices)) or "any"
    if honoured == (knob.default,):
        return f"{value_text(knob.default)} only"
    return ", ".join(map(value_text, honoured))


def _schedule_text(engine: Capability, schedule: str) -> str:
    if not engine.honours("pipeline_schedule", schedule) or not engine.honours("pipeline_parallel_size", 2):
        return "no"
    refusing = [item.rule for item in engine.combinations if _may_refuse(item, engine, schedule)]
    return f"unless {', '.join(refusing)}" if refusing else "yes"


def _may_refuse(combination: Combination, engine: Capability, schedule: str) -> bool:
    """Whether the combination holds with this schedule for some honoured values of the knobs that it reads."""
    if "pipeline_schedule" not in combination.reads:
        return False
    # 1 and 2 for knobs without choices: 8 ranks are enough for two along each of three dimensions.
    domains: dict[str, tuple[Value, ...]] = {
        name: engine.honoured(name) or KNOBS[name].choices or (1, 2) for name in combination.reads
    }
    domains |= {"pipeline_schedule": (schedule,), "pipeline_parallel_size": (2,)}
    points = (dict(zip(domains, values, strict=True)) for values in itertools.product(*domains.values()))
    return any(combination.holds(TrialConfig().replace(point), 8) for point in points)


NAMES = (knob_head()[0], schedule_head()[0], *refused_head()[:2])
"""Columns whose cells are names, which must not wrap."""


def engines_command(as_markdown: bool) -> Status:
    """Print the tables of docs/engines.md, or that file itself."""
    if as_markdown:
        sys.stdout.write(engines_page_markdown())
        return Status.OK
    console = Console()
    for head, rows in ((knob_head(), knob_rows()), (schedule_head(), schedule_rows())):
        _print(head, rows, console)
        console.print()
    console.print("refused combinations", style="bold")
    _print(refused_head(), refused_rows(), console)
    for engine in CAPABILITIES:
        if refusal := why_unusable(engine):
            console.print(f"\nengine {engine}: {refusal.message}; {refusal.remedy}", soft_wrap=True)
    return Status.OK


def _print(head: Row, rows: list[Row], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=name in NAMES)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def knobs_page_markdown() -> str:
    """The whole page docs/knobs.md."""
    introduction = """\
# Knobs

Generated from `search_spaces.knob_values` and `search_spaces.rules.table` by `autotune.cli.engines.knobs_page_markdown()`.

Sizes are in elements, not bytes. A knob whose condition does not hold is set to its default, and all element sizes of at
least the model's parameter count are one value (the default if it is among them, else the count), so that configurations
with equal behaviour are one configuration. **Numerics** is the effect of a change on the results: `exact`: the same sums in
the same order, `reorders`: equal except for rounding, `changes`: different results; such a knob is searched only if a space
file or a pin names it. **A change needs**, from cheap to expensive: `step`, `rebuild`, `process_group`, `process`.
"""
    head = ("knob", "what it does", "domain", "default", "has an effect when", "numerics", "a change needs")
    rows: list[tuple[str, ...]] = []
    for knob in KNOBS.values():
        numerics = f"**{knob.numerics}**" if knob.numerics is Numerics.CHANGES else str(knob.numerics)
        condition = knob.condition.name if knob.condition else "always"
        texts = (knob.description, domain_text(knob), default_text(knob), condition, numerics, str(knob.applies))
        rows.append((f"`{knob.name}`", *texts))
    knobs, rows = markdown_table(head, rows), []
    for rule in RULES:
        names = "every knob" if len(rule.reads) == len(KNOBS) else ", ".join(f"`{name}`" for name in rule.reads)
        rows.append((f"`{rule.name}`", names, rule.remedy))
    rules = markdown_table(("rule", "knobs", "remedy"), rows)
    rules_head = "These apply to every engine. [Engines](engines.md) lists what each engine refuses in addition."
    return f"{introduction}\n{knobs}\n## Rules\n\n{rules_head}\n\n{rules}"


def default_text(knob: Knob) -> str:
    """The default, and the default on CUDA devices if it differs."""
    default = value_text(knob.default)
    return f"{default}; {value_text(CUDA_DEFAULTS[knob.name])} on CUDA" if knob.name in CUDA_DEFAULTS else default


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table, a line for each row."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
