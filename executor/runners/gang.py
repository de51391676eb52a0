"""A gang: the ranks that run a trial (or a micro-benchmark) together, kept warm from one trial to the next."""

import dataclasses
import time
from collections.abc import Sequence
from enum import StrEnum

from executor.errors import RunnerError
from executor.runners import devices
from executor.runners.messages import Kind, Message
from executor.runners.transport import Death, Transport
from executor.runners.verdict import Report, Verdict, died, how_it_ended, judge
from search_spaces.microbenchmark import MicrobenchmarkRequest
from search_spaces.model import FactoryModel, Model
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Progress, TrialRequest, TrialResult

Work = TrialRequest | MicrobenchmarkRequest
"""What a gang runs. A micro-benchmark is a trial to it: both have an attempt, a time limit and a result."""
START_SECONDS = 180.0
"""Time for cold ranks to import their code and to join."""
REJOIN_SECONDS = 15.0
"""Time for warm ranks to change their process group; a group with work left half done may never let go."""


class Stage(StrEnum):
    """Where a gang stands. DOWN -> STARTING -> JOINING -> IDLE <-> RUNNING; a failure leads back to DOWN, or to STANDING."""

    DOWN = "down"
    """No process."""
    STARTING = "starting"
    """The processes import their code."""
    STANDING = "standing"
    """Processes are ready, but in no process group that can be used."""
    JOINING = "joining"
    IDLE = "idle"
    RUNNING = "running"


class Gang:
    """Runs one trial at a time on the ranks behind a transport. Used from one thread.

    `start` a trial, then call `poll` until it returns the `TrialResult`. The trial's time limit counts from the moment at
    which every rank is ready; the time before is told as the phase `setup`.

    Raises:
        RunnerError: ranks do not start; from `start` and `poll`.
    """

    def __init__(self, transport: Transport, *, python_path: Sequence[str] = (), device: str = "auto") -> None:
        self._transport = transport
        self._own_path = tuple(python_path)
        self._device = device
        self._stage = Stage.DOWN
        self._path: tuple[str, ...] = ()
        self._ready: dict[int, Message] = {}
        self._places: list[Message] = []
        self._joined: set[int] = set()
        self._trials = 0
        self._lives = 0
        self._request: Work | None = None
        self._deadline = 0.0
        self._asked_at = 0.0
        self._setup_seconds = 0.0
        self._reports: dict[int, Report] = {}
        self._failed_at: float | None = None
        self._seen: Progress | None = None

    @property
    def attempt(self) -> str | None:
        """The token of the attempt that runs."""
        return self._request.attempt if self._request else None

    def warm_up(self, model: Model) -> None:
        """Have processes import their code for trials of this model while nobody waits for them yet. The first only."""
        if self._stage is Stage.DOWN:
            self._path = (*_folders(model), *self._own_path)
            self._start_ranks()

    def start(self, request: Work) -> None:
        """Begin a trial; the gang must have none."""
        self._request = request
        self._asked_at, self._setup_seconds = time.monotonic(), 0.0
        path = (*(_folders(request.model) if isinstance(request, TrialRequest) else ()), *self._own_path)
        # A warm process holds the modules that it found along the old path.
        if path != self._path or self._died_idle():
            self._kill()
            self._path = path
        match self._stage:
            case Stage.IDLE:
                self._run()
            case Stage.STANDING:
                self._join(REJOIN_SECONDS)
            case Stage.STARTING:
                self._deadline = time.monotonic() + START_SECONDS
            case _:
                self._start_ranks()

    def poll(self, timeout: float) -> list[Progress | TrialResult]:
        """What happened to the trial, waiting up to `timeout` seconds for something to happen."""
        events: list[Progress | TrialResult] = []
        lives = self._lives
        for rank, message in self._transport.receive(timeout):
            if self._request is not None and self._lives == lives:  # what else came is of processes that are gone
                events += self._hear(rank, message)
        if self._request is not None:
            events += self._check_time()
        return events

    def end(self, outcome: Outcome, message: str) -> TrialResult:
        """End the running trial by force, with every rank."""
        assert self._request is not None
        result = TrialResult(attempt=self._request.attempt, outcome=outcome, message=message)
        return self._finish(Verdict(result=result, keep=False))

    def close(self) -> None:
        """End every rank and give back everything. May be called twice."""
        self._stage = Stage.DOWN
        self._request = None
        self._transport.close()

    def _died_idle(self) -> bool:
        # What processes say that are still starting is for `poll`.
        if self._stage in (Stage.DOWN, Stage.STARTING):
            return False
        return any(isinstance(message, Death) for _, message in self._transport.receive(0))

    def _start_ranks(self) -> None:
        self._kill()
        self._lives += 1
        self._stage = Stage.STARTING
        self._deadline = time.monotonic() + START_SECONDS
        self._transport.start(self._path)

    def _join(self, seconds: float) -> None:
        self._stage = Stage.JOINING
        self._deadline = time.monotonic() + seconds
        self._joined.clear()
        self._send_join(0, None)

    def _send_join(self, rank: int, port: int | None) -> None:
        world = {"rank": rank, "world_size": self._transport.world_size, "address": self._transport.address, "port": port}
        self._transport.send(rank, {"kind": Kind.JOIN, **world, **self._places[rank]})

    def _run(self) -> None:
        assert self._request is not None
        self._stage = Stage.RUNNING
        now = time.monotonic()
        self._setup_seconds = now - self._asked_at
        self._deadline = now + self._request.timeout_seconds
        self._reports, self._failed_at, self._seen = {}, None, None
        kind = Kind.RUN if isinstance(self._request, TrialRequest) else Kind.MEASURE
        for rank in range(self._transport.world_size):
            self._transport.send(rank, {"kind": kind, "request": to_plain(self._request)})

    def _hear(self, rank: int, message: Message | Death) -> list[Progress | TrialResult]:
        if isinstance(message, Death) or message["kind"] in (Kind.RESULT, Kind.FAILURE):
            return self._hear_end(rank, message)
        match message["kind"]:
            case Kind.READY:
                self._hear_ready(rank, message)
            case Kind.LISTENING:
                for other in range(1, self._transport.world_size):
                    self._send_join(other, message["port"])
            case Kind.JOINED:
                self._joined.add(rank)
                if len(self._joined) == self._transport.world_size:
                    self._run()
            case Kind.PROGRESS if rank == 0:
                self._seen = from_plain(Progress, message["progress"])
                return [self._seen]
        return []

    def _hear_ready(self, rank: int, message: Message) -> None:
        self._ready[rank] = message
        if len(self._ready) == self._transport.world_size:
            try:
                self._places = devices.assign([message for _, message in sorted(self._ready.items())], self._device)
            except RunnerError:
                self._give_up()
                raise
            self._join(START_SECONDS)

    def _hear_end(self, rank: int, report: Report) -> list[Progress | TrialResult]:
        if self._stage is not Stage.RUNNING:
            return self._hear_start_failure(rank, report)
        self._reports.setdefault(rank, report)  # a rank that failed and then died has told its cause already
        if self._failed_at is None and (isinstance(report, Death) or report["kind"] == Kind.FAILURE):
            self._failed_at = time.monotonic()
        return self._judge()

    def _judge(self) -> list[Progress | TrialResult]:
        assert self._request is not None
        waited = 0.0 if self._failed_at is None else time.monotonic() - self._failed_at
        verdict = judge(self._request.attempt, self._reports, self._transport.world_size, waited)
        return [] if verdict is None else [self._finish(verdict)]

    def _hear_start_failure(self, rank: int, report: Report) -> list[Progress | TrialResult]:
        """Warm ranks that cannot change their group are started anew; cold ones that were taken from outside are LOST."""
        assert self._request is not None
        if self._trials:
            self._start_ranks()
            return []
        if isinstance(report, Death):
            result = died(self._request.attempt, rank, report)
            if result.outcome is Outcome.LOST:
                return [self._finish(Verdict(result=result, keep=False))]
        self._give_up()
        told, trace = _start_failure(report)
        raise RunnerError(f"rank {rank} did not start: {told}" + (f"\n{trace}" if trace else ""))

    def _check_time(self) -> list[Progress | TrialResult]:
        assert self._request is not None
        if self._failed_at is not None and self._stage is Stage.RUNNING and (verdict := self._judge()):
            return verdict
        if time.monotonic() < self._deadline:
            return []
        if self._stage is Stage.RUNNING:
            return [self.end(Outcome.TIMEOUT, self._timeout_message())]
        if self._trials:
            self._start_ranks()
            return []
        self._give_up()
        raise RunnerError(f"the ranks were not ready within {START_SECONDS:g} s; look for a loaded machine or a blocked port")

    def _timeout_message(self) -> str:
        assert self._request is not None
        seen = f"last seen in {self._seen.phase}, step {self._seen.step}" if self._seen else "nothing was heard of it"
        return f"no result within {self._request.timeout_seconds:g} s ({seen}); every rank was killed"

    def _finish(self, verdict: Verdict) -> TrialResult:
        result = dataclasses.replace(
            verdict.result,
            warm=self._trials > 0,
            phase_seconds={"setup": self._setup_seconds, **verdict.result.phase_seconds},
        )
        self._request = None
        self._trials += 1
        self._stage = Stage.STANDING if verdict.rejoin else Stage.IDLE
        if not verdict.keep:
            self._kill()
        return result

    def _give_up(self) -> None:
        self._request = None
        self._kill()

    def _kill(self) -> None:
        if self._stage is not Stage.DOWN:
            self._transport.kill()
        self._stage = Stage.DOWN
        self._trials = 0
        self._ready.clear()


def _folders(model: Model) -> tuple[str, ...]:
    return model.python_path if isinstance(model, FactoryModel) else ()


def _start_failure(report: Report) -> tuple[str, str | None]:
    if isinstance(report, Death):
        return f"it {how_it_ended(report)}", report.output
    return report["message"], report["traceback"]
