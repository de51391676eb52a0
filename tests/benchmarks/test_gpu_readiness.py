"""Branches that only CUDA executes are all declared, with tests that exist, and the page says so."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.branches import BRANCHES, Branch
from benchmarks.gpu.readiness import ROOT, branches_of, page, planted, problems, scan

SOURCE = textwrap.dedent(
    '''
    """Says "cuda"."""
    import torch
    from liger_kernel.ops import norm

    LIMIT: torch.cuda.Event | None = None

    class Clock:
        """On "cuda"."""

        def read(self, device: torch.device) -> torch.cuda.Event:
            def inner():
                return torch.cuda.nccl.version()
            if device.type == "cuda":
                inner()
            return offload == "cpu"

    def place(value):
        return value.copy_(value, non_blocking=True) if value.is_cuda else run("nvidia-smi")

    def nothing(kind):
        return kind == "cpu"
    '''
)


def test_branches_are_found_where_they_are_and_nowhere_else() -> None:
    assert branches_of(SOURCE) == {
        "(module)": ["import liger_kernel.ops"],
        "Clock.read": ["torch.cuda.nccl.version", "device.type == 'cuda'"],
        "place": ["value.is_cuda", "non_blocking=True", "'nvidia-smi'"],
    }


@pytest.mark.prove
def test_every_branch_has_an_entry_and_every_test_exists() -> None:
    assert problems(scan(ROOT), BRANCHES, ROOT) == []


@pytest.mark.prove
def test_the_page_is_the_one_that_is_written() -> None:
    written = (ROOT / "docs/results/gpu-readiness.md").read_text(encoding="utf-8")
    assert page(scan(ROOT), BRANCHES, *planted(ROOT)) == written, (
        "run python -m benchmarks.gpu.readiness --markdown docs/results/gpu-readiness.md"
    )


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text("class TestIt:\n    def test_this(self): ...\n")
    entry = Branch(file="executor/a.py", function="place", tests=("tests/test_it.py::test_this",), proves="it", parts=("grid",))
    found = {("executor/a.py", "place"): ["value.is_cuda"]}
    assert problems(found, [entry], tmp_path) == []
    assert problems(found, [], tmp_path) == [
        "executor/a.py: place has no entry in benchmarks/gpu/branches.py; it has value.is_cuda"
    ]
    assert problems({}, [entry], tmp_path) == ["executor/a.py: place has an entry in benchmarks/gpu/branches.py, but no branch"]
    wrong = replace(entry, tests=("tests/test_it.py::test_that", "tests/none.py::test_this"), parts=("all",))
    assert problems(found, [wrong], tmp_path) == [
        "executor/a.py: place: there is no test tests/test_it.py::test_that",
        "executor/a.py: place: there is no test tests/none.py::test_this",
        "executor/a.py: place: 'all' is not a part of `make gpu`",
    ]
    assert problems(found, [entry, entry], tmp_path) == ["benchmarks/gpu/branches.py has two entries of one function"]
