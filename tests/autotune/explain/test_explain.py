"""Explanations of jobs whose table of measurements is made up, so that the answer is known."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import table
from pydantic import TypeAdapter

from autotune.errors import JobNotResumableError, NoBestError
from autotune.explain.explain import SCHEMA_PATH, explain
from autotune.explain.findings import Basis, Explanation, KnobFinding, KnobPoint, KnobVerdict
from autotune.loop.loop import run_job
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from autotune.text.explain_sections import markdown_of
from executor.dry.module_profile import profile_module
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import finite, from_plain, to_plain
from search_spaces.trial import CollectiveCount, Interval, TrialResult, Workload
from search_spaces.trial_config import TrialConfig
from storage.errors import UnknownJobError
from storage.store import Store

LIMIT = 50_000_000


def doubled(config: TrialConfig) -> TrialResult:
    """Recomputation halves the rate, the micro-batch does nothing, stage 0 does not fit, and stage 3 costs a fifth."""
    if config.zero_stage == 0:
        return table.ended(Outcome.INFEASIBLE, "out of memory on rank 1")
    rate = 200.0 * (0.5 if config.activation_checkpointing == "full" else 1.0) * (0.8 if config.zero_stage == 3 else 1.0)
    return table.ok(rate + 0.1 * config.micro_batch_size - 0.2 * config.zero_stage)


def swept(session: Session, store: Store, answer: Any) -> str:
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    return job.id


def explained(folder: Path, store: Store, answer: Any = doubled, **changes: Any) -> Explanation:
    fields = {"strategy": "grid", "trials": 100, "racing": False, "confirm_repeats": 1} | changes
    return explain(store, swept(table.session(folder, **fields), store, answer))


def knob(told: Explanation, name: str) -> KnobFinding:
    return next(finding for finding in told.knobs if finding.knob == name)


def point(finding: KnobFinding, value: Any) -> KnobPoint:
    return next(one for one in finding.curve if one.value == value)


@pytest.fixture(scope="module")
def schema() -> Iterator[dict[str, Any]]:
    loaded: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(loaded)
    yield loaded


@pytest.mark.prove
def test_every_trial_measured(tmp_path: Path, store: Store) -> None:
    told = explained(tmp_path, store, confirm_repeats=0)
    assert (told.config.activation_checkpointing, told.config.zero_stage) == ("none", 1)

    full = knob(told, "activation_checkpointing")
    assert told.knobs[0] is full
    assert (full.verdict, full.source, full.best_other) == (KnobVerdict.FASTER, Basis.MEASURED, "full")
    assert full.gain is not None
    assert full.gain.mean == pytest.approx(2.0, rel=0.02)
    assert full.gain.low > 1.5
    assert full.text.startswith("2.0")

    batch = knob(told, "micro_batch_size")
    assert batch.verdict is KnobVerdict.NOISE
    assert batch.text.startswith("no difference within the noise to")

    stage = knob(told, "zero_stage")
    assert point(stage, 0).source is Basis.OUT_OF_MEMORY
    assert point(stage, 0).speedup is None
    assert "0 is out of memory" in stage.text
    slower = point(stage, 3).speedup
    assert slower is not None
    assert slower.mean == pytest.approx(1.25, rel=0.02)
    assert point(stage, 2).source is Basis.MEASURED


@pytest.mark.prove
def test_few_trials_leave_much_to_predictions(tmp_path: Path, store: Store) -> None:
    told = explained(tmp_path, store, table.measured, strategy="random", trials=5)
    points = [one for finding in told.knobs for one in finding.curve]
    assert any(one.source in (Basis.PREDICTED, Basis.DOES_NOT_FIT) for one in points)
    for one in points:
        assert (one.trial is None) == (one.source in (Basis.PREDICTED, Basis.DOES_NOT_FIT, Basis.REFUSED, Basis.UNKNOWN))
        if one.source is Basis.PREDICTED:
            assert one.samples_per_second is not None
            assert one.samples_per_second.low < one.samples_per_second.mean < one.samples_per_second.high
    assert all("predicted" in f.text for f in told.knobs if f.source is Basis.PREDICTED and f.verdict is KnobVerdict.FASTER)
    assert any(finding.far for finding in told.knobs)
    for finding in told.knobs:
        # A trial that differs in more than the knob is no neighbour, and is told with what else it differs in.
        for far in finding.far:
            assert far.also
            assert finding.knob not in far.also
            assert not [one for one in finding.curve if one.trial == far.trial]
        if finding.verdict is KnobVerdict.NOISE:
            apart = [one for one in finding.curve if one.speedup and not one.speedup.low <= 1.0 <= one.speedup.high]
            assert [one.value for one in apart if one.source in (Basis.MEASURED, Basis.PREDICTED)] == []


@pytest.mark.prove
def test_the_parts_of_a_step_sum_to_what_was_measured(tmp_path: Path, store: Store) -> None:
    told = explained(tmp_path, store, table.measured, strategy="guided", trials=5)
    seconds = told.time.step_seconds.mean
    assert seconds == pytest.approx(8 / told.time.samples_per_second.mean)
    assert sum(part.seconds for part in told.time.parts) == pytest.approx(seconds)
    assert sum(part.share for part in told.time.parts) == pytest.approx(1.0)
    assert all(part.seconds >= 0 for part in told.time.parts)
    assert told.limits is not None
    assert sum(bound.share for bound in told.limits.bounds) < 1.5
    assert all(1.0 <= upgrade.gain.low <= upgrade.gain.mean <= upgrade.gain.high for upgrade in told.upgrades)
    gains = [upgrade.gain.mean for upgrade in told.upgrades]
    assert gains == sorted(gains, reverse=True)
    assert all(upgrade.gain.mean <= 2.0 + 1e-9 for upgrade in told.upgrades if upgrade.name.startswith("twice"))


@pytest.mark.prove
def test_memory_of_the_fullest_rank(tmp_path: Path, store: Store) -> None:
    ranks = (table.rank(0, 10_000_000), table.rank(1, 30_000_000))
    sent = (CollectiveCount(operation="all_reduce", mesh_dimension="data", count=3, bytes=400),)
    ranks = tuple(dataclasses.replace(rank, collectives=sent if rank.rank else ()) for rank in ranks)

    def answer(config: TrialConfig) -> TrialResult:
        return table.ok(100.0 - config.zero_stage, 30_000_000, ranks=ranks)

    told = explained(tmp_path, store, answer, trials=3, memory_limit=LIMIT, headroom=0.1)
    memory = told.memory
    assert memory is not None
    assert (memory.rank, memory.peak_bytes, sum(memory.by_tag.values())) == (1, 30_000_000, 30_000_000)
    assert (memory.limit_bytes, memory.free_bytes) == (LIMIT, 15_000_000)
    assert (memory.breaks_first, memory.breaks_at) == (next(iter(memory.by_tag)), pytest.approx(2.0))
    assert told.time.collectives == sent


@pytest.mark.prove
def test_more_memory_would_help_where_it_is_what_is_missing(tmp_path: Path, store: Store) -> None:
    """With a limit between a micro-batch and its double, twice the memory allows a larger one."""
    wide = table.session(tmp_path, strategy="grid", trials=100, racing=False, confirm_repeats=0)
    assert isinstance(wide.model, ModelSpec)
    asked = Question(model=wide.model, cluster=wide.cluster, global_batch_size=8, sequence_length=64)
    small, large = estimates(asked, [TrialConfig(micro_batch_size=size) for size in (1, 2)])
    limit = int((small.peak_memory_bytes.mean + large.peak_memory_bytes.mean) / 2)

    def answer(config: TrialConfig) -> TrialResult:
        peak = int(estimates(asked, [config])[0].peak_memory_bytes.mean)
        return table.ok(60.0 * config.micro_batch_size, peak) if peak <= limit else table.ended(Outcome.INFEASIBLE)

    told = explained(tmp_path, store, answer, memory_limit=limit, headroom=0.0, confirm_repeats=0)
    assert told.limits is not None
    by_factor = {more.factor: more for more in told.limits.memory}
    assert by_factor[2.0].gain.mean > 1.05
    assert by_factor[2.0].config is not None
    assert by_factor[2.0].gain.mean >= by_factor[1.1].gain.mean


@pytest.mark.prove
@pytest.mark.parametrize(
    "changes",
    [{"strategy": "tpe", "trials": 4, "memory_limit": LIMIT, "objective": "memory"}, {"trials": 1}],
)
def test_the_document_keeps_its_schema(tmp_path: Path, store: Store, schema: dict[str, Any], changes: dict[str, Any]) -> None:
    told = explained(tmp_path, store, table.measured, **changes)
    text = json.dumps(finite(to_plain(told)), allow_nan=False)
    jsonschema.validate(json.loads(text), schema)
    assert from_plain(Explanation, json.loads(text)) == told
    assert "nan" not in markdown_of(told).lower()


@pytest.mark.prove
@pytest.mark.parametrize("interval", [(0.0, math.inf), (100.0, 100.0)])
def test_figures_stay_finite_whatever_was_measured(
    tmp_path: Path, store: Store, schema: dict[str, Any], interval: tuple[float, float]
) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        if config.zero_stage == 2:
            return table.ok(1.0, 1, ranks=(), outcome=Outcome.PRUNED)
        stated = Interval(mean=100.0, low=interval[0], high=interval[1])
        return table.ok(100.0, 0, ranks=(), samples_per_second=stated, within_relative_error=2.0)

    told = explained(tmp_path, store, answer, trials=9, confirm_repeats=0)
    assert told.memory is None
    jsonschema.validate(json.loads(json.dumps(finite(to_plain(told)), allow_nan=False)), schema)
    assert from_plain(Explanation, finite(to_plain(told))) == told


def test_the_schema_is_what_the_classes_say(schema: dict[str, Any]) -> None:
    """Write the file anew with AUTOTUNE_WRITE_GOLDEN=1."""
    made = TypeAdapter(Explanation).json_schema()
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        SCHEMA_PATH.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    assert made == schema


@pytest.mark.prove
def test_a_module_with_a_profile_is_explained_like_our_model(tmp_path: Path, store: Store, schema: dict[str, Any]) -> None:
    model = profile_module(
        "benchmarks.prediction.plan_modules:mlp", Workload(global_batch_size=8, sequence_length=128), ("fp32",)
    )
    told = explained(tmp_path, store, trials=8, confirm_repeats=0, model=model.reference, resolved_model=model)
    assert told.time.predicted_seconds is not None and told.limits is not None and told.upgrades
    assert not any("do not know" in note for note in told.notes)
    jsonschema.validate(finite(to_plain(told)), schema)


def test_a_factory_has_measured_parts_alone(tmp_path: Path, store: Store, schema: dict[str, Any]) -> None:
    model = FactoryModel(reference="mine:make", parameter_count=100_000)
    told = explained(tmp_path, store, trials=16, confirm_repeats=0, model="mine:make", resolved_model=model)
    assert (told.time.parts, told.time.predicted_seconds, told.limits, told.upgrades) == ((), None, None, ())
    assert [note for note in told.notes if "do not know the module" in note] == list(told.notes)
    assert len(told.notes) == 1
    assert knob(told, "activation_checkpointing").verdict is KnobVerdict.FASTER
    assert all(one.source is not Basis.PREDICTED for finding in told.knobs for one in finding.curve)
    jsonschema.validate(finite(to_plain(told)), schema)


def test_a_job_without_a_winner_says_what_its_trials_were(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        return table.ended(Outcome.FAILED if config.zero_stage == 3 else Outcome.INFEASIBLE)

    with pytest.raises(NoBestError, match=r"no winner to explain: 24 trials, 18 INFEASIBLE, 6 FAILED"):
        explained(tmp_path, store, answer)
    with pytest.raises(UnknownJobError):
        explain(store, "nothing")


@pytest.mark.prove
def test_an_old_request_lacks_fields(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, strategy="random", trials=4)
    row = request_to_row(session.request)
    for name in ("racing", "fidelity", "headroom", "allow_unstable", "python_path", "resolved_base"):
        del row[name]
    job = store.jobs.create(row)
    run_job(session, store, job.id, table.runner())
    assert explain(store, job.id).measured == 4

    del row["model"]
    broken = store.jobs.create(row)
    with pytest.raises(JobNotResumableError, match="cannot be read by this version"):
        explain(store, broken.id)


@pytest.mark.prove
def test_the_objective_memory_is_told_in_peaks(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        return table.ok(100.0, 10_000_000 * (3 if config.activation_checkpointing == "none" else 1) * config.micro_batch_size)

    told = explained(tmp_path, store, answer, objective="memory", trials=12, confirm_repeats=0)
    full = knob(told, "activation_checkpointing")
    assert (full.value, told.config.micro_batch_size) == ("full", 1)
    assert full.least_peak is not None
    assert full.least_peak.value == "none"
    assert full.text.startswith("3.00x the peak with none;")
    assert knob(told, "micro_batch_size").text.startswith("2.00x the peak with 2;")
