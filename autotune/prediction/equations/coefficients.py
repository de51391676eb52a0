"""Parameters that the equations cannot derive: efficiencies, latencies and constants, each with its prior uncertainty.

`benchmarks/prediction/fit_coefficients.py` fits the shipped coefficients to published measurements.
"""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.clusters.cluster import ClusterSpec


def _known(default: float, spread: float, quantity: str, *, shared: bool = True) -> Any:
    """A positive coefficient: its default, the standard deviation of its logarithm, and the quantity it affects (time, memory).

    A coefficient that is not `shared` is specific to one software on one network and does not transfer to others.
    """
    return field(default=default, metadata={"spread": spread, "quantity": quantity, "shared": shared})


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Defaults are those of a GPU with NCCL; `fitted.toml` holds the values fitted to measurements."""

    matrix_efficiency: float = _known(0.85, 0.15, "time")
    """Share of the peak that the largest matrix products reach, on an A100 or H100."""
    rows_half: float = _known(120.0, 0.3, "time")
    """Rows (tokens) at which a product reaches half of that. This and the next: fitted to isolated kernels on nine devices."""
    width_half: float = _known(150.0, 0.3, "time")
    """Inner and outer width (of a rank's slice) at which a product reaches half of that."""
    attention_efficiency: float = _known(0.45, 0.3, "time")
    """Share of the peak of a fused attention kernel with 4,096 tokens and heads of 128, forward and backward."""
    backward_ratio: float = _known(2.0, 0.08, "time")
    """Time of backward as a multiple of forward's."""
    traffic: float = _known(1.0, 0.4, "time")
    """Bytes that norms, residuals and activations move, as a multiple of the minimum."""
    kernel_seconds: float = _known(6.0e-4, 0.8, "time", shared=False)
    """Seconds in which the host launches one layer's forward: some 30 operators of about 20 us each in eager mode."""
    collective_launch: float = _known(2.0e-4, 1.0, "time", shared=False)
    """Seconds that launching tensor-parallel collectives adds to that: four of about 50 us."""
    link_efficiency: float = _known(0.8, 0.2, "time")
    """Share of the stated bandwidth inside a link domain that a collective reaches."""
    network_efficiency: float = _known(0.7, 0.35, "time")
    """Share of the stated bandwidth of the network."""
    link_seconds: float = _known(5.0e-6, 0.5, "time")
    """Latency of a collective inside a link domain."""
    chunk_seconds: float = _known(2.0e-5, 0.5, "time")
    """Inside a link domain, a message that takes T seconds at full bandwidth takes sqrt(chunk_seconds x T) more: it travels in
    chunks, and fewer or smaller ones than would fill the link."""
    network_seconds: float = _known(3.0e-5, 0.7, "time")
    """Latency of a collective across link domains, for each doubling of them."""
    half_message: float = _known(2.0e7, 0.8, "time")
    """Bytes of a message of a group that uses a node's whole network at which half of the bandwidth is reached."""
    crossed_seconds: float = _known(1.0e-5, 2.5, "time")
    """Seconds that a tensor-parallel collective waits per rank of its group if the host waits for messages to another link
    domain."""
    data_exposed: float = _known(0.15, 0.8, "time")
    """Share of the data-parallel communication that could be hidden but is not."""
    hop_seconds: float = _known(2.0e-4, 0.8, "time")
    """Seconds per micro-batch at a boundary of pipeline stages beyond the transfer of its bytes."""
    blocked_seconds: float = _known(5.0e-5, 2.0, "time")
    """Seconds per micro-batch, and per pair of the run's link domains, that blocking messages between stages cost."""
    update_efficiency: float = _known(0.6, 0.4, "time")
    """Share of the memory bandwidth that the optimizer's update reaches."""
    host_update_efficiency: float = _known(1.5, 0.5, "time")
    """Bytes per second that an update on the host moves, as a multiple of 2.5 GB/s for each core."""
    step_seconds: float = _known(0.01, 0.8, "time")
    """Seconds of a step not accounted for elsewhere."""
    overlap_slowdown: float = _known(0.15, 0.5, "time")
    """Share of the shorter of two overlapping operations that is not hidden [Galvatron: 0.13]."""
    file_read_bandwidth: float = _known(3.0e9, 0.7, "files", shared=False)
    """Bytes/s that the ranks of a node together read from files, as the engine reads them; measured by a calibration."""
    file_update_bandwidth: float = _known(3.0e9, 0.7, "files", shared=False)
    """Bytes/s, sum of both directions, with equal simultaneous reads and writes."""
    time_spread: float = _known(0.12, 0.5, "band")
    """Standard deviation of the logarithm of measured / predicted time."""
    time_tail: float = _known(1.0, 0.5, "band")
    """Half-width of the 90 % band of times as a multiple of that of a normal distribution with `time_spread`.

    Software and networks without trials of their own share an error that the spread within a source does not contain.
    """
    time_doubt: float = _known(1.0, 0.5, "band")
    """What is left of the doubts about a kind of case (`step.doubt`): 1 without trials, nothing after many."""

    context_bytes: float = _known(1.8e9, 0.3, "memory")
    """Bytes outside of torch's allocator: the device's context and communicators."""
    workspace_bytes: float = _known(2.0e8, 0.6, "memory")
    """Bytes in the allocator that the equations do not count: workspaces of libraries, small tensors."""
    fragmentation: float = _known(1.05, 0.03, "memory", shared=False)
    """Reserved / allocated."""
    activation_scale: float = _known(1.0, 0.06, "memory", shared=False)
    """Activations kept / those counted by the equations."""
    working_layers: float = _known(2.0, 0.3, "memory", shared=False)
    """Activations of a layer that backward holds besides the kept ones: gradients and temporaries."""
    memory_spread: float = _known(0.06, 0.5, "band")
    """Standard deviation of the logarithm of measured / predicted memory."""
    memory_tail: float = _known(1.0, 0.5, "band")
    """The same as `time_tail` for the 90 % band of memory."""


def names(quantity: str, *, shared: bool = False) -> tuple[str, ...]:
    """The coefficients of `time`, `memory` or `band`; `shared`: only those that hold for any software."""
    chosen = [item for item in dataclasses.fields(Coefficients) if item.metadata["quantity"] == quantity]
    return tuple(item.name for item in chosen if item.metadata["shared"] or not shared)


def spread(name: str) -> float:
    """The prior standard deviation of a coefficient's logarithm."""
    return float(Coefficients.__dataclass_fields__[name].metadata["spread"])


ON_A_PROCESSOR = {
    "context_bytes": 1.0, "workspace_bytes": 1e5, "fragmentation": 1.0, "kernel_seconds": 2e-4, "collective_launch": 4e-4,
}  # fmt: skip
"""On a CPU the memory limit applies to the allocator, which reserves nothing extra; libraries allocate elsewhere. Operators are
called, not launched; collectives of gloo wait for a thread."""


def rates_for(cluster: ClusterSpec, engine: str) -> Coefficients:  # noqa: ARG001  shipped values hold for all engines
    """The coefficients for an engine on a cluster. A CPU has no device context and reserves nothing beyond the memory used."""
    if cluster.device.kind == "cpu":
        return dataclasses.replace(shipped_rates(), **ON_A_PROCESSOR)
    return shipped_rates()


def shipped_rates() -> Coefficients:
    """The shipped coefficients."""
    return Coefficients(**_fitted()["coefficients"])


def fitted_sources() -> frozenset[str]:
    """Names of the sources of the measurements used for the fit."""
    return frozenset(_fitted()["sources"]["names"])


@cache
def _fitted() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("fitted.toml").read_text(encoding="utf-8"))
