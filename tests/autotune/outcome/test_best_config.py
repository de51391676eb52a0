"""The best-config document: its schema, what it rests on, reading it back; and its exports."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import table

from autotune.errors import BestConfigError, NoBestError, UnknownFormatError
from autotune.frameworks.best_config import SCHEMA_PATH, best_config_text, read_best_config, request_of, winner_of
from autotune.frameworks.exporters import exporter
from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.resolve import prepare
from autotune.session.session import Session
from search_spaces.mesh import make_mesh
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.store import Store


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def swept(session: Session, store: Store, answer: Any = table.measured) -> JobSnapshot:
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(answer))
    return read_snapshot(store, job.id)


@pytest.mark.prove
@pytest.mark.parametrize(
    "changes", [{}, {"objective": "memory"}, {"memory_limit": 4_500_000}, {"confirm_repeats": 0}, {"trials": 1}]
)
def test_the_document_keeps_its_schema(tmp_path: Path, store: Store, schema: dict[str, Any], changes: dict[str, Any]) -> None:
    session = table.session(tmp_path, trials=changes.pop("trials", 24), **changes)
    document = build_best_config(session, swept(session, store))
    jsonschema.validate(json.loads(best_config_text(document)), schema)


def test_the_document_lists_what_nobody_stated(tmp_path: Path, store: Store, schema: dict[str, Any]) -> None:
    session = table.session(tmp_path, trials=1, resolved_defaults=("sequence_length",))
    document = build_best_config(session, swept(session, store))
    jsonschema.validate(json.loads(best_config_text(document)), schema)
    (assumed,) = document["job"]["assumed"]
    assert (assumed["name"], assumed["value"], assumed["stated_by"]) == ("sequence_length", 128, "--sequence-length")
    assert request_of(document).resolved_assumed == session.request.resolved_assumed


def test_without_a_baseline_the_document_keeps_its_schema(tmp_path: Path, store: Store, schema: dict[str, Any]) -> None:
    def answer(config: TrialConfig) -> Any:
        return table.measured(config) if config.micro_batch_size > 1 else table.ended(Outcome.FAILED)

    session = table.session(tmp_path, trials=10)
    document = build_best_config(session, swept(session, store, answer))
    jsonschema.validate(json.loads(best_config_text(document)), schema)
    assert document["baseline"] is None


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 2, "virtual_stages": 1, "pipeline_schedule": "gpipe", "rank_order": "tp-cp-pp-dp"},
    {"context_parallel_size": 2, "zero_stage": 3, "expandable_segments": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_is_placed(tmp_path: Path, schema: dict[str, Any], layout: dict[str, Any]) -> None:
    session, config = table.session(tmp_path, ranks=4), TrialConfig().replace(layout)
    launch = launch_of(config, session)
    jsonschema.validate(launch, schema["properties"]["launch"])
    placement, mesh = launch["placement"], make_mesh(config, 4)
    assert placement["mesh"] == {
        "tensor": mesh.tensor, "context": mesh.context, "data": mesh.data, "pipeline": mesh.pipeline, "order": mesh.order,
    }  # fmt: skip
    assert [rank["rank"] for rank in placement["ranks"]] == [0, 1, 2, 3]
    assert len({tuple(rank["coordinates"].values()) for rank in placement["ranks"]}) == 4
    for rank in placement["ranks"]:
        assert rank["node"] * placement["ranks_per_node"] + rank["local_rank"] == rank["rank"]
    held = {stage["stage"]: stage["layers"] for rank in placement["ranks"] for stage in rank["stages"]}
    assert [layer for stage in sorted(held) for layer in held[stage]] == [0, 1]
    assert bool(launch["env"]) is config.expandable_segments
    assert json.dumps(launch) == json.dumps(launch_of(config, session))


@pytest.mark.prove
def test_a_pipeline_winner_says_which_rank_holds_which_layers(tmp_path: Path, store: Store, schema: dict[str, Any]) -> None:
    def answer(config: TrialConfig) -> Any:
        wanted = config.pipeline_schedule == "1f1b" and config.pipeline_parallel_size == 2 and config.tensor_parallel_size == 2
        return table.ok(200.0 if wanted else 100.0, hfu=0.25)

    session = table.session(tmp_path, ranks=4, space="3d", trials=40, pins={"micro_batch_size": 1, "zero_stage": 1})
    document = build_best_config(session, swept(session, store, answer))
    jsonschema.validate(json.loads(best_config_text(document)), schema)
    assert document["best"]["config"]["pipeline_parallel_size"] == 2
    assert document["best"]["measured"]["hfu"] == pytest.approx(0.25, rel=0.02)
    ranks = document["launch"]["placement"]["ranks"]
    assert [(rank["coordinates"]["tensor"], rank["coordinates"]["pipeline"]) for rank in ranks] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert [rank["stages"] for rank in ranks] == [[{"stage": at, "layers": [at]}] for at in (0, 0, 1, 1)]


def test_the_layers_of_a_factory_are_not_known(tmp_path: Path, schema: dict[str, Any]) -> None:
    model = FactoryModel(reference="m:f", parameter_count=10)
    launch = launch_of(TrialConfig(), dataclasses.replace(table.session(tmp_path), model=model))
    jsonschema.validate(launch, schema["properties"]["launch"])
    assert launch["placement"]["ranks"][0]["stages"] == [{"stage": 0, "layers": None}]


@pytest.mark.prove
def test_the_fastest_within_the_headroom_wins(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24, memory_limit=7_000_000, headroom=0.1)
    document = build_best_config(session, swept(session, store))
    assert document["best"]["measured"]["peak_memory_bytes"][0]["total"] <= 6_300_000
    assert document["best"]["config"]["micro_batch_size"] == 4
    assert document["baseline"]["gain"]["of"] == "samples_per_second"
    assert document["baseline"]["gain"]["low"] > 1.0


@pytest.mark.prove
def test_least_memory_wins_where_it_is_the_objective(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24, objective="memory")
    document = build_best_config(session, swept(session, store))
    assert document["best"]["config"]["zero_stage"] == 3
    assert document["best"]["config"]["activation_checkpointing"] == "full"
    assert document["baseline"]["gain"]["mean"] == pytest.approx(5_000_000 / 1_600_000)


@pytest.mark.prove
def test_a_tie_goes_to_less_memory_and_is_told(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24)
    document = build_best_config(
        session, swept(session, store, lambda c: table.ok(100.0 + c.micro_batch_size / 100, c.micro_batch_size * 1_000))
    )
    assert document["job"]["tie"]
    assert document["best"]["measured"]["peak_memory_bytes"][0]["total"] <= 4_000


@pytest.mark.prove
def test_wrong_and_unstable_trials_never_win(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> Any:
        if config.zero_stage == 1:
            return table.ok(1_000.0, unstable=True)
        return table.ended(Outcome.WRONG) if config.zero_stage == 2 else table.measured(config)

    session = table.session(tmp_path, trials=24)
    assert build_best_config(session, swept(session, store, answer))["best"]["config"]["zero_stage"] in (0, 3)
    allowed = table.session(tmp_path, trials=24, allow_unstable=True)
    assert build_best_config(allowed, swept(allowed, store, answer))["best"]["config"]["zero_stage"] == 1


@pytest.mark.prove
def test_a_finalist_whose_confirmation_fails_does_not_win(tmp_path: Path, store: Store) -> None:
    seen: set[str] = set()

    def answer(config: TrialConfig) -> Any:
        again = config.hash in seen
        seen.add(config.hash)
        fastest = config.micro_batch_size == 4 and config.zero_stage == 0 and config.activation_checkpointing == "none"
        return table.ended(Outcome.INFEASIBLE) if again and fastest else table.measured(config)

    session = table.session(tmp_path, trials=24)
    best = build_best_config(session, swept(session, store, answer))["best"]["config"]
    assert (best["zero_stage"], best["micro_batch_size"]) == (1, 4)


@pytest.mark.prove
def test_alternatives_are_the_front_of_throughput_and_memory(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24)
    front = build_best_config(session, swept(session, store))["alternatives"]
    memory = [entry["measured"]["peak_memory_bytes"][0]["total"] for entry in front]
    rates = [entry["measured"]["samples_per_second"]["mean"] for entry in front]
    assert len(front) > 2
    assert memory == sorted(memory, reverse=True)
    assert rates == sorted(rates, reverse=True)


def test_the_same_rows_give_the_same_document(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    snapshot = swept(session, store)
    first, second = build_best_config(session, snapshot), build_best_config(session, snapshot)
    for document in (first, second):
        document["provenance"].pop("time")
    assert best_config_text(first) == best_config_text(second)


def test_the_file_alone_is_enough_to_run_it_again(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    path = tmp_path / "best-config.json"
    path.write_text(best_config_text(build_best_config(session, swept(session, store))))
    (tmp_path / "config.json").unlink()
    document = read_best_config(path)
    again = prepare(request_of(document))
    assert again.model == session.model
    assert TrialConfig().replace(document["best"]["config"]) in again.space


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 2}', '{"schema_version": 1, "job": {}}'])
def test_what_is_no_best_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "best-config.json"
    path.write_text(content)
    with pytest.raises(BestConfigError):
        read_best_config(path)


def test_a_document_of_another_schema_version_is_refused(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    document = {**build_best_config(session, swept(session, store)), "schema_version": 2}
    with pytest.raises(BestConfigError, match=r"has schema version 2, not 1; write it again with `autotune export`"):
        winner_of(document)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BestConfigError, match="cannot be read"):
        read_best_config(tmp_path / "none.json")


def test_a_job_with_nothing_feasible_has_no_best(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path)
    snapshot = swept(session, store, lambda config: table.ended(Outcome.INFEASIBLE))
    with pytest.raises(NoBestError):
        build_best_config(session, snapshot)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match="json, deepspeed"):
        exporter("nemo")
