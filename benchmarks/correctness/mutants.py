"""What the tests of each tier notice: the product with one random change at a time.

    python -m benchmarks.correctness.mutants --count 160 --seed 0 --out build/mutants.jsonl --markdown docs/mutants.md

Each change is written into this tree, and back after its tests: run it in a clone with an environment of its own. Changes that
`--out` has are not run again. Files are drawn by their lines; a change is another operator, number or truth value, or a
condition negated. A change counts as noticed if a test fails or the tests do not end. The tests nearest to the file run first.
"""

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.reports.markdown import table
from benchmarks.common.written_page import give, page_parser

PACKAGES = ("api", "autotune", "executor", "search_spaces", "storage")
TIERS = {"test": "not nightly and not hostile and not prove", "prove": "prove and not nightly and not hostile"}
"""Target of the Makefile -> its tests, the quicker tier first."""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
NEAR_SECONDS, ALL_SECONDS = 400, 1800
"""Limits of the nearest tests and of a whole tier."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one expression."""

    path: str
    line: int
    start: int
    """Bytes of the file before the expression."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutants(count: int, seed: int) -> list[Mutant]:
    """Different random changes of the product."""
    files = [path for package in PACKAGES for path in sorted(Path(package).rglob("*.py"))]
    lines = [path.read_text("utf-8").count("\n") for path in files]
    draw, chosen = random.Random(seed), {}
    while len(chosen) < count:
        (path,) = draw.choices(files, lines)
        if changes := list(_changes(path)):
            change = draw.choice(changes)
            chosen[change] = None
    return list(chosen)


def _changes(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, after in _expressions(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Mutant(path=str(path), line=node.lineno, start=start, before=source[start:end].decode(), after=f"({after})")


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions with their changed text; annotations and decorators are left alone."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(tree, ast.Call):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            if isinstance(node, ast.expr) and (after := _changed(node)) is not None:
                yield node, after
            if isinstance(node, ast.expr) and name == "test" and isinstance(tree, ast.If | ast.IfExp | ast.While):
                yield node, f"not ({ast.unparse(node)})"
            yield from _expressions(node)


def _changed(node: ast.expr) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators) if type(operator) in SWAPPED:
            changed: ast.expr = ast.Compare(left=left, ops=[SWAPPED[type(operator)]()], comparators=comparators)  # type: ignore[list-item]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPPED:
            changed = ast.BinOp(left=left, op=SWAPPED[type(operator)](), right=right)  # type: ignore[arg-type]
        case ast.BoolOp(op=operator, values=values):
            changed = ast.BoolOp(op=SWAPPED[type(operator)](), values=values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            changed = operand
        case ast.Constant(value=bool(value)):
            changed = ast.Constant(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            changed = ast.Constant(value=value + 1)
        case _:
            return None
    return ast.unparse(changed)


def noticed_by(mutant: Mutant) -> dict[str, str]:
    """The tier that notices the change, with the test; empty: none does."""
    path = Path(mutant.path)
    whole = path.read_bytes()
    before, after = mutant.before.encode(), mutant.after.encode()
    path.write_bytes(whole[: mutant.start] + after + whole[mutant.start + len(before) :])
    try:
        for tier, marks in TIERS.items():
            for tests, seconds in ((nearest(path), NEAR_SECONDS), ([], ALL_SECONDS)):
                if (test := _failing(marks, tests, seconds)) is not None:
                    return {"tier": tier, "test": test}
    finally:
        path.write_bytes(whole)
    return {}


def nearest(path: Path) -> list[str]:
    """The tests of the file's folder, and those that name its module."""
    folder = Path("tests") / path.parent
    while not folder.is_dir():
        folder = folder.parent
    module = re.compile(rf"\b{re.escape('.'.join(path.with_suffix('').parts))}\b")
    naming = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if module.search(file.read_text("utf-8"))]
    return [*naming, *sorted(str(file) for file in folder.glob("test_*.py") if str(file) not in naming)]


def _failing(marks: str, tests: list[str], seconds: int) -> str | None:
    """The first test that fails, or why none ended; None: all pass, or none has these marks."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--numprocesses", "3", "--dist", "loadfile", "-m", marks, *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no end in {seconds} s"
    if done.returncode in (0, 5):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else (done.stdout + done.stderr).strip().rsplit("\n", 1)[-1][:200]


def page(rows: list[dict[str, Any]], seed: int) -> list[str]:
    """The lines of the page."""
    quick, slow = (sum(row.get("tier") == tier for row in rows) for tier in TIERS)
    counts = [
        [
            package,
            *(
                str(sum(row["path"].startswith(f"{package}/") and row.get("tier") == tier for row in rows))
                for tier in (*TIERS, None)
            ),
        ]
        for package in PACKAGES
    ]
    missed = [
        [row["path"], str(row["line"]), f"`{row['before']}` → `{row['after']}`", row.get("test", "nothing")]
        for row in rows if row.get("tier") != "test"
    ]  # fmt: skip
    return [
        "# What the tests notice",
        "",
        f"Written by `python -m benchmarks.correctness.mutants`: {len(rows)} random changes of the product, seed {seed}.",
        f"`make test` and `make prove` notice {quick + slow} of them,",
        f"`make test` alone {quick} ({quick / max(quick + slow, 1):.0%}).",
        "",
        table(("package", "`make test`", "only `make prove`", "none"), counts, (1, 2, 3)),
        "",
        "## Not noticed by `make test`",
        "",
        table(("file", "line", "change", "noticed by"), missed, (1,)),
    ]


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text("utf-8").splitlines()] if arguments.out.exists() else []
    known = {(row["path"], row["start"], row["after"]) for row in rows}
    for number, mutant in enumerate(mutants(arguments.count, arguments.seed), 1):
        if (mutant.path, mutant.start, mutant.after) in known:
            continue
        rows.append(asdict(mutant) | noticed_by(mutant))
        print(f"{number}/{arguments.count} {mutant}: {rows[-1].get('tier', 'not noticed')}", flush=True)
        with arguments.out.open("a", encoding="utf-8") as out:
            print(json.dumps(rows[-1]), file=out)
    give(page(rows, arguments.seed), arguments.markdown)


if __name__ == "__main__":
    main()
