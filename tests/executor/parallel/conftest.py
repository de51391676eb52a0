"""Small models gain nothing from a second thread."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_models(one_thread: None) -> None:
    """Of all tests here."""
