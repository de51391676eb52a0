"""`--from`: use a configuration of another framework as the baseline of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.frameworks.imported import Imported
from autotune.frameworks.read import read_imported
from autotune.frameworks.shell_values import stated_variables
from autotune.outcome.verification import LAYOUT
from autotune.request.engines import capability_of
from autotune.request.field_forms import with_command
from autotune.session.session import OPTIMIZER
from executor.engines.capabilities import COMMAND
from search_spaces.capability import Capability
from search_spaces.knob import Numerics, Value
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.models.command import CommandModel
from search_spaces.trial_config import TrialConfig

Report = Callable[[str], None]


def with_imported(
    fields: Mapping[str, Any], path: Path, stated: Sequence[str], ranks: tuple[int, ...], report: Report
) -> dict[str, Any]:
    """The fields completed from the file; settings that are not knobs are reported.

    Knobs that change results (precision, the type of reductions) are pinned too, so that every trial computes like the user's
    runs. For a best configuration measured with another of our engines, everything is pinned except engine-specific knobs.

    Raises:
        RequestError: the file cannot be read, or has an invalid value.
    """
    return with_found(fields, read_imported(path, stated_variables(stated)), path.name, ranks, report)


def with_found(
    fields: Mapping[str, Any], imported: Imported, source: str, ranks: tuple[int, ...], report: Report
) -> dict[str, Any]:
    """`with_imported` for a file that is read already; `source` is its name in notes."""
    knobs, knob_notes = _honoured_knobs(imported.knobs, fields)
    if "precision" in fields.get("pins", {}) or "precision" in (fields.get("baseline") or {}):
        knobs.pop("reduce_dtype", None)  # it belongs to the file's precision
    hyperparameters, unused = _stated(imported, fields)
    if "optimizer" in fields:
        knobs.pop("optimizer", None)
    stated = {**fields.get("pins", {}), **(fields.get("baseline") or {}), **knobs}
    assumed = [
        f"{name}={value_text(value)}: assumed, because the file leaves it to the program that trains (--pin {name}=VALUE)"
        for name, value in imported.assumed.items() if name in KNOBS and name not in stated
    ]  # fmt: skip
    if _capability(fields).engine == COMMAND:  # it is that program
        assumed = []
    for note in (*imported.notes, *assumed, *knob_notes, *unused):
        report(f"{source}: {note}")
    if hyperparameters:
        values = " ".join(f"{name}={value_text(value)}" for name, value in hyperparameters.items())
        report(f"{source}: trials and exported files take {values}")
    pins = dict(fields.get("pins", {}))
    changing = {name: value for name, value in knobs.items() if KNOBS[name].numerics is Numerics.CHANGES}
    for name, value in {**_carried_over(imported, fields, report), **changing}.items():
        pins.setdefault(name, value)
    if imported.ranks is not None and ranks not in ((), (imported.ranks,)):
        report(f"{source}: is for {imported.ranks} processes, but trials run on {', '.join(map(str, ranks))}")
    baseline = {**knobs, **(fields.get("baseline") or {})}
    knobs_text = " ".join(f"{name}={value_text(value)}" for name, value in baseline.items())
    report(f"{source}: the baseline is {knobs_text or 'the defaults'}")
    sizes = _sizes(fields, imported, source, ranks, report)
    return {**sizes, **fields, **hyperparameters, "baseline": baseline, "pins": pins}


def _stated(imported: Imported, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The file's hyperparameters that are not given otherwise, and a line about an optimizer that trials do not support."""
    hyperparameters = {name: value for name, value in imported.hyperparameters.values().items() if name not in fields}
    capability, optimizer = _capability(fields), hyperparameters.get(OPTIMIZER)
    if optimizer is None or capability.engine == COMMAND:  # a script creates its own optimizer
        return hyperparameters, []
    if OPTIMIZER in fields.get("pins", {}):
        del hyperparameters[OPTIMIZER]
    elif not capability.honours(OPTIMIZER, optimizer):
        del hyperparameters[OPTIMIZER]
        return hyperparameters, [
            f"optimizer={optimizer}: the {capability.engine} engine has no such knob; trials train with its own"
        ]
    return hyperparameters, []


def _carried_over(imported: Imported, fields: Mapping[str, Any], report: Report) -> dict[str, Value]:
    """Values of another engine's best configuration that also suit this engine, as far as the engines were compared."""
    capability = _capability(fields)
    if imported.engine in (None, capability.engine) or not capability.specific:
        return {}
    specific = ", ".join(sorted(capability.specific))
    report(
        f"measured on {imported.engine}: values that carry over to {capability.engine} are kept, and {specific} tuned "
        "(docs/results/transfer.md)"
    )
    values = TrialConfig().replace(imported.knobs).every_value()
    return {
        name: value for name, value in values.items() if name not in capability.specific and capability.honours(name, value)
    }


def _capability(fields: Mapping[str, Any]) -> Capability:
    command = with_command(fields).get("command")
    engine = fields.get("engine", "native" if command is None else "command")
    return capability_of(engine, None if command is None else CommandModel(**command))


def _honoured_knobs(knobs: Mapping[str, Value], fields: Mapping[str, Any]) -> tuple[dict[str, Value], list[str]]:
    """The knobs that the sweep's engine honours, and a line for each other one.

    A layout knob is kept even if it is not honoured, because the baseline would be different without it, and the engine's
    refusal names the remedy. This does not apply to scripts, which choose their own layout.
    """
    capability = _capability(fields)
    script = capability.engine == COMMAND
    honoured, notes = {}, []
    for name, value in knobs.items():
        if capability.honours(name, value) or (not script and name in LAYOUT):
            honoured[name] = value
        else:
            why = "no placeholder of the command carries it" if script else f"the {capability.engine} engine has no such knob"
            notes.append(f"{name}={value_text(value)}: {why}; the baseline is without it")
    return honoured, notes


def _sizes(
    fields: Mapping[str, Any], imported: Imported, source: str, ranks: tuple[int, ...], report: Report
) -> dict[str, int]:
    """The batch and the length of samples that the file states, of those that `fields` do not."""
    batch = imported.global_batch_size
    if batch is None and imported.samples_per_rank is not None and len(ranks) == 1:
        batch = imported.samples_per_rank * max(TrialConfig().replace(imported.knobs).data_parallel_size(ranks[0]), 1)
    if batch is None and "global_batch_size" not in fields:
        report("global_batch_size: the file does not state it; give --global-batch-size, or the default is used")
    if imported.sequence_length is not None and "sequence_length" not in fields:
        report(f"{source}: samples have its {imported.sequence_length:,} tokens")
    sizes = {"global_batch_size": batch, "sequence_length": imported.sequence_length}
    return {name: size for name, size in sizes.items() if size is not None and name not in fields}
