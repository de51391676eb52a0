"""Every figure of a job in every state: what it says, and that it says something."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import table
from swept import LIMIT, swept, waiting

from autotune.explain.evidence import gather
from autotune.explain.figures import NAMES, figure_of
from autotune.explain.figures.module_tree import parts_of_model
from autotune.explain.figures.pipeline_schedule import durations_of, place
from autotune.explain.figures.source import FigureSource
from autotune.explain.figures.trial_figures import concordance
from autotune.request.rows import request_to_row
from autotune.wire.figures import Figure
from executor.parallel.schedule import actions_of
from search_spaces.errors import UnknownNameError
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.models.pipeline import split_layers
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial_config import TrialConfig
from storage.store import Store


def figures_of(store: Store, job: str) -> dict[str, Figure]:
    source = FigureSource(store, job)
    return {name: figure_of(source, name) for name in NAMES}


def require_sound(figure: Figure) -> None:
    """A sentence, columns of one length, cells that JSON can hold, axes that name columns."""
    assert figure.summary.endswith(".")
    assert "\n" not in figure.summary
    for found in figure.tables:
        assert {len(column.values) for column in found.columns} == {len(found)}
        assert len({column.name for column in found.columns}) == len(found.columns)
    for axis in filter(None, (figure.x, figure.y)):
        if figure and axis.column:
            figure.tables[0].column(axis.column)
    json.dumps(to_plain(figure), allow_nan=False)


def test_a_job_that_ran(tmp_path: Path, store: Store) -> None:
    job = swept(tmp_path, store, trials=24)
    found = figures_of(store, job)
    for figure in found.values():
        require_sound(figure)
    assert [name for name, figure in found.items() if not figure] == ["pipeline_schedule"]
    evidence = gather(store, job)

    trials = found["throughput_memory"].table("trials")
    by_outcome = dict(zip(trials.column("trial"), trials.column("outcome"), strict=True))
    assert set(by_outcome.values()) == {"OK", "INFEASIBLE"}
    assert [placed for placed, outcome in zip(trials.column("placed"), trials.column("outcome"), strict=True)
            if (placed == "predicted") != (outcome == "INFEASIBLE")] == []  # fmt: skip
    assert all(rate for rate in trials.column("samples_per_second"))
    assert [trial for trial, best in zip(trials.column("trial"), trials.column("best"), strict=True) if best] == [
        evidence.winner.number
    ]
    assert {mark.name: mark.value for mark in found["throughput_memory"].marks} == {"limit": LIMIT, "capacity": 0.95 * LIMIT}

    best = [value for value in found["best_so_far"].tables[0].column("best") if isinstance(value, float)]
    assert best == sorted(best)
    assert best[-1] == pytest.approx(evidence.rate.mean)

    parts = found["time_breakdown"].table("parts")
    mine = [row for row, name in enumerate(parts.column("configuration")) if str(name).startswith("best")]
    assert math.fsum(float(parts.column("seconds")[row] or 0) for row in mine) == pytest.approx(evidence.step_seconds)

    tags = found["memory_breakdown"].table("tags")
    peak = evidence.winner.result.peak_memory_bytes if evidence.winner.result else None
    held = [size for size, name in zip(tags.column("bytes"), tags.column("configuration"), strict=True) if "best" in str(name)]
    assert sum(int(size or 0) for size in held) == peak

    knobs = found["knob_importance"].table("knobs")
    rows = list(zip(*(knobs.column(name) for name in ("knob", "low", "importance", "high")), strict=True))
    assert {knob for knob, *_ in rows} == {"zero_stage", "micro_batch_size", "activation_checkpointing"}
    assert all(0 <= float(low or 0) <= float(middle or 0) <= float(high or 0) <= 1 for _, low, middle, high in rows)
    assert rows[0][0] == "micro_batch_size"  # what the table of measurements makes of it


@pytest.mark.prove
def test_a_knob_that_does_nothing_is_not_important(tmp_path: Path, store: Store) -> None:
    job = swept(
        tmp_path, store, lambda config: table.ok(200.0 if config.activation_checkpointing == "none" else 50.0), trials=24
    )
    knobs = figure_of(FigureSource(store, job), "knob_importance").table("knobs")
    shares = dict(zip(knobs.column("knob"), knobs.column("importance"), strict=True))
    assert float(shares["activation_checkpointing"] or 0) > 0.5 > float(shares["micro_batch_size"] or 0)


@pytest.mark.prove
def test_few_trials_tell_no_importance(tmp_path: Path, store: Store) -> None:
    figure = figure_of(FigureSource(store, swept(tmp_path, store, table.measured, trials=3)), "knob_importance")
    assert not figure
    assert "3 trials have a rate" in figure.summary


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: table.ended(Outcome.INFEASIBLE, "out of memory"), "INFEASIBLE"),
        (lambda _: table.ended(Outcome.FAILED, "no <b>such</b> thing"), "FAILED"),
    ],
)
def test_nothing_won(tmp_path: Path, store: Store, answer: Any, said: str) -> None:
    found = figures_of(store, swept(tmp_path, store, answer, trials=6))
    for figure in found.values():
        require_sound(figure)
    assert said in found["time_breakdown"].summary
    # What does not run is placed all the same: one sees what is nearest to fitting.
    placed = found["throughput_memory"].table("trials")
    assert set(placed.column("placed")) == {"predicted"}
    assert all(placed.column("peak_bytes"))


def test_a_job_that_has_not_begun(tmp_path: Path, store: Store) -> None:
    found = figures_of(store, waiting(tmp_path, store))
    for name, figure in found.items():
        require_sound(figure)
        assert not figure, name
    assert "no trial has started" in found["best_so_far"].summary


def test_a_request_that_cannot_be_read(tmp_path: Path, store: Store) -> None:
    row = request_to_row(table.session(tmp_path).request)
    del row["model"]
    for figure in figures_of(store, store.jobs.create(row).id).values():
        require_sound(figure)
        assert not figure


def test_a_model_without_a_shape(tmp_path: Path, store: Store) -> None:
    model = FactoryModel(reference="mine:make", parameter_count=100_000)
    found = figures_of(store, swept(tmp_path, store, trials=16, model="mine:make", resolved_model=model))
    for figure in found.values():
        require_sound(figure)
    lacking = {name for name, figure in found.items() if not figure}
    assert lacking == {"time_breakdown", "module_tree", "predicted_measured", "pipeline_schedule"}
    assert "do not know the module" in found["module_tree"].summary
    placed = found["throughput_memory"].table("trials")
    assert "none" in placed.column("placed")  # nothing is predicted of it


@pytest.mark.prove
def test_the_objective_memory(tmp_path: Path, store: Store) -> None:
    figure = figure_of(FigureSource(store, swept(tmp_path, store, objective="memory")), "best_so_far")
    best = [value for value in figure.tables[0].column("best") if value is not None]
    assert best == sorted(best, reverse=True)


@pytest.mark.prove
def test_a_pipeline_that_won(tmp_path: Path, store: Store) -> None:
    pins = {"pipeline_parallel_size": [2], "pipeline_schedule": ["1f1b"], "tensor_parallel_size": [1]}
    job = swept(tmp_path, store, trials=4, space="3d", ranks=2, pins=pins, strategy="random")
    figure = figure_of(FigureSource(store, job), "pipeline_schedule")
    require_sound(figure)
    actions, ranks = figure.table("actions"), figure.table("ranks")
    rows = sorted(zip(*(actions.column(name) for name in ("rank", "start", "kind", "micro_batch")), strict=True))
    config = gather(store, job).config
    batches = config.gradient_accumulation_steps(8, 2)
    for rank, order in enumerate(actions_of(config, batches)):
        mine = [(kind, batch) for own, _, kind, batch in rows if own == rank]
        assert mine == [(action.kind.value, action.micro_batch) for action in order]
    assert all(0 <= float(share or 0) < 1 for share in ranks.column("idle_share"))


def test_what_a_stage_needs_is_there_before_it_runs(tmp_path: Path, store: Store) -> None:
    question = gather(store, swept(tmp_path, store, trials=2)).question
    assert question is not None and isinstance(question.model, ModelSpec)
    for name, virtual in (("1f1b", 1), ("zbv", 2), ("dualpipev", 2), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2)):
        config = TrialConfig(pipeline_parallel_size=2, virtual_stages=virtual, pipeline_schedule=name)
        spec = dataclasses.replace(question.model, num_layers=4)
        layers = [len(held) for held in split_layers(spec, config, 64)]
        durations = durations_of(config, question, layers)
        placed = place(actions_of(config, 8), durations)
        ends = {(one.action.stage, one.action.kind.value, one.action.micro_batch): one.end for one in placed}
        for one in placed:
            stage, batch = one.action.stage, one.action.micro_batch
            if one.action.kind.value == "forward" and stage:
                assert one.start >= ends[stage - 1, "forward", batch]
            if one.action.kind.value == "weight_gradient":
                assert one.start >= ends[stage, "input_gradient", batch]
        for rank in range(2):
            own = [one for one in placed if one.rank == rank]
            assert all(before.end <= after.start + 1e-12 for before, after in itertools.pairwise(own))


@pytest.mark.parametrize(
    ("name", "predictions"),
    [
        ("llama-tiny", 0),
        ("gpt2", 0),
        ("llama-3-8b", 2),
        ("mixtral-8x7b", 0),
        ("deepseek-v3", 1),
        ("llama-4-maverick-17b-128e", 0),
    ],
)
def test_modules_sum_to_the_model(name: str, predictions: int) -> None:
    spec = dataclasses.replace(resolve_model(name), mtp_layers=predictions)
    parts = parts_of_model(spec, 128)
    assert parts[0].parameters == spec.parameter_count
    assert parts[0].flops_per_token == pytest.approx(spec.flops_per_token(128))


def test_an_unknown_figure(tmp_path: Path, store: Store) -> None:
    with pytest.raises(UnknownNameError, match="did you mean timeline"):
        figure_of(FigureSource(store, waiting(tmp_path, store)), "timelines")


def test_the_order_of_pairs() -> None:
    assert concordance([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1.0
    assert concordance([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == 0.0
    assert concordance([1.0, 1.0], [2.0, 3.0]) is None
