"""Search trials of fewer micro-batches or layers: what wins rests on full ones."""

import dataclasses
from pathlib import Path

import pytest
import table
from played import run, searched

from autotune.outcome.best_config import build_best_config
from autotune.outcome.verdict import decide
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from search_spaces.outcome import Outcome, Purpose
from search_spaces.training.fewer import fewer_layers, fewer_micro_batches
from search_spaces.trial import Fidelity, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store


class Fewer(table.Recorded):
    """Answers as the ranks would where steps may have fewer micro-batches, a tenth too fast."""

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        most = request.fidelity.most_micro_batches
        if fewer_micro_batches(request.config, request.workload, request.world_size, most) is None:
            return result
        assert result.samples_per_second is not None
        rate = table.ok(result.samples_per_second.mean * 1.1).samples_per_second
        return dataclasses.replace(result, samples_per_second=rate, extrapolated=("micro_batches",))


@pytest.mark.prove
@pytest.mark.parametrize("rounds", [0, 2])
def test_the_winner_rests_on_full_steps(tmp_path: Path, store: Store, rounds: int) -> None:
    """Of small micro-batches, which a step has more than the most of, some are fastest here."""
    runner = Fewer(lambda config: table.ok(100.0 / config.micro_batch_size * (1 + 0.05 * config.zero_stage)))
    session = table.session(
        tmp_path, trials=24, global_batch_size=16, confirm_repeats=rounds, fidelity=Fidelity(most_micro_batches=4)
    )
    snapshot = run(session, store, runner)
    requests = dict(zip([trial.number for trial in snapshot.trials], runner.requests, strict=True))
    assert requests[0].fidelity.most_micro_batches is None
    confirmations = [trial for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM]
    assert {requests[trial.number].fidelity.most_micro_batches for trial in confirmations} == {None}
    assert all(trial.result is not None and not trial.result.extrapolated for trial in confirmations)
    assert len(confirmations) == (1 if rounds == 0 else len(confirmations))
    for trial in searched(snapshot):
        reduced = trial.result is not None and bool(trial.result.extrapolated)
        assert trial.fidelity == ("fewer_micro_batches" if reduced else "full")
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    assert verdict.best.result is not None
    assert verdict.best.result.extrapolated == ("micro_batches",)
    assert snapshot.confirmed(verdict.best.config)
    measured = build_best_config(session, snapshot)["best"]["measured"]
    assert measured["extrapolated"] == []
    assert measured["samples_per_second"]["mean"] == pytest.approx(115.0, rel=0.03)


class Shallower(table.Recorded):
    """Answers as the ranks would of models of fewer layers: a tenth too fast, and with too small a peak."""

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        if fewer_layers(request.config, request.model, request.fidelity.most_layers) is None:
            return result
        assert result.samples_per_second is not None
        less = table.ok(result.samples_per_second.mean * 1.1, 900_000, attempt=request.attempt)
        return dataclasses.replace(less, losses=(), extrapolated=("layers",))


@pytest.mark.prove
@pytest.mark.parametrize("rounds", [0, 2])
def test_the_winner_and_its_memory_rest_on_the_whole_model(tmp_path: Path, store: Store, rounds: int) -> None:
    runner = Shallower(lambda config: table.ok(100.0 * (1 + 0.1 * config.micro_batch_size), 1_000_000))
    model = {"model": "llama-mini", "fidelity": Fidelity(most_layers=3)}
    session = table.session(tmp_path, trials=8, confirm_repeats=rounds, pins={"zero_stage": [1, 2]}, **model)
    snapshot = run(session, store, runner)
    requests = dict(zip([trial.number for trial in snapshot.trials], runner.requests, strict=True))
    assert requests[0].fidelity.most_layers is None
    for trial in snapshot.trials[1:]:
        shallow = trial.purpose is Purpose.SEARCH
        assert (trial.fidelity == "fewer_layers") == shallow
        assert requests[trial.number].fidelity.most_layers == (3 if shallow else None)
        assert not shallow or requests[trial.number].rate_to_beat is None
    assert snapshot.job.reference_losses == {"": (5.0, 4.5)}
    best = build_best_config(session, snapshot)["best"]["measured"]
    assert best["extrapolated"] == []
    assert {rank["total"] for rank in best["peak_memory_bytes"]} == {1_000_000}


@pytest.mark.parametrize("warmup_steps", [6, None])
def test_a_script_is_not_ended_in_the_warm_up_that_its_baseline_needed(store: Store, warmup_steps: int | None) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        return dataclasses.replace(table.ok(100.0 + config.micro_batch_size), warmup_steps=warmup_steps)

    runner = table.Recorded(answer)
    fields = {"command": "python train.py -b {micro_batch_size}", "strategy": "random", "trials": 3, "confirm_repeats": 0}
    run(resolve(request_from_fields(fields)), store, runner)
    first, *others = runner.requests
    assert (first.rate_to_beat, first.command_has_reported) == (None, False)
    assert [(other.race_warmup_steps, other.command_has_reported) for other in others] == [(warmup_steps, True)] * 2


def test_what_could_not_be_confirmed_in_full_does_not_win(tmp_path: Path, store: Store) -> None:
    class Unconfirmed(Fewer):
        def _answer(self, request: TrialRequest) -> TrialResult:
            result = super()._answer(request)
            asked = request.rate_to_beat is None and len(self.requests) > 1
            return dataclasses.replace(table.ended(Outcome.FAILED), attempt=request.attempt) if asked else result

    def answer(config: TrialConfig) -> TrialResult:
        return table.ok(100.0 / config.micro_batch_size * (1 + 0.05 * config.zero_stage))

    session = table.session(
        tmp_path, trials=6, global_batch_size=16, confirm_repeats=0, fidelity=Fidelity(most_micro_batches=4)
    )
    snapshot = run(session, store, Unconfirmed(answer))
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    assert verdict.best.result is not None
    assert verdict.best.result.extrapolated == ()
