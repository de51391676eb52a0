"""The result of an exporter, and its notes as comments of the file."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.exports.checkpoints import Checkpoints, checkpoint_note
from autotune.exports.coverage import specific_note, verified_note
from autotune.exports.winner import Winner


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration in another framework's format."""

    text: str
    """The file's content."""
    notes: tuple[str, ...] = ()
    """One line each: what the format cannot express or its framework does not do, then how checkpoints load, then whether the
    figures were measured in that framework."""


def remarks(
    winner: Winner, notes: Iterable[str], checkpoints: Checkpoints | None, same: Collection[str] = ()
) -> tuple[str, ...]:
    """Assemble the notes of an export.

    Args:
        winner: the exported configuration.
        notes: what the format cannot express.
        checkpoints: the library that writes them; None: the export does not affect checkpoints.
        same: our engines that run the export's framework itself.
    """
    checkpoint_notes = [] if checkpoints is None else [checkpoint_note(winner, checkpoints)]
    size_notes = [] if winner.answer_for is None else [
        f"written for the {winner.world_size} ranks that were measured; the answer for {winner.answer_for} is extrapolated"
    ]  # fmt: skip
    return (*notes, *size_notes, *checkpoint_notes, *specific_note(winner, same), verified_note(winner, same))


def header(winner: Winner, title: str, notes: Sequence[str], mark: str = "# ") -> str:
    """The comment lines at the top of a file: its kind, its job, and the notes."""
    of = f" (job {winner.job})" if winner.job else ""
    lines = [f"{title}: the best configuration that Autotune found{of}.", *notes]
    return "".join(f"{mark}{line}\n" for line in lines)


def python_text(value: object, indent: str = "") -> str:
    """The value as an expression: mappings on several lines, text in double quotes."""
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = indent + "    "
        lines = "".join(f"{inner}{python_text(name)}: {python_text(item, inner)},\n" for name, item in value.items())
        return f"{{\n{lines}{indent}}}"
    if isinstance(value, tuple) and value:
        return f"({', '.join(python_text(item) for item in value)}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)


_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_SPECIAL = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML does not read as text."""


def yaml_text(content: Mapping[str, object]) -> str:
    """The tables as YAML, keys in their order."""
    return "".join(_lines(content, ""))


def _lines(content: Mapping[str, object], indent: str) -> list[str]:
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:\n", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return lines


def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL:
        return value
    return json.dumps(value)
