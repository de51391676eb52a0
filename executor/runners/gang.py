"""A gang: the ranks that run a trial (or a micro-benchmark) together, kept warm from one trial to the next."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum

from executor.errors import RunnerError
from executor.failures import failure_table
from executor.runners import devices
from executor.runners.messages import Kind, Message
from executor.runners.rank_heartbeat import Standing
from executor.runners.transport import NO_VARIABLES, Death, Transport
from executor.runners.verdict import Report, Verdict, died, how_it_ended, is_clean, judge
from executor.runners.watchdog import Watchdog, stacks_text
from executor.runners.wear import TRIALS_IN_A_LIFE, Rest, Wear
from search_spaces.environment import variables_of
from search_spaces.failure import Evidence, Sign
from search_spaces.microbenchmark import MicrobenchmarkRequest
from search_spaces.model import FactoryModel, Model
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import LogLines, Progress, RankMeasurement, TrialRequest, TrialResult

Told = Progress | LogLines | TrialResult
"""What a gang tells of the trial that it runs."""
Work = TrialRequest | MicrobenchmarkRequest
"""What a gang runs. A micro-benchmark is a trial to it: both have an attempt, a time limit and a result."""
STACK_SECONDS = 0.5
"""Time for ranks that are ended for want of time to print where their threads stand."""
MOST_STACKS = 4
"""Ranks whose threads are told of: those that have come least far."""
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

    Processes serve one trial after the other. They are started anew after a failure that they may not get over, for a trial
    that asks for it (`fresh_processes`) or has another `environment`, after `recycle_after` trials, and where they do not come
    back to their base (`wear`).

    Raises:
        RunnerError: ranks do not start; from `start` and `poll`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        python_path: Sequence[str] = (),
        device: str = "auto",
        recycle_after: int = TRIALS_IN_A_LIFE,
    ) -> None:
        self._transport = transport
        self._own_path = tuple(python_path)
        self._device = device
        self._recycle_after = recycle_after
        self._wear = Wear()
        self._dead = False
        self._stage = Stage.DOWN
        self._path: tuple[str, ...] = ()
        self._variables: Mapping[str, str] = NO_VARIABLES
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
        self._aborted = False
        self._table = failure_table()
        self._watchdog: Watchdog | None = None

    @property
    def attempt(self) -> str | None:
        """The token of the attempt that runs."""
        return self._request.attempt if self._request else None

    @property
    def is_up(self) -> bool:
        """Whether it has started processes, or taken up others'."""
        return self._stage is not Stage.DOWN

    def warm_up(self, model: Model) -> None:
        """Have processes import their code for trials of this model while nobody waits for them yet. The first only."""
        if self._stage is Stage.DOWN:
            self._path = (*_folders(model), *self._own_path)
            self._start_ranks()

    def start(self, request: Work) -> None:
        """Begin a trial; the gang must have none.

        Raises:
            KnobValueError: its `environment` has what no process is started with.
        """
        variables = variables_of(request.config.environment) if isinstance(request, TrialRequest) else NO_VARIABLES
        self._request = request
        self._asked_at, self._setup_seconds = time.monotonic(), 0.0
        path = (*(_folders(request.model) if isinstance(request, TrialRequest) else ()), *self._own_path)
        self._table = failure_table(request.failures if isinstance(request, TrialRequest) else ())
        self._hear_idle()
        # A warm process holds the modules that it found along the old path, and what its libraries read when it started.
        started_for = (self._path, self._variables)
        if (path, variables) != started_for or self._dead or self._is_spent(request):
            self._kill()
            self._path, self._variables = path, variables
        match self._stage:
            case Stage.IDLE:
                self._run()
            case Stage.STANDING:
                self._join(REJOIN_SECONDS)
            case Stage.STARTING:
                self._deadline = time.monotonic() + START_SECONDS
            case _:
                self._start_ranks()

    def poll(self, timeout: float) -> list[Told]:
        """What happened to the trial, waiting up to `timeout` seconds for something to happen."""
        events: list[Told] = []
        lives = self._lives
        for rank, message in self._transport.receive(timeout):
            if self._lives != lives or self._stage is Stage.DOWN:  # it is of processes that are gone
                continue
            events += self._hear(rank, message) if self._request is not None else self._note(rank, message)
        if self._request is not None:
            events += self._check_time()
        return events

    def end(self, outcome: Outcome, message: str, *, cause: str | None = None, traceback: str | None = None) -> TrialResult:
        """End the running trial by force, with every rank."""
        assert self._request is not None
        attempt = self._request.attempt
        result = TrialResult(attempt=attempt, outcome=outcome, message=message, cause=cause, traceback=traceback)
        return self._finish(Verdict(result=result, keep=False))

    def close(self) -> None:
        """End every rank and give back everything. May be called twice."""
        self._stage = Stage.DOWN
        self._request = None
        self._transport.close()

    @property
    def _is_warm(self) -> bool:
        """Whether the processes have been up before this trial, in this gang or in another."""
        return self._trials > 0 or self._transport.reused

    def _hear_idle(self) -> None:
        """What ranks have told since the last trial. What processes say that are still starting is for `poll`."""
        if self._stage not in (Stage.DOWN, Stage.STARTING):
            for rank, message in self._transport.receive(0):
                self._note(rank, message)

    def _note(self, rank: int, message: Message | Death) -> list[Told]:
        """What a rank tells outside of a trial."""
        if isinstance(message, Death):
            self._dead = True
        elif message["kind"] == Kind.RESTED:
            self._wear.note(rank, from_plain(Rest, message["rest"]))
        return []

    def _is_spent(self, request: Work) -> bool:
        """Whether warm processes are not to run this trial."""
        fresh = isinstance(request, TrialRequest) and request.fresh_processes
        return self._trials > 0 and (fresh or self._trials >= self._recycle_after or bool(self._wear.worn()))

    def _start_ranks(self) -> None:
        self._kill()
        self._lives += 1
        self._stage = Stage.STARTING
        self._deadline = time.monotonic() + START_SECONDS
        self._transport.start(self._path, self._variables)

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
        self._reports, self._failed_at, self._aborted, self._watchdog = {}, None, False, Watchdog(self._request)
        kind = Kind.RUN if isinstance(self._request, TrialRequest) else Kind.MEASURE
        for rank in range(self._transport.world_size):
            self._transport.send(rank, {"kind": kind, "request": to_plain(self._request)})

    def _hear(self, rank: int, message: Message | Death) -> list[Told]:
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
                return [from_plain(Progress, message["progress"])]
            case Kind.BEAT if self._watchdog is not None and message["attempt"] == self.attempt:
                self._watchdog.note(rank, from_plain(Standing, message["standing"]), time.monotonic())
            case Kind.OUTPUT:
                assert self._request is not None
                lines = {"rank": rank, "text": message["text"], "left_out": message["left_out"]}
                return [LogLines(attempt=self._request.attempt, **lines)]
            case Kind.RESTED:
                self._note(rank, message)
                if self._stage is Stage.JOINING and self._is_warm and self._wear.worn():  # after a failure
                    self._start_ranks()
        return []

    def _hear_ready(self, rank: int, message: Message) -> None:
        self._ready[rank] = message
        if len(self._ready) == self._transport.world_size:
            try:
                self._places = devices.assign([message for _, message in sorted(self._ready.items())], self._wanted_device())
            except RunnerError:
                self._give_up()
                raise
            self._join(START_SECONDS)

    def _wanted_device(self) -> str:
        """The gang's own; where it leaves that open, what the trial is for."""
        kind = self._request.device_kind if isinstance(self._request, TrialRequest) else None
        return kind if kind is not None and self._device == devices.AUTO else self._device

    def _hear_end(self, rank: int, report: Report) -> list[Told]:
        if self._stage is not Stage.RUNNING:
            return self._hear_start_failure(rank, report)
        self._reports.setdefault(rank, report)  # a rank that failed and then died has told its cause already
        if self._failed_at is None and (isinstance(report, Death) or report["kind"] == Kind.FAILURE):
            self._failed_at = time.monotonic()
        if is_clean(report) and not self._aborted:
            self._abort_others()
        return self._judge()

    def _abort_others(self) -> None:
        """Have ranks that may wait for one that has failed fail too, so that all can go on: alone they might wait for ever."""
        self._aborted = True
        for rank in range(self._transport.world_size):
            if rank not in self._reports:
                self._transport.send(rank, {"kind": Kind.ABORT, "attempt": self.attempt})

    def _judge(self) -> list[Told]:
        assert self._request is not None
        waited = 0.0 if self._failed_at is None else time.monotonic() - self._failed_at
        verdict = judge(self._request.attempt, self._reports, self._transport.world_size, waited, self._table)
        return [] if verdict is None else [self._finish(verdict)]

    def _hear_start_failure(self, rank: int, report: Report) -> list[Told]:
        """Warm ranks that cannot change their group are started anew; cold ones that were taken from outside are LOST."""
        assert self._request is not None
        if self._is_warm:
            self._start_ranks()
            return []
        if isinstance(report, Death):
            # What a process needs to start says nothing of the trial's memory.
            death = dataclasses.replace(report, out_of_memory_kill=False)
            result = died(self._request.attempt, rank, death, self._table)
            if result.outcome in (Outcome.LOST, Outcome.PREEMPTED):
                return [self._finish(Verdict(result=result, keep=False, rank=rank))]
        self._give_up()
        told, trace = _start_failure(report)
        raise RunnerError(f"rank {rank} did not start: {told}" + (f"\n{trace}" if trace else ""))

    def _check_time(self) -> list[Told]:
        assert self._request is not None
        if self._failed_at is not None and self._stage is Stage.RUNNING and (verdict := self._judge()):
            return verdict
        now = time.monotonic()
        if self._stage is Stage.RUNNING:
            assert self._watchdog is not None
            if hang := self._watchdog.hang(now):
                return [self._end_late(Sign.HANG, hang)]
            if now >= self._deadline:
                return [self._end_late(Sign.TIME_LIMIT, f"no result within {self._request.timeout_seconds:g} s")]
            return []
        if now < self._deadline:
            return []
        if self._is_warm:
            self._start_ranks()
            return []
        self._give_up()
        raise RunnerError(f"the ranks were not ready within {START_SECONDS:g} s; look for a loaded machine or a blocked port")

    def _end_late(self, sign: Sign, why: str) -> TrialResult:
        """End a trial that hangs, or is out of time, with where its ranks stand and what their threads do."""
        assert self._watchdog is not None
        row, _ = self._table.find(Evidence(signs=(sign,)))
        places, order = self._watchdog.places(time.monotonic()), self._watchdog.behind()
        stacks = stacks_text(self._transport.stacks(STACK_SECONDS), order, MOST_STACKS)
        return self.end(row.outcome, f"{why} ({places}); every rank was killed", cause=row.name, traceback=stacks)

    def _node_of(self, rank: int) -> str | None:
        told = self._transport.node_of(rank)
        return told if told is not None else self._ready.get(rank, {}).get("host")

    def _finish(self, verdict: Verdict) -> TrialResult:
        result = dataclasses.replace(
            verdict.result,
            warm=self._is_warm,
            node=verdict.result.node if verdict.rank is None else self._node_of(verdict.rank),
            phase_seconds={"setup": self._setup_seconds, **verdict.result.phase_seconds},
            ranks=tuple(self._placed(rank) for rank in verdict.result.ranks),
        )
        self._request = None
        self._trials += 1
        self._stage = Stage.STANDING if verdict.rejoin else Stage.IDLE
        if not verdict.keep:
            self._kill()
        return result

    def _placed(self, measured: RankMeasurement) -> RankMeasurement:
        """With the name of its node, as the transport tells it."""
        return dataclasses.replace(measured, node=self._ready[measured.rank]["host"])

    def _give_up(self) -> None:
        self._request = None
        self._kill()

    def _kill(self) -> None:
        if self._stage is not Stage.DOWN:
            self._transport.kill()
        self._stage = Stage.DOWN
        self._trials = 0
        self._dead = False
        self._ready.clear()
        self._wear.clear()


def _folders(model: Model) -> tuple[str, ...]:
    return model.python_path if isinstance(model, FactoryModel) else ()


def _start_failure(report: Report) -> tuple[str, str | None]:
    if isinstance(report, Death):
        return f"it {how_it_ended(report)}", report.output
    return report["message"], report["traceback"]
