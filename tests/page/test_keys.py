"""Keys and owners, as in the API."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest
from playwright.sync_api import Page, expect

from storage.store import open_store
from tests.page.conftest import Open
from tests.page.place import Place

REFUSED = ("401 (Unauthorized", "404 (Not Found", "403 (Forbidden")


class Guarded(Place):
    """A service that asks for keys, with those of two people."""

    options = ("--keys", "--share-days", "30")

    def serve(self) -> None:
        with open_store(self.database) as store:
            self.anna, self.ben = (store.keys.create(owner, {"read", "submit"})[1] for owner in ("anna", "ben"))
            self.reader = store.keys.create("anna", {"read"})[1]
        super().serve()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with closing(Guarded(tmp_path_factory.mktemp("guarded"))) as place:
        place.serve()
        yield place


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


@pytest.mark.prove
def test_the_page_asks_for_a_key_and_goes_on_where_it_was(guarded: Guarded, open_page: Open) -> None:
    page = open_page("#/new", at=guarded, expected=REFUSED)
    expect(page).to_have_url(re.compile("#/key$"))
    sign_in(page, "at_wrong")
    expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    sign_in(page, guarded.anna)
    expect(page.locator("main h1")).to_have_text("New job")
    assert guarded.anna not in page.content()
    page.get_by_role("link", name="Sign out").click()
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage])").find(guarded.anna) == -1


@pytest.mark.prove
def test_a_browser_keeps_a_key_until_its_person_signs_out(guarded: Guarded, open_page: Open) -> None:
    page = open_page("#/new", at=guarded, expected=REFUSED)
    sign_in(page, guarded.anna)
    expect(page.locator("main h1")).to_have_text("New job")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("main h1")).to_have_text("New job")


@pytest.mark.prove
def test_a_job_of_somebody_else_is_not_there(guarded: Guarded, open_page: Open) -> None:
    job = guarded.submit(api_key=guarded.anna)
    page = open_page("#/key", at=guarded, expected=REFUSED)
    sign_in(page, guarded.ben)
    expect(page.locator("main h1")).to_have_text("Jobs")
    expect(page.get_by_text(job)).to_have_count(0)
    page.goto(f"/#/jobs/{job}")
    expect(page.locator("main h1")).to_have_text("Not found")
    page.get_by_role("link", name="Sign out").click()
    sign_in(page, guarded.anna)
    expect(page.locator("main h1")).to_have_text("Jobs")
    page.goto(f"/#/jobs/{job}")
    expect(page.locator("main h1")).to_have_text("llama-tiny")


@pytest.mark.prove
def test_a_key_that_only_reads_cannot_submit(guarded: Guarded, open_page: Open) -> None:
    page = open_page("#/new", at=guarded, expected=REFUSED)
    sign_in(page, guarded.reader)
    expect(page.get_by_text("This key may read alone.")).to_be_visible()
    expect(page.get_by_role("button", name="Submit")).to_be_disabled()


@pytest.mark.prove
def test_a_link_opens_its_job_without_a_key_until_it_is_withdrawn(guarded: Guarded, open_page: Open) -> None:
    job = guarded.submit(api_key=guarded.anna)
    page = open_page("#/key", at=guarded, expected=REFUSED)
    sign_in(page, guarded.anna)
    expect(page.locator("main h1")).to_have_text("Jobs")
    page.goto(f"/#/jobs/{job}")
    page.get_by_role("button", name="Share").click()
    dialog = page.get_by_role("dialog", name="Share")
    expect(dialog.get_by_label("For those who may see it", exact=True)).to_have_value(f"{guarded.url}/#/jobs/{job}")
    dialog.get_by_role("button", name="Make a link").click()
    link = dialog.get_by_label("For anybody who has it; shown once", exact=True).input_value()
    expect(dialog.get_by_role("listitem")).to_contain_text("by anna, until")
    stranger = open_page(link.removeprefix(f"{guarded.url}/"), at=guarded, expected=REFUSED)
    expect(stranger.locator("main h1")).to_have_text("llama-tiny")
    stranger.goto("/#/")
    expect(stranger.get_by_text(f"is a link to job {job} only")).to_be_visible()
    dialog.get_by_role("button", name="Withdraw").click()
    expect(dialog.get_by_role("listitem")).to_have_count(0)
    late = open_page(link.removeprefix(f"{guarded.url}/"), at=guarded, expected=REFUSED)
    expect(late).to_have_url(re.compile("#/key$"))
    sign_in(late, guarded.anna)
    expect(late).to_have_url(f"{guarded.url}/#/jobs/{job}")
