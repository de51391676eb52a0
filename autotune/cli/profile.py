"""`autotune profile`: the cost of every module of a model in an optimizer step."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, log10
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from autotune.cli.fields import import_folders
from autotune.cli.status import Status, write_document
from autotune.errors import RequestError
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from executor.measurement.flops import ModelProfile, ModuleCost, Phases, flops_utilization, summed
from executor.runners.one_process import profile_model
from search_spaces.knob import Value
from search_spaces.models.huggingface import is_factory_reference, resolve_model
from search_spaces.rules.table import illegal
from search_spaces.space import parse_domain
from search_spaces.spaces import parse_pins
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig

OWN = "(own)"
"""Label of the row for a module's own operations, outside its sub-modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module, or several identical ones, including sub-modules."""

    label: str
    name: str
    """Dotted path; for several modules with their numbers: `blocks.0-11.attention`."""
    kind: str
    depth: int
    """Nesting level; 0: the model."""
    count: int
    """Number of modules in the row."""
    calls: int
    parameters: int
    """Elements; all figures are sums over the modules in the row."""
    flops: Phases
    seconds: Phases


@dataclass(frozen=True, slots=True)
class _Node:
    """Identical modules (often one), with their sub-modules."""

    label: str
    name: str
    costs: tuple[ModuleCost, ...]
    inside: "tuple[_Node, ...]"

    @property
    def every(self) -> Iterator[ModuleCost]:
        yield from self.costs
        for node in self.inside:
            yield from node.every

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for identical modules."""
        cost = self.costs[0]
        return (cost.kind, cost.parameters, tuple((node.label, node.shape) for node in self.inside))


def rows_of(profile: ModelProfile, *, depth: int | None, merge: bool) -> list[ModuleRow]:
    """The rows from the model down to `depth` levels (None: all), parents before children.

    With `merge`, identical numbered neighbours (the blocks of a transformer) are one row with their sum. The children of a row,
    including `(own)`, sum to it.
    """
    return list(_rows(_tree(profile.modules, merge), 0, depth))


def _tree(modules: Sequence[ModuleCost], merge: bool) -> _Node:
    """Build the tree from the flat list, in which parents precede children."""
    inside: dict[str, list[ModuleCost]] = {}
    names = {module.name for module in modules}
    for module in modules[1:]:
        parent = module.name.rpartition(".")[0]
        while parent and parent not in names:  # a shared module's other name
            parent = parent.rpartition(".")[0]
        inside.setdefault(parent, []).append(module)

    def node(module: ModuleCost, prefix: str) -> _Node:
        child_nodes = [
            child_node for child in inside.get(module.name, ()) for child_node in _children(node(child, module.name))
        ]
        label = module.name[len(prefix) :].lstrip(".") or "model"
        return _Node(label, module.name, (module,), tuple(_merged(child_nodes) if merge else child_nodes))

    return node(modules[0], "")


def _children(node: _Node) -> Iterable[_Node]:
    """The node itself; for a container its children instead, with its name in their labels."""
    if node.costs[0].kind not in ("ModuleList", "ModuleDict"):  # containers that are never called
        return (node,)
    return tuple(_Node(f"{node.label}.{child.label}", child.name, child.costs, child.inside) for child in node.inside)


def _merged(nodes: Sequence[_Node]) -> Iterator[_Node]:
    """Merge identical numbered neighbours."""

    def key(node: _Node) -> tuple[object, ...]:
        stem, _, number = node.label.rpartition(".")
        return (stem, node.shape) if number.isdigit() else (node.label,)

    for _, group in groupby(nodes, key):
        identical = list(group)
        yield identical[0] if len(identical) == 1 else _as_one(identical)


def _as_one(alike: Sequence[_Node]) -> _Node:
    first, last = alike[0], alike[-1]
    stem, _, number = first.label.rpartition(".")
    numbers = f"{number}-{last.label.rpartition('.')[2]}"
    return _spread(alike, f"{stem}.{numbers}".lstrip("."), f"{first.name.rpartition('.')[0]}.{numbers}".lstrip("."))


def _spread(alike: Sequence[_Node], label: str, name: str) -> _Node:
    inside = tuple(
        _spread(nodes, nodes[0].label, f"{name}.{nodes[0].label}")
        for nodes in zip(*(node.inside for node in alike), strict=True)
    )
    return _Node(label, name, tuple(cost for node in alike for cost in node.costs), inside)


def _rows(node: _Node, level: int, depth: int | None) -> Iterator[ModuleRow]:
    yield _row(node.label, node.name, node.costs[0].kind, level, node.costs, tuple(node.every))
    if not node.inside or (depth is not None and level >= depth):
        return
    yield _row(OWN, node.name, "", level + 1, node.costs, node.costs)
    for child in node.inside:
        yield from _rows(child, level + 1, depth)


def _row(
    label: str, name: str, kind: str, level: int, modules: Sequence[ModuleCost], counted: Sequence[ModuleCost]
) -> ModuleRow:
    return ModuleRow(
        label=label,
        name=name,
        kind=kind,
        depth=level,
        count=len(modules),
        calls=sum(cost.calls for cost in modules),
        parameters=sum(cost.parameters for cost in counted),
        flops=summed(cost.flops for cost in counted),
        seconds=summed(cost.seconds for cost in counted),
    )


def print_profile(
    session: Session, config: TrialConfig, profile: ModelProfile, rows: Sequence[ModuleRow], hfu: float | None, console: Console
) -> None:
    """Print what was profiled, the table, and the totals of a step."""
    for line in (_heading(session, config, profile), "Figures are per optimizer step; a row includes its sub-modules."):
        console.print(line, soft_wrap=True)
    _print_whole(console, _table(profile, rows, classes=True), _table(profile, rows, classes=False))
    for line in _sums(profile, rows[0], hfu):
        console.print(line, soft_wrap=True)


def _heading(session: Session, config: TrialConfig, profile: ModelProfile) -> str:
    parameters = sum(module.parameters for module in profile.modules)
    batches = f"{profile.micro_batches} micro-batch{'es' if profile.micro_batches != 1 else ''}"
    size = f"{config.micro_batch_size} x {session.request.sequence_length} tokens"
    device = profile.environment.get("device", "")
    threads = profile.environment.get("threads_per_rank")
    device_text = (
        f"{device}, {threads} thread{'s' if threads != '1' else ''}" if session.cluster.device.kind == "cpu" else device
    )
    return f"{session.model.name}: {parameters:,} parameters, {config.precision}, {batches} of {size}, on {device_text}"


def _print_whole(console: Console, *tables: Table) -> None:
    """Print the first table that fits, else the last one in full width, because truncated figures are useless."""
    wide = console.options.update(max_width=1_000)
    widths = [Measurement.get(console, wide, table).maximum for table in tables]
    chosen = next((index for index, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])
    console.print(tables[chosen])


def _table(profile: ModelProfile, rows: Sequence[ModuleRow], *, classes: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("\nmodule", no_wrap=True)
    if classes:
        table.add_column("\nclass", no_wrap=True, style="dim")
    columns = [_column("\nparameters", lambda row: row.parameters, rows, 0)]
    model = rows[0]
    scale, unit = _scale(model.flops.total)
    # Recompute is shown only if something is recomputed.
    phases = [
        phase
        for phase in ("forward", "backward", "recompute")
        if phase != "recompute" or model.flops.recompute or model.seconds.recompute
    ]
    for phase in phases:
        columns.append(_column(f"{phase}\n{unit}", lambda row, of=phase: getattr(row.flops, of) / scale, rows))  # type: ignore[misc]
    for phase in phases:
        columns.append(_column(f"{phase}\nms", lambda row, of=phase: getattr(row.seconds, of) * 1e3, rows))  # type: ignore[misc]
    columns.append(_column("step\n%", lambda row: 100 * row.seconds.total / profile.hooked_seconds, rows, 1))
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        names = [_label(row), row.kind] if classes else [_label(row)]
        table.add_row(*names, *(cells[index] for _, cells in columns), style="dim" if row.label == OWN else "")
    outside = f"{100 * profile.outside_seconds / profile.hooked_seconds:.1f}"
    table.add_row("(outside the model)", *[""] * (len(columns) - 1 + classes), outside, style="dim")
    return table


def _column(
    title: str, figure: Callable[[ModuleRow], float], rows: Sequence[ModuleRow], decimals: int | None = None
) -> tuple[str, list[str]]:
    """The title and the cells, with the same number of decimals so that decimal points align."""
    figures = [figure(row) for row in rows]
    if decimals is None:
        largest = max(figures)
        # Four significant digits of the largest number.
        decimals = max(3 - floor(log10(largest)), 0) if largest else 0
    return title, [f"{value:,.{decimals}f}" if value else "-" for value in figures]


def _label(row: ModuleRow) -> str:
    # Only for merged blocks: their sub-modules have the same count.
    return "  " * row.depth + row.label + (f" (x{row.count})" if "-" in row.label else "")


def _scale(flops: float) -> tuple[float, str]:
    """The unit in which the model's FLOPs are at least 1."""
    for factor, unit in ((1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= factor:
            return factor, unit
    return 1e6, "MFLOP"


def _sums(profile: ModelProfile, model: ModuleRow, hfu: float | None) -> list[str]:
    seconds = model.seconds
    again = f" + recompute {_time(seconds.recompute)}" if seconds.recompute else ""
    rate = profile.flops / profile.step_seconds
    share = "" if hfu is None else f", HFU {hfu:.1%}"
    parts = f"forward {_time(seconds.forward)} + backward {_time(seconds.backward)}{again}"
    outside = f"outside the model {_time(profile.outside_seconds)} (update, clipping, reduction)"
    done = f"{profile.flops / 1e9:,.4g} GFLOP per step are {rate / 1e9:,.3g} GFLOP/s{share}"
    return [
        f"{_time(profile.hooked_seconds)} total = {parts} + {outside}",
        f"a step without the profiler's hooks takes {_time(profile.step_seconds)}; {done}; medians of {profile.repeats} steps",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Parsed options of the command."""

    model: str | None
    pins: tuple[str, ...]
    depth: int | None
    """Levels of modules to show; None: all."""
    every_block: bool
    """Whether identical blocks get one row each."""
    global_batch_size: int | None
    """Samples per step; None: one micro-batch."""
    sequence_length: int | None
    data_path: Path | None
    timeout: float
    json: bool


def profile_command(options: ProfileOptions) -> Status:
    """Validate, then profile in one rank process. Nothing is stored."""
    values = single_values(options.pins, "a profile has one configuration")
    _require_whole_model(values)
    session = prepare(request_from_fields(_fields(options, values)))
    config = configuration(session, values)
    request = dataclasses.replace(
        trial_request(session, "profile", config, ()),
        fidelity=Fidelity(min_steps=5, max_steps=50, max_seconds=2.0),
        timeout_seconds=options.timeout,
    )
    console = Console(stderr=True)
    with console.status(f"profiling {session.model.name}"):
        profile = profile_model(request, python_path=session.request.python_path, device=session.cluster.device.kind)
    rows = rows_of(profile, depth=options.depth, merge=not options.every_block)
    peak = request.peak_flops_per_device
    if options.json:
        write_document(_document(session, config, profile, rows, peak))
    else:
        print_profile(session, config, profile, rows, hfu(profile, peak), Console())
    return Status.OK


def hfu(profile: ModelProfile, peak_flops: float | None) -> float | None:
    """Hardware FLOPs utilization of the step; None if no peak is stated."""
    return flops_utilization(profile.flops / profile.step_seconds / 1e12, peak_flops)


def single_values(texts: tuple[str, ...], why: str) -> dict[str, Value]:
    """Knob -> its single value, from `KNOB=VALUE`.

    Raises:
        RequestError: several values are given; `why` explains why only one is allowed.
        SearchSpaceError: a knob or a value does not exist.
    """
    values: dict[str, Value] = {}
    for name, text in parse_pins(texts).items():
        value = parse_domain(name, text)
        if isinstance(value, str) or len(value) != 1:
            raise RequestError(name, f"{text} is not one value", f"{why}: write {name}=VALUE")
        values[name] = value[0]
    return values


def _require_whole_model(values: Mapping[str, Value]) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"):
        if values.get(name, 1) != 1:
            problem = f"{values[name]} ranks would divide the model"
            raise RequestError(name, problem, "a profile covers the whole model on one rank: leave it at 1")


def _fields(options: ProfileOptions, values: Mapping[str, Value]) -> dict[str, Any]:
    if not options.model:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
    fields = {
        "model": options.model,
        "ranks": 1,
        "runner": "local",
        "pins": {name: [value] for name, value in values.items()},
        "global_batch_size": options.global_batch_size or values.get("micro_batch_size", TrialConfig().micro_batch_size),
        "sequence_length": options.sequence_length or _length(options.model),
        "data_path": str(options.data_path) if options.data_path else None,
        "trial_timeout": options.timeout,
    }
    if is_factory_reference(options.model):
        fields["python_path"] = import_folders()
    return {name: value for name, value in fields.items() if value is not None}


def _length(model: str) -> int | None:
    """The default tokens per sample; None: those of the module's own batches."""
    return None if is_factory_reference(model) else min(resolve_model(model).sequence_length, 128)


def configuration(session: Session, values: Mapping[str, Value]) -> TrialConfig:
    """The space's defaults with these values.

    Raises:
        IllegalConfigError: a rule refuses it.
    """
    config = session.space.canonical(session.space.base.replace(values))
    if refusals := session.space.check(config):
        raise illegal(refusals[0], values)
    return config


def _document(
    session: Session, config: TrialConfig, profile: ModelProfile, rows: list[ModuleRow], peak_flops: float | None
) -> dict[str, Any]:
    return {
        "model": session.model.name,
        "config": config.values(),
        "global_batch_size": session.request.global_batch_size,
        "sequence_length": session.request.sequence_length,
        "micro_batches": profile.micro_batches,
        "step_seconds": profile.step_seconds,
        "hooked_seconds": profile.hooked_seconds,
        "repeats": profile.repeats,
        "flops": int(profile.flops),
        "hardware_tflops_per_device": profile.flops / profile.step_seconds / 1e12,
        "hfu": hfu(profile, peak_flops),
        "modules": [_row_document(row, profile) for row in rows],
        "outside": {"flops": int(profile.outside_flops), "seconds": profile.outside_seconds},
        "environment": profile.environment,
    }


def _row_document(row: ModuleRow, profile: ModelProfile) -> dict[str, Any]:
    return {
        "name": row.name,
        "own": row.label == OWN,
        "kind": row.kind,
        "depth": row.depth,
        "count": row.count,
        "calls": row.calls,
        "parameters": row.parameters,
        "flops": {name: int(value) for name, value in _phases(row.flops).items()},
        "seconds": _phases(row.seconds),
        "share": row.seconds.total / profile.hooked_seconds,
    }


def _phases(phases: Phases) -> dict[str, float]:
    return dataclasses.asdict(phases)
