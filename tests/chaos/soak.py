"""A soak: jobs, people and clients on one side, a killer on the other."""

import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.client import Service
from tests.chaos.databases import ChaosDatabase
from tests.chaos.killer import Kill, Killer, Kind, plan
from tests.chaos.leftovers import abandoned_since, marked_processes, shared_memory
from tests.chaos.people import ENDED, RAY, REPLAYED, Job, People
from tests.chaos.supervisor import Exit, Supervisor
from tests.ports import free_port

LEFT_OVER_SECONDS = 150.0
"""Time for what hangs on a process to end with it: agents of a Ray that was killed take a minute to see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a soak is."""

    servers: int
    replayers: int
    """Workers that answer trials from a table."""
    ray: bool
    """Whether one further worker runs jobs on Ray."""
    jobs: dict[str, int]
    """Runner -> least number of jobs."""
    trials: dict[str, int]
    """Runner -> budget of a job."""
    kills: int
    most_pause: float
    """Longest time from one kill to the next, in seconds."""
    long_outages: int = 0
    end_seconds: float = 300.0
    """Time in which everything must have ended after the last kill."""


@dataclass(slots=True, kw_only=True)
class Soaked:
    """What a soak has seen."""

    database: str
    seed: int
    jobs: list[Job]
    kills: list[Kill] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    """What no outage excuses."""
    seconds: float = 0.0
    restarts: int = 0
    repeated: int = 0
    """Requests that were sent again."""
    left_over_seconds: float = 0.0
    """Until no process was left, from when the last one was told to end."""

    def counts(self) -> Counter[Kind]:
        """Kills by kind."""
        return Counter(kill.kind for kill in self.kills)


def soak(folder: Path, database: ChaosDatabase, size: Size, seed: int, table: str) -> Soaked:
    """Run a soak to its end. Nothing of it runs any more when this returns."""
    chance = random.Random(seed)
    (folder / "table.json").write_text(table)
    supervisor = Supervisor(folder=folder, variables={"AUTOTUNE_DB": database.address}, chance=chance)
    ports = [free_port() for _ in range(size.servers)]
    service = Service([f"http://127.0.0.1:{port}" for port in ports], chance)
    people = People(service=service, chance=chance, trials=size.trials)
    soaked = Soaked(database=database.name, seed=seed, jobs=people.jobs)
    began, shared_before = time.monotonic(), shared_memory()
    try:
        names = _start(supervisor, size, ports)
        killer = Killer(
            supervisor=supervisor, database=database, names=names, chance=chance, most_pause=size.most_pause,
            long_outages=size.long_outages,
        )  # fmt: skip
        soaked.kills = killer.kills
        _run(people, killer, size, plan(chance, size.kills, size.ray))
        _end(people, soaked, size.end_seconds)
    finally:
        statuses = supervisor.close()
        for job in people.jobs:
            job.follower.join(5.0)
        people.join(5.0)
        service.close()
    soaked.seconds = time.monotonic() - began
    soaked.exits, soaked.restarts, soaked.repeated = supervisor.exits, supervisor.restarts(), service.repeated
    soaked.mistakes += [f"{name} ended with {status} on SIGTERM" for name, status in statuses.items() if status]
    ended = time.monotonic()
    soaked.mistakes += people.mistakes + _left_over(supervisor, shared_before)
    soaked.left_over_seconds = time.monotonic() - ended
    soaked.mistakes += [f"{log.name}: a traceback" for log in folder.glob("*.log") if "Traceback" in log.read_text()]
    soaked.mistakes += [f"{job.id}: {mistake}" for job in people.jobs for mistake in job.follower.mistakes]
    return soaked


def _start(supervisor: Supervisor, size: Size, ports: list[int]) -> dict[Kind, list[str]]:
    names: dict[Kind, list[str]] = {Kind.SERVER: [], Kind.WORKER: [], Kind.DRIVER: []}
    for number, port in enumerate(ports):
        supervisor.keep(f"server-{number}", "serve", "--no-worker", "--port", str(port))
        names[Kind.SERVER].append(f"server-{number}")
    for number in range(size.replayers):
        supervisor.keep(f"worker-{number}", "worker", "--replay", "table.json", "--runner", REPLAYED)
        names[Kind.WORKER].append(f"worker-{number}")
    if size.ray:
        supervisor.keep("ray-worker", "worker", "--runner", RAY)
        names[Kind.DRIVER].append("ray-worker")
    supervisor.watch()
    return names


def _run(people: People, killer: Killer, size: Size, kinds: list[Kind]) -> None:
    """Kill by plan, and see to it that there is work while something is killed."""
    for number, kind in enumerate(kinds):
        share = (number + 1) / len(kinds)
        for runner, least in size.jobs.items():
            while sum(job.runner == runner for job in people.jobs) < share * least:
                people.submit(runner)
        runner = RAY if kind in (Kind.DRIVER, Kind.RANK, Kind.RAYLET) else REPLAYED
        for _ in range((size.replayers if runner == REPLAYED else 1) - len(people.open(runner))):
            people.submit(runner)
        if runner == RAY:
            _wait_for_ray(people)
        killer.kill(kind)


def _wait_for_ray(people: People) -> None:
    """Until a job on Ray is under way."""
    until = time.monotonic() + 120
    while not people.running(RAY):
        assert time.monotonic() < until, "no worker takes the jobs on Ray"
        if not people.open(RAY):
            people.submit(RAY)
        time.sleep(0.2)


def _end(people: People, soaked: Soaked, seconds: float) -> None:
    """Wait until every job has ended and every client knows it."""
    until = time.monotonic() + seconds
    for job in people.jobs:
        while (state := people.state(job)) not in ENDED and time.monotonic() < until:
            time.sleep(0.5)
        if state not in ENDED:
            soaked.mistakes.append(f"{job.id} ({job.runner}) is {state}")
        elif not job.follower.join(max(5.0, until - time.monotonic())):
            soaked.mistakes.append(f"{job.id}: its stream was not told to be over after {len(job.follower.events)} events")
    people.join(max(0.0, until - time.monotonic()))


def _left_over(supervisor: Supervisor, shared_before: set[str]) -> list[str]:
    """Processes, and files in /dev/shm that nobody has open, that are there still after a while."""
    until = time.monotonic() + LEFT_OVER_SECONDS
    while (found := marked_processes(supervisor.mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return [f"left over: {what}" for what in (*found, *abandoned_since(shared_before, others=("PostgreSQL.",)))]


def keep_logs(folder: Path, target: Path) -> None:
    """Copy what the processes wrote to where it outlives the test."""
    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        shutil.copy(log, target)
