"""The interface is what docs/openapi.json says: clients are made from it."""

from pathlib import Path

from api.reference import document

GOLDEN = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_document_is_up_to_date() -> None:
    """Write it anew with `python -m api.reference > docs/openapi.json`; say in CHANGELOG.md what clients must know."""
    assert GOLDEN.read_text(encoding="utf-8") == document()
