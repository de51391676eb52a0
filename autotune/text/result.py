"""The printed result of a sweep, from its best-config document."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from autotune.frameworks.best_config import winner_of
from autotune.frameworks.launch import files_notes
from autotune.objective.ranking import BEYOND, front_over_baseline
from autotune.outcome.best_config import environment_line
from autotune.request.job_fields import Objective
from autotune.session.placement import launch_line
from autotune.text.console import Console
from autotune.text.rows import bytes_text, first_text
from executor.engines.capabilities import COMMAND
from search_spaces.knob_values import value_text
from search_spaces.quantities import number_text, ratio_text
from search_spaces.trial import COMPARABLE
from search_spaces.trial_config import TrialConfig

DEFAULTS = TrialConfig().every_value()


def print_result(document: dict[str, Any] | None, console: Console) -> None:
    """Print the best configuration, its figures, and the gain over the baseline."""
    if document is None:
        return
    best, baseline = document["best"], document["baseline"]
    count = document["job"]["trials"]
    console.print(f"\n{_headline(document, count)}", style="bold")
    console.print("  " + _knobs(best["config"], baseline["config"] if baseline else DEFAULTS), soft_wrap=True)
    keeps = bool(baseline) and best["config"] == baseline["config"]
    rows = {"  best": best["measured"], **({"  baseline": baseline["measured"]} if baseline and not keeps else {})}
    # Both need the device's peak FLOP/s, which is not known for a CPU.
    shares = [key for key in ("mfu", "hfu") if any(measured[key] is not None for measured in rows.values())]
    # A script's steps may have other samples than the job's.
    step = f"{document['job']['request']['global_batch_size']} samples" if document["engine"] == COMMAND else "step"
    names = ("samples/s [95 %]", step, "peak/rank", "TFLOP/s", *map(str.upper, shares))
    cells = [
        (name, *_figures(measured), *("-" if measured[key] is None else f"{measured[key]:.1%}" for key in shares))
        for name, measured in rows.items()
    ]
    table = _table(("", *names), cells)
    if Measurement.get(console, console.options.update(width=1000), table).maximum > console.width:  # a figure per line
        figures = zip((f"  {name}" for name in names), *(figures for _, *figures in cells), strict=True)
        table = _table(("", *rows), figures)
    console.print(table)
    console.print(_gain_text(document), soft_wrap=True)
    if decision := document.get("decision"):
        console.print(_decision_text(decision), soft_wrap=True)
    if (environments := document.get("environments", {})).get("tried"):
        console.print(f"  environment: {environment_line(environments)}", soft_wrap=True)
    if comparable := document["provenance"]["environment"].get(COMPARABLE):
        console.print(f"  comparable {comparable}", soft_wrap=True)
    if goodput := (document.get("decision") or {}).get("goodput"):
        console.print(_goodput_text(goodput), soft_wrap=True)
    if spent := document["job"].get("spent"):
        console.print(_spent_text(spent), soft_wrap=True)
    if "extrapolated" in document:
        console.print(_extrapolated_text(document["extrapolated"]), soft_wrap=True)
    if document["objective"]["name"] == Objective.PARETO:
        console.print(_front_text(document), soft_wrap=True)
    if document["engine"] == COMMAND:
        console.print("launch:", style="bold")
        console.print(f"  {launch_line(document)}", soft_wrap=True)
        for note in files_notes(winner_of(document)):
            console.print(f"  {note}", soft_wrap=True)


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in header:
        table.add_column(name.strip(), justify="right" if name else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _headline(document: dict[str, Any], count: int) -> str:
    tried = f"{count} trial{'s' if count != 1 else ''}"
    baseline = document["baseline"]
    if not baseline or document["best"]["config"] != baseline["config"]:
        return f"Best configuration of {tried}"
    baseline_text = (
        "your configuration" if document["job"]["request"].get("baseline") else "the baseline, which are the defaults"
    )
    decision = document.get("decision") or {}
    if others := _uncompared_alone(decision):
        listed = ", ".join(f"{len(numbers)} {outcome}" for outcome, numbers in others.items())
        return f"Keep {baseline_text}, to which nothing could be compared: of {tried}, {listed}"
    return f"Keep {baseline_text}: none of {tried} is known to be better"


def _uncompared_alone(decision: dict[str, Any]) -> dict[str, list[int]]:
    """The trials that could not be compared, if there are no others; else empty."""
    return decision.get("not_compared", {}) if decision.get("runner_up") is None else {}


def _decision_text(decision: dict[str, Any]) -> str:
    """How certain the answer is, and the runner-up."""
    if _uncompared_alone(decision) and not decision.get("unresolved"):
        return _uncompared_text(decision, ("PRUNED", "FAILED", "WRONG", "TIMEOUT"))
    text = f"  probability that nothing measured is better: {_probability_text(decision)}"
    if decision["expected_loss"] > 0.0:
        text += f"; expected loss if it is not the best: {100 * decision['expected_loss']:.2g} %"
    if uncompared := _uncompared_text(decision, ("FAILED", "WRONG", "TIMEOUT")):
        text += f"\n{uncompared}"
    if decision["runner_up"] is None:
        return text
    # Above this expected loss of keeping the baseline, more measurements are worthwhile.
    if decision["keeps_baseline"] and decision["expected_loss"] > 0.03:
        text += "\n  undecided: repeats differ too much; raise --confirm-repeats, or tune where less else runs"
    ratio = decision["runner_up_ratio"]
    tie = "; the measurements do not separate them" if decision["tie"] else ""
    text_of_ratio = ratio_text(ratio["mean"], ratio["low"], ratio["high"])
    return f"{text}\n  runner-up: trial {decision['runner_up']}, {text_of_ratio} the samples/s of the answer{tie}"


def _uncompared_text(decision: dict[str, Any], outcomes: tuple[str, ...]) -> str:
    """The trials with these outcomes, which no probability includes; empty: there are none."""
    unresolved = {trial["trial"] for trial in decision.get("unresolved", ())}
    parts = []
    for outcome, numbers in decision.get("not_compared", {}).items():
        numbers = [number for number in numbers if number not in unresolved]
        if outcome in outcomes and numbers:
            parts.append(f"trial{'s' if len(numbers) > 1 else ''} {first_text(numbers, 8)} ({outcome})")
    return f"  not compared: {', '.join(parts)}; see `autotune show`" if parts else ""


def _probability_text(decision: dict[str, Any]) -> str:
    share = decision["probability_best"]
    if unresolved := decision.get("unresolved"):
        trials = []
        for trial in unresolved:
            rate = trial["rate"]
            measured = "" if rate is None else f" ({number_text(rate['mean'])} samples/s when it ran, then an error)"
            trials.append(f"trial {trial['trial']}{measured}")
        return f"unknown, since trials failed for another reason than their speed: {', '.join(trials)}"
    if share is None:
        return "unknown, because nothing else was measured"
    return "> 99.9 %" if share > 0.999 else f"{100 * share:.3g} %"


def _spent_text(spent: dict[str, Any]) -> str:
    text = f"  spent {spent['device_hours']:.2g} device-hours"
    if spent["break_even_device_hours"] is not None:
        text += f"; pays off for runs of at least {spent['break_even_device_hours']:.2g} device-hours at the baseline's speed"
    if spent["saved_device_hours"] is not None:
        text += f"; a run of {spent['run_device_hours']:g} saves {spent['saved_device_hours']:.3g}"
    return text


def _extrapolated_text(beyond: dict[str, Any]) -> str:
    rate = beyond["samples_per_second"]
    return (
        f"  extrapolated to {beyond['world_size']} devices, not measured: {number_text(rate['mean'])} samples/s "
        f"[{number_text(rate['low'])}, {number_text(rate['high'])}] at a global batch of {beyond['global_batch_size']}; "
        "verify there with --baseline"
    )


def _goodput_text(goodput: dict[str, Any]) -> str:
    """How to run the answer on nodes that fail, and what the baseline would keep."""
    if not goodput["ways"]:
        return "  goodput: no recovery of the terms is possible in this layout"
    text, baseline = f"  on failing nodes: {way_text(goodput['ways'][0])}", goodput["baseline"]
    return text if baseline in (None, goodput["ways"][0]) else f"{text}\n  the baseline there: {way_text(baseline)}"


def way_text(choice: dict[str, Any]) -> str:
    """A way to run a configuration on nodes that fail, in one line."""
    steps = choice["interval_steps"]
    saved = "no checkpoints" if steps is None else f"{choice['checkpoint']} checkpoint every {steps:,} steps"
    quantiles = choice["hours_quantiles"]
    return (
        f"{choice['recovery']}, {saved}, {choice['spares']} spares: {choice['effective']:.2%} effective, "
        f"{choice['interruptions']:,.0f} interruptions, {choice['tokens']:.3g} tokens in {choice['hours'] / 24:.3g} days "
        f"[{quantiles['0.05'] / 24:.3g}, {quantiles['0.95'] / 24:.3g}]"
    )


def _front_text(document: dict[str, Any]) -> str:
    count, share = len(document["alternatives"]), front_over_baseline(document)
    text = f"  front of samples/s and memory: {count} configuration{'s' if count != 1 else ''} (alternatives)"
    if share is None:
        return text
    return f"{text}, hypervolume {share:.2f}x the baseline's (from 0 samples/s and {BEYOND:g}x its peak)"


def _knobs(config: dict[str, Any], reference: dict[str, Any]) -> str:
    """The knobs that differ from the reference or the defaults, and always `zero_stage` and `micro_batch_size`."""
    every, reference_values = DEFAULTS | config, DEFAULTS | reference
    shown = [
        name
        for name, value in every.items()
        if name in ("zero_stage", "micro_batch_size")
        or value != reference_values.get(name, value)
        or value != DEFAULTS.get(name)
    ]
    return " ".join(f"{name}={value_text(every[name])}" for name in shown)


def _figures(measured: dict[str, Any]) -> list[str]:
    rate = measured["samples_per_second"]
    peak = max((rank["total"] for rank in measured["peak_memory_bytes"]), default=None)
    tflops = measured["tflops_per_device"]
    return [
        f"{number_text(rate['mean'])} [{number_text(rate['low'])}, {number_text(rate['high'])}]",
        f"{measured['step_seconds'] * 1e3:.4g} ms",
        bytes_text(peak),
        "-" if tflops is None else f"{tflops:.3g}",
    ]


def _gain_text(document: dict[str, Any]) -> str:
    baseline = document["baseline"]
    if not baseline:
        return "  no baseline was measured: the gain is unknown"
    gain = baseline["gain"]
    if document["best"]["config"] == baseline["config"]:
        return "  gain over the baseline: none, the answer is the baseline itself"
    unit = {"samples_per_second": "samples/s", "goodput": "tokens kept"}.get(gain["of"], "less peak memory")
    text = f"  gain over the baseline: {ratio_text(gain['mean'], gain['low'], gain['high'])} {unit}"
    if gain["low"] <= 1.0 <= gain["high"]:
        text += " (unproven: the interval includes 1)"
    return text
