"""How does a model scale? The best configuration on 1, 2 and 4 ranks of one host, and on two hosts with a slow network.

    python -m benchmarks.search.scale_hosts [--sizes 1x1 1x2 1x4 2x1 2x2] [--rate 500] [--markdown docs/results/scaling.md]

Runs `autotune scale` on simulated hosts: each is a network namespace on a switch whose ports have a rate (root, Linux). A size
is HOSTSxRANKS; each has a new sweep, and the finalists are confirmed. A rank computes on one thread, so that sizes differ only
in their ranks. Takes about 3 minutes on two cores.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.request.field_forms import parse_shape
from autotune.request.request import JobRequest
from autotune.series import SeriesEntry, SeriesObjective, SeriesRequest, SeriesResult
from autotune.series_run import scaled
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.tuning import TuneResult, run_new_job
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser, table
from executor.runners.runner import Runner
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster
from search_spaces.knob_values import value_text
from search_spaces.trial import Fidelity, Interval
from search_spaces.trial_config import TrialConfig

MODEL, SPACE = "llama-tiny", "3d"
SIZES = ("1x1", "1x2", "1x4", "2x1", "2x2")
FIDELITY = Fidelity(min_steps=5, max_steps=60, max_seconds=1.0)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
INTRODUCTION = """# How a model scales

Written by `make bench` (`benchmarks/search/scale_hosts.py`): `autotune scale` on hosts that are network namespaces of one
machine, joined by a switch whose ports have {rate} Mbit/s each way. {model}, space `{space}`, {trials} trials a size, the
finalists confirmed in at most {confirm} rounds; the global batch is 8 samples of 128 tokens at every size. A rank computes on
one thread; the machine has {cores} cores, so that more ranks than that share them and cannot compute faster.

Efficiency is a rank's samples/s as a share of a single rank's. Intervals are 95 % intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of hosts, and of ranks on each."""

    hosts: int
    ranks_of_host: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_of_host

    def cluster(self, rate: int) -> ClusterSpec:
        """This machine divided into the hosts, with the network described by its known rate."""
        here = local_cluster(self.ranks)
        return replace(
            here, name=f"{self.hosts}x{self.ranks_of_host}", nodes=self.hosts, devices_per_node=self.ranks_of_host,
            inter_node_bandwidth=rate * 1e6 / 8, host_memory_bytes=here.host_memory_bytes // self.hosts,
            cores_per_node=max(here.cores_per_node // self.hosts, 1),
        )  # fmt: skip


def size_of(text: str) -> Size:
    """Parse HOSTSxRANKS."""
    hosts, ranks = parse_shape("sizes", text)
    return Size(hosts=hosts, ranks_of_host=ranks)


def prepared(size: Size, arguments: argparse.Namespace) -> Session:
    """The session of a size's job."""
    request = JobRequest(
        model=MODEL, space=SPACE, trials=arguments.trials, confirm_repeats=arguments.confirm, fidelity=FIDELITY,
        runner="local", ranks=size.ranks, resolved_cluster=size.cluster(arguments.rate),
    )  # fmt: skip
    return prepare(request)


def measured(sizes: list[Size], arguments: argparse.Namespace) -> SeriesResult:
    """Sweep every size on its hosts."""
    sessions = [prepared(size, arguments) for size in sizes]
    series = SeriesRequest(objective=SeriesObjective.SCALE, ranks=tuple(sorted({size.ranks for size in sizes})))
    with tempfile.TemporaryDirectory() as folder:

        def sweep(session: Session) -> TuneResult:
            began, cluster = time.monotonic(), session.cluster
            with ShapedNetwork(cluster.nodes, f"{arguments.rate}mbit") as network:

                def start(_: Session) -> Runner:
                    return NetworkRunner(network, cluster.devices_per_node, ONE_THREAD)

                result = run_new_job(session, str(Path(folder) / "jobs.db"), runner_of=start)
            print(f"{cluster.name}: {time.monotonic() - began:.0f} s, {result.message}", flush=True)
            return result

        return scaled(series, sessions, sweep)


def rows(found: SeriesResult) -> list[list[str]]:
    """A line for each size."""
    return [
        [
            f"{entry.nodes} host{'s' if entry.nodes > 1 else ''}, {entry.ranks} rank{'s' if entry.ranks > 1 else ''}",
            _text(entry.samples_per_second, "{:.4g}"),
            _text(entry.efficiency, "{:.0%}"),
            best_text(entry),
            _text(entry.result.gain if entry.result else None, "{:.2f}"),
        ]
        for entry in found.entries
    ]


def best_text(entry: SeriesEntry) -> str:
    """The best configuration's knobs that differ from their defaults."""
    if entry.result is None or entry.result.best is None:
        return entry.message
    changed = entry.result.best.differences(TrialConfig())
    return " ".join(f"`{name}={value_text(value)}`" for name, value in changed.items()) or "all defaults"


def busy_seconds() -> tuple[float, float]:
    """CPU seconds of this machine since its start, and those of this process and its ended children."""
    user, nice, system, _, _, *further = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9])
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    whole = (user + nice + system + sum(further)) / ticks
    return whole, own.user + own.system + own.children_user + own.children_system


def page(found: SeriesResult, arguments: argparse.Namespace, seconds: float, others: float) -> list[str]:
    """Lines of Markdown."""
    introduction = INTRODUCTION.format(
        rate=arguments.rate, model=MODEL, space=SPACE, trials=arguments.trials, confirm=arguments.confirm,
        cores=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    first, *warnings = found.message.split("; ")
    headings = ["size", "samples/s", "efficiency", "best configuration", "gain over the baseline"]
    lines = [*introduction.splitlines(), "", *table(headings, rows(found)), "", f"{first[:1].upper()}{first[1:]}."]
    if warnings:
        lines += ["", *(f"- {text}" for text in _joined(warnings))]
    share = f"{max(others / seconds / len(os.sched_getaffinity(0)), 0.0):.0%}".replace("%", " %")
    return [*lines, "", f"{len(found.entries)} sweeps in {seconds:.0f} s; other work took {share} of the CPUs meanwhile."]


def _joined(parts: list[str]) -> list[str]:
    """Rejoin warnings that were split: each has its remedy after a semicolon."""
    whole: list[str] = []
    for part in parts:
        if part.startswith("warning: "):
            whole.append(part)
        else:
            whole[-1] += f"; {part}"
    return whole


def _text(interval: Interval | None, form: str) -> str:
    if interval is None:
        return "–"
    mean, low, high = (form.format(value).replace("%", " %") for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", type=size_of, default=[size_of(text) for text in SIZES], metavar="HOSTSxRANKS")
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s of a host's port, each way")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--confirm", type=int, default=2, help="maximum of confirmation rounds")
    arguments = parser.parse_args()
    if missing := why_not():
        print(f"nothing is measured: {missing}")
        return 0
    began, (whole, own) = time.monotonic(), busy_seconds()
    found = measured(arguments.sizes, arguments)
    whole_after, own_after = busy_seconds()
    others = whole_after - whole - (own_after - own)
    lines = page(found, arguments, time.monotonic() - began, others)
    give(lines, arguments.markdown)
    return 0 if found.answer is not None else 1


if __name__ == "__main__":
    sys.exit(main())
