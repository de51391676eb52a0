"""Published runs with failures, computed from inputs with their sources; assumed inputs are varied."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

from autotune.goodput.closed_form import end_date, expected
from autotune.goodput.failures import FailureKind, FailureRates, failure_rates
from autotune.goodput.run import Bandwidths, Checkpoint, CheckpointKind, Recovery, Run, SavedState, checkpoint_of

MINUTE = 60.0
NODE = 8
"""Devices of a node in all of them."""
LLAMA_STATE = SavedState(
    total_bytes=405e9 * 14, saved_bytes_per_device=405e9 * 14 / 16384, loaded_bytes_per_device=405e9 * 14 / 16384
)
"""bf16 parameters and Adam in fp32 of 405 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that a computation uses."""

    name: str
    value: str
    source: str
    """"assumed": no publication gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published figure beside the computed one."""

    name: str
    published: float
    computed: float
    unit: str
    basis: str
    """`predicted`: from published inputs; `assumed`: from published and assumed ones; `calibrated`: an input was taken from
    it."""
    at_least: bool = False
    """Whether the publication gives a lower bound."""

    @property
    def error(self) -> float:
        """Relative difference; 0: the bound is kept."""
        return 0.0 if self.at_least and self.computed >= self.published else self.computed / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """One source: inputs, figures, and how the figures depend on assumed inputs."""

    title: str
    inputs: tuple[Input, ...]
    figures: tuple[Figure, ...]
    varied: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    """(Assumed input and what is shown, ((value, figure), ...))."""
    remarks: str


def mean_time_to_failure() -> Publication:
    """arXiv 2410.21680."""
    hardware, jobs = failure_rates("rsc1", 1), failure_rates("rsc1-jobs-1024", 1)
    small = FailureRates(name="8 GPUs", kinds=(FailureKind(name="any", per_node_day=1 / 47.7),))
    return Publication(
        title="Mean time to failure of 1,024 and 16,384 GPUs",
        inputs=(
            Input(name="failures of RSC-1", value="6.50 per 1,000 node-days", source="arXiv 2410.21680"),
            Input(name="mean time to failure of jobs on 8 GPUs", value="47.7 days", source="arXiv 2410.21680"),
        ),
        figures=(
            Figure(
                name="16,384 GPUs, from 6.50 per 1,000 node-days",
                published=1.8,
                unit="h",
                basis="predicted",
                computed=hardware.mean_hours_between(16384 // NODE),
            ),
            Figure(
                name="131,072 GPUs, likewise",
                published=0.23,
                unit="h",
                basis="predicted",
                computed=hardware.mean_hours_between(131072 // NODE),
            ),
            Figure(
                name="1,024 GPUs, from jobs on 8 GPUs",
                published=7.9,
                unit="h",
                basis="predicted",
                computed=small.mean_hours_between(1024 // NODE),
            ),
            Figure(
                name="1,024 GPUs, preset `rsc1-jobs-1024`",
                published=7.9,
                unit="h",
                basis="calibrated",
                computed=jobs.mean_hours_between(1024 // NODE),
            ),
        ),
        varied=(),
        remarks=(
            "The published figures are of two kinds: 7.9 h was measured on jobs that ended for any cause, 1.8 h is "
            "projected from node "
            f"failures. One rate per node cannot give both: from 6.50 per 1,000 node-days, 1,024 GPUs have "
            f"{hardware.mean_hours_between(1024 // NODE):.1f} h. Choose the preset that counts what ends your job."
        ),
    )


def llama() -> Publication:
    """The Llama 3 Herd of Models."""
    nodes, days = 16384 // NODE, 54
    rates = failure_rates("llama3", nodes)
    paths = Bandwidths(write=2e12, read=2e12, node=50e9)
    checkpoint = checkpoint_of(LLAMA_STATE, paths, CheckpointKind.SYNCHRONOUS, NODE)
    run = Run(
        nodes=nodes,
        step_seconds=10.0,
        failures=rates,
        checkpoint=checkpoint,
        spares=256,
        detection_seconds=120.0,
        restart_seconds=300.0,
        planned_seconds=1800.0,
    )
    course = expected(run)

    def effective(**changes: float) -> float:
        return 100 * expected(dataclasses.replace(run, **changes)).effective  # type: ignore[arg-type]

    others = failure_rates("hsdp-32k", nodes)
    return Publication(
        title="Llama 3 405B: 54 days on 16,384 H100",
        inputs=(
            Input(name="failures", value="419 in 54 days on 2,048 nodes", source="arXiv 2407.21783, table 5"),
            Input(name="planned interruptions", value="47 in 54 days", source="arXiv 2407.21783"),
            Input(name="file system", value="2 TB/s sustained", source="arXiv 2407.21783"),
            Input(name="state", value="14 bytes for each of 405 billion parameters", source="bf16 with Adam in fp32"),
            Input(name="spare nodes", value="256", source="assumed: the cluster had 24,000 GPUs (arXiv 2407.21783)"),
            Input(name="step", value="10 s", source="assumed; it only rounds the interval"),
            Input(name="detection, restart, planned interruption", value="2, 5 and 30 minutes", source="assumed"),
        ),
        figures=(
            Figure(
                name="effective training time",
                published=90.0,
                computed=100 * course.effective,
                unit="%",
                basis="assumed",
                at_least=True,
            ),
            Figure(
                name="unexpected interruptions",
                published=419,
                unit="",
                basis="calibrated",
                computed=course.interruptions_per_second * days * 86400,
            ),
            Figure(
                name="planned interruptions",
                published=47,
                unit="",
                basis="calibrated",
                computed=course.planned_per_second * days * 86400,
            ),
            Figure(
                name="hardware interruptions, from the rate of 32,000 other GPUs",
                published=257,
                unit="",
                basis="predicted",
                computed=others.per_second(nodes) * days * 86400,
            ),
        ),
        varied=(
            (
                "restart, minutes -> effective training time, %",
                tuple((f"{minutes}", effective(restart_seconds=minutes * MINUTE)) for minutes in (2, 5, 10, 12, 15, 20)),
            ),
            (
                "detection, minutes -> effective training time, %",
                tuple((f"{minutes}", effective(detection_seconds=minutes * MINUTE)) for minutes in (0.5, 2, 5, 10)),
            ),
        ),
        remarks=(
            f"A checkpoint stops training for {checkpoint.blocking_seconds:.1f} s; the best interval is "
            f"{course.interval / MINUTE:.1f} "
            "minutes. Of the 419 interruptions, 257 are of the GPU, its memory, the network and the host (arXiv 2407.21783)."
        ),
    )


def byterobust() -> Publication:
    """arXiv 2509.16293."""
    nodes = 9600 // NODE
    checkpoint = Checkpoint(blocking_seconds=0.05, durable_seconds=5.0, load_seconds=10.0, kind=CheckpointKind.PEERS)

    def run(name: str = "llama3", detection: float = 120.0, restart: float = 300.0) -> Run:
        return Run(
            nodes=nodes,
            step_seconds=10.0,
            failures=failure_rates(name, nodes),
            checkpoint=checkpoint,
            spares=16,
            detection_seconds=detection,
            restart_seconds=restart,
        )

    def effective(tried: Run) -> float:
        return 100 * expected(tried, 10.0).effective

    return Publication(
        title="ByteRobust: three months on 9,600 GPUs",
        inputs=(
            Input(name="GPUs, checkpoints", value="9,600; every step, in peers' memory", source="arXiv 2509.16293"),
            Input(name="spares", value="warm standbys; 16 nodes", source="arXiv 2509.16293; number assumed"),
            Input(name="failures", value="those of Llama 3 per node-day", source="arXiv 2407.21783"),
            Input(
                name="stop for a checkpoint",
                value="0.05 s of a step of 10 s",
                source="assumed: the paper reports nearly no overhead",
            ),
            Input(name="detection, restart", value="2 and 5 minutes", source="assumed"),
        ),
        figures=(Figure(name="effective training time", published=97.0, computed=effective(run()), unit="%", basis="assumed"),),
        varied=(
            (
                "failures -> effective training time, %",
                tuple((name, effective(run(name))) for name in ("hsdp-32k", "rsc2", "llama3", "rsc1")),
            ),
            (
                "restart, minutes -> effective training time, %",
                tuple((f"{minutes}", effective(run(restart=minutes * MINUTE))) for minutes in (1, 5, 10, 15)),
            ),
        ),
        remarks="Restarts for new code, which the paper counts too, are not included: their number is not an input.",
    )


GLOO = 0.4e9 * 6.52
"""Bytes/s of gloo's all-reduce of 0.4 GB on one host, 6.52 a second (meta-pytorch/torchft, pull request 199)."""
PARAMETERS = 109e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """Inputs of the benchmark with injected failures that no publication gives, in seconds and bytes/s."""

    migrate: float = 2 * MINUTE
    detection: float = 100.0
    start: float = 15 * MINUTE
    replacement: float = 5 * MINUTE
    bandwidth: float = 10e9
    replica_devices: int = 16
    gloo: float = GLOO

    @property
    def step(self) -> float:
        """Seconds of a step without failures: 405 minutes less the migrations, over 3,000 steps."""
        return (405 * MINUTE - 405 * MINUTE / 3600 * self.migrate) / 3000

    def run(self, recovery: Recovery) -> Run:
        """64 GPUs in 8 nodes with a failure an hour."""
        kinds = (FailureKind(name="injected", per_node_day=24 / 8, takes_node=False),)
        # Written beside training within the 13 minutes between checkpoints; the copy to the host is neglected.
        moved = PARAMETERS * 12 / self.bandwidth
        checkpoint = Checkpoint(blocking_seconds=0.0, durable_seconds=moved, load_seconds=moved)
        reduced = PARAMETERS * 4 / self.replica_devices / self.gloo
        drops = recovery is Recovery.DROP
        return Run(
            nodes=8,
            step_seconds=self.step,
            failures=FailureRates(name="injected", kinds=kinds),
            checkpoint=checkpoint,
            recovery=recovery,
            detection_seconds=0.0 if recovery is Recovery.MIGRATE else self.detection,
            restart_seconds=self.replacement + self.start,
            in_place_seconds=self.migrate if recovery is Recovery.MIGRATE else 0.0,
            step_overhead=1 + reduced / self.step if drops else 1.0,
            replicas=64 // self.replica_devices,
            # A step counts although the samples of a missing replica are never processed: nothing is lost by its absence.
            join_seconds=0.0,
        )

    def minutes(self, recovery: Recovery) -> float:
        """Minutes until 3,000 steps, checkpoint every 100."""
        run = self.run(recovery)
        interval = max(100 * run.step, run.checkpoint.durable_seconds)
        return end_date(run, 3000 * self.step, interval).mean / MINUTE


def restart_minutes(inputs: Injected, draws: int = 200_000) -> float:
    """Minutes of restarts if the failures are 2,700 to 4,500 s apart, as injected, instead of exponential times.

    No failure hits a recovery, which is shorter. Of a gap g, the work floor((g - D - L) / c) c is kept (step 1 of the closed
    form), so that the run has the rate E(kept) / E(g).
    """
    run, draw = inputs.run(Recovery.RESTART), random.Random(0)
    lost = inputs.detection + run.rollback_seconds + run.checkpoint.durable_seconds
    cycle = max(100 * inputs.step, run.checkpoint.durable_seconds)
    kept = sum(max((draw.uniform(2700, 4500) - lost) // cycle, 0) * cycle for _ in range(draws)) / draws
    return 3000 * inputs.step / kept * 3600 / MINUTE


def injected() -> Publication:
    """Clockwork's benchmark."""
    known = Injected()

    def varied(
        name: str, show: Callable[[Injected], float], values: tuple[tuple[str, float], ...]
    ) -> tuple[tuple[str, float], ...]:
        changed = ((text, dataclasses.replace(known, **{name: value})) for text, value in values)  # type: ignore[arg-type]
        return tuple((text, show(inputs)) for text, inputs in changed)

    def drop(inputs: Injected) -> float:
        return inputs.minutes(Recovery.DROP)

    source = "clockwork.io/blog/keeping-distributed-training-running-through-failures"
    return Publication(
        title="3,000 steps of Llama 4 Scout (109B) on 64 H200 with injected failures",
        inputs=(
            Input(name="failures", value="one every 2,700 to 4,500 s", source=source),
            Input(name="checkpoints", value="every 100 steps", source=source),
            Input(
                name="step without failures",
                value=f"{known.step:.2f} s: 405 minutes less the migrations",
                source="calibrated on 405 minutes",
            ),
            Input(name="migration", value="2 minutes", source='assumed: "a few minutes" in a press report on the product'),
            Input(
                name="start of the job", value="15 minutes", source="clockwork.io/workload-failover, an assumption there too"
            ),
            Input(
                name="replacement of the node",
                value="5 minutes",
                source="assumed; the vendor lists it beside the start of the job",
            ),
            Input(name="detection", value="100 s", source="torchtitan's default timeout of collectives"),
            Input(name="state", value="12 bytes a parameter, 1.31 TB", source="fp32 parameters and Adam of torchtitan"),
            Input(name="file system", value="10 GB/s, both ways", source="assumed"),
            Input(
                name="all-reduce between replicas",
                value=f"{GLOO / 1e9:.2f} GB/s over gloo",
                source="meta-pytorch/torchft pull request 199",
            ),
            Input(name="replica", value="16 GPUs: the fewest whose memory holds the states", source="assumed"),
        ),
        figures=(
            Figure(name="migration", published=405, computed=known.minutes(Recovery.MIGRATE), unit="min", basis="calibrated"),
            Figure(name="restart", published=818, computed=restart_minutes(known), unit="min", basis="assumed"),
            Figure(
                name="restart, if failures were a Poisson process",
                published=818,
                unit="min",
                basis="assumed",
                computed=known.minutes(Recovery.RESTART),
            ),
            Figure(name="dropping replicas", published=930, computed=drop(known), unit="min", basis="assumed"),
        ),
        varied=(
            (
                "file system, GB/s -> restart, minutes",
                varied("bandwidth", restart_minutes, (("2.5", 2.5e9), ("5", 5e9), ("10", 10e9), ("20", 20e9), ("40", 40e9))),
            ),
            (
                "replacement of the node, minutes -> restart, minutes",
                varied("replacement", restart_minutes, _minutes(0, 2, 5, 7, 10)),
            ),
            ("start of the job, minutes -> restart, minutes", varied("start", restart_minutes, _minutes(5, 10, 15, 20))),
            ("migration, minutes -> restart, minutes", varied("migrate", restart_minutes, _minutes(0.5, 2, 5))),
            ("gloo, GB/s -> dropping, minutes", varied("gloo", drop, (("2", 2e9), ("2.61", GLOO), ("4", 4e9), ("8", 8e9)))),
            ("GPUs of a replica -> dropping, minutes", varied("replica_devices", drop, (("8", 8), ("16", 16), ("32", 32)))),
        ),
        remarks=(
            "The source gives three durations and neither the step time nor the time of a restart. The step is taken "
            "from the first "
            "duration. The other two then rest on assumed inputs: they show that the durations are explained by "
            "plausible ones, "
            "and which, not that they were predicted. Dropping is slow because every step waits for the "
            "all-reduce over gloo, "
            "not because of the failures."
        ),
    )


def _minutes(*values: float) -> tuple[tuple[str, float], ...]:
    return tuple((f"{value:g}", value * MINUTE) for value in values)


def publications() -> list[Publication]:
    """All of them."""
    return [mean_time_to_failure(), llama(), byterobust(), injected()]
