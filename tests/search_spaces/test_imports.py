"""The package imports the standard library alone."""

import subprocess
import sys
from pathlib import Path

import search_spaces

LIST_FOREIGN = """
import importlib, pathlib, sys
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    importlib.import_module("search_spaces" if file.stem == "__init__" else f"search_spaces.{file.stem}")
known = set(sys.stdlib_module_names) | {"search_spaces"}
print(sorted({name.split(".")[0] for name in sys.modules} - known - {"__main__"}))
"""


def test_the_package_imports_the_standard_library_alone() -> None:
    package = Path(search_spaces.__file__).parent
    told = subprocess.run(
        [sys.executable, "-S", "-c", LIST_FOREIGN, str(package)], cwd=package.parent, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "[]"
