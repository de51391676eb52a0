"""Takes the pictures of docs/screenshots: the page's main states, of jobs whose trials are answered from a table.

python -m tests.page.screenshots [--out docs/screenshots] [--png FOLDER]

Every state of a job is taken on a desktop and a phone, in light and dark: STATE-DESKTOP-LIGHT.webp and so on.
"""

import argparse
import base64
import itertools
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from autotune.client import Client
from tests.page.conftest import BROWSERS, DESKTOP, PATIENCE, PHONE
from tests.page.place import LARGE, SUBMITTED, Place

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


def in_every_form(name: str, path: str, before: Callable[[Page], object] = lambda page: None) -> list[Shot]:
    """A view on a desktop and on a phone, in light and in dark."""
    return [
        Shot(name=f"{name}-{device}-{scheme}", path=path, viewport=viewport, scheme=scheme, before=before)
        for (device, viewport), scheme in itertools.product({"desktop": DESKTOP, "phone": PHONE}.items(), ("light", "dark"))
    ]


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
    expect(page.get_by_text(re.compile(r"^([6-9]|\d\d+) of 200 trials$"))).to_be_visible()


def shows(name: str) -> Callable[[Page], object]:
    """Waits for a region."""
    return lambda page: expect(page.get_by_role("region", name=name)).to_be_visible()


def take(browser: Browser, place: Place, shot: Shot, folders: Mapping[str, Path]) -> None:
    context = browser.new_context(viewport=shot.viewport, color_scheme=shot.scheme, reduced_motion="reduce", base_url=place.url)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"/{shot.path}")
    expect(page.locator("main h1")).to_be_visible()
    shot.before(page)
    if page.locator("[data-figure=throughput_memory]").count():
        page.locator("[data-figure=throughput_memory]").first.scroll_into_view_if_needed()  # it is drawn when it is near
        expect(page.locator("[data-figure=throughput_memory] canvas").first).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(2500)  # plots are drawn when the page has nothing else to do
    session = context.new_cdp_session(page)
    for form, folder in folders.items():
        taken = session.send("Page.captureScreenshot", {"format": form} | ({"quality": 85} if form == "webp" else {}))
        (folder / f"{shot.name}.{form}").write_bytes(base64.b64decode(taken["data"]))
    context.close()


def first_failed(place: Place, job: str) -> int:
    with Client(place.url) as client:
        return next(trial.number for trial in client.trials(job) if trial.outcome == "FAILED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/screenshots"))
    parser.add_argument("--png", type=Path, help="a folder for the same pictures as PNG, which more programs show")
    arguments = parser.parse_args()
    folders = {form: folder for form, folder in {"webp": arguments.out, "png": arguments.png}.items() if folder}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE)
    path = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as work, closing(Place(Path(work))) as place, sync_playwright() as playwright:
        place.serve()
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])

        def all_of(*shots: Shot) -> None:
            for shot in shots:
                take(browser, place, shot, folders)

        all_of(*in_every_form("empty", "#/"))
        alone = place.submit(trials=24)
        all_of(Shot(name="no-worker", path=f"#/jobs/{alone}", viewport=LOW))
        with Client(place.url) as client:
            client.cancel(alone)
        place.work(0.3, (SUBMITTED, LARGE))
        finished = place.finished(trials=24, memory_limit=LIMIT)
        other = place.finished(model="llama-mini", trials=8, strategy="random", seed=3)
        nothing = place.finished(
            trials=4, pins={"zero_stage": [0, 1], "micro_batch_size": 4, "activation_checkpointing": "none"}
        )
        failed = place.finished(trials=4, pins={"zero_stage": 3, "activation_checkpointing": "full"})
        large = place.finished(1800, **LARGE)
        queued = place.submit(runner="local", trials=12)
        trial = first_failed(place, finished)
        for name, job in {"finished": finished, "nothing-fits": nothing, "failed": failed, "queued": queued}.items():
            all_of(*in_every_form(name, f"#/jobs/{job}"))
        all_of(*in_every_form("trials-200", f"#/jobs/{large}"))
        all_of(
            Shot(name="after", path=f"#/jobs/{finished}", viewport=TALL),
            Shot(name="jobs", path="#/", viewport=WIDE),
            Shot(name="form", path="#/new", viewport=WIDE, before=fill_form),
            Shot(name="trial-failed", path=f"#/jobs/{finished}/trials/{trial}", viewport=DESKTOP),
            Shot(
                name="compare",
                path=f"#/compare?jobs={finished},{other}",
                viewport=TALL,
                before=shows("Trials beside each other"),
            ),
            Shot(name="leaderboard", path="#/best", viewport=DESKTOP, before=shows("The fastest answers")),
            Shot(
                name="fit",
                path="#/fit?model=llama-2-7b&cluster=1x4090,2x4GB",
                viewport=WIDE,
                before=shows("Ways of training on 1x4090"),
            ),
            Shot(name="workers", path="#/usage", viewport=DESKTOP),
        )
        running = place.submit(**LARGE)
        all_of(*in_every_form("running", f"#/jobs/{running}", wait_for_trials))
        browser.close()


if __name__ == "__main__":
    main()
