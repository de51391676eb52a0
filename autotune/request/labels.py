"""Labels of a job: a name, tags for searching, and a note. They do not affect its results."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=+-]{0,63}")
MOST_TAGS = 32
LONGEST = {"name": 100, "note": 2000}
"""Maximum characters of each."""


def require_labels(name: object, tags: object, note: object) -> None:
    """Refuse labels that cannot be displayed in lists.

    Raises:
        RequestError: a text is too long or has control characters, or a tag is not one word.
    """
    for field, text in (("name", name), ("note", note)):
        if not isinstance(text, str):
            raise RequestError(field, f"{text!r} is not text", "give text")
        if len(text) > LONGEST[field]:
            raise RequestError(field, f"has {len(text):,} characters", f"give at most {LONGEST[field]:,}")
        # A note may have several lines. A name must not control the terminal, and databases reject lone surrogates.
        if any(unicodedata.category(char) in ("Cc", "Cs") and (field == "name" or char not in "\n\t") for char in text):
            raise RequestError(field, f"{text!r} has control characters", "leave them out")
    if not isinstance(tags, tuple) or len(tags) > MOST_TAGS:
        raise RequestError("tags", f"{tags!r} is not a list of at most {MOST_TAGS} tags", "list words such as smoke")
    for tag in tags:
        if not isinstance(tag, str) or TAG.fullmatch(tag) is None:
            rule = "letters, digits and . _ : / = + -, at most 64 characters"
            raise RequestError("tags", f"{tag!r} is not a tag", f"give one word of {rule}")
        if tags.count(tag) > 1:
            raise RequestError("tags", f"{tag} is given twice", "leave one of them out")


def checked_labels(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Some labels as they are stored. Raises as `require_labels`."""
    labels = {"name": "", "tags": (), "note": "", **changes}
    labels["tags"] = tuple(labels["tags"])
    require_labels(**labels)
    return {name: labels[name] for name in changes}
