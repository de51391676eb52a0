"""Trials as figures and as plain data, on every backend."""

import dataclasses
from pathlib import Path

from sqlalchemy import event

from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import Lease
from storage.store import Store


class TestFigures:
    def test_they_are_the_trials_without_what_goes_with_each_rank_and_step(self, store: Store, lease: Lease) -> None:
        for number in range(5):
            store.trials.add(lease, TrialConfig(micro_batch_size=1 + number), Purpose.SEARCH)
        refused = TrialResult(attempt="", outcome=Outcome.INVALID, rule="some-rule", message="no")
        store.trials.add(lease, TrialConfig(zero_stage=3), Purpose.SEARCH, refusal=refused)
        whole = TrialResult(
            attempt="", outcome=Outcome.OK, message="told", samples_per_second=Interval(mean=3.0, low=2.0, high=4.0),
            within_relative_error=float("inf"), peak_memory_bytes=7, unstable=True, losses=(1.0,), step_seconds=(0.1,) * 20,
            environment={"torch": "2"}, phase_seconds={"setup": 1.0},
        )  # fmt: skip
        for number in (0, 2):
            token = store.attempts.start(lease, number).token
            store.attempts.finish(lease, dataclasses.replace(whole, attempt=token))
        slim = dataclasses.replace(whole, losses=(), step_seconds=(), environment={}, phase_seconds={})
        figures, trials = store.trials.figures_of(lease.job_id), store.trials.of(lease.job_id)
        assert [trial.number for trial in figures] == list(range(6))
        for figure, trial in zip(figures, trials, strict=True):
            assert figure.config_hash == trial.config_hash == trial.config.hash
            expected = trial.result if trial.number not in (0, 2) else slim
            assert figure == dataclasses.replace(trial, result=expected)
        assert store.trials.figures_of(lease.job_id, 4) == figures[4:]
        assert store.trials.figures_of("nothing") == []

    def test_plain_trials_say_what_records_say(self, store: Store, lease: Lease) -> None:
        store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.attempts.start(lease, 0)
        store.attempts.finish(lease, TrialResult(attempt=attempt.token, outcome=Outcome.OK, losses=(5.0, float("nan"))))
        refusal = TrialResult(attempt="", outcome=Outcome.INVALID, rule="r", message="m")
        store.trials.add(lease, TrialConfig(zero_stage=3), Purpose.SEARCH, refusal=refusal)
        store.trials.add(lease, TrialConfig(), Purpose.CONFIRM, repeat=1)
        for record, item in zip(store.trials.of(lease.job_id), store.trials.plain(lease.job_id), strict=True):
            told = to_plain(record) | {"config": record.config.values(), "result": to_plain(record.result)}
            if told["result"]:
                del told["result"]["attempt"]
            assert repr(item) == repr({name: told[name] for name in item})  # as text: a NaN equals nothing
        assert [item["number"] for item in store.trials.plain(lease.job_id, 1, 1)] == [1]

    def test_sqlite_finds_the_attempt_of_a_trial_by_its_trial(self, tmp_path: Path) -> None:
        plans: list[str] = []
        with Store(str(tmp_path / "jobs.db")) as store:
            engine = store.database._engine

            @event.listens_for(engine, "before_cursor_execute")
            def explain(connection, cursor, statement, parameters, context, many) -> None:  # type: ignore[no-untyped-def]
                if "JOIN attempts" in statement:
                    rows = cursor.connection.execute("EXPLAIN QUERY PLAN " + statement, parameters).fetchall()
                    plans.extend(row[3] for row in rows if "attempts" in row[3])

            store.trials.figures_of("job")
            store.trials.of("job", 3, 10)
            store.trials.plain("job", 3, 10)
        assert len(plans) == 3
        assert all("job_id=? AND trial_number=?" in plan for plan in plans), plans
