"""What an exporter returns, and how its remarks stand in files that take comments."""

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
    """What the format cannot say or its framework does not do, then what becomes of checkpoints, then whether the figures were
    measured there: one line each."""


def remarks(
    winner: Winner, notes: Iterable[str], checkpoints: Checkpoints | None, same: Collection[str] = ()
) -> tuple[str, ...]:
    """The notes of an export.

    Args:
        winner: what is exported.
        notes: what the format cannot say.
        checkpoints: who writes them; None: what is exported touches none.
        same: engines of ours that run the export's framework itself.
    """
    kept = [] if checkpoints is None else [checkpoint_note(winner, checkpoints)]
    return (*notes, *size_note(winner), *kept, *specific_note(winner, same), verified_note(winner, same))


def header(winner: Winner, what: str, notes: Sequence[str], mark: str = "# ") -> str:
    """The first lines of a file that takes comments: what it is, of which job, and the notes."""
    of = f" (job {winner.job})" if winner.job else ""
    lines = [f"{what}: the best configuration that Autotune found{of}.", *notes]
    return "".join(f"{mark}{line}\n" for line in lines)
