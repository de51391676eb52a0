"""Generate the reference page of knobs and rules, docs/knobs.md."""

from collections.abc import Iterable

from search_spaces.knob import Knob, Numerics
from search_spaces.knob_values import KNOBS, domain_text, value_text
from search_spaces.rules.table import RULES
from search_spaces.spaces import CUDA_DEFAULTS

INTRODUCTION = """\
# Knobs

Generated from `search_spaces.knob_values` and `search_spaces.rules.table` by `search_spaces.reference.knobs_page_markdown()`.

Sizes are in elements, not bytes. A knob whose condition does not hold is set to its default, and all element sizes of at
least the model's parameter count are one value (the default if it is among them, else the count), so that configurations
with equal behaviour are one configuration. **Numerics** is the effect of a change on the results: `exact`: the same sums in
the same order, `reorders`: equal except for rounding, `changes`: different results; such a knob is searched only if a space
file or a pin names it. **A change needs**, from cheap to expensive: `step`, `rebuild`, `process_group`, `process`.
"""


def knobs_page_markdown() -> str:
    """The whole page."""
    head = ("knob", "what it does", "domain", "default", "has an effect when", "numerics", "a change needs")
    knobs = markdown_table(head, (_knob_row(knob) for knob in KNOBS.values()))
    rows = []
    for rule in RULES:
        names = "every knob" if len(rule.reads) == len(KNOBS) else ", ".join(f"`{name}`" for name in rule.reads)
        rows.append((f"`{rule.name}`", names, rule.remedy))
    rules = markdown_table(("rule", "knobs", "remedy"), rows)
    rules_head = "These apply to every engine. [Engines](engines.md) lists what each engine refuses in addition."
    return f"{INTRODUCTION}\n{knobs}\n## Rules\n\n{rules_head}\n\n{rules}"


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
    """The default, and the default on CUDA devices if it differs."""
    default = value_text(knob.default)
    return f"{default}; {value_text(CUDA_DEFAULTS[knob.name])} on CUDA" if knob.name in CUDA_DEFAULTS else default


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table, a line for each row."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
