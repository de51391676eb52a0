"""Sources are believed as far as they do not contradict local measurements."""

import dataclasses
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from known import REAL, measured, run_job

from autotune.evaluation.row_cases import refusal
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.table import read_table
from autotune.evaluation.validation.truth import peak_bytes, step_seconds
from autotune.knowledge.collect import local_measurements
from autotune.knowledge.learning import learned_from
from autotune.knowledge.measurement import Measurement
from autotune.knowledge.trust import trust_in
from autotune.prediction.equations.rates import shipped_rates
from autotune.prediction.planning.calibrated import calibrated
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import question_of
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from storage.store import Store

DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[4] / "shared" / "data"))


@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_source_is_found_by_five_trials(seed: int) -> None:
    local = measured("local", 5, seed=10 + seed)
    sources = [
        *measured("honest", 20, seed=seed),
        *measured("poisoned", 20, seed=seed, times=0.5, peaks=2.0),
        *measured("fast", 20, seed=seed, times=0.5),
        *measured("full", 20, seed=seed, peaks=2.0),
    ]
    found = trust_in(sources, local, shipped_rates())
    assert {name: each.contradicts for name, each in found.items()} == {
        "honest": False, "poisoned": True, "fast": True, "full": True
    }  # fmt: skip
    assert found["honest"].weight > 0.9
    assert found["poisoned"].time_ratio == pytest.approx(0.5, rel=0.15)
    assert found["poisoned"].memory_ratio == pytest.approx(2.0, rel=0.1)
    assert "by 5 local measurements" in found["poisoned"].text


def test_one_local_trial_decides_nothing() -> None:
    """It may be the broken one."""
    found = trust_in(measured("a", 20), measured("local", 1, seed=5, times=8.0), shipped_rates())
    assert not found["a"].contradicts


def test_without_local_measurements_sources_are_believed() -> None:
    (found,) = trust_in(measured("a", 5), [], shipped_rates()).values()
    assert (found.weight, found.compared, found.text) == (1.0, 0, "nothing local to compare it with")


def test_other_models_are_compared_with_less_certainty() -> None:
    local = measured("local", 5, seed=3)
    near, far = (
        trust_in(measured("a", 20, model=model, cluster=cluster, times=0.6), local, shipped_rates())["a"]
        for model, cluster in (("qwen2-0.5b", "dgx-a100:1"), ("llama-2-7b", "dgx-h100:1"))
    )
    assert near.weight < far.weight


def predicted(measurements: list[Measurement], store: Store | None = None) -> tuple[float, float]:
    """Step seconds of the defaults, predicted with measurements by others, and as they are."""
    asked = question_of(
        resolve_model("qwen2-0.5b"), resolve_cluster("dgx-a100:1"), global_batch_size=32, sequence_length=1024,
        pins={"precision": "bf16", "zero_stage": 1},
    )  # fmt: skip
    learned = learned_from(measurements, store, asked.cluster, "native")
    known = calibrated(store, asked.cluster, "native", shipped_rates(), borrowed=learned.borrowed)
    informed = dataclasses.replace(asked, known=known.rates, lessons=known.lessons, rests_on=known.source)
    truth = dataclasses.replace(asked, known=REAL)
    first, second = (estimates(each, [asked.config()])[0].step_seconds.mean for each in (informed, truth))
    return first, second


@pytest.mark.prove
def test_measurements_on_the_same_devices_correct_predictions() -> None:
    blind, truth = predicted([])
    informed, _ = predicted(measured("theirs", 24))
    assert abs(np.log(informed / truth)) < 0.5 * abs(np.log(blind / truth))
    assert abs(np.log(informed / truth)) < 0.06


@pytest.mark.prove
def test_nothing_is_learned_from_a_source_that_contradicts(store: Store) -> None:
    run_job(store, measured("x", 6, seed=9))
    honest, truth = predicted([], store)
    poisoned, _ = predicted(measured("theirs", 24, times=0.5, peaks=2.0), store)
    assert poisoned == pytest.approx(honest, rel=1e-9)
    assert abs(np.log(poisoned / truth)) < 0.2
    notes = learned_from(measured("theirs", 24, times=0.5, peaks=2.0), store, resolve_cluster("dgx-a100:1"), "native").notes
    assert len(notes) == 1
    assert notes[0].startswith("source theirs contradicts local measurements (times 0.")


def test_an_own_job_is_not_learned_from_twice(store: Store) -> None:
    run_job(store, measured("x", 6))
    own = local_measurements(store)
    assert len(own) == 6
    learned = learned_from(own, store, resolve_cluster("dgx-a100:1"), "native")
    assert (learned.borrowed.runs, learned.borrowed.text) == ((), "")


def poisoned(row: Row) -> Row:
    """Times halved, memory doubled."""
    faster = {
        name: None if getattr(row, name) is None else 2 * getattr(row, name)
        for name in ("tokens_per_s_per_gpu", "samples_per_s")
    }
    seconds, peak = row.step_time_s, row.peak_mem_gb
    return dataclasses.replace(row, **faster, step_time_s=seconds and seconds / 2, peak_mem_gb=peak and peak * 2)


@pytest.mark.prove
def test_poisoned_tables_are_found_by_five_of_their_rows() -> None:
    if not (DATA / "measured.csv").exists():
        pytest.skip(f"no measurements in {DATA}")
    sources: dict[str, list[Row]] = defaultdict(list)
    for row in read_table(DATA / "measured.csv").rows:
        if refusal(row) is None and not row.batch_problem and (step_seconds(row) or peak_bytes(row)):
            sources[row.source].append(row)
    draw, verdicts = np.random.default_rng(0), {}
    for source, rows in sources.items():
        if len(rows) >= 20:
            order = draw.permutation(len(rows))[:200]
            local = [Measurement(source="local", row=rows[place]) for place in order[:5]]
            rest = [rows[place] for place in order[5:]]
            told = [
                *(Measurement(source="honest", row=row) for row in rest),
                *(Measurement(source="poisoned", row=poisoned(row)) for row in rest),
            ]
            found = trust_in(told, local, shipped_rates())
            verdicts[source] = (found["honest"].contradicts, found["poisoned"].contradicts)
    assert len(verdicts) >= 8
    assert set(verdicts.values()) == {(False, True)}, verdicts
