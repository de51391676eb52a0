"""How well the equations of kernels (`autotune.prediction.equations.kernels`) hold on published measurements of nine devices.

    python -m benchmarks.prediction.kernel_model [--data ../shared/data] [--markdown docs/results/kernel-model.md] [--write]

Matrix products, forward attention and collectives inside a node. For each, the shared constants and one figure per device are
fitted to nine tenths of the measurements; the error is that on the other tenth. Then each device is left out: the constants are
fitted on the others, and its own figure is borrowed from the device that is nearest in peak and bandwidth. `--write` keeps the
devices' figures in autotune/prediction/equations/kernels.toml; only these are kept, not the measurements.
"""

import argparse
import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autotune.knowledge.row_cases import FP8_GAIN
from autotune.prediction.equations import kernels
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients, shipped_rates
from autotune.prediction.equations.kernels import (
    NARROW_HEAD,
    SHORT_SEQUENCE,
    attention_slowdown,
    link_seconds,
    nearest,
    product_seconds,
)
from search_spaces.clusters.cluster import DeviceSpec
from search_spaces.clusters.devices import device_preset

DEVICES = {
    "a100_sxm": "a100-80gb", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200",
    "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
"""Name in the tables -> preset."""
LINKS = {"a100-80gb": 300e9, "h100": 450e9, "h200": 450e9, "b200": 900e9, "b300": 900e9, "gb200": 900e9, "gb300": 900e9}
"""Bytes/s of NVLink in one direction. Nodes that only have PCIe differ by how their sockets are joined: left out."""
SOURCE = "ai-dynamo/aiconfigurator at 095f58a (Apache-2.0)"
PREFACE = [
    "# Kernels against measurements", "",
    "Written by `python -m benchmarks.prediction.kernel_model --markdown docs/results/kernel-model.md`.",
    f"Measurements: {SOURCE}. The equations are those of [predictions](../prediction-model.md#time).",
    "Errors are |predicted / measured - 1| on a random tenth that no fit saw. Beside them: the error if all sizes reach one",
    "share of the peak, bandwidth and launch included; and that of a device of which no measurement was seen, with the figure",
    "of the nearest other.", "",
]  # fmt: skip
SAMPLE = 2500
"""Measurements of a device that a fit uses: drawn evenly, so that all devices have the same weight."""
LATENCIES = ("seconds of a launch", "link_seconds")
"""Shared constants that do not depend on the size."""
ELEMENT_BYTES = 2.0
"""Of bf16, and of the message sizes."""
WIDEST_HEAD = 256
"""Wider ones run in kernels of their own."""
PEERS = ("a100-80gb", "h100", "h200")
"""Devices on which the shipped `matrix_efficiency` was fitted to whole steps: that of others is relative to theirs."""
BEST_SHAPES = {
    "a100-80gb": 0.869, "h100": 0.803, "h200": 0.803, "b200": 0.776, "b300": 0.786, "gb200": 0.729, "gh200": 0.838,
    "a100-pcie-80gb": 0.811, "mi300x": 0.514, "mi325x": 0.604, "mi355x": 0.680,
}  # fmt: skip
"""Share of the peak of the best of many shapes of products in bf16, also of devices that the tables lack."""
BEST_SOURCE = "stas00/ml-engineering, Maximum Achievable Matmul FLOPS (CC BY-SA 4.0)"
CONSUMER_SHAPES = {"3090": 1.134, "4090": 1.080, "5090": 1.071}
"""The same of consumer cards, which exceed their stated peak, that of a lower clock: no other device borrows from them."""
CONSUMER_SOURCE = (
    "mli/transformers-benchmarks (3090: as its 3090 Ti, by its A100), mag-/gpu_benchmark (4090) and main-horse.github.io, "
    "5090-mm-perf (5090): figures only, no licence is stated"
)
LASTING_RATES = {"t4": 24e12}
"""FLOP/s in fp16 of lasting products of 4,096 rows and widths on devices that the tables lack, whose power limit lowers the
clock: forums.developer.nvidia.com, "About GPU peak performance" (figures only)."""
WIDE = 4096
"""Least rows and widths of large products: of those, the gain of 8 bits and the speed under a lasting load are shown."""
LASTING = 1e-3
"""Seconds of a product from which a device's power limit lowers its clock, if anything does."""
SLOWED = 0.8
"""Relative speed of lasting products below which it is shipped: elsewhere they are as fast as the equations say."""
LASTING_TEXT = (
    "Training is a lasting load. Large products of a millisecond or more are slower where they exceed the power limit, so\n"
    "that the clock falls, by a factor of: {}. B200 has the chip of GB200 with a lower limit and is taken to\n"
    "sustain no more operations a second, although its own table shows no such fall."
)
SAME_CHIPS = {"b200": "gb200"}
"""Device -> one with the same chip and a higher power limit: it sustains no more operations a second than that one."""
OUT = Path(kernels.__file__).with_name("kernels.toml")

Table = NDArray[np.float64]
"""Measurements: sizes, and seconds in the last column."""
Predict = Callable[[Table, DeviceSpec, float, Sequence[float]], Array]
"""(measurements, device, the device's own figure, shared constants) -> seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of kernel, its measurements and its equation."""

    title: str
    own: str
    """What is fitted for each device."""
    begin: float
    """Where its fit begins."""
    shared: Mapping[str, float]
    """Constant -> where its fit begins."""
    shipped: Mapping[str, float]
    """Constant -> what predictions begin with."""
    predict: Predict
    read: Callable[[Path], dict[str, Table]]
    """Folder -> measurements of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of a device, |predicted / measured - 1|."""

    device: str
    rows: int
    own: float
    median: float
    tail: float
    """90th percentile."""
    constant: float
    """Median error if all sizes reach one share of the peak or of the bandwidth."""
    left_out: float
    """Median error where the constants are fitted on the other devices and `own` is borrowed from `neighbour`."""
    neighbour: str


def _products(table: Table, device: DeviceSpec, own: float, shared: Sequence[float]) -> Array:
    rows, outer, inner = table[:, :3].T
    rates = replace(Coefficients(), matrix_efficiency=own, rows_half=shared[0], width_half=shared[1])
    peak, bandwidth = np.full(1, device.peak_flops["bf16"]), np.full(1, device.memory_bandwidth or np.inf)
    return shared[2] + product_seconds(rows, inner, outer, peak, bandwidth, np.full(1, ELEMENT_BYTES), rates)


def _attention(table: Table, device: DeviceSpec, own: float, shared: Sequence[float]) -> Array:
    batch, tokens, heads, width = table[:, :4].T
    flops = 2 * batch * heads * tokens**2 * width
    peak = device.peak_flops["bf16"]
    return shared[2] + flops / (peak * own) * attention_slowdown(tokens, width, peak, shared[0], shared[1])


def _collectives(table: Table, device: DeviceSpec, own: float, shared: Sequence[float]) -> Array:
    ranks, volume = table[:, :2].T
    rates = replace(Coefficients(), link_efficiency=own, chunk_seconds=shared[0])
    return shared[1] * np.log2(1 + ranks) + link_seconds(volume, np.ones(1), np.full(1, LINKS[device.name]), rates)


@cache
def _read_products(data: Path, kind: str = "bfloat16") -> dict[str, Table]:
    rows = (row for row in _rows(data / "gemm.csv.gz") if row["gemm_dtype"] == kind)
    return _tables((row["system"], [row["m"], row["n"], row["k"]], row["ms"]) for row in rows)


def _read_attention(data: Path) -> dict[str, Table]:
    rows = (row for row in _rows(data / "attention_forward.csv.gz") if int(row["head_dim"]) <= WIDEST_HEAD)
    return _tables(
        (row["system"], [row[name] for name in ("batch", "sequence", "heads", "head_dim")], row["ms"]) for row in rows
    )


def _read_collectives(data: Path) -> dict[str, Table]:
    def sizes(row: Mapping[str, str]) -> list[float]:
        ranks = int(row["num_gpus"])
        volume = float(row["message_size"]) * ELEMENT_BYTES * (ranks - 1) / ranks
        return [ranks, 2 * volume if row["op_name"] == "all_reduce" else volume]

    tables = _tables((row["system"], sizes(row), row["ms"]) for row in _rows(data / "nccl.csv"))
    return {device: table for device, table in tables.items() if device in LINKS}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


def _tables(rows: Iterable[tuple[str, Sequence[str | float], str]]) -> dict[str, Table]:
    found: dict[str, list[list[float]]] = defaultdict(list)
    for system, sizes, milliseconds in rows:
        found[DEVICES[system]].append([*map(float, sizes), float(milliseconds) / 1e3])
    return {device: np.array(found[device]) for device in sorted(found)}


KINDS = (
    Kind(
        title="Matrix products in bf16", own="matrix_efficiency", begin=0.85,
        shared={"rows_half": 150.0, "width_half": 150.0, "seconds of a launch": 3e-6},
        shipped={"rows_half": Coefficients().rows_half, "width_half": Coefficients().width_half},
        predict=_products, read=_read_products,
    ),
    Kind(
        title="Forward attention in bf16, causal", own="attention_efficiency", begin=0.5,
        shared={"short_sequence": 500.0, "narrow_head": 25.0, "seconds of a launch": 1e-5},
        shipped={"short_sequence": SHORT_SEQUENCE, "narrow_head": NARROW_HEAD},
        predict=_attention, read=_read_attention,
    ),
    Kind(
        title="Collectives inside a node", own="link_efficiency", begin=0.8,
        shared={"chunk_seconds": 2e-5, "link_seconds": 5e-6},
        shipped={"chunk_seconds": Coefficients().chunk_seconds, "link_seconds": Coefficients().link_seconds},
        predict=_collectives, read=_read_collectives,
    ),
)  # fmt: skip


def main() -> int:
    """Fit, score, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = options.data / "operators"
    if not folder.is_dir():
        print(f"{folder}: not found; give --data, the folder of measurements", file=sys.stderr)
        return 2
    sections = []
    for kind in KINDS:
        scores, shared = score(kind, kind.read(folder))
        lines = section(kind, scores, shared)
        sections += lines
        print("\n".join(lines), flush=True)
        if kind.own == "matrix_efficiency":
            own = {score.device: score.own for score in scores}
            slowed = sustained(_read_products(folder), own, shared)
            if options.write:
                OUT.write_text(document(own, slowed), encoding="utf-8")
            sections += [LASTING_TEXT.format(", ".join(f"{name} {value:.2f}" for name, value in slowed.items())), ""]
    if options.markdown:
        options.markdown.write_text("\n".join([*PREFACE, *sections, *gain_section(folder)]), encoding="utf-8")
    return 0


def fit(kind: Kind, tables: Mapping[str, Table]) -> tuple[dict[str, float], list[float]]:
    """Return each device's own figure and the shared constants: least squares of logarithms, robust to outliers."""
    devices = {name: device_preset(name) for name in tables}

    def errors(logarithms: Array) -> Array:
        own, shared = np.exp(logarithms[: len(tables)]), np.exp(logarithms[len(tables) :])
        parts = [
            np.log(kind.predict(table, devices[name], value, shared) / table[:, -1]) / len(table) ** 0.5
            for (name, table), value in zip(tables.items(), own, strict=True)
        ]
        return np.concatenate(parts) * SAMPLE**0.5

    begin = np.log([kind.begin] * len(tables) + [*kind.shared.values()])
    found = np.exp(least_squares(errors, begin, loss="soft_l1", f_scale=0.1).x)
    return dict(zip(tables, map(float, found), strict=False)), [float(value) for value in found[len(tables) :]]


def score(kind: Kind, tables: Mapping[str, Table]) -> tuple[list[Score], list[float]]:
    """The errors of each device, and the shared constants fitted to all."""
    generator = np.random.default_rng(0)
    mixed = {name: table[generator.permutation(len(table))] for name, table in tables.items()}
    tests = {name: table[: len(table) // 10] for name, table in mixed.items()}
    seen = {name: table[len(table) // 10 :][:SAMPLE] for name, table in mixed.items()}
    own, shared = fit(kind, seen)
    negligible = [value if name in LATENCIES else 1e-12 for name, value in zip(kind.shared, shared, strict=True)]
    scores = []
    for name, table in tests.items():
        device = device_preset(name)
        others = {other: part for other, part in seen.items() if other != name}
        theirs, without = fit(kind, others)
        neighbour = nearest(device, [device_preset(other) for other in others]).name
        alone = {name: seen[name]}
        plain = replace(kind, shared={}, predict=lambda *given: kind.predict(*given[:3], negligible))
        at = errors_of(kind.predict(table, device, own[name], shared), table)
        scores.append(
            Score(
                device=name, rows=len(table), own=own[name], median=float(np.median(at)), tail=float(np.quantile(at, 0.9)),
                constant=float(np.median(errors_of(plain.predict(table, device, fit(plain, alone)[0][name], ()), table))),
                left_out=float(np.median(errors_of(kind.predict(table, device, theirs[neighbour], without), table))),
                neighbour=neighbour,
            )
        )  # fmt: skip
    return scores, shared


def errors_of(predicted: Array, table: Table) -> Array:
    """|predicted / measured - 1| of each row."""
    found: Array = np.abs(predicted / table[:, -1] - 1)
    return found


def section(kind: Kind, scores: Sequence[Score], shared: Sequence[float]) -> list[str]:
    """Markdown of a kind."""
    fitted = ", ".join(
        f"`{name}` {value:.3g}" + (f" (predictions begin with {kind.shipped[name]:.3g})" if name in kind.shipped else "")
        for name, value in zip(kind.shared, shared, strict=True)
    )
    names = ("device", "rows", f"`{kind.own}`", "median error", "90th percentile", "one share for all sizes", "device left out")
    lines = [
        f"## {kind.title}", "", f"Shared by all devices: {fitted}.", "", f"| {' | '.join(names)} | borrows from |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    lines += [
        f"| {one.device} | {one.rows:,} | {one.own:.2f} | {one.median:.1%} | {one.tail:.1%} | {one.constant:.1%} "
        f"| {one.left_out:.1%} | {one.neighbour} |"
        for one in scores
    ]
    return [*lines, ""]


def gain_section(folder: Path) -> list[str]:
    """Markdown: how much faster products in 8 bits are, with the rounding of their inputs."""
    half, eight = _read_products(folder), _read_products(folder, "fp8")
    lines = [
        "## Products in 8 bits", "",
        f"Time in bf16 over that in fp8 and of rounding the inputs, of products of {WIDE:,} rows and widths or more.",
        f"Predictions of rows by others take {FP8_GAIN} for a whole step.", "",
        "| device | products | 10th percentile | median | 90th percentile |", "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for device, table in eight.items():
        known = {tuple(row[:3]): row[3] for row in half[device]}
        gains = [known[tuple(row[:3])] / row[3] for row in table if tuple(row[:3]) in known and min(row[:3]) >= WIDE]
        low, median, high = np.quantile(gains, [0.1, 0.5, 0.9])
        lines.append(f"| {device} | {len(gains)} | {low:.2f} | {median:.2f} | {high:.2f} |")
    return [*lines, ""]


def sustained(tables: Mapping[str, Table], own: Mapping[str, float], shared: Sequence[float]) -> dict[str, float]:
    """Speed of large lasting products relative to that of all products, of devices whose power limit lowers it."""

    def share(name: str) -> float:
        lasting = tables[name][(tables[name][:, :3].min(axis=1) >= WIDE) & (tables[name][:, -1] >= LASTING)]
        return float(np.median(_products(lasting, device_preset(name), 1.0, shared) / lasting[:, -1]))

    shares = {name: share(name) for name in tables}
    peaks = {name: device_preset(name).peak_flops["bf16"] for name in tables}
    for name, other in SAME_CHIPS.items():
        shares[name] = min(shares[name], shares[other] * peaks[other] / peaks[name])
    usual = np.mean([shares[name] / own[name] for name in PEERS])
    relative = {name: value / own[name] / float(usual) for name, value in shares.items()}
    for name, rate in LASTING_RATES.items():
        device, size = device_preset(name), np.full(1, 4096.0)
        whole = product_seconds(size, size, size, np.full(1, device.peak_flops["fp16"]), np.full(1, device.memory_bandwidth),
                                np.full(1, ELEMENT_BYTES), shipped_rates())  # fmt: skip
        relative[name] = float(whole[0]) * rate / (2 * 4096**3)
    return {name: value for name, value in relative.items() if value < SLOWED}


def document(own: Mapping[str, float], slowed: Mapping[str, float]) -> str:
    """The file of the devices' efficiencies."""
    usual, best = (float(np.mean([values[name] for name in PEERS])) for values in (own, BEST_SHAPES))
    lines = [
        "# Made by benchmarks/prediction/kernel_model.py; not to be edited.",
        "[speed] # Of large matrix products as a share of the peak, relative to that share on A100, H100 and H200.",
        f"# From {SOURCE}:",
        *(f"{name} = {value / usual:.3f}" for name, value in own.items()),
        f"# From {BEST_SOURCE}:",
        *(f"{name} = {value / best:.3f}" for name, value in BEST_SHAPES.items() if name not in own),
        "",
        "[consumer] # The same of cards whose stated peak is that of a lower clock.",
        f"# From {CONSUMER_SOURCE}:",
        *(f"{name} = {value / best:.3f}" for name, value in CONSUMER_SHAPES.items()),
        "",
        f"[sustained] # Of products that take {LASTING * 1e3:g} ms or more, relative to all: the power limit lowers the clock.",
        f"# From {SOURCE}, and t4 from forums.developer.nvidia.com (figures only):",
        *(f"{name} = {value:.3f}" for name, value in slowed.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
