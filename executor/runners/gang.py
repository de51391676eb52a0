"""A gang: the ranks that run a trial (or a micro-benchmark) together. They stay warm from one trial to the next."""

import collections
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum

from executor.errors import RunnerError, failure_table
from executor.runners.transport import NO_VARIABLES, Death, Message, MessageKind, RankTransport
from executor.runners.verdict import Report, TrialVerdict, died, how_it_ended, is_clean, judge
from executor.runners.watchdog import TRIALS_PER_PROCESS, ProcessUsage, RankPosition, Watchdog, Wear, stacks_text
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.environment import variables_of
from search_spaces.failure import Evidence, Sign
from search_spaces.models.model import FactoryModel, Model
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import LogLines, Progress, TrialRequest, TrialResult

GangEvent = Progress | LogLines | TrialResult
"""An event of the running trial."""
Work = TrialRequest | MicrobenchmarkRequest
"""What a gang runs. It treats a micro-benchmark like a trial: both have an attempt, a time limit and a result."""
STACK_SECONDS = 0.5
"""Time for ranks to print their threads' stacks before they are killed for a hang or a time limit."""
START_SECONDS = 180.0
"""Time for cold ranks to import their code and to join."""
REJOIN_SECONDS = 15.0
"""Time for warm ranks to change their process group. A group with unfinished work may never be released."""


class GangState(StrEnum):
    """The state of a gang. DOWN -> STARTING -> JOINING -> IDLE <-> RUNNING; a failure leads back to DOWN, or to STANDING."""

    DOWN = "down"
    """No process."""
    STARTING = "starting"
    """The processes import their code."""
    STANDING = "standing"
    """Processes are ready, but not in a usable process group."""
    JOINING = "joining"
    IDLE = "idle"
    RUNNING = "running"


class Gang:
    """Runs one trial at a time on the ranks behind a transport. Used from one thread.

    Call `start`, then `poll` until it returns the `TrialResult`. The trial's time limit counts from the moment at which every
    rank is ready; the time before is reported as the phase `setup`.

    Processes serve one trial after another. They are restarted after a failure that they may not recover from, for a trial that
    requests it (`fresh_processes`) or has another `environment`, after `recycle_after` trials, and when they do not return to
    their base usage (`wear`).

    Raises:
        RunnerError: ranks do not start; from `start` and `poll`.
    """

    def __init__(
        self,
        transport: RankTransport,
        *,
        python_path: Sequence[str] = (),
        device: str = "auto",
        recycle_after: int = TRIALS_PER_PROCESS,
    ) -> None:
        self._transport = transport
        self._own_path = tuple(python_path)
        self._device = device
        self._recycle_after = recycle_after
        self._wear = Wear()
        self._dead = False
        self._stage = GangState.DOWN
        self._path: tuple[str, ...] = ()
        self._variables: Mapping[str, str] = NO_VARIABLES
        self._ready: dict[int, Message] = {}
        self._places: list[Message] = []
        self._joined: set[int] = set()
        self._trials = 0
        self._generation = 0
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
        """Whether the gang has processes, started by itself or taken over."""
        return self._stage is not GangState.DOWN

    def warm_up(self, model: Model) -> None:
        """Start processes for trials of this model before the first trial; they import their code meanwhile."""
        if self._stage is GangState.DOWN:
            self._path = (*_folders(model), *self._own_path)
            self._start_ranks()

    def start(self, request: Work) -> None:
        """Start a trial; none may be running.

        Raises:
            KnobValueError: its `environment` sets a variable that is not allowed.
        """
        variables = variables_of(request.config.environment) if isinstance(request, TrialRequest) else NO_VARIABLES
        self._request = request
        self._asked_at, self._setup_seconds = time.monotonic(), 0.0
        path = (*(_folders(request.model) if isinstance(request, TrialRequest) else ()), *self._own_path)
        self._table = failure_table(request.failures if isinstance(request, TrialRequest) else ())
        # The messages since the last trial; those of processes that are still starting are left to `poll`.
        if self._stage not in (GangState.DOWN, GangState.STARTING):
            for rank, message in self._transport.receive(0):
                self._handle_idle(rank, message)
        # A warm process has modules imported from the old path, and libraries configured by the old variables.
        started_for = (self._path, self._variables)
        fresh = isinstance(request, TrialRequest) and request.fresh_processes
        worn = fresh or self._trials >= self._recycle_after or bool(self._wear.restart_reason())
        if (path, variables) != started_for or self._dead or (self._trials > 0 and worn):
            self._kill()
            self._path, self._variables = path, variables
        match self._stage:
            case GangState.IDLE:
                self._run()
            case GangState.STANDING:
                self._join(REJOIN_SECONDS)
            case GangState.STARTING:
                self._deadline = time.monotonic() + START_SECONDS
            case _:
                self._start_ranks()

    def poll(self, timeout: float) -> list[GangEvent]:
        """Return the events of the trial, waiting up to `timeout` seconds for the first."""
        events: list[GangEvent] = []
        generation = self._generation
        for rank, message in self._transport.receive(timeout):
            if self._generation != generation or self._stage is GangState.DOWN:  # sent by processes that have been ended
                continue
            events += self._handle(rank, message) if self._request is not None else self._handle_idle(rank, message)
        if self._request is not None:
            events += self._check_time()
        return events

    def end(self, outcome: Outcome, message: str, *, cause: str | None = None, traceback: str | None = None) -> TrialResult:
        """Abort the running trial and kill every rank."""
        assert self._request is not None
        attempt = self._request.attempt
        result = TrialResult(attempt=attempt, outcome=outcome, message=message, cause=cause, traceback=traceback)
        return self._finish(TrialVerdict(result=result, keep=False))

    def close(self) -> None:
        """End every rank and release all resources. May be called twice."""
        self._stage = GangState.DOWN
        self._request = None
        self._transport.close()

    @property
    def _is_warm(self) -> bool:
        """Whether the processes were running before this trial, in this gang or in another."""
        return self._trials > 0 or self._transport.reused

    def _handle_idle(self, rank: int, message: Message | Death) -> list[GangEvent]:
        """Handle a message that arrives outside a trial."""
        if isinstance(message, Death):
            self._dead = True
        elif message["kind"] == MessageKind.RESTED:
            self._wear.record(rank, from_plain(ProcessUsage, message["rest"]))
        return []

    def _start_ranks(self) -> None:
        self._kill()
        self._generation += 1
        self._stage = GangState.STARTING
        self._deadline = time.monotonic() + START_SECONDS
        self._transport.start(self._path, self._variables)

    def _join(self, seconds: float) -> None:
        self._stage = GangState.JOINING
        self._deadline = time.monotonic() + seconds
        self._joined.clear()
        self._send_join(0, None)

    def _send_join(self, rank: int, port: int | None) -> None:
        world = {"rank": rank, "world_size": self._transport.world_size, "address": self._transport.address, "port": port}
        self._transport.send(rank, {"kind": MessageKind.JOIN, **world, **self._places[rank]})

    def _run(self) -> None:
        assert self._request is not None
        self._stage = GangState.RUNNING
        now = time.monotonic()
        self._setup_seconds = now - self._asked_at
        self._deadline = now + self._request.timeout_seconds
        self._reports, self._failed_at, self._aborted, self._watchdog = {}, None, False, Watchdog(self._request)
        kind = MessageKind.RUN if isinstance(self._request, TrialRequest) else MessageKind.MEASURE
        for rank in range(self._transport.world_size):
            self._transport.send(rank, {"kind": kind, "request": to_plain(self._request)})

    def _handle(self, rank: int, message: Message | Death) -> list[GangEvent]:
        if isinstance(message, Death) or message["kind"] in (MessageKind.RESULT, MessageKind.FAILURE):
            return self._handle_end(rank, message)
        match message["kind"]:
            case MessageKind.READY:
                self._handle_ready(rank, message)
            case MessageKind.LISTENING:
                for other in range(1, self._transport.world_size):
                    self._send_join(other, message["port"])
            case MessageKind.JOINED:
                self._joined.add(rank)
                if len(self._joined) == self._transport.world_size:
                    self._run()
            case MessageKind.PROGRESS if rank == 0:
                return [from_plain(Progress, message["progress"])]
            case MessageKind.BEAT if self._watchdog is not None and message["attempt"] == self.attempt:
                self._watchdog.record(rank, from_plain(RankPosition, message["standing"]), time.monotonic())
            case MessageKind.OUTPUT:
                assert self._request is not None
                lines = {"rank": rank, "text": message["text"], "left_out": message["left_out"]}
                return [LogLines(attempt=self._request.attempt, **lines)]
            case MessageKind.RESTED:
                self._handle_idle(rank, message)
                if self._stage is GangState.JOINING and self._is_warm and self._wear.restart_reason():  # after a failure
                    self._start_ranks()
        return []

    def _handle_ready(self, rank: int, message: Message) -> None:
        self._ready[rank] = message
        if len(self._ready) == self._transport.world_size:
            # If the gang's device is `auto`, the trial's device kind decides.
            kind = self._request.device_kind if isinstance(self._request, TrialRequest) else None
            device = kind if kind is not None and self._device == "auto" else self._device
            try:
                order = device_order([self._ready[rank] for rank in range(self._transport.world_size)])
                if order != [*range(self._transport.world_size)]:
                    self._transport.renumber(order)
                    self._ready = {rank: self._ready[former] for rank, former in enumerate(order)}
                self._places = assign_devices([message for _, message in sorted(self._ready.items())], device)
            except RunnerError:
                self._give_up()
                raise
            self._join(START_SECONDS)

    def _handle_end(self, rank: int, report: Report) -> list[GangEvent]:
        if self._stage is not GangState.RUNNING:
            return self._handle_start_failure(rank, report)
        self._reports.setdefault(rank, report)  # a rank that failed and then died has already reported the cause
        if self._failed_at is None and (isinstance(report, Death) or report["kind"] == MessageKind.FAILURE):
            self._failed_at = time.monotonic()
        if is_clean(report) and not self._aborted:
            self._abort_others()
        return self._judge()

    def _abort_others(self) -> None:
        """Abort the other ranks, which may wait for the failed one forever, so that all of them can continue."""
        self._aborted = True
        for rank in range(self._transport.world_size):
            if rank not in self._reports:
                self._transport.send(rank, {"kind": MessageKind.ABORT, "attempt": self.attempt})

    def _judge(self) -> list[GangEvent]:
        assert self._request is not None
        waited = 0.0 if self._failed_at is None else time.monotonic() - self._failed_at
        verdict = judge(self._request.attempt, self._reports, self._transport.world_size, waited, self._table)
        return [] if verdict is None else [self._finish(verdict)]

    def _handle_start_failure(self, rank: int, report: Report) -> list[GangEvent]:
        """Restart warm ranks that cannot change their group. Cold ranks that were killed from outside are LOST."""
        assert self._request is not None
        if self._is_warm:
            self._start_ranks()
            return []
        if isinstance(report, Death):
            # Running out of memory during start-up says nothing about the trial.
            death = dataclasses.replace(report, out_of_memory_kill=False)
            result = died(self._request.attempt, rank, death, self._table)
            if result.outcome in (Outcome.LOST, Outcome.PREEMPTED):
                return [self._finish(TrialVerdict(result=result, keep=False, rank=rank))]
        self._give_up()
        if isinstance(report, Death):
            reason, trace = f"it {how_it_ended(report)}", report.output
        else:
            reason, trace = report["message"], report["traceback"]
        raise RunnerError(f"rank {rank} did not start: {reason}" + (f"\n{trace}" if trace else ""))

    def _check_time(self) -> list[GangEvent]:
        assert self._request is not None
        if self._failed_at is not None and self._stage is GangState.RUNNING and (verdict := self._judge()):
            return verdict
        now = time.monotonic()
        if self._stage is GangState.RUNNING:
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
        """End a trial that hangs or is out of time. The result has its ranks' positions and the stacks of their threads."""
        assert self._watchdog is not None
        row, _ = self._table.find(Evidence(signs=(sign,)))
        places, order = self._watchdog.places(time.monotonic()), self._watchdog.behind()
        stacks = stacks_text(self._transport.stacks(STACK_SECONDS), order, 4)  # of the ranks with the least progress
        return self.end(row.outcome, f"{why} ({places}); every rank was killed", cause=row.name, traceback=stacks)

    def _finish(self, verdict: TrialVerdict) -> TrialResult:
        node = verdict.result.node
        if verdict.rank is not None:
            node = self._transport.node_of(verdict.rank) or self._ready.get(verdict.rank, {}).get("host")
        result = dataclasses.replace(
            verdict.result,
            warm=self._is_warm,
            node=node,
            phase_seconds={"setup": self._setup_seconds, **verdict.result.phase_seconds},
            ranks=tuple(dataclasses.replace(rank, node=self._ready[rank.rank]["host"]) for rank in verdict.result.ranks),
        )
        self._request = None
        self._trials += 1
        self._stage = GangState.STANDING if verdict.rejoin else GangState.IDLE
        if not verdict.keep:
            self._kill()
        return result

    def _give_up(self) -> None:
        self._request = None
        self._kill()

    def _kill(self) -> None:
        if self._stage is not GangState.DOWN:
            self._transport.kill()
        self._stage = GangState.DOWN
        self._trials = 0
        self._dead = False
        self._ready.clear()
        self._wear.clear()


def _folders(model: Model) -> tuple[str, ...]:
    return model.python_path if isinstance(model, FactoryModel) else ()


def assign_devices(ready: Sequence[Message], device: str) -> list[Message]:
    """Return the device fields of each rank's `join` message, from what the ranks reported when ready.

    `device` is `cpu`, the accelerator's type, or `auto`: the accelerator that a rank sees or a driver lists, otherwise the CPU.
    Ranks that see the same devices of a host take them in turn. NCCL does not support two ranks on one device; gloo is used
    then.

    Raises:
        RunnerError: a rank cannot provide the accelerator. A job for an accelerator never falls back to CPUs.
    """
    accelerator = _accelerator(ready, device)
    ranks_in_pool: collections.Counter[tuple[str, str | None]] = collections.Counter()
    hosts: collections.Counter[str] = collections.Counter()
    assignments: list[Message] = []
    shared = False
    for rank in ready:
        pool, count = (rank["host"], rank["visible_devices"]), rank["device_count"]
        shared = shared or (accelerator is not None and ranks_in_pool[pool] >= count)
        index = ranks_in_pool[pool] % count if accelerator else 0
        assignments.append({"device": f"{accelerator}:{index}" if accelerator else "cpu", "local_rank": hosts[rank["host"]]})
        ranks_in_pool[pool] += 1
        hosts[rank["host"]] += 1
    backend = "nccl" if accelerator == "cuda" and not shared else "gloo"
    return [
        {**assignment, "backend": backend, "shares_device": shared, "local_world_size": hosts[rank["host"]]}
        for assignment, rank in zip(assignments, ready, strict=True)
    ]


def device_order(ready: Sequence[Message]) -> list[int]:
    """The ranks, those of each host in the order of their first visible device: neighbours in a group are then neighbours on
    the host's links, whatever the order in which the cluster gave out its devices."""
    ranks_by_host: dict[str, list[int]] = collections.defaultdict(list)
    for rank, message in enumerate(ready):
        ranks_by_host[message["host"]].append(rank)

    def device(rank: int) -> tuple[int, str]:
        first = (ready[rank]["visible_devices"] or "").split(",")[0].strip()
        return (int(first), "") if first.isdigit() else (sys.maxsize, first)

    order = [*range(len(ready))]
    for ranks in ranks_by_host.values():
        for number, rank in zip(ranks, sorted(ranks, key=device), strict=True):
            order[number] = rank
    return order


def _accelerator(ready: Sequence[Message], device: str) -> str | None:
    if device == "cpu":
        return None
    accelerators = (rank["accelerator"] or (rank["driver_devices"] and "cuda") for rank in ready)
    kind_needed = next((kind for kind in accelerators if kind), None) if device == "auto" else device
    for rank in ready:
        if kind_needed is not None and rank["accelerator"] != kind_needed:
            raise RunnerError(_missing(rank, kind_needed))
    return kind_needed


def _missing(rank: Message, accelerator: str) -> str:
    """Return one line: why this rank has no such device, and the remedy."""
    has, build, visible = f"torch {rank['torch']} on host {rank['host']}", rank["torch_build"], rank["visible_devices"]
    if build != accelerator:
        why = f"{has} is built for {build}"
        remedy = f"install the {accelerator.upper()} build of torch there"
    else:
        why = f"{has} finds no {accelerator} device" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES there, or use fewer ranks"
    return f"device: this job needs {accelerator}, but {why}; {remedy}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
