"""Takes the pictures of docs/screenshots: the page's main states, of jobs whose trials are answered from a table.

python -m tests.page.screenshots [--out docs/screenshots]
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from autotune.client import Client
from tests.page.conftest import BROWSERS, DESKTOP, PATIENCE, PHONE
from tests.page.place import Place

WIDE, TALL = ViewportSize(width=1280, height=960), ViewportSize(width=1280, height=1500)
LOW = ViewportSize(width=1280, height=560)
LIMIT = 20 * 2**20


@dataclass(frozen=True, kw_only=True)
class Shot:
    """A picture: of which view, after what."""

    name: str
    path: str
    viewport: ViewportSize
    scheme: str = "light"
    before: Callable[[Page], object] = lambda page: None


def fill_form(page: Page) -> None:
    for label, text in {"Ranks": "8", "Global batch size": "512", "Sequence length": "2048", "Trials": "40"}.items():
        page.get_by_label(re.compile(f"^{label}")).fill(text)
    page.get_by_label("Model", exact=True).fill("llama-3-8b")
    page.get_by_label("Cluster", exact=True).fill("dgx-h100")
    page.get_by_label("Space", exact=True).select_option("3d")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    expect(page.get_by_role("complementary")).to_contain_text("Predicted best")
    expect(page.get_by_text(re.compile("^(Counting|Asking)"))).to_have_count(0)


def wait_for_trials(page: Page) -> None:
    expect(page.get_by_text(re.compile(r"^([6-9]|1\d) of 24 trials"))).to_be_visible()


def shots(finished: str, other: str, nothing: str, queued: str, failed: int) -> list[Shot]:
    return [
        Shot(name="jobs", path="#/", viewport=WIDE),
        Shot(name="form", path="#/new", viewport=WIDE, before=fill_form),
        Shot(name="job-queued", path=f"#/jobs/{queued}", viewport=DESKTOP),
        Shot(name="job", path=f"#/jobs/{finished}", viewport=TALL),
        Shot(name="job-phone", path=f"#/jobs/{finished}", viewport=PHONE),
        Shot(name="job-dark-phone", path=f"#/jobs/{finished}", viewport=PHONE, scheme="dark"),
        Shot(name="nothing-fits", path=f"#/jobs/{nothing}", viewport=DESKTOP),
        Shot(name="trial-failed", path=f"#/jobs/{finished}/trials/{failed}", viewport=DESKTOP),
        Shot(name="compare", path=f"#/compare?jobs={finished},{other}", viewport=WIDE, scheme="dark"),
    ]


def take(browser: Browser, place: Place, shot: Shot, folder: Path) -> None:
    context = browser.new_context(viewport=shot.viewport, color_scheme=shot.scheme, reduced_motion="reduce", base_url=place.url)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"/{shot.path}")
    expect(page.locator("main h1")).to_be_visible()
    shot.before(page)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(2500)  # plots are drawn when the page has nothing else to do
    page.screenshot(path=folder / f"{shot.name}.png")
    context.close()


def first_failed(place: Place, job: str) -> int:
    with Client(place.url) as client:
        return next(trial.number for trial in client.trials(job) if trial.outcome == "FAILED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE)
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as work, closing(Place(Path(work))) as place, sync_playwright() as playwright:
        place.serve()
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        take(browser, place, Shot(name="empty", path="#/", viewport=LOW), folder)
        alone = place.submit(trials=24)
        take(browser, place, Shot(name="no-worker", path=f"#/jobs/{alone}", viewport=LOW), folder)
        with Client(place.url) as client:
            client.cancel(alone)
        place.work(seconds_per_trial=0.6)
        finished = place.finished(trials=24, memory_limit=LIMIT)
        other = place.finished(model="llama-mini", trials=8, strategy="random", seed=3)
        nothing = place.finished(
            trials=4, pins={"zero_stage": [0, 1], "micro_batch_size": 4, "activation_checkpointing": "none"}
        )
        running = place.submit(trials=24, strategy="grid", memory_limit=LIMIT)
        take(browser, place, Shot(name="job-live", path=f"#/jobs/{running}", viewport=WIDE, before=wait_for_trials), folder)
        take(browser, place, Shot(name="workers", path="#/usage", viewport=DESKTOP), folder)
        queued = place.submit(runner="local", trials=12)
        for shot in shots(finished, other, nothing, queued, first_failed(place, finished)):
            take(browser, place, shot, folder)
        browser.close()


if __name__ == "__main__":
    main()
