"""The OpenAPI document as /docs shows it: under the page's policy, with nothing from elsewhere."""

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Open


@pytest.mark.nightly
def test_operations_are_shown_and_can_be_tried(open_page: Open) -> None:
    page = open_page("docs")
    operation = page.locator("#operations-jobs-list_jobs")
    expect(operation).to_be_visible()
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(".live-responses-table tr.response .response-col_status")).to_contain_text("200")
