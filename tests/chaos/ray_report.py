"""What a hurt sweep on a Ray cluster came to, as a page."""

import os
from collections import Counter
from pathlib import Path

from autotune.outcome.job_snapshot import read_snapshot
from storage.store import open_store
from tests.chaos.harm import Fault, fault_of
from tests.storage.whole import every_event

PAGE = """# A sweep on Ray, hurt

Written by `make chaos`, on {cores} cores: a sweep of {trials} trials on a Ray cluster of {nodes} nodes with eight fake devices
each, {gangs} gangs side by side. What is measured follows from a configuration's hash, and so does how it hurts: terminal
faults belong to configurations, transient ones to their first attempts. The driver is killed {kills} times with SIGKILL and
started again; a node is killed, and one is added. The cluster is a process of its own, apart from the driver.

| what a configuration does | configurations | attempts | how its attempts ended |
|---|---|---|---|
{faults}

| | |
|---|---|
| search trials that count | {counted} |
| attempts accepted, one for each trial that ran | {accepted} |
| attempts made again, given up or too late | {others} |
| nodes lost, and added | {lost}, {added} |
| seconds | {seconds:.0f} |
| best configuration | {best} |
| best of the same sweep with terminal faults alone | {same} |

Asserted: every trial has exactly one accepted result, of the outcome that its fault has in the end; none is lost, none
double; no process of the sweep, and nothing of it in `/dev/shm`, is left over.
"""


def page(hurt: Path, best: str, unhurt_best: str, nodes: int, gangs: int, kills: int) -> str:
    """Markdown: which faults there were, and what came of them."""
    with open_store(str(hurt)) as store:
        snapshot = read_snapshot(store, store.jobs.get().id)
        attempts, events = (
            store.attempts.of(snapshot.job.id),
            Counter(item.kind for item in every_event(store, snapshot.job.id)),
        )
    faults = {trial.number: fault_of(trial.config.hash) for trial in snapshot.trials}
    ended: dict[Fault, Counter[str]] = {fault: Counter() for fault in Fault}
    for attempt in attempts:
        ended[faults[attempt.trial_number]][str(attempt.outcome or attempt.state)] += 1
    states = Counter(str(attempt.state) for attempt in attempts)
    return PAGE.format(
        cores=os.cpu_count(), trials=snapshot.job.request["trials"], nodes=nodes, gangs=gangs, kills=kills,
        faults="\n".join(_row(fault, ended[fault], [*faults.values()]) for fault in Fault),
        counted=sum(trial.counted for trial in snapshot.trials),
        accepted=states.pop("accepted"),
        others=", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none",
        lost=events["node_lost"], added=events["node_added"], seconds=snapshot.job.active_seconds, best=best, same=unhurt_best,
    )  # fmt: skip


def _row(fault: Fault, ended: Counter[str], met: list[Fault]) -> str:
    told = ", ".join(f"{count} {outcome}" for outcome, count in ended.most_common())
    when = " (its first attempt)" if fault.is_transient else ""
    return f"| {fault}{when} | {met.count(fault)} | {ended.total()} | {told} |"
