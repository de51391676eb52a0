"""docs/architecture.md names only what exists."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_dotted_names_exist() -> None:
    names = set(re.findall(r"`((?:api|autotune|executor|search_spaces|storage)(?:\.\w+)+)`", PAGE))
    assert len(names) > 20
    for name in sorted(names):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            for part in parts[length:]:
                found = getattr(found, part)
            break


def test_packages_are_all_listed() -> None:
    for package in sorted(path.parent.name for path in (ROOT / "autotune").glob("*/__init__.py")):
        assert f"`{package}`" in PAGE, package
