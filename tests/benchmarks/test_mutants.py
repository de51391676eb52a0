"""Random changes of the product: each is another program, and the file is what it was after its tests."""

import ast
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from benchmarks.correctness.mutants import (
    PACKAGES,
    TIERS,
    Mutant,
    mutants,
    nearest,
    noticed_by,
    page,
    reaching_tests,
)


def test_a_change_is_one_expression_of_the_product() -> None:
    changes = mutants(20, 1)
    assert changes == mutants(20, 1) and len(set(changes)) == 20
    for change in changes:
        source = Path(change.path).read_bytes()
        end = change.start + len(change.before.encode())
        assert source[change.start : end].decode() == change.before and change.path.split("/")[0] in PACKAGES
        changed = source[: change.start] + change.after.encode() + source[end:]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), change


def test_the_file_is_written_back_and_the_tier_is_told(tmp_path: Path) -> None:
    file = tmp_path / "product.py"
    file.write_text("x = 1\n")
    seen = []

    def run(marks: str, tests: Sequence[str], _seconds: int, *_options: str) -> list[str]:
        seen.append((marks, [*tests], file.read_text()))
        return ["tests/test_one.py::test_one"] if marks == TIERS["prove"] else []

    change = Mutant(path=str(file), line=1, start=4, before="1", after="(2)")
    reaching = {"tests/far.py", "tests/far.py::test_of_it", "tests/near.py::test_near"}
    with patch.multiple("benchmarks.correctness.mutants", _run=run, nearest=lambda _: ["tests/near.py"]):
        assert noticed_by(change, reaching) == {"tier": "prove", "test": "tests/test_one.py::test_one"}
        assert noticed_by(change, {""}) == {"tier": "prove", "test": "tests/test_one.py::test_one"}
    near_first, text = ["tests/near.py::test_near", "tests/far.py"], "x = (2)\n"
    near_only = ["tests/near.py"]
    assert seen[:3] == [(TIERS["test"], near_first, text), (TIERS["prove"], near_first, text), (TIERS["test"], near_only, text)]
    assert file.read_text() == "x = 1\n"


def test_what_reaches_an_import_or_a_kept_process_reaches_its_module(tmp_path: Path) -> None:
    measured = tmp_path / "reached"
    measured.write_text(
        "0 1 tests/a.py::test_x[1] (call)\n0 1 \n1 1 tests/a.py::test_x (setup)\n1 0 tests/b.py::test_y (call)\n"
    )
    change = Mutant(path="product.py", line=1, start=4, before="1", after="(2)")
    assert reaching_tests([change, change], measured) == [{"tests/a.py::test_x", ""}, {"tests/a.py", "tests/b.py"}]


def test_the_nearest_tests_are_those_of_the_folder() -> None:
    assert "tests/search_spaces/models/test_huggingface.py" in nearest(Path("search_spaces/models/config_keys.py"))


def test_the_page_tells_what_make_test_misses() -> None:
    row = {"path": "api/app.py", "line": 3, "start": 9, "before": "1", "after": "(2)"}
    lines = page([{**row, "tier": "test", "test": "t"}, {**row, "tier": "prove", "test": "u"}, row], 0)
    assert "`make test` alone 1 (50%)." in lines[4]
    assert lines[-1].count("api/app.py") == 2
