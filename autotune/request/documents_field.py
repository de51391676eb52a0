"""Parse the field `document_lengths` of a request from the command line."""

import re
from pathlib import Path

from autotune.errors import RequestError

_FIELD = "document_lengths"
_REMEDY = "give numbers separated by commas, or the path of a file of numbers"
_BETWEEN = re.compile(r"[,\s]+")


def read_lengths(text: str | None, folder: Path = Path()) -> tuple[int, ...]:
    """Lengths of the documents in tokens, from numbers separated by commas or from a file of numbers in `folder`; empty if
    nothing is given.

    Raises:
        RequestError: the file cannot be read, or it contains something else than numbers.
    """
    if text is None:
        return ()
    written = text if re.fullmatch(r"[\d,\s]*", text) else _content(folder / text)
    words = [word for word in _BETWEEN.split(written) if word]
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise RequestError(_FIELD, f"{wrong[:40]!r} in {text} is not a number of tokens", _REMEDY)
    if not words:
        raise RequestError(_FIELD, f"{text!r} contains no numbers", _REMEDY)
    return tuple(map(int, words))


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(_FIELD, f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except UnicodeDecodeError as error:
        raise RequestError(_FIELD, f"{path} is not text", _REMEDY) from error
