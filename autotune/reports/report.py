"""The content of a report in reading order, and how it is written in the requested format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from autotune.errors import NoBestError, UnknownFormatError
from autotune.explain.explain import explain_evidence
from autotune.explain.figures import NAMES, figure_of
from autotune.explain.figures.source import FigureSource, bytes_text, rate_text, seconds_text, share_text
from autotune.objective.intervals import CONFIDENCE
from autotune.outcome.best_config import build_best_config
from autotune.request.rows import assumed_of_row
from autotune.session.placement import launch_line
from autotune.text.explain_sections import Section, sections_of
from autotune.text.result import way_text
from autotune.text.rows import place_text, state_text
from autotune.wire.figures import Figure
from autotune.wire.trials import Points
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.quantities import ratio_text
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from storage.store import Store

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """A knob of the best configuration."""

    name: str
    best: str
    baseline: str
    default: str
    moved: bool
    """Whether its value differs from the baseline's."""
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole content as text, not escaped."""

    title: str
    job: str
    facts: Pairs
    """The job: state, strategy, trials, time."""
    headline: str
    """The answer in one sentence."""
    assumed: tuple[str, ...]
    """What nobody stated when the job was opened."""
    results: Pairs
    """Results of the best, a name and a value each; empty: there is no best."""
    knobs: tuple[KnobRow, ...]
    """Those that differ from the baseline or from the defaults, and always `zero_stage` and `micro_batch_size`."""
    figures: tuple[Figure, ...]
    points: Points | None
    """The trials as columns. None: this version cannot read the job's request."""
    sections: tuple[Section, ...]
    """The sections of the explanation."""
    environment: Pairs
    commands: tuple[str, ...]
    """Commands that export the answer and measure it again."""
    notes: tuple[str, ...]


def report_of(store: "Store", job: str | None, has_points: bool = True) -> Report:
    """Build the report of a job in any state. `has_points`: also read the trials' columns, which only the HTML file needs.

    Raises:
        UnknownJobError: there is no such job.
    """
    source = FigureSource(store, store.jobs.get(job).id)
    document = _document(source)
    explanation = explain_evidence(source.evidence) if source.evidence is not None else None
    return Report(
        title=place_text(source.job),
        job=source.job.id,
        facts=tuple(_facts(source)),
        headline=_headline(source, document),
        assumed=tuple(map(str, assumed_of_row(source.job.request))),
        results=tuple(_results(document)) if document else (),
        knobs=tuple(_knobs(document)) if document else (),
        figures=tuple(figure_of(source, name) for name in NAMES),
        points=source.points if has_points else None,
        sections=tuple(sections_of(explanation)) if explanation is not None else (),
        environment=tuple(_environment(source, document)),
        commands=_commands(source, document),
        notes=explanation.notes if explanation is not None else (),
    )


def _document(source: FigureSource) -> dict[str, Any] | None:
    try:
        return build_best_config(source.session, source.snapshot) if source.session is not None else None
    except NoBestError:
        return None


def _facts(source: FigureSource) -> Iterator[tuple[str, str]]:
    job, request = source.job, source.job.request
    yield "state", state_text(job) + (f": {job.message}" if job.message else "")
    yield "opened", f"{job.created:%Y-%m-%d %H:%M} UTC"
    yield "took", seconds_text(job.active_seconds)
    yield "trials", f"{source.snapshot.spent:,} of {request.get('trials', 0):,}"
    for name in ("strategy", "objective", "engine", "space"):
        yield name, str(request.get(name, "default"))
    has_tokens = "hidden_size" in (request.get("resolved_model") or {})  # not a module or a script
    length = f" of {request.get('sequence_length')} tokens" if has_tokens else ""
    yield "batch", f"{request.get('global_batch_size')} samples{length}"


def _headline(source: FigureSource, document: Mapping[str, Any] | None) -> str:
    if document is None:
        return source.lacking()
    best, baseline = document["best"], document["baseline"]
    rate = best["measured"]["samples_per_second"]
    decision = document["decision"]
    if decision["keeps_baseline"]:
        text = f"Keep the baseline: {rate_text(rate['mean'])} samples/s, and nothing that was tried is known to be better"
        other = decision["runner_up_ratio"]
        if other is None:
            return f"{text}."
        return f"{text}. The runner-up has {ratio_text(**other)} its rate."
    text = f"Trial {best['trial']} is the best: {rate_text(rate['mean'])} samples/s"
    if baseline is None:
        return f"{text}; no baseline was measured: the gain is unknown."
    gain = baseline["gain"]
    references = {"samples_per_second": "the baseline's samples/s", "goodput": "the tokens that the baseline keeps"}
    reference = references.get(gain["of"], "less peak memory than the baseline")
    sure = "" if not gain["low"] <= 1.0 <= gain["high"] else " (unproven: the interval includes 1)"
    tie = "; a tie with the runner-up" if document["job"]["tie"] else ""
    return f"{text}, {ratio_text(gain['mean'])} {reference}{sure}{tie}."


def _results(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    best, baseline = document["best"]["measured"], document["baseline"]
    rate = best["samples_per_second"]
    yield f"samples/s, {CONFIDENCE:.0%} interval".replace("%", " %"), _interval(rate, rate_text)
    if baseline is not None:
        gain = baseline["gain"]
        yield "over the baseline", ratio_text(gain["mean"], gain["low"], gain["high"])
        yield "baseline's samples/s", rate_text(baseline["measured"]["samples_per_second"]["mean"])
    decision = document["decision"]
    share = decision["probability_best"]
    yield "probability of being the best", "unknown" if share is None else share_text(share)
    yield "expected loss", share_text(decision["expected_loss"])
    if decision.get("goodput", {}).get("ways"):
        yield "on nodes that fail", way_text(decision["goodput"]["ways"][0])
    yield "a step", seconds_text(best["step_seconds"])
    peak = max((rank["total"] for rank in best["peak_memory_bytes"]), default=None)
    limit = document["objective"]["memory_limit"]
    if peak is not None:
        yield "peak of a rank", bytes_text(peak) + (f" of {bytes_text(limit)}" if limit else "")
    if best["tflops_per_device"] is not None:
        yield "a device", f"{best['tflops_per_device']:.3g} TFLOP/s"
    if best["mfu"] is not None:
        yield "MFU", share_text(best["mfu"])
    if spent := document["job"].get("spent"):
        yield "spent", f"{spent['device_hours']:.2g} device-hours"


def _interval(interval: Mapping[str, float], text: Any) -> str:
    return f"{text(interval['mean'])} [{text(interval['low'])}, {text(interval['high'])}]"


def _knobs(document: Mapping[str, Any]) -> Iterator[KnobRow]:
    best, baseline = document["best"]["config"], (document["baseline"] or {}).get("config", {})
    for name, value in best.items():
        stood, default = baseline.get(name), TrialConfig().values().get(name, "")
        if value != default or (baseline and value != stood) or name in ("zero_stage", "micro_batch_size"):
            yield KnobRow(
                name=name, best=value_text(value), baseline=value_text(stood) if name in baseline else "–",
                default=value_text(default), moved=bool(baseline) and value != stood, description=KNOBS[name].description,
            )  # fmt: skip


def _environment(source: FigureSource, document: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if source.session is not None:
        cluster, model = source.session.cluster, source.session.model
        yield "model", f"{model.name}, {model.parameter_count:,} parameters"
        yield "cluster", f"{cluster.name}: {cluster.nodes} × {cluster.devices_per_node} {cluster.device.name}"
    if document is None:
        return
    provenance = document["provenance"]
    yield "hosts", ", ".join(provenance["topology"]["hosts"]) or "–"
    yield "seed", str(provenance["seed"])
    yield "trials' hash", provenance["history_hash"]
    if provenance["git_commit"]:
        yield "commit", provenance["git_commit"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    for name, value in provenance["environment"].items():
        yield name.replace("_", " "), str(value)


def _commands(source: FigureSource, document: Mapping[str, Any] | None) -> tuple[str, ...]:
    job = source.job.id
    if document is None:
        return (f"autotune show {job}",)
    started = launch_line(document)
    again = "autotune reproduce best-config.json"
    return (f"autotune export {job} --out best-config.json", again, *([started] if started != again else []))


WRITERS: Mapping[str, tuple[str, str]] = {
    "html": ("autotune.reports.page", "page_of"),
    "md": ("autotune.reports.markdown", "markdown_of"),
}
"""Format -> the module and function that write it; imported on demand, since the page needs jinja2."""


def report_text(store: "Store", job: str | None, format_name: str) -> str:
    """Return the job's report.

    Args:
        store: the store that has the job.
        job: its id or a unique prefix; None: the latest job.
        format_name: one of `WRITERS`.

    Raises:
        UnknownFormatError: there is no such format.
        UnknownJobError: there is no such job.
    """
    require_format(format_name)
    module, function = WRITERS[format_name]
    text: str = getattr(import_module(module), function)(report_of(store, job, has_points=format_name == "html"))
    return text


def require_format(name: str) -> None:
    """Check that a report format exists.

    Raises:
        UnknownFormatError: there is no such format.
    """
    if name not in WRITERS:
        raise UnknownFormatError("format", f"{name!r} is not known", f"use {' or '.join(WRITERS)}")
