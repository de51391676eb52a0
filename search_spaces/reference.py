"""The reference page of knobs and rules, generated from the code: docs/knobs.md."""

from collections.abc import Iterable

from search_spaces.knob import Knob, Numerics
from search_spaces.knob_values import KNOBS, domain_text, value_text
from search_spaces.rules.table import RULES
from search_spaces.spaces import CUDA_DEFAULTS

INTRODUCTION = """\
# Knobs

Generated from `search_spaces.knob_values` and `search_spaces.rules.table` by `search_spaces.reference.knobs_page_markdown()`.

Sizes are elements, not bytes. A knob whose condition does not hold stands at its default, and all element sizes from the
model's parameter count on are one value (the default where it is among them, else the count), so that equal behaviour is
one configuration. **Numerics** says what a move does to the results: `exact` the same sums in the same order, `reorders`
equal but for rounding, `changes` other numbers: such a knob is searched only where a space file or a pin names it. **A move
costs**, from cheap to dear: `step`, `rebuild`, `process_group`, `process`.
"""
RULES_INTRODUCTION = """\
These hold for every engine. What an engine refuses beside them is on the page of [engines](engines.md).
"""


def knobs_page_markdown() -> str:
    """The whole page."""
    return f"{INTRODUCTION}\n{knob_table_markdown()}\n## Rules\n\n{RULES_INTRODUCTION}\n{rule_table_markdown()}"


def knob_table_markdown() -> str:
    """A row for each knob, in the order of TrialConfig."""
    head = ("knob", "what it does", "domain", "default", "matters when", "numerics", "a move costs")
    return markdown_table(head, (_knob_row(knob) for knob in KNOBS.values()))


def rule_table_markdown() -> str:
    """A row for each rule, in the order in which refusals are listed."""
    rows = ((f"`{rule.name}`", _knob_names(rule.reads), rule.remedy) for rule in RULES)
    return markdown_table(("rule", "knobs", "remedy"), rows)


def _knob_row(knob: Knob) -> tuple[str, ...]:
    numerics = f"**{knob.numerics}**" if knob.numerics is Numerics.CHANGES else str(knob.numerics)
    condition = knob.condition.name if knob.condition else "always"
    return (
        f"`{knob.name}`",
        knob.description,
        domain_text(knob),
        default_text(knob),
        condition,
        numerics,
        str(knob.applies),
    )


def default_text(knob: Knob) -> str:
    """The default, and that on CUDA devices where it is another there."""
    default = value_text(knob.default)
    return f"{default}; {value_text(CUDA_DEFAULTS[knob.name])} on CUDA" if knob.name in CUDA_DEFAULTS else default


def _knob_names(names: tuple[str, ...]) -> str:
    return "every knob" if len(names) == len(KNOBS) else ", ".join(f"`{name}`" for name in names)


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table, a line for each row."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
