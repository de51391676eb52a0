"""Where the user's folders and ours stand on a rank's import path."""

import subprocess
import sys

import pytest

from executor.runners import rank_main
from executor.runners.transport import RANK_MAIN

PROGRAM = """
import importlib.util, sys, types
theirs = sys.modules["storage"] = types.ModuleType("storage")
spec = importlib.util.spec_from_file_location("rank_main", sys.argv[1])
rank_main = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rank_main)
loop, run_trial = rank_main.load("executor.runners.verdict:classify")
assert loop.__name__ == "RankLoop" and run_trial(ValueError("x")).outcome == "FAILED"
assert sys.modules["storage"] is theirs
print(sorted(name for name in sys.modules if name.partition(".")[0] in rank_main.PACKAGES))
"""


@pytest.mark.prove
def test_our_names_are_forgotten_and_the_users_early_imports_are_not() -> None:
    ran = subprocess.run([sys.executable, "-P", "-c", PROGRAM, RANK_MAIN], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "['storage']", ran.stderr


@pytest.mark.parametrize(
    ("root", "before", "after"),
    [
        ("/src", ["/src", "/lib", "/env/site-packages"], ["/theirs", "/lib", "/env/site-packages", "/src"]),
        ("/env/site-packages", ["/lib", "/env/site-packages"], ["/theirs", "/lib", "/env/site-packages"]),
        ("/src", ["/lib", "/theirs"], ["/theirs", "/lib"]),
    ],
)
def test_the_users_folders_come_first(monkeypatch: pytest.MonkeyPatch, root: str, before: list[str], after: list[str]) -> None:
    monkeypatch.setattr(rank_main, "ROOT", root)
    monkeypatch.setattr(sys, "path", before)
    rank_main.put_first(["/theirs"])
    assert sys.path == after
