"""Tracks the positions of a trial's ranks and decides whether they hang or are only slow."""

from collections.abc import Mapping

from executor.runners.rank_heartbeat import RankPosition
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.models.command import CommandModel
from search_spaces.trial import TrialRequest

STEPPING = ("warmup", "memory", "measure")
"""Phases that consist of steps. The build time is not predicted, so only the trial's time limit bounds it."""
SLOW_FACTOR = 20.0
"""Multiple of the predicted step time, or of the longest step so far, above which a step counts as hanging. A prediction may be
ten times too short, another process may take half of the machine, and the memory account makes a step several times longer."""
HANG_SECONDS = 30.0
"""Least time before a step counts as hanging: a short step may wait for a disk, swap or garbage collection."""
FIRST_STEP_SECONDS = 120.0
"""Additional time for the first step: it loads kernels, connects and allocates, which no prediction includes and which does not
grow with the step. It is added, because a step may both be slow and connect slowly."""
COMPILE_SECONDS = 600.0
"""Further additional time for the first step with torch.compile."""
MOST_RANKS = 8
"""Most ranks that a message names."""


class Watchdog:
    """Receives the beats of one trial's ranks. `now` is the gang's clock, in seconds."""

    def __init__(self, request: TrialRequest | MicrobenchmarkRequest) -> None:
        # A user's script may save or evaluate between two reports, so `engines.command` monitors its activity instead.
        steps = isinstance(request, TrialRequest) and not isinstance(request.model, CommandModel)
        self._expected = request.expected_step_seconds if isinstance(request, TrialRequest) else None
        self._watches = steps
        compiles = isinstance(request, TrialRequest) and request.config.compile_blocks
        self._first = FIRST_STEP_SECONDS + (COMPILE_SECONDS if compiles else 0.0)
        self._world_size = request.world_size
        self._positions: dict[int, RankPosition] = {}
        self._heard: dict[int, float] = {}

    def record(self, rank: int, position: RankPosition, now: float) -> None:
        """Record a rank's beat."""
        self._positions[rank], self._heard[rank] = position, now

    def hang(self, now: float) -> str:
        """Return why the trial hangs; empty: it does not.

        1. Every rank has sent a beat, and all are in a phase of steps.
        2. No rank has made progress for `SLOW_FACTOR` times the predicted step, or the longest step so far if that is longer: a
           prediction that is too short does not end a trial that has finished a step.
        3. Until every rank has finished a step, `FIRST_STEP_SECONDS` are added, and `COMPILE_SECONDS` if the trial compiles.
           Afterwards at least `HANG_SECONDS` must pass.
        4. Without a step and without a prediction there is no reference: only the trial's own limit applies.
        """
        ranks = self._positions.values()
        if not self._watches or len(ranks) < self._world_size or any(rank.phase not in STEPPING for rank in ranks):
            return ""
        slowest = min(rank.longest for rank in ranks)
        known = max(self._expected or 0.0, max(rank.longest for rank in ranks))
        if not known:
            return ""
        most = max(SLOW_FACTOR * known, HANG_SECONDS) if slowest else self._first + SLOW_FACTOR * known
        if (still := self._still(now)) <= most:
            return ""
        verb = "is predicted to take" if known == self._expected else "took"
        return f"no rank has made progress for {still:.0f} s, and a step {verb} {known:.2g} s"

    def places(self, now: float) -> str:
        """Describe the positions of the ranks, grouping ranks at the same position."""
        groups: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(self._positions):
            position = self._positions[rank]
            groups.setdefault((position.phase, position.step), []).append(rank)
        parts = [
            f"{_named(ranks)} in {phase}, step {step}, for {self._since(ranks, now):.0f} s"
            for (phase, step), ranks in groups.items()
        ]
        silent = [rank for rank in range(self._world_size) if rank not in self._positions]
        if silent:
            parts.append("nothing was heard of it" if self._world_size == 1 else f"nothing was heard of {_named(silent)}")
        return "; ".join(parts)

    def behind(self) -> list[int]:
        """Return the ranks, those with the least progress first."""
        return sorted(self._positions, key=lambda rank: (self._positions[rank].step, -self._positions[rank].since))

    def _still(self, now: float) -> float:
        return self._since(list(self._positions), now)

    def _since(self, ranks: list[int], now: float) -> float:
        """Return the seconds since the last progress of any of these ranks. A silent rank counts as still at its position."""
        return min(self._positions[rank].since + now - self._heard[rank] for rank in ranks)


def stacks_text(stacks: Mapping[int, str], order: list[int], most: int) -> str | None:
    """Join the stacks that ranks printed, for the first `most` ranks in this order; None: no rank printed any."""
    shown = [rank for rank in [*order, *sorted(set(stacks) - set(order))] if rank in stacks][:most]
    return "\n".join(f"rank {rank}:\n{stacks[rank]}" for rank in shown) or None


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS])) + (
        f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
