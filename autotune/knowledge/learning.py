"""What predictions for a cluster and an engine learn from measurements by others."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.knowledge.measurement import Measurement, TrialMeasurement, local_measurements
from autotune.knowledge.row import TableRow, blinded, step_seconds
from autotune.knowledge.row_cases import cases_of_rows, noted_adapters, refusal
from autotune.knowledge.row_names import named_model, row_hardware
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients, names, rates_for
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.residuals import MOST_RESIDUALS
from autotune.prediction.fitting.trial_fit import Runs, fitted
from autotune.prediction.planning.calibrated import Borrowed
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from storage.store import Store

KNOB_OF = {
    "zero_stage": "zero_stage", "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "vpp": "virtual_stages",
    "cp": "context_parallel_size", "ep": "expert_parallel_size", "sequence_parallel": "sequence_parallel",
    "recompute": "activation_checkpointing", "micro_batch": "micro_batch_size",
}  # fmt: skip
"""Column -> its knob."""


def learned_from(
    measurements: Sequence[Measurement], store: "Store | None", cluster: ClusterSpec, engine: str, model: Any = None
) -> Borrowed:
    """Learn from measurements by others, except those that the database has itself. `model`: of which times are predicted.

    1. Measurements on other devices refine the coefficients that hold for any software, each source with little weight.
    2. Those on the same devices are learned from like trials, in proportion to their likeness; other software has more noise,
       and its memory is not used.
    """
    wanted = _Kind.of_model(model, cluster.world_size) if isinstance(model, ModelSpec) else None
    local = local_measurements(store) if store is not None else ()
    local_trials = {_identity(measurement) for measurement in local}  # the database has no rows
    foreign = [measurement for measurement in measurements if _identity(measurement) not in local_trials]
    same_device, other_devices = list[Measurement](), list[Measurement]()
    for measurement in foreign:
        (same_device if _is_same_device(measurement, cluster) else other_devices).append(measurement)
    return Borrowed(
        rates=_refined(_timed(other_devices), rates_for(cluster, engine)),
        runs=tuple(_runs(_timed(same_device), engine, wanted)),
        text=_text(len(same_device), len(other_devices), len({measurement.source for measurement in foreign})),
    )


def _text(same_device: int, other_devices: int, sources: int) -> str:
    if not same_device + other_devices:
        return ""
    of = f"{sources} source{'s' * (sources != 1)}"
    parts = [
        f"{count} {hardware}"
        for count, hardware in ((same_device, "on the same devices"), (other_devices, "on others"))
        if count
    ]
    return f"measurements of {of} by others ({', '.join(parts)})"


def _identity(measurement: Measurement) -> tuple[str, str] | None:
    """Equal for trials of one configuration; None: a row."""
    trial = measurement.measured
    return (trial.setting.key, trial.config.hash) if isinstance(trial, TrialMeasurement) else None


def thinned(measurements: Sequence[Measurement], most: int) -> list[Measurement]:
    """At most so many measurements: of each source as many, evenly spread."""
    sources: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        sources.setdefault(measurement.source, []).append(measurement)
    if len(measurements) <= most:
        return list(measurements)
    share = max(most // len(sources), 1)
    return [
        members[index]
        for members in sources.values()
        for index in sorted({round(at) for at in np.linspace(0, len(members) - 1, min(len(members), share)).tolist()})
    ]


def _timed(measurements: Sequence[Measurement]) -> list[Measurement]:
    return thinned([measurement for measurement in measurements if _seconds(measurement) is not None], MOST_RESIDUALS)


def _seconds(measurement: Measurement) -> float | None:
    measured = measurement.measured
    if isinstance(measured, TableRow):
        return step_seconds(measured) if refusal(measured) is None else None
    return measured.setting.global_batch_size / measured.samples_per_second if measured.samples_per_second else None


def _is_same_device(measurement: Measurement, cluster: ClusterSpec) -> bool:
    """Whether device and links are the same; the number of nodes may differ."""
    measured = measurement.measured
    if isinstance(measured, TrialMeasurement):
        trial_cluster = measured.setting.cluster
        if trial_cluster.device.kind != cluster.device.kind or trial_cluster.devices_per_node != cluster.devices_per_node:
            return False
        if cluster.device.kind == "cpu" and trial_cluster.cores_per_node != cluster.cores_per_node:
            return False
        pairs = [
            (trial_cluster.intra_node_bandwidth, cluster.intra_node_bandwidth),
            (trial_cluster.device.memory_bandwidth, cluster.device.memory_bandwidth),
            *((flops, cluster.device.peak_flops.get(name)) for name, flops in trial_cluster.device.peak_flops.items()),
        ]
        if trial_cluster.nodes > 1 and cluster.nodes > 1:
            pairs.append((trial_cluster.inter_node_bandwidth, cluster.inter_node_bandwidth))
        return all(_is_close(value, other) for value, other in pairs)
    row, device = measured, cluster.device
    if device.kind != "cuda" or refusal(row) is not None:
        return False
    hardware = row_hardware(row.gpu_type or "", row.gpus_per_node, row.num_gpus or 1, row.intra_bw, row.inter_bw)
    return (
        hardware is not None
        and hardware.devices_per_node == cluster.linked_devices
        and _is_close(hardware.intra, cluster.intra_node_bandwidth)
        and _is_close(hardware.device.memory_bandwidth, device.memory_bandwidth)
        and _is_close(hardware.device.peak_flops.get("bf16"), device.peak_flops.get("bf16"))
    )


def _is_close(value: float | None, other: float | None) -> bool:
    # Largest difference of the logarithm of a figure between devices that are the same.
    return value == other or (bool(value) and bool(other) and abs(math.log(value / other)) < 0.02)  # type: ignore[operator]


def _refined(measurements: Sequence[Measurement], before: Coefficients) -> Coefficients:
    """The coefficients of time that hold for any software, by measurements on other devices."""
    if not measurements:
        return before
    counts: dict[str, int] = {}
    for measurement in measurements:
        counts[measurement.source] = counts.get(measurement.source, 0) + 1
    runs = list(_groups(measurements))
    seconds = np.concatenate(
        [np.array([_seconds(measurement) or math.nan for measurement in members]) for members, _, _ in runs]
    )
    # A source on other devices weighs at most as much as three measurements.
    share = np.concatenate(
        [np.array([min(1.0, 3.0 / counts[measurement.source]) for measurement in members]) for members, _, _ in runs]
    )

    def predicted(tried: Coefficients) -> Array:
        return np.concatenate([seconds_of(cases, tried) * np.ones(len(members)) for members, cases, _ in runs])

    # 0.3: between devices and software, the logarithm of a time varies by effects that no coefficient represents.
    return fitted(names("time", shared=True), before, predicted, seconds, 0.3, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What errors of predictions depend on, beside software and device."""

    experts: bool
    adapters: bool
    parameters: float
    devices: int

    @classmethod
    def of_model(cls, model: ModelSpec, devices: int) -> "_Kind":
        return cls(
            experts=bool(model.num_experts), adapters=bool(model.lora_rank), parameters=model.parameter_count, devices=devices
        )

    @classmethod
    def of_row(cls, row: TableRow) -> "_Kind":
        model = named_model(row)
        layers, hidden = row.num_layers or 1, row.hidden or 1
        return cls(
            experts=bool(row.experts or (model is not None and model.num_experts)),
            adapters=noted_adapters(row.notes) is not None,
            parameters=model.parameter_count if model else 1e9 * (row.params_b or 12e-9 * layers * hidden**2),
            devices=row.num_gpus or 1,
        )

    def likeness(self, other: "_Kind") -> float:
        """1 if they are equal. Halved for another kind of model, and for 16 times the size or the devices."""
        kinds = (self.experts != other.experts) + (self.adapters != other.adapters)
        sizes = abs(math.log2(self.parameters / other.parameters)) + abs(math.log2(self.devices / other.devices))
        return float(0.5 ** (kinds + sizes / 4))


def _runs(measurements: Sequence[Measurement], engine: str, wanted: _Kind | None) -> Iterable[Runs]:
    for members, cases, configs in _groups(measurements):
        trials = [measured for measurement in members if isinstance(measured := measurement.measured, TrialMeasurement)]
        same = bool(trials) and trials[0].setting.engine == engine
        # 0.1: standard deviation of the logarithm of a time between software on the same devices.
        further = 0.0 if same else 0.1**2
        measured = members[0].measured
        kind = (
            _Kind.of_row(measured)
            if isinstance(measured, TableRow)
            else _Kind.of_model(measured.setting.model, measured.setting.cluster.world_size)
        )
        yield Runs(
            cases=cases,
            configs=tuple(configs),
            keys=tuple(f"{measurement.source}:{index}" for index, measurement in enumerate(members)),
            seconds=np.array([_seconds(measurement) or math.nan for measurement in members]),
            peaks=np.array([trial.peak_memory_bytes or math.nan for trial in trials] if same else [math.nan] * len(members)),
            repeats=np.array([float(measurement.repeats) for measurement in members]),
            noise=np.sqrt(np.array([measurement.noise for measurement in members]) ** 2 + further),
            likeness=(1.0 if same else 0.5) * (1.0 if wanted is None else wanted.likeness(kind)),
        )


def _groups(measurements: Sequence[Measurement]) -> Iterable[tuple[list[Measurement], Cases, list[TrialConfig]]]:
    """Measurements with their cases: the rows of one model of each source, and the trials of one setting."""
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(_group(measurement), []).append(measurement)
    for members in groups.values():
        trials = [measured for measurement in members if isinstance(measured := measurement.measured, TrialMeasurement)]
        rows = [measured for measurement in members if isinstance(measured := measurement.measured, TableRow)]
        if trials:
            setting, configs = trials[0].setting, [trial.config for trial in trials]
            yield members, cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine), configs
        else:
            yield members, cases_of_rows([blinded(row) for row in rows]), [_config(row) for row in rows]


def _group(measurement: Measurement) -> tuple[object, ...]:
    trial = measurement.measured
    if isinstance(trial, TrialMeasurement):
        return measurement.source, trial.setting.key, trial.config.precision, trial.config.attention_backend == "math"
    return measurement.source, trial.model_name, trial.num_layers, trial.hidden


def _config(row: TableRow) -> TrialConfig:
    """The knobs that the row's columns state."""
    values = {knob: getattr(row, column) for column, knob in KNOB_OF.items() if getattr(row, column) is not None}
    values["precision"] = row.precision
    knob_values = {
        name: value
        for name, value in values.items()
        if (value in KNOBS[name].choices if KNOBS[name].choices else isinstance(value, int))
    }
    return TrialConfig().replace(knob_values)
