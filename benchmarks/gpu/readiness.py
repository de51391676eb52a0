"""Every branch that only CUDA executes: the tests that replace it on the CPU, and what only a GPU can prove.

    python -m benchmarks.gpu.readiness [--markdown docs/results/gpu-readiness.md]

The branches are found in the source of `executor/`. `benchmarks/gpu/branches.py` declares an entry for each function that has
one. A branch without an entry, an entry without a branch or a test that does not exist is printed, and nothing is written.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common.written_page import judge, page_parser
from benchmarks.gpu.branches import BRANCHES, PARTS, Branch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "executor"
DEVICES = ("cuda", "nccl")
"""Strings that name a device or a backend that only CUDA has."""
TOOLS = ("nvidia-smi",)
CALLS = (
    "any_kernel", "compiled_flex", "create_block_mask", "flex_attention", "_scaled_mm", "_accelerator_setAllocatorSettings",
    "has_no_bias", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip
"""Functions of torch whose kernels run only on devices, and our functions that lead to them."""
NAMESPACES = ("torch.cuda", "torch.accelerator", "torch.version")
PACKAGES = ("triton", "liger_kernel", "transformer_engine")
"""Packages whose kernels run only on devices."""

STREAMS = "tests/executor/parallel/test_streams.py"

Place = tuple[str, str]
"""File and function. A method is `Class.method`; the module's own lines have the function `(module)`."""


def branches_of(source: str) -> dict[str, list[str]]:
    """Function -> the expressions in it that only CUDA executes, or that check for CUDA, as written."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for function, node in _walk(ast.parse(source), ()):
        if (mark := _cuda_mark(node)) is not None:
            found[function][mark] = None
    # `torch.cuda.nccl.version` contains `torch.cuda.nccl`, which adds nothing.
    return {name: [one for one in marks if not _is_part(one, marks)] for name, marks in found.items()}


def scan(root: Path) -> dict[Place, list[str]]:
    """(file, function) -> its branches, over all files of `executor/`."""
    files = sorted((root / SOURCE).rglob("*.py"))
    return {
        (str(file.relative_to(root)), function): marks
        for file in files
        for function, marks in branches_of(file.read_text(encoding="utf-8")).items()
    }


def problems(found: Mapping[Place, Sequence[str]], entries: Sequence[Branch], root: Path) -> list[str]:
    """Mismatches, one line each; the line of a missing entry names what to declare."""
    declared = {(entry.file, entry.function): entry for entry in entries}
    mismatches = [
        f"{file}: {function} has no entry in benchmarks/gpu/branches.py; it has {', '.join(found[file, function])}"
        for file, function in found
        if (file, function) not in declared
    ]
    mismatches += [
        f"{file}: {function} has an entry in benchmarks/gpu/branches.py, but no branch"
        for file, function in declared
        if (file, function) not in found
    ]
    if len(declared) < len(entries):
        mismatches.append("benchmarks/gpu/branches.py has two entries of one function")
    for entry in entries:
        where = f"{entry.file}: {entry.function}"
        mismatches += [f"{where}: there is no test {test}" for test in entry.tests if not _exists(test, root)]
        mismatches += [f"{where}: {part!r} is not a part of `make gpu`" for part in entry.parts if part not in PARTS]
    return mismatches


def planted(root: Path) -> tuple[list[str], int]:
    """The faults planted under the stream checker, and the number of configurations in which it finds none."""
    tree = ast.parse((root / STREAMS).read_text(encoding="utf-8"))
    tables = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.List)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    faults, clean = tables["PLANTED"], tables["CLEAN"]
    assert isinstance(faults, ast.Dict) and isinstance(clean, ast.List)
    return [ast.literal_eval(name) for name in faults.keys if name is not None], len(clean.elts)


def page(found: Mapping[Place, Sequence[str]], entries: Sequence[Branch], faults: Sequence[str], clean: int) -> str:
    """The page: one table for each file, and the `planted` faults."""
    declared = {(entry.file, entry.function): entry for entry in entries}
    known = [place for place in found if place in declared]
    without = [place for place in known if not declared[place].tests]
    unproved = [place for place in known if not declared[place].parts]
    files = {file for file, _ in known}
    lines = [
        "# Ready for a GPU", "",
        "Every function of `executor/` that has a branch only CUDA executes, or that checks for CUDA. Written by",
        "`python -m benchmarks.gpu.readiness --markdown docs/results/gpu-readiness.md` from the source and from",
        "`benchmarks/gpu/branches.py`; `tests/benchmarks/test_gpu_readiness.py` fails if they disagree with the tests.", "",
        f"{len(known)} functions in {len(files)} files. {len(known) - len(without)} of them have a substitute in tests,",
        f"{len(without)} have none. No part of `make gpu` reaches {len(unproved)}.", "",
        "A substitute runs the branch itself, or the same code with a stand-in for the device: the stream checker",
        "(`tests/executor/engines/native/stream_checker.py`) for streams, events and collectives,",
        "`benchmarks/common/static_buffers.py` for graphs, packages of the same names for fused kernels, patched answers for",
        "what a driver returns. It shows that the engine calls the right functions in the right order. Only a GPU can prove",
        "what the device then does; the last column names the part of `make gpu` that proves it.", "",
    ]  # fmt: skip
    for part, proves in PARTS.items():
        lines.append(f"- `{part}`: {proves}")
    lines += [
        "", "## The order on streams", "",
        f"`{STREAMS}` trains under the stream checker in {clean} configurations on one",
        f"rank, and on two ranks as a pipeline and with experts; it finds no wrong order. {len(faults)} faults are planted",
        "in the engine's own code: each removes a wait or an ordering. The checker finds each:", "",
        *(f"- {fault}" for fault in faults),
    ]  # fmt: skip
    by_file: dict[str, list[Place]] = defaultdict(list)
    for place in known:
        by_file[place[0]].append(place)
    for file, places in by_file.items():
        lines += ["", f"## {file}", "", "| function | branch | substitute in tests | only a GPU can prove | part |"]
        lines.append("|---|---|---|---|---|")
        for place in places:
            entry = declared[place]
            marks = ", ".join(f"`{mark}`" for mark in found[place])
            tests = "<br>".join(f"`{_short(test)}`" for test in entry.tests) or "none"
            parts = ", ".join(entry.parts) or "none"
            lines.append(f"| `{place[1]}` | {marks} | {tests} | {entry.proves} | {parts} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    given = page_parser(__doc__).parse_args(arguments)
    found = scan(ROOT)
    return judge(page(found, BRANCHES, *planted(ROOT)), problems(found, BRANCHES, ROOT), given.markdown)


def _walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """Every node and its function, without annotations and docstrings. An inner function counts as its outer one."""
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not _is_function(node, names):
            inner = (*names, child.name)
        if child in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield ".".join(inner) or "(module)", child
        yield from _walk(child, inner)


def _is_function(node: ast.AST, names: tuple[str, ...]) -> bool:
    return bool(names) and not isinstance(node, ast.ClassDef)


def _cuda_mark(node: ast.AST) -> str | None:
    """How the node depends on CUDA; None: it does not."""
    if isinstance(node, ast.Compare):
        return ast.unparse(node) if _compares_device(node) else None
    if isinstance(node, ast.Attribute):
        whole = ast.unparse(node)
        special = node.attr in ("is_cuda", *CALLS) or whole in ("torch.Stream", "ProfilerActivity.CUDA")
        return whole if special or any(whole.startswith(f"{space}.") for space in NAMESPACES) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return f"{node.func.id}()" if node.func.id in CALLS else None
    if isinstance(node, ast.keyword):
        return f"{node.arg}={ast.unparse(node.value)}" if node.arg in ("pin_memory", "non_blocking") else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        package, _, rest = node.value.partition(".")
        special = node.value in (*DEVICES, *TOOLS, *CALLS) or (package in PACKAGES and rest.isidentifier())
        return repr(node.value) if special else None
    if isinstance(node, ast.ImportFrom | ast.Import):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        return next((f"import {name}" for name in names if name.split(".")[0] in PACKAGES), None)
    return None


def _compares_device(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    texts = [side.value for side in sides if isinstance(side, ast.Constant)]
    asks_type = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
    return any(text in DEVICES for text in texts) or ("cpu" in texts and asks_type)


def _is_part(mark: str, marks: Mapping[str, None]) -> bool:
    """Whether another mark contains this one."""
    return any(mark != other and mark.strip("'") in other for other in marks)


def _exists(test: str, root: Path) -> bool:
    """Whether a file has a test, `tests/….py::name`."""
    file, _, name = test.partition("::")
    path = root / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def _short(test: str) -> str:
    return test.removeprefix("tests/")


if __name__ == "__main__":
    sys.exit(main())
