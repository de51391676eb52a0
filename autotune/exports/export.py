"""The result of an exporter, and its notes as comments of the file."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autotune.exports.checkpoints import Checkpoints, checkpoint_note
from autotune.exports.coverage import size_note, specific_note, verified_note
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
    kept = [] if checkpoints is None else [checkpoint_note(winner, checkpoints)]
    return (*notes, *size_note(winner), *kept, *specific_note(winner, same), verified_note(winner, same))


def header(winner: Winner, what: str, notes: Sequence[str], mark: str = "# ") -> str:
    """The comment lines at the top of a file: its kind, its job, and the notes."""
    of = f" (job {winner.job})" if winner.job else ""
    lines = [f"{what}: the best configuration that Autotune found{of}.", *notes]
    return "".join(f"{mark}{line}\n" for line in lines)
