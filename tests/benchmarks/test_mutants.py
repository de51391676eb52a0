"""Random changes of the product: each is another program, and the file is what it was after its tests."""

import ast
from pathlib import Path
from unittest.mock import patch

from benchmarks.correctness.mutants import PACKAGES, Mutant, mutants, nearest, noticed_by, page


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

    def failing(_marks: str, tests: list[str], _seconds: int) -> str | None:
        seen.append((tests, file.read_text()))
        return "tests/test_one.py::test_one" if len(seen) == 3 else None

    change = Mutant(path=str(file), line=1, start=4, before="1", after="(2)")
    with patch.multiple("benchmarks.correctness.mutants", _failing=failing, nearest=lambda _: ["near"]):
        assert noticed_by(change) == {"tier": "prove", "test": "tests/test_one.py::test_one"}
    assert seen == [(["near"], "x = (2)\n"), ([], "x = (2)\n"), (["near"], "x = (2)\n")]
    assert file.read_text() == "x = 1\n"


def test_the_nearest_tests_are_those_of_the_folder() -> None:
    assert "tests/search_spaces/models/test_huggingface.py" in nearest(Path("search_spaces/models/rope.py"))


def test_the_page_tells_what_make_test_misses() -> None:
    row = {"path": "api/app.py", "line": 3, "start": 9, "before": "1", "after": "(2)"}
    lines = page([{**row, "tier": "test", "test": "t"}, {**row, "tier": "prove", "test": "u"}, row], 0)
    assert "`make test` alone 1 (50%)." in lines[4]
    assert lines[-1].count("api/app.py") == 2
