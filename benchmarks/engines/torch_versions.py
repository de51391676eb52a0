"""The page of supported torch versions and of what each refuses, from the declaration and a run of `make oldest`.

python -m benchmarks.engines.torch_versions --results .venv-oldest/engines.xml [--markdown docs/results/torch-versions.md]
"""

import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.written_page import give, page_parser
from executor.engines.capabilities import NEWER, RULE, release

ROOT = Path(__file__).resolve().parents[2]
HEADER = f"""# Versions of torch

Written by `make oldest`, which runs the tests of the engines, a sample of the parity matrix ([parity](parity.md)) and the dry
run of `make gpu` under the oldest torch that `pyproject.toml` allows. `make test` runs under the newest tested version
(`constraints.txt`); versions between them are expected to behave like the oldest.

Features that are not listed here run under both. Listed ones are refused before anything is built, with the rule `{RULE}` and
one line that names the required version (`executor/engines/capabilities.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a test run."""

    passed: int
    skipped: int
    parity_cases: int
    """Cases of the sample, all within their bounds: the test fails otherwise."""


def oldest() -> str:
    """The oldest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (least,) = (text.removeprefix("torch>=") for text in project["dependencies"] if text.startswith("torch>="))
    return str(least)


def newest() -> str:
    """The version that `make test` runs under."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (version,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    return version


def declaration() -> str:
    """Markdown: each version and what it refuses."""
    lines = ["| torch | refuses | because | instead |", "|---|---|---|---|"]
    for version in (oldest(), newest()):
        refused = [item for item in NEWER if release(version) < release(item.since)]
        lines += [
            f"| {version} | {item.settings} (needs {item.since}) | {item.problem} | {item.remedy} |" for item in refused
        ] or [f"| {version} | nothing | | |"]
    return "\n".join(lines)


def figures_of(results: Path) -> Figures:
    """Read the figures from a file of `pytest --junitxml`."""
    suites = ElementTree.parse(results).getroot().findall("testsuite")
    counts: Mapping[str, int] = {
        name: sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    cases = [
        int(item.get("value", "0")) for item in ElementTree.parse(results).iter("property") if item.get("name") == "parity"
    ]
    return Figures(
        passed=counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        skipped=counts["skipped"],
        parity_cases=sum(cases),
    )


def page(figures: Figures) -> str:
    """The whole page."""
    text = (
        f"Under torch {oldest()}, {figures.passed} tests pass and {figures.skipped} are skipped (they need further packages). "
        f"Among them {figures.parity_cases} cases of the parity matrix, each within its bound. The dry run of `make gpu` ends "
        "without a failing claim."
    )
    return "\n\n".join([HEADER, declaration(), text])


def main() -> None:
    """Print the page, and write it if requested."""
    parser = page_parser(__doc__)
    parser.add_argument("--results", type=Path, required=True, help="What `pytest --junitxml` wrote.")
    given = parser.parse_args()
    give([page(figures_of(given.results))], given.markdown)


if __name__ == "__main__":
    main()
