"""What benchmarks that write a page have in common: where it goes, and when."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def page_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that describes itself by the docstring of a benchmark and knows `--markdown FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    return parser


def give(lines: Sequence[str], markdown: Path | None) -> None:
    """Print a page, and write it where that is asked for."""
    print("\n".join(lines))
    if markdown:
        markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def judge(text: str, problems: Sequence[str], markdown: Path | None) -> int:
    """Print a page and what is wrong with it; write it only where nothing is. The exit code: 1 where something is wrong."""
    print(text)
    for problem in problems:
        print(f"WRONG {problem}")
    if markdown and not problems:
        markdown.write_text(text, encoding="utf-8")
    return 1 if problems else 0
