"""Where the ranks of a trial stand, and whether they hang or are only slow."""

from collections.abc import Mapping

from executor.runners.rank_heartbeat import Standing
from search_spaces.command import CommandModel
from search_spaces.microbenchmark import MicrobenchmarkRequest
from search_spaces.trial import TrialRequest

STEPPING = ("warmup", "memory", "measure")
"""Phases in which a rank comes on from step to step. What building takes is not predicted: the trial's limit is its limit."""
SLOW_FACTOR = 20.0
"""So many times as long as predicted, or as the longest step so far, a step is not slow any more: a prediction may be ten times
too short and a neighbour take half of the machine; a step whose memory is accounted for takes several times as long."""
HANG_SECONDS = 30.0
"""No step is taken for a hang sooner: what is short may wait for a disk, a swap or a garbage collection."""
FIRST_STEP_SECONDS = 120.0
"""What the first step may take beside that: it loads kernels, connects and allocates, which no prediction has and which does
not grow with the step. Added, not the larger of the two: a step that is slow and connects slowly takes both."""
COMPILE_SECONDS = 600.0
"""What the first step may take besides where torch.compile makes its kernels in it."""
MOST_RANKS = 8
"""Ranks that a line names."""


class Watchdog:
    """Takes the beats of one trial's ranks. `now` is the gang's clock, in seconds."""

    def __init__(self, request: TrialRequest | MicrobenchmarkRequest) -> None:
        # A script of a user's own may save or evaluate between two reports: it is watched by what it does (`engines.command`).
        steps = isinstance(request, TrialRequest) and not isinstance(request.model, CommandModel)
        self._expected = request.expected_step_seconds if isinstance(request, TrialRequest) else None
        self._watches = steps
        compiles = isinstance(request, TrialRequest) and request.config.compile_blocks
        self._first = FIRST_STEP_SECONDS + (COMPILE_SECONDS if compiles else 0.0)
        self._world_size = request.world_size
        self._standings: dict[int, Standing] = {}
        self._heard: dict[int, float] = {}

    def note(self, rank: int, standing: Standing, now: float) -> None:
        """A rank's beat."""
        self._standings[rank], self._heard[rank] = standing, now

    def hang(self, now: float) -> str:
        """Why this is a hang, in words; empty: it is none.

        1. Every rank has been heard of, and all are in a phase of steps.
        2. None of them has come on for `SLOW_FACTOR` predicted steps, or as many of the longest so far where that is longer:
           a prediction that is too short ends no trial that has a step to show.
        3. Until every rank has made a step, `FIRST_STEP_SECONDS` more, and `COMPILE_SECONDS` where it compiles; afterwards
           never sooner than `HANG_SECONDS`.
        4. Without a step and without a prediction there is nothing to compare with: the trial's own limit holds.
        """
        ranks = self._standings.values()
        if not self._watches or len(ranks) < self._world_size or any(rank.phase not in STEPPING for rank in ranks):
            return ""
        slowest = min(rank.longest for rank in ranks)
        known = max(self._expected or 0.0, max(rank.longest for rank in ranks))
        if not known:
            return ""
        most = max(SLOW_FACTOR * known, HANG_SECONDS) if slowest else self._first + SLOW_FACTOR * known
        if (still := self._still(now)) <= most:
            return ""
        told = "is predicted to take" if known == self._expected else "took"
        return f"no rank has come on for {still:.0f} s, and a step {told} {known:.2g} s"

    def places(self, now: float) -> str:
        """Where the ranks stand, those that stand together in one."""
        groups: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(self._standings):
            standing = self._standings[rank]
            groups.setdefault((standing.phase, standing.step), []).append(rank)
        told = [
            f"{_named(ranks)} in {phase}, step {step}, for {self._since(ranks, now):.0f} s"
            for (phase, step), ranks in groups.items()
        ]
        silent = [rank for rank in range(self._world_size) if rank not in self._standings]
        if silent:
            told.append("nothing was heard of it" if self._world_size == 1 else f"nothing was heard of {_named(silent)}")
        return "; ".join(told)

    def behind(self) -> list[int]:
        """The ranks, those that have come least far first."""
        return sorted(self._standings, key=lambda rank: (self._standings[rank].step, -self._standings[rank].since))

    def _still(self, now: float) -> float:
        return self._since(list(self._standings), now)

    def _since(self, ranks: list[int], now: float) -> float:
        """Seconds since the last of these came where it stands; a rank that is not heard any more stands there still."""
        return min(self._standings[rank].since + now - self._heard[rank] for rank in ranks)


def stacks_text(stacks: Mapping[int, str], order: list[int], most: int) -> str | None:
    """What ranks printed of their threads, of the first so many in this order; None: nothing."""
    shown = [rank for rank in [*order, *sorted(set(stacks) - set(order))] if rank in stacks][:most]
    return "\n".join(f"rank {rank}:\n{stacks[rank]}" for rank in shown) or None


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS])) + (
        f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
