"""Parse the field `document_lengths` of a request from the command line."""

from pathlib import Path

from autotune.errors import RequestError
from autotune.request.number_text import words_of_lines

_FIELD = "document_lengths"
_REMEDY = "give numbers separated by commas, or the path of a file of numbers"


def read_lengths(text: str | None, folder: Path = Path()) -> tuple[int, ...]:
    """Lengths of the documents in tokens, from numbers separated by commas or from a file of numbers in `folder`; empty if
    nothing is given.

    Raises:
        RequestError: the file cannot be read, or it contains something else than numbers.
    """
    if text is None:
        return ()
    words = [word for line in words_of_lines(_FIELD, text, r"[\d,\s]", folder, _REMEDY) for word in line]
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise RequestError(_FIELD, f"{wrong[:40]!r} in {text} is not a number of tokens", _REMEDY)
    return tuple(map(int, words))
