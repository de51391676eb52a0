"""What people do meanwhile: they submit jobs, pause and resume them, stop them, and extend their budgets."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.client import Follower, Service

REPLAYED, RAY = "local", "ray"
"""Runners that jobs name: the worker that answers from a table takes those of the first, the one with ranks the others."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass(slots=True, kw_only=True)
class Job:
    """A job as its submitter knows it."""

    id: str
    runner: str
    follower: Follower
    trials: int
    """The last budget of which it is known that it was granted."""
    stop_asked: bool = False
    """Whether somebody asked for a stop: then it need not spend its budget."""


@dataclass(slots=True, kw_only=True)
class People:
    """Submits jobs one after another, and has somebody for each who steers it."""

    service: Service
    chance: random.Random
    trials: dict[str, int]
    """Runner -> budget of its jobs."""
    jobs: list[Job] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    _steering: list[threading.Thread] = field(default_factory=list)

    def submit(self, runner: str) -> Job:
        """Submit a job, now and then twice: one key is one job."""
        number = len(self.jobs)
        body = {
            "model": "llama-tiny", "ranks": 2, "space": "zero", "trials": self.trials[runner], "runner": runner,
            "global_batch_size": 4, "sequence_length": 64, "confirm_repeats": 1, "seed": number,
            "strategy": self.chance.choice(["tpe", "random", "grid"]),
        }  # fmt: skip
        headers = {"Idempotency-Key": f"soak-{number}"}
        ids = set()
        for _ in range(self.chance.choice([1, 1, 2])):
            answer = self.service.ask("POST", "/v1/jobs", json=body, headers=headers)
            assert answer.status_code == 202, answer.text
            ids.add(answer.json()["id"])
        (job_id,) = ids
        follower = Follower(self.service, job_id, random.Random(self.chance.random()))
        job = Job(id=job_id, runner=runner, follower=follower, trials=self.trials[runner])
        self.jobs.append(job)
        self._steer(job, number)
        return job

    def open(self, runner: str) -> list[Job]:
        """Jobs that are not known to have ended."""
        return [job for job in self.jobs if job.runner == runner and self.state(job) not in ENDED]

    def running(self, runner: str) -> bool:
        """Whether some job is in a worker's hands."""
        return any(self.state(job) == "RUNNING" for job in self.jobs if job.runner == runner)

    def state(self, job: Job) -> str:
        """What the service says of the job."""
        answer = self.service.ask("GET", f"/v1/jobs/{job.id}")
        assert answer.status_code == 200, answer.text
        return str(answer.json()["state"])

    def join(self, seconds: float) -> None:
        """Wait until nobody has anything more to ask."""
        until = time.monotonic() + seconds
        for thread in self._steering:
            thread.join(max(0.0, until - time.monotonic()))

    def _steer(self, job: Job, number: int) -> None:
        wishes: dict[int, Callable[[Job], None]] = {1: self._pause_and_resume, 2: self._extend, 3: self._stop}
        wish = wishes.get(number % 6)
        if wish is not None:
            self._steering.append(threading.Thread(target=self._told, args=(wish, job)))
            self._steering[-1].start()

    def _told(self, wish: Callable[[Job], None], job: Job) -> None:
        try:
            # Once it is under way: what is asked of a job that waits has no holder to race with.
            self._wait(job, lambda view: view["state"] != "QUEUED" and view["version"] > 4)
            time.sleep(self.chance.uniform(0.0, 3.0))
            wish(job)
        except Exception as error:
            self.mistakes.append(f"{job.id}: {error!r}")

    def _pause_and_resume(self, job: Job) -> None:
        if self._granted(job, "pause"):
            if self._wait(job, lambda view: view["state"] == "PAUSED")["state"] in ENDED:
                return
            time.sleep(self.chance.uniform(0.0, 2.0))
            # Asked again where the answer was lost, it may have gone on to its end meanwhile.
            assert self._granted(job, "resume") or self.state(job) in ENDED, "a paused job was not resumed"

    def _stop(self, job: Job) -> None:
        job.stop_asked = True
        self._granted(job, "stop")

    def _extend(self, job: Job) -> None:
        more = job.trials + 3
        answer = self.service.ask("PATCH", f"/v1/jobs/{job.id}", json={"trials": more})
        assert answer.status_code in (200, 409), answer.text
        if answer.status_code == 200:
            job.trials = more

    def _granted(self, job: Job, verb: str) -> bool:
        answer = self.service.ask("POST", f"/v1/jobs/{job.id}/{verb}")
        assert answer.status_code in (202, 409), answer.text
        return answer.status_code == 202

    def _wait(self, job: Job, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            view: dict[str, Any] = self.service.ask("GET", f"/v1/jobs/{job.id}").json()
            if holds(view) or view["state"] in ENDED:
                return view
            time.sleep(0.3)
