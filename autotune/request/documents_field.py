"""The field `document_lengths` of a request, as people write it on a command line."""

import re
from pathlib import Path

from autotune.errors import RequestError

_FIELD = "document_lengths"
_REMEDY = "give numbers with commas between them, or the path of a file that holds them"
_BETWEEN = re.compile(r"[,\s]+")


def read_lengths(text: str | None, folder: Path = Path()) -> tuple[int, ...]:
    """Tokens of each document, of numbers with commas between them or of a file of numbers, looked for in `folder`; none
    where nothing is given.

    Raises:
        RequestError: the file cannot be read, or something in it is no number.
    """
    if text is None:
        return ()
    written = text if re.fullmatch(r"[\d,\s]*", text) else _content(folder / text)
    words = [word for word in _BETWEEN.split(written) if word]
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise RequestError(_FIELD, f"{wrong[:40]!r} in {text} is no number of tokens", _REMEDY)
    if not words:
        raise RequestError(_FIELD, f"{text!r} holds no numbers", _REMEDY)
    return tuple(map(int, words))


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(_FIELD, f"{path} cannot be read ({error.strerror})", _REMEDY) from error
    except UnicodeDecodeError as error:
        raise RequestError(_FIELD, f"{path} is no text", _REMEDY) from error
