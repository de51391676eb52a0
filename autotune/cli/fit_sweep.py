"""`autotune fit --measure`: the ways that fit, run by the user's program in a sweep, and the file of the fastest of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autotune.cli.foreground import run_new
from autotune.cli.options import SweepOfWays, SweepOptions, WantedFile
from autotune.cli.status import Status, print_note, write_document, write_export
from autotune.cli.worker import pass_environment
from autotune.errors import ExportRefusedError, NothingFeasibleError, RequestError
from autotune.output import require_writable, write_whole
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.fit import Fit, SetupAnswer, sizes_of_step
from autotune.question.question import PlanningFields
from autotune.ray_cluster import with_address
from autotune.recipes.fit_recipe import file_of, program_of
from autotune.request.rows import read_config_file, request_from_fields
from autotune.session.resolve import prepare
from autotune.text.console import Console
from autotune.text.result import print_result
from autotune.text.rows import rate_text
from autotune.tuning import TuneResult
from search_spaces.models.command import CommandModel, variant_values
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import JobState
from search_spaces.placeholders import names_in, words_of
from search_spaces.plain import to_plain
from search_spaces.trial import Interval
from storage.records import TrialRecord

WAY = "way"
"""The only knob of the sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedWay:
    """A way with a micro-batch."""

    answer: SetupAnswer
    estimate: StepEstimate

    @property
    def name(self) -> str:
        """`lora-zero-3-recomputed-4`, its value of the sweep's knob `way`."""
        setup = self.answer.setup
        sharding = setup.sharding.name.lower().replace(",", "").replace(" ", "-")
        recomputed = ["recomputed"] if setup.recomputes else []
        return "-".join([setup.method.name, sharding, *recomputed, str(self.estimate.config.micro_batch_size)])


def candidates(result: Fit, most: int) -> list[SizedWay]:
    """What is measured, in this order: the headline; the other ways that fit, the surely fastest first; half and twice the
    micro-batches of the leading ones."""
    chosen = [SizedWay(answer=answer, estimate=answer.estimate) for answer in result.ranked]
    for answer in result.ranked[:3]:
        size, (sizes, question) = answer.estimate.config.micro_batch_size, sizes_of_step(answer.setup)
        others = [other for other in (2 * size, size // 2) if other in sizes and other <= answer.micro_batch_size]
        predictions = estimates(question, [answer.setup.config(other) for other in others])
        chosen += [SizedWay(answer=answer, estimate=estimate) for estimate in predictions]
    return chosen[:most]


def measured_fit(
    result: Fit, inputs: PlanningFields, sweep: SweepOfWays, file: WantedFile | None, database: str | None, *, json: bool
) -> Status:
    """Write a file for each candidate, sweep them, print what was measured beside what was predicted, and write the file of the
    fastest."""
    if result.fastest is None:
        raise NothingFeasibleError("memory", "nothing fits, so there is nothing to measure", "ask without --measure first")
    if not isinstance(result.question.model, ModelSpec):
        raise RequestError("measure", "is for a model's shape", "sweep your module: autotune sweep MODULE:FACTORY")
    program = None if file is None else program_of(file.format)
    words = sweep.words or ([] if program is None else program.command.split())
    if not words or any("{file}" in word for word in words) != (program is not None):
        problem = "needs --for PROGRAM, a command with {file} in the place of that program's file, or one of your own without"
        raise RequestError("measure", problem, "write for example: -- python train.py --batch {micro_batch_size}")
    out = Path(f"fastest{program.suffix if program else ''}") if file is None or file.out is None else file.out
    require_writable(out)
    folder = out.with_name(f"{out.stem}-ways").absolute()
    folder.mkdir(exist_ok=True)
    chosen: dict[str, SizedWay] = {}
    for candidate in candidates(result, sweep.trials):
        if file is not None and program is not None:
            config = candidate.estimate.config
            try:
                text = file_of(result, inputs, file.format, file.dataset, candidate.answer, config).text
            except ExportRefusedError as error:
                print_note(f"{candidate.name} is not measured: {error}")
                continue
            write_whole(folder / f"{candidate.name}{program.suffix}", text)
        chosen[candidate.name] = candidate
    line = [
        text
        for word in words
        for text in _words(word.replace("{file}", f"{folder}/{{{WAY}}}{program.suffix if program else ''}"), chosen.values())
    ]
    fields = with_address(_fields(result, inputs, sweep.config, {"arguments": line, "script_knobs": {WAY: list(chosen)}}))
    options = SweepOptions(
        fields=fields, series={}, imported=None, out=folder / "best-config.json", config=None, resume=None, database=database,
        json=json,
    )  # fmt: skip
    pass_environment(tuple(sweep.environment))
    swept = run_new(prepare(request_from_fields(fields)), options, Console(stderr=True), options.out)
    fastest = None if swept.best is None else chosen.get(variant_values(swept.best.script).get(WAY, ""))
    if json:
        write_document({
            "job": swept.job_id, "state": swept.state.value, "fastest": fastest and fastest.name,
            "best_config": swept.best_config, "ways": _ways(swept, chosen),
        })  # fmt: skip
    else:
        console = Console()
        if swept.traceback is not None:
            console.print(swept.traceback.rstrip(), highlight=False, markup=False, soft_wrap=True)
        print_result(swept.best_config, console)
        console.print(_table(swept, chosen, with_memory=result.question.cluster.device.kind != "cpu"), highlight=False)
    if swept.state is JobState.PAUSED:
        return Status.INTERRUPTED
    if fastest is None or swept.best_config is None:
        return Status.NOTHING_FEASIBLE
    rate = Interval(**swept.best_config["best"]["measured"]["samples_per_second"])
    text = f"measured here: {rate_text(rate)} samples/s; predicted: {rate_text(fastest.estimate.samples_per_second)}"
    if file is None:
        print_note(f"fastest: {fastest.name}; {text}")
        return Status.OK
    exported = file_of(result, inputs, file.format, file.dataset, fastest.answer, fastest.estimate.config, text).named(out)
    write_export(exported.text, (f"fastest: {fastest.name}, written to {out}", *exported.notes), out)
    return Status.OK


def _words(word: str, chosen: Iterable[SizedWay]) -> Iterator[str]:
    """The word; if it has placeholders of knobs, one of each candidate with its own values, which its way chooses."""
    names = names_in(single := CommandModel(arguments=(word,)))
    if not names or names == (WAY,):
        yield word
        return
    for candidate in chosen:
        question = candidate.answer.setup.question
        filled = words_of(single, candidate.estimate.config, question.workload, question.cluster.world_size, {})
        yield f"{{{WAY}={candidate.name}:{filled[0]}}}"


def _fields(result: Fit, inputs: PlanningFields, config: Path | None, command: Mapping[str, Any]) -> dict[str, Any]:
    """The request of the sweep, whose only knob is the way. Trials run in the order of the candidates."""
    question, stated = result.question, {} if config is None else read_config_file(config)
    of_file = stated.pop("command", {})
    script_knobs = {**of_file.get("script_knobs", {}), **command["script_knobs"]}
    place = "ray" if inputs.cluster == "ray" else "local"
    fields = {
        "cluster": place, "runner": place, "ranks": question.cluster.world_size, "trials": len(script_knobs[WAY]),
        "strategy": "grid", "global_batch_size": question.global_batch_size, "sequence_length": question.sequence_length,
    }  # fmt: skip
    if inputs.memory_limit is not None:
        fields["memory_limit"] = inputs.memory_limit
    return {**fields, **stated, "command": {"folder": str(Path.cwd()), **of_file, **command, "script_knobs": script_knobs}}


def _table(swept: TuneResult, chosen: Mapping[str, SizedWay], *, with_memory: bool) -> Table:
    """Each way as predicted and as its trials measured it."""
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("way", overflow="fold")
    for name in ("predicted samples/s", "measured", "measured / predicted", *(("GiB predicted", "measured") * with_memory)):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in _ways(swept, chosen):
        predicted, measured, peak = row["predicted"], row["measured"], row["measured_peak_bytes"]
        memory = [f"{row['predicted_peak_bytes'] / 2**30:.2f}", "-" if peak is None else f"{peak / 2**30:.2f}"]
        table.add_row(
            row["way"], _rate(predicted), _rate(measured),
            "-" if measured is None else f"{measured['mean'] / predicted['mean']:.2f}", *(memory * with_memory),
            (row["outcome"] or "").lower(),
        )  # fmt: skip
    return table


def _rate(interval: Mapping[str, float] | None) -> str:
    return "-" if interval is None else rate_text(Interval(**interval))


def _ways(swept: TuneResult, chosen: Mapping[str, SizedWay]) -> list[dict[str, Any]]:
    """Each way that ran, with its prediction and its first trial; memory is the allocator's peak."""
    trials: dict[str, TrialRecord] = {}
    for trial in swept.trials:
        trials.setdefault(variant_values(trial.config.script)[WAY], trial)
    rows = []
    for name, trial in trials.items():
        estimate, result = chosen[name].estimate, trial.result
        rows.append({
            "way": name,
            "predicted": to_plain(estimate.samples_per_second),
            "predicted_peak_bytes": estimate.fullest.total,
            "outcome": trial.outcome and trial.outcome.value,
            "measured": to_plain(result.samples_per_second) if result else None,
            "measured_peak_bytes": result.peak_memory_bytes if result else None,
            "message": result.message if result else "",
        })  # fmt: skip
    return rows
