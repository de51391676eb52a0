"""What the tests of each tier notice: the product with one random change at a time.

    python -m benchmarks.correctness.mutants --count 160 --seed 0 --out build/mutants.jsonl --markdown docs/results/mutants.md

Files are drawn by their lines, and in a file an expression of its functions; a change is another operator, number or truth
value, or a condition negated. A change counts as noticed if a test fails.

1. Both tiers run once with a probe at every drawn expression, which writes the tests that reach it, from any process.
2. Each change runs the tests that reach it, the nearest first and at most 70, until one fails: of `make test`, then of
   `make prove`.
   What is reached at import, by whichever test comes first, counts as reached by the tests of its folder.

Probes and changes are written into this tree, and back: run it in a clone with an environment of its own. Changes in `--out`
are not run again. `--share 0/2` runs every second one, for a second clone beside it, which gets a copy of the file of step 1.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.reports.markdown import table
from benchmarks.common.written_page import give, page_parser

PROBE = Path(__file__).with_name("reach_probe.py")
PACKAGES = ("api", "autotune", "executor", "search_spaces", "storage")
MAKEFILE = Path(__file__).parents[2] / "Makefile"
TIERS = dict(re.findall(r'^(test|prove):.*\n\t\$\(PYTEST\) -m "([^"]+)"', MAKEFILE.read_text("utf-8"), re.MULTILINE))
"""Target of the Makefile -> the marks of its tests, the quicker tier first."""
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
PARALLEL = ("--numprocesses", "3", "--dist", "loadfile", "--no-loadscope-reorder")
FEW, MOST, PART_SECONDS, WHOLE_SECONDS = 30, 70, 120, 3600
"""Tests of a change that run before its others, the most that run, and the limits of a part and of a whole tier."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one expression."""

    path: str
    line: int
    start: int
    """Bytes of the file before the expression."""
    before: str
    after: str

    def key(self) -> tuple[str, int, str]:
        """What names it in a file of results."""
        return self.path, self.start, self.after

    def overlaps(self, other: "Mutant") -> bool:
        """Whether they change the same bytes."""
        end, other_end = self.start + len(self.before.encode()), other.start + len(other.before.encode())
        return self.path == other.path and self.start < other_end and other.start < end

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before} -> {self.after}"


def mutants(count: int, seed: int) -> list[Mutant]:
    """Random changes of the product, of which none is within another."""
    files = [path for package in PACKAGES for path in sorted(Path(package).rglob("*.py"))]
    lines = [path.read_text("utf-8").count("\n") for path in files]
    draw = random.Random(seed)
    chosen: dict[Mutant, None] = {}
    while len(chosen) < count:
        (path,) = draw.choices(files, lines)
        if changes := list(_changes(path)):
            change = draw.choice(changes)
            if not any(change.overlaps(other) for other in chosen):
                chosen[change] = None
    return list(chosen)


def _changes(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    methods = [part for kind in tree.body if isinstance(kind, ast.ClassDef) for part in kind.body]
    functions = [part for part in (*tree.body, *methods) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node, after in (changed for function in functions for changed in _expressions(function)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Mutant(path=str(path), line=node.lineno, start=start, before=source[start:end].decode(), after=f"({after})")


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions with their changed text; no annotations, decorators, defaults, patterns and parts of f-strings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "args", "bases", "keywords") and not isinstance(tree, ast.Call):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr | ast.pattern):
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


def reaching_tests(changes: Sequence[Mutant], file: Path) -> list[set[str]]:
    """For each change, the tests and whole modules that reach it, and "" where an import does. `file` keeps the measurement."""
    if not file.exists():
        packages = Path(sysconfig.get_path("purelib"))
        probe, start, log = packages / PROBE.name, packages / "reach_probe.pth", packages / "reached.log"
        log.unlink(missing_ok=True)
        shutil.copy(PROBE, probe)
        start.write_text("import reach_probe\n", "utf-8")
        call = '__import__("builtins").__dict__.get("reached_probe", bool)'
        with _written({change: f"({call}({number}) and 0 or ({change.before}))" for number, change in enumerate(changes)}):
            for tier, marks in TIERS.items():
                print(f"make {tier} with probes fails in:", *_run(marks, [], WHOLE_SECONDS, *PARALLEL), flush=True)
        probe.unlink()
        start.unlink()
        shutil.copy(log, file)
    ray = {str(path) for path in Path("tests").rglob("test_*.py") if "pytest.mark.ray" in path.read_text("utf-8")}
    tests: list[set[str]] = [set() for _ in changes]
    for line in file.read_text("utf-8").splitlines():
        number, inside, current = line.split(" ", 2)
        test, _, phase = current.rpartition(" ")
        test, module = test.partition("[")[0], test.partition("::")[0]
        # What a fixture or a kept process does for its first test, it does for the other tests of its module too.
        shared = phase != "(call)" or inside == "0"
        tests[int(number)] |= (ray if module in ray else {module}) if shared else {test}
    return tests


@contextmanager
def _written(texts: Mapping[Mutant, str]) -> Iterator[None]:
    """The tree with other texts for expressions."""
    whole = {path: Path(path).read_bytes() for path in {change.path for change in texts}}
    try:
        for path, source in whole.items():
            for change in sorted(texts, key=lambda change: -change.start):
                if change.path == path:
                    end = change.start + len(change.before.encode())
                    source = source[: change.start] + texts[change].encode() + source[end:]
            Path(path).write_bytes(source)
        yield
    finally:
        for path, source in whole.items():
            Path(path).write_bytes(source)


def noticed_by(change: Mutant, reaching: set[str]) -> dict[str, str]:
    """The tier that notices the change, with the test; empty: none does."""
    near = nearest(Path(change.path))
    tests = reaching - {""} | (set(near) if "" in reaching else set())
    tests = {name for name in tests if name.partition("::")[0] not in tests - {name}}
    draw = random.Random(str(change))
    order = sorted(tests, key=lambda name: (name.partition("::")[0] not in near, "::" not in name, draw.random()))
    with _written({change: change.after}):
        for tier, marks in TIERS.items():
            for part in (order[:FEW], order[FEW:MOST]):
                if part and (failed := _run(marks, part, PART_SECONDS, "-x")):
                    return {"tier": tier, "test": failed[0]}
    return {}


def nearest(path: Path) -> list[str]:
    """The tests of the file's folder, and those that name its module."""
    folder = Path("tests") / path.parent
    while not folder.is_dir():
        folder = folder.parent
    module = re.compile(rf"\b{re.escape('.'.join(path.with_suffix('').parts))}\b")
    naming = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if module.search(file.read_text("utf-8"))]
    return [*naming, *sorted(str(file) for file in folder.glob("test_*.py") if str(file) not in naming)]


def _run(marks: str, tests: Sequence[str], seconds: int, *options: str) -> list[str]:
    """The tests that fail; empty: all pass, none has these marks, or the run does not end."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, *options, *tests]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode in (0, 5):
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed or [(done.stdout + done.stderr).strip().rsplit("\n", 1)[-1][:200]]


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
        [row["path"], str(row["line"]), f"{row['before']} → {row['after']}", row.get("test", "nothing")]
        for row in rows if row.get("tier") != "test"
    ]  # fmt: skip
    return [
        "# What the tests notice",
        "",
        f"Written by `python -m benchmarks.correctness.mutants`: {len(rows)} random changes of the product, seed {seed}.",
        f"`make test` and `make prove` notice {quick + slow} of them,",
        f"`make test` alone {quick} ({quick / max(quick + slow, 1):.0%}).",
        "",
        table(("package", "make test", "only make prove", "none"), counts, (1, 2, 3)),
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
    parser.add_argument("--share", type=lambda text: tuple(map(int, text.split("/"))), default=(0, 1))
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.out.read_text("utf-8").splitlines()] if arguments.out.exists() else []
    changes = mutants(arguments.count, arguments.seed)
    reaching = reaching_tests(changes, arguments.out.with_suffix(".reached"))
    known = {(row["path"], row["start"], row["after"]) for row in rows}
    share, shares = arguments.share
    left = [pair for pair in list(zip(changes, reaching, strict=True))[share::shares] if pair[0].key() not in known]

    for change, tests in left:
        rows.append(asdict(change) | noticed_by(change, tests))
        print(f"{len(rows)}/{arguments.count} {change}: {rows[-1].get('tier', 'not noticed')}", flush=True)
        with arguments.out.open("a", encoding="utf-8") as out:
            print(json.dumps(rows[-1]), file=out)
    give(page(rows, arguments.seed), arguments.markdown)


if __name__ == "__main__":
    main()
