"""Common parts of benchmarks that write a page."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path


def page_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with a benchmark's docstring as its description, and the option `--markdown FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    return parser


def give(lines: Sequence[str], markdown: Path | None) -> None:
    """Print a page, and write it to `markdown` if given."""
    print("\n".join(lines))
    if markdown:
        markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judge(text: str, problems: Sequence[str], markdown: Path | None) -> int:
    """Print a page and its problems; write it only without problems. Return the exit code: 1 if there are problems."""
    print(text)
    for problem in problems:
        print(f"WRONG {problem}")
    if markdown and not problems:
        markdown.write_text(text, encoding="utf-8")
    return 1 if problems else 0


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is text."""
    lines = [f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]
