"""An explanation in Markdown."""

from autotune.explain.explanation.findings import Explanation
from autotune.text.explain_sections import Rows, Section, head_lines, sections_of


def markdown_of(explanation: Explanation) -> str:
    """The whole report."""
    first, *rest = head_lines(explanation)
    parts = [f"# {first}", *(line.strip() for line in rest), *map(_section, sections_of(explanation))]
    return "\n\n".join([*parts, *(f"Note: {note}" for note in explanation.notes)]) + "\n"


def _section(section: Section) -> str:
    content = [_table(item) if isinstance(item, Rows) else _escaped(item.strip()) for item in section.content]
    return "\n\n".join([f"## {section.title}", *content])


def _table(table: Rows) -> str:
    rule = ["---" if column in table.left else "---:" for column in range(len(table.header))]
    lines = [table.header, tuple(rule), *table.rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Escape a cell or a line: a bar would end the cell; underscores inside words need no escape."""
    return text.replace("|", "\\|").replace("\n", " ")
