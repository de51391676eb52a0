"""What `test_two_hosts` runs on the first host: a long trial over both, and another when the node that was lost is back.

    python two_hosts_driver.py ADDRESS

Says what happens on standard output, a JSON object a line.
"""

import json
import sys
import time
from collections.abc import Iterator

import ray

from executor.errors import RunnerError
from executor.runners.ray import RayRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.plain import to_plain
from search_spaces.trial import Fidelity, Progress, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

RANKS = 4
ENDLESS = Fidelity(max_seconds=600.0, max_steps=1_000_000, target_relative_half_width=1e-9, measure_memory=False)
SHORT = Fidelity(max_seconds=1.0, measure_memory=False)


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def join(address: str, seconds: float = 90.0) -> None:
    """Connect as soon as the head is there."""
    limit = time.monotonic() + seconds
    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except ConnectionError:
            if time.monotonic() > limit:
                raise
            time.sleep(1.0)


def living() -> dict[str, str]:
    """Node id -> address."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def wait_for(addresses: int, without: frozenset[str] = frozenset(), runner: RayRunner | None = None) -> dict[str, str]:
    """Nodes at so many addresses, none of which has one of these ids. Meanwhile the runner is listened to, as a job does."""
    while len(nodes := living()) != addresses or without & set(nodes):
        if runner is None:
            time.sleep(0.2)
        else:
            runner.events(0.2)
    return nodes


def request(attempt: str, fidelity: Fidelity) -> TrialRequest:
    return TrialRequest(
        attempt=attempt,
        model=resolve_model("llama-tiny"),
        config=TrialConfig(),
        workload=Workload(global_batch_size=4, sequence_length=32),
        world_size=RANKS,
        fidelity=fidelity,
        timeout_seconds=600.0,
    )


def events(runner: RayRunner, wanted: TrialRequest) -> Iterator[Progress | TrialResult]:
    """What is heard of the trial, up to its result."""
    runner.submit(wanted)
    while True:
        for handle, event in runner.events(0.5):
            if handle == wanted.attempt and isinstance(event, Progress | TrialResult):
                yield event
                if isinstance(event, TrialResult):
                    return


def attempt(runner: RayRunner, wanted: TrialRequest) -> None:
    for event in events(runner, wanted):
        if isinstance(event, TrialResult):
            tell(result=to_plain(event))
        else:
            tell(phase=event.phase, step=event.step)


def start(address: str) -> RayRunner:
    return RayRunner(RANKS, address=address, device="cpu", placement_seconds=120.0)


def main(address: str) -> None:
    join(address)
    before = wait_for(2)
    tell(nodes=before)
    runner = start(address)
    attempt(runner, request("first", ENDLESS))
    (left,) = wait_for(1, runner=runner)
    lost = frozenset(before) - {left}
    tell(gone=[before[node] for node in lost])
    tell(nodes=wait_for(2, without=lost, runner=runner))
    try:
        attempt(runner, request("second", SHORT))
    except RunnerError as error:  # as a worker does: ranks that break for good are made anew
        tell(broken=str(error))
        runner.close()
        runner = start(address)
        attempt(runner, request("third", SHORT))
    runner.close()


if __name__ == "__main__":
    main(sys.argv[1])
