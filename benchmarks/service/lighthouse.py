"""Lighthouse on every view of the page: accessibility and best practices.

    python -m benchmarks.service.lighthouse --lighthouse node_modules/.bin/lighthouse [--markdown docs/results/lighthouse.md]

Lighthouse is not among the development tools (`npm install lighthouse`). Needs Chromium. Trials are answered from a table.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.page.conftest import BROWSERS
from tests.page.place import Place

CATEGORIES = {"accessibility": "Accessibility", "best-practices": "Best practices"}
VIEWS = {
    "jobs": "#/", "form": "#/new", "finished job": "#/jobs/{finished}", "queued job": "#/jobs/{queued}",
    "trial": "#/jobs/{finished}/trials/0", "compare": "#/compare?jobs={finished},{other}", "best": "#/best",
    "what fits": "#/fit?model=llama-2-7b&cluster=1x4090", "workers": "#/usage", "documentation of the API": "docs",
}  # fmt: skip


def measure(program: Path, url: str, is_desktop: bool) -> dict[str, Any]:
    """What Lighthouse says of a view."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        words = [
            str(program), url, "--output=json", f"--output-path={path}", "--quiet", "--throttling-method=provided",
            f"--only-categories={','.join(CATEGORIES)}", "--max-wait-for-load=30000",
            "--chrome-flags=--headless=new --no-sandbox --disable-gpu", *(["--preset=desktop"] if is_desktop else []),
        ]  # fmt: skip
        browser = next(filter(None, map(shutil.which, BROWSERS)))
        subprocess.run(words, env=os.environ | {"CHROME_PATH": browser}, check=True, timeout=600)
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


def faults(report: dict[str, Any]) -> list[str]:
    """The titles of the audits that the view does not pass."""
    names = {item["id"] for category in CATEGORIES for item in report["categories"][category]["auditRefs"] if item["weight"]}
    audits = (report["audits"][name] for name in sorted(names))
    return [audit["title"] for audit in audits if audit["score"] is not None and audit["score"] < 1]


def page(rows: list[str], version: str) -> str:
    """The page of results."""
    titles = " | ".join(CATEGORIES.values())
    return "\n".join([
        "# Lighthouse on every view", "",
        f"Scores of 100 by Lighthouse {version}, by `python -m benchmarks.service.lighthouse`.",
        "`tests/page/test_accessible.py` runs axe-core, which Lighthouse's accessibility is made of, on more states.", "",
        f"| view | device | {titles} | what is not passed |", "|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lighthouse", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    rows, version = [], ""
    with tempfile.TemporaryDirectory() as work, closing(Place(Path(work))) as place:
        place.serve()
        place.work()
        jobs = {
            "finished": place.finished(600, trials=8),
            "other": place.finished(600, model="llama-mini", trials=2, strategy="random"),
            "queued": place.submit(runner="local"),
        }
        for view, path in VIEWS.items():
            for device in ("desktop", "phone"):
                report = measure(arguments.lighthouse, f"{place.url}/{path.format(**jobs)}", device == "desktop")
                scores = [f"{100 * report['categories'][name]['score']:.0f}" for name in CATEGORIES]
                version = report["lighthouseVersion"]
                rows.append(f"| {view} | {device} | {' | '.join(scores)} | {'; '.join(faults(report)) or 'nothing'} |")
                print(rows[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text(page(rows, version), encoding="utf-8")
    sys.exit(any("nothing" not in row for row in rows))


if __name__ == "__main__":
    main()
