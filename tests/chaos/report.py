"""The crash matrix as a page."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.killer import Kind
from tests.chaos.people import RAY
from tests.chaos.soak import Soaked

PAGE = """# Crash matrix

Written by `make chaos`, on {cores} cores. While people submit jobs over REST, pause, resume and stop them and extend their
budgets, and while a client follows the events of every job, processes are killed with SIGKILL at random points and started
again. On PostgreSQL there are two API servers and three workers, on SQLite one and two; one worker runs its jobs on Ray, with
2 ranks of `llama-tiny` on the CPU, and the others answer trials from a table.

Killed, times:

{kills}

The database: on PostgreSQL every process of the server, which is started again after up to 3 s, and once after 33 s; on SQLite
whichever process of ours holds the write lock, stopped and seen to hold it still before it is killed. A Ray driver is a
worker for which a job on Ray is under way and which runs Ray, or starts it; ranks and raylet are processes below it.

What came of it:

{figures}

Asserted of every job: it ended SUCCEEDED, with its whole budget (as extended) unless somebody asked for a stop; every trial has
exactly one accepted attempt (the last one of a job that was stopped may have none), and search trials are counted once; what
clients heard over all their connections, taken up by `Last-Event-ID`, equals the rows of the database, 1, 2, 3, … with no gap
and no repeat; every submission, sent again until it is answered and sometimes twice, is one job. Asserted of the end: no
process is left over, nothing in `/dev/shm`, and no log has a traceback.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A soak, and what the database had in the end."""

    soaked: Soaked
    found: Counter[str]


def page(rows: list[Row]) -> str:
    """Markdown: what was killed how often, and what came of it."""
    head = [_cells("", [row.soaked.database for row in rows]), "|---|" + "---|" * len(rows)]
    kills = [*(_cells(kind, [row.soaked.counts()[kind] for row in rows]) for kind in Kind)]
    kills.append(_cells("all", [len(row.soaked.kills) for row in rows]))
    figures = [_cells(name, [_figure(name, row) for row in rows]) for name in FIGURES]
    tables = {"kills": "\n".join([*head, *kills]), "figures": "\n".join([*head, *figures])}
    return PAGE.format(cores=os.cpu_count(), **tables)


FIGURES = {
    "jobs": "jobs",
    "of them on Ray": "",
    "search trials, each counted once": "trials",
    "confirming trials": "confirmations",
    "attempts accepted": "attempts accepted",
    "attempts abandoned": "attempts abandoned",
    "attempts superseded": "attempts superseded",
    "attempts retried": "attempts retried",
    "jobs taken over from a holder": "takeovers",
    "events": "events",
    "streams opened by the clients": "connections",
    "requests sent again": "",
    "processes started again": "",
    "of them ended by themselves": "",
    "seconds": "",
    "seconds until no process was left": "",
    "seed": "",
}
"""What a line tells -> its name among what was found."""


def _figure(name: str, row: Row) -> int:
    soaked = row.soaked
    others = {
        "of them on Ray": sum(job.runner == RAY for job in soaked.jobs),
        "requests sent again": soaked.repeated,
        "processes started again": soaked.restarts,
        "of them ended by themselves": len(soaked.exits),
        "seconds": round(soaked.seconds),
        "seconds until no process was left": round(soaked.left_over_seconds),
        "seed": soaked.seed,
    }
    return others[name] if name in others else row.found[FIGURES[name]]


def _cells(name: str, figures: Sequence[object]) -> str:
    return f"| {name} | " + " | ".join(str(figure) for figure in figures) + " |"
