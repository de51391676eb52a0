"""Names, messages, tracebacks and logs that would like to be more than text."""

import re

import pytest
from playwright.sync_api import Page, expect

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, LogLines, Progress, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import Submission
from storage.store import Store, open_store
from tests.page.conftest import DESKTOP, Open
from tests.page.place import SUBMITTED, Place

pytestmark = pytest.mark.nightly

MARKUP = """<img src=x onerror="window.hit='img'"><svg onload=window.hit='svg'></svg>"""
SCRIPT = """</script><script>window.hit='script'</script>"""
LINK = "javascript:window.hit='link'"
QUOTES = """"'><b onmouseover=window.hit='quote'>`${window.hit=1}`{{7*7}}&lt;i&gt;"""
TURNED = "\u202edesrever\u202c \u2066\u2069\u200f"
LONG = "x" * 10_000
RICH = "{a|rich} %s {value} {b} ${c}"
INJECTED = """() => {
  const [picture, box] = ["img", "div"].map((name) => document.body.appendChild(document.createElement(name)));
  box.innerHTML = '<img src=x onerror="window.hit=1">';
  picture.src = "http://127.0.0.1:9/x.png";
  const inline = document.createElement("script");
  inline.textContent = "window.hit = 2";
  document.body.append(inline);
}"""
"""What somebody would do who had got markup into the page."""
EVERYTHING = " ".join((MARKUP, SCRIPT, LINK, QUOTES, TURNED, RICH))


@pytest.fixture(scope="module")
def hostile(place: Place) -> str:
    """A job with such text in every field that takes text."""
    submission = JobSubmission(**SUBMITTED, runner="local")  # type: ignore[arg-type]
    session = session_of_submission(submission, Settings(database_url=""), 10**6)
    row = request_to_row(session.request)
    row["model"] = row["resolved_model"]["name"] = EVERYTHING
    row["cluster"] = row["resolved_cluster"]["name"] = row["space"] = MARKUP
    row["resolved_cluster"]["device"]["name"] = MARKUP
    with open_store(place.database) as store:
        job, _ = store.queue.submit(row, Submission(submitter=MARKUP[:60]))
        lease = store.jobs.acquire(job.id, current_owner())
        for number, config in enumerate(session.space.enumerate()):
            if number < 12:
                _try(store, lease, config, number)
        store.events.add(lease, MARKUP, {"text": EVERYTHING, MARKUP: LONG})
        store.jobs.release(lease, JobState.FAILED, MARKUP, f"{EVERYTHING} {LONG}")
    return job.id


@pytest.fixture(scope="module")
def hostile_script(place: Place) -> str:
    """A job that tunes a script, whose own knobs have such names and values as far as they may."""
    values = ("<img/src=x/onerror=window.hit=1>", "javascript:window.hit=2", "</script><script>window.hit=3</script>")
    command = {"arguments": ["python", f"{MARKUP}.py", "{a}"], "folder": "/", "script_knobs": {"a": values}}
    request = request_from_fields({"command": command, "ranks": 2, "space": "zero", "runner": "local", "trials": 3})
    session = resolve(request)
    with open_store(place.database) as store:
        job, _ = store.queue.submit(request_to_row(session.request), Submission())
        lease = store.jobs.acquire(job.id, current_owner())
        for number, config in enumerate(session.space.enumerate()):
            if number < 6:
                _try(store, lease, config, number)
        store.jobs.release(lease, JobState.FAILED, "", MARKUP)
    return job.id


def _try(store: Store, lease, config: TrialConfig, number: int) -> None:
    store.trials.add(lease, config, Purpose.SEARCH)
    token = store.attempts.start(lease, number).token
    store.logs.add(
        lease,
        [LogLines(attempt=token, rank=0, text=f"{EVERYTHING}\n\x1b[31m{LONG}\n")],
        [Progress(attempt=token, phase=MARKUP, step=1, message=EVERYTHING)],
    )
    rank = RankMeasurement(
        rank=0,
        host=MARKUP,
        node=f"{QUOTES} {number % 3}",
        peak_memory_bytes=10**6,
        memory_by_tag={MARKUP: 6 * 10**5, LINK: 4 * 10**5},
        tag_peak_bytes={},
        rss_peak_bytes=1,
        cpu_seconds_per_step=0.1,
        collectives=(),
    )
    failed = number % 3 == 2
    rate = 100.0 + number
    told = {"message": EVERYTHING, "traceback": f"{EVERYTHING}\n{LONG}", "cause": QUOTES[:60], "node": MARKUP} if failed else {}
    store.attempts.finish(
        lease,
        TrialResult(
            attempt=token,
            outcome=Outcome.FAILED if failed else Outcome.OK,
            ranks=(rank,),
            peak_memory_bytes=None if failed else 10**6,
            samples_per_second=None if failed else Interval(mean=rate, low=rate - 1, high=rate + 1),
            environment={MARKUP: EVERYTHING},
            **told,
        ),
    )


@pytest.mark.parametrize("path", ["#/jobs/{job}", "#/jobs/{job}/trials/1", "#/compare?jobs={job}", "#/new?from={job}"])
def test_knobs_of_a_script(path: str, hostile_script: str, open_page: Open) -> None:
    page = open_page(path.format(job=hostile_script), expected=("422 (Unprocessable",))
    look_around(page)
    if "new" not in path:
        expect(page.get_by_text("onerror=window.hit=1").or_(page.get_by_text("javascript:window.hit=2")).first).to_be_attached()
    assert_is_text(page)


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        ("#/", MARKUP), ("#/jobs/{job}", MARKUP), ("#/jobs/{job}/trials/2", SCRIPT), ("#/jobs/{job}/trials/0", MARKUP),
        ("#/compare?jobs={job}&trials={job}:1,{job}:2", MARKUP), ("#/new?from={job}", ""),
    ],
)  # fmt: skip
def test_it_is_shown_as_text_and_does_nothing(view: str, shown: str, hostile: str, open_page: Open) -> None:
    page = open_page(view.format(job=hostile), expected=("422 (Unprocessable", "409 (Conflict", "404 (Not Found"))
    look_around(page)
    if shown:
        expect(page.get_by_text(shown).first).to_be_attached()
    assert_is_text(page)


def look_around(page: Page) -> None:
    """Have all that a view can show shown."""
    page.wait_for_load_state("networkidle")
    for figure in page.locator("figure[data-figure]").all():
        figure.scroll_into_view_if_needed()
        expect(figure.get_by_text(re.compile("^Loading"))).to_have_count(0)
        if (button := figure.get_by_role("button", name="As table")).count():
            button.click()
    for summary in page.locator("summary").all():
        summary.click()
    page.wait_for_load_state("networkidle")


def assert_is_text(page: Page) -> None:
    assert page.evaluate("window.hit") is None
    assert page.locator("main :is(img, svg[onload], script, b, i, iframe)").count() == 0
    assert page.locator("a[href^='javascript' i]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= DESKTOP["width"], "a long name breaks the page"


@pytest.mark.parametrize(
    "hash",
    [
        "#/jobs/<img src=x onerror=window.hit=1>", "#/compare?jobs=%3Cscript%3E&trials=a:b,:,1:2", "#/new?from=javascript:1",
        "#/new?from=../..", "#/jobs/%", "#" + "x" * 5000,
    ],
)  # fmt: skip
def test_addresses_that_name_nothing(hash: str, open_page: Open) -> None:
    page = open_page(hash)
    expect(page.locator("main h1")).to_be_visible()
    assert page.evaluate("window.hit") is None


def test_what_is_typed_stays_text(open_page: Open) -> None:
    page = open_page("#/new", expected=("422 (Unprocessable",))
    page.get_by_label(re.compile("^Trials")).fill(MARKUP)
    expect(page.get_by_label(re.compile("^Trials"))).to_have_attribute("aria-invalid", "true")
    page.get_by_label(re.compile("^Memory limit")).fill(SCRIPT)
    expect(page.get_by_label(re.compile("^Memory limit"))).to_have_attribute("aria-invalid", "true")
    assert page.evaluate("window.hit") is None


def test_the_policy_holds(open_page: Open) -> None:
    """No script that is not a file of the server runs: not in the markup, not from elsewhere, not from a text."""
    page = open_page("#/", expected=("Content Security Policy", "violates the following", "127.0.0.1:9/", "404 (Not Found"))
    page.evaluate(INJECTED)
    assert page.evaluate("window.hit") is None
    policy = page.request.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
