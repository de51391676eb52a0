"""Numbers that the command line takes as text or from a file."""

import re
from pathlib import Path

from autotune.errors import RequestError

_BETWEEN = re.compile(r"[,\s]+")


def words_of_lines(field: str, text: str, characters: str, folder: Path, remedy: str) -> list[list[str]]:
    """The words of each line that has any: of `text` if it consists of `characters` (a regular expression of one of them), else
    of the file in `folder` that it names.

    Raises:
        RequestError: the file cannot be read, or there are no words.
    """
    written = text if re.fullmatch(f"{characters}*", text) else _content(field, folder / text, remedy)
    lines = [[word for word in _BETWEEN.split(line) if word] for line in written.splitlines()]
    if not any(lines):
        raise RequestError(field, f"{text!r} contains no numbers", remedy)
    return [words for words in lines if words]


def _content(field: str, path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(field, f"{path} cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        raise RequestError(field, f"{path} is not text", remedy) from error
