"""Bundles: the same bytes for the same measurements, whole or refused, and nothing personal."""

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from known import measured, run_job
from measurements import row, write_table

from autotune.errors import KnowledgeError
from autotune.evaluation.validation.table import read_table
from autotune.evaluation.validation.truth import peak_bytes, step_seconds
from autotune.knowledge.bundle import Bundle, bundle_text, distinct, merged, pseudonym, read_bundle, read_content, signed_part
from autotune.knowledge.collect import all_measurements, job_measurements
from autotune.knowledge.measurement import Measurement, measurements_of_rows
from autotune.knowledge.residuals import residuals_of
from autotune.prediction.equations.rates import shipped_rates
from storage.store import Store

OURS, THEIRS = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))


def rows(folder: Path, **cells: Any) -> list[Measurement]:
    """Measurements of a small table."""
    written = [
        row("a", samples_per_s=80.0, peak_mem_gb=20.5, **cells),
        row("b", micro_batch=2, samples_per_s=95.0, notes="kernel=flash v2; grad_acc=4", **cells),
        row("c", micro_batch=8, outcome="oom", oom="true", **cells),
    ]
    read = read_table(write_table(folder / "table.csv", written)).rows
    return list(measurements_of_rows(read, {each.source: pseudonym(OURS, each.source) for each in read}).measurements)


def bundle(*measurements: Measurement, key: Ed25519PrivateKey = OURS) -> Bundle:
    return Bundle(parts=(signed_part(measurements, key),))


@pytest.fixture
def everything(tmp_path: Path) -> list[Measurement]:
    return [*rows(tmp_path), *measured("trials", 5)]


def test_what_is_read_is_what_was_written(everything: list[Measurement]) -> None:
    text = bundle_text(bundle(*everything))
    assert bundle_text(bundle(*reversed(everything))) == text
    again = read_bundle(text, "file")
    assert bundle_text(again) == text
    found = distinct(again.parts)
    assert len(found) == len(everything) == 8
    assert len({each.source for each in found}) == 2
    figures = sorted((step_seconds(each.row), peak_bytes(each.row)) for each in found if each.row and step_seconds(each.row))
    before = [each.row for each in everything if each.row is not None and step_seconds(each.row)]
    for (seconds, peak), was in zip(figures, sorted((step_seconds(each), peak_bytes(each)) for each in before), strict=True):
        assert seconds == pytest.approx(was[0], rel=1e-5)
        assert peak == (None if was[1] is None else pytest.approx(was[1], rel=1e-5))
    one, other = (residuals_of(each, shipped_rates())[0] for each in (everything, found))
    assert sorted(other.features.sum(axis=1)) == pytest.approx(sorted(one.features.sum(axis=1)))


def test_merged_parts_stay_apart_and_duplicates_count_once(tmp_path: Path) -> None:
    first, later = measured("trials", 5), measured("trials", 9)
    ours, more, theirs = bundle(*first), bundle(*later, *first), bundle(*rows(tmp_path), key=THEIRS)
    whole = merged([theirs, more, ours, ours])
    assert bundle_text(whole) == bundle_text(merged([merged([ours, theirs]), more]))
    assert len(whole.parts) == 3
    kept = distinct(read_bundle(bundle_text(whole), "file").parts)
    assert len({each.source for each in kept}) == 2
    assert whole.duplicates == 5
    assert len(kept) == len({*map(repr, [*first, *later])}) + 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-40], "is not JSON"),
        (lambda text: text.replace('"version":1', '"version":2'), "version: 2 is not 1, the version that this release reads"),
        (lambda text: text.replace("autotune-knowledge", "other"), "format: 'other' is not 'autotune-knowledge'"),
        (lambda text: text.replace('"zero_stage":3', '"zero_stage":1'), "signature: is not by the key"),
        (lambda text: text.replace('"samples_per_second":', '"samples_per_second":9'), "signature: is not by the key"),
        (lambda text: _with(text, key="AAAA"), r"parts\[0\].key: is not 32 bytes in base64"),
        (lambda text: _with(text, signature=bundle_json(THEIRS)["signature"]), "the signature is forged"),
        (lambda text: _with(text, key=bundle_json(THEIRS)["key"]), "the signature is forged"),
        (lambda _: '{"format": "autotune-knowledge", "version": 1, "parts": []}', "parts: is not a list of parts"),
        (lambda _: "[1]", "is not an object of JSON"),
    ],
)
def test_what_is_damaged_or_forged_is_refused_in_one_line(change: Any, says: str) -> None:
    text = bundle_text(bundle(*measured("trials", 5)))
    assert change(text) != text
    with pytest.raises(KnowledgeError, match=says) as caught:
        read_bundle(change(text), "b.json")
    assert str(caught.value).startswith("b.json")
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def _with(text: str, **changes: str) -> str:
    document = json.loads(text)
    document["parts"][0] |= changes
    return json.dumps(document)


def bundle_json(key: Ed25519PrivateKey) -> dict[str, Any]:
    """The only part of a bundle by this key."""
    part: dict[str, Any] = json.loads(bundle_text(bundle(*measured("trials", 5), key=key)))["parts"][0]
    return part


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"samples_per_second": -2.0},
            r"knowledge.measurements\[0\].samples_per_second: -2.0 is not a positive number; export",
        ),
        ({"samples_per_second": True}, "samples_per_second: True is not a positive number"),
        ({"peak_memory_bytes": "much"}, "peak_memory_bytes: 'much' is not a positive number"),
        ({"repeats": 0}, "repeats: 0 is not a positive whole number"),
        ({"outcome": "oom"}, "outcome: 'oom' is neither ok with a rate nor oom without"),
        ({"setting": 4}, "setting: 4 is not the place of a setting"),
        ({"config": {"tensor_parallel_size": 3}}, "does not divide 8 devices and a batch of 32"),
        ({"config": {"micro_batch_size": 64}}, "does not divide 8 devices and a batch of 32"),
        ({"config": {"zero_stage": "many"}}, "config: "),
        ({"source": ""}, "source: '' is not the name of a source"),
        ({"host": "node7"}, "host: is unknown or missing"),
    ],
)
def test_damaged_measurements(change: dict[str, Any], says: str) -> None:
    content = json.loads(bundle_text(bundle(*measured("trials", 1))))["parts"][0]["content"]
    content["measurements"][0] |= change
    with pytest.raises(KnowledgeError, match=says):
        read_content(content, "knowledge")


@pytest.mark.parametrize(
    ("part", "name", "value", "says"),
    [
        ("model", "hidden_size", "wide", r"settings\[0\]"),
        ("model", "num_layers", -1, r"settings\[0\]: cannot be read"),
        ("model", "rope_theta", None, r"settings\[0\].model.rope_theta: has a value of another type"),
        ("cluster", "nodes", 1.5, r"settings\[0\].cluster.nodes: has a value of another type"),
        ("cluster", "device", {}, r"settings\[0\]: cannot be read"),
    ],
)
def test_damaged_settings(part: str, name: str, value: Any, says: str) -> None:
    content = json.loads(bundle_text(bundle(*measured("trials", 1))))["parts"][0]["content"]
    content["settings"][0][part][name] = value
    with pytest.raises(KnowledgeError, match=says):
        read_content(content, "knowledge")


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("samples_per_s", -80, "columns: samples_per_s '-80' is not positive"),
        ("dp", 3, "columns: tp 1 x pp 1 x dp 3 x cp 1 is 3, not the 8 devices"),
        ("row_id", "mine", "columns.row_id: is not a column of a bundle"),
        ("notes", "x" * 3000, "columns.notes: is not a column of a bundle, or not its value"),
    ],
)
def test_damaged_rows(tmp_path: Path, column: str, value: Any, says: str) -> None:
    content = json.loads(bundle_text(bundle(*rows(tmp_path))))["parts"][0]["content"]
    content["measurements"][0]["columns"][column] = value
    with pytest.raises(KnowledgeError, match=says):
        read_content(content, "knowledge")


PLANTED = ("ada-lovelace", "secret-project", "node17.corp", "/srv/secret", "hunter2", "NCCL_SECRET_IFNAME", "tag-of-ours")


def test_nothing_personal_is_inside(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of people, hosts, paths and jobs, and environment variables: in every text that a job and a table have."""
    monkeypatch.setenv("NCCL_SECRET_IFNAME", "hunter2")
    fields = {"name": "secret-project", "tags": ["tag-of-ours"], "note": "by ada-lovelace in /srv/secret", "data_path": None}
    job = run_job(
        store, measured("x", 6), fields, message="on node17.corp in /srv/secret", traceback="hunter2", node="node17.corp",
        slow_nodes=("node17.corp",), environment={"NCCL_SECRET_IFNAME": "hunter2", "host": "node17.corp"},
    )  # fmt: skip
    trials = all_measurements(store, lambda text: pseudonym(OURS, text)).measurements
    texts = {
        "source": "ada-lovelace",
        "source_locator": "/srv/secret/node17.corp",
        "model_name": "secret-project",
        "framework": "hunter2",
        "inter_bw": "400 Gb/s per node to node17.corp",
        "intra_bw": "NVLink of node17.corp",
        "gpu_type": "A100-SXM-80GB of ada-lovelace",
        "optimizer": "AdamW ada-lovelace",
        "rank_group": "secret-project",
        "mem_kind": "max allocated GiB on node17.corp",
        "offload": "none (hunter2)",
        "precision": "bf16 hunter2",
        "recompute": "none /srv/secret",
        "notes": "by ada-lovelace; kernel=flash; NCCL_SECRET_IFNAME=hunter2; /srv/secret; tag-of-ours",
    }
    table = rows(tmp_path, **{name: text for name, text in texts.items() if name != "notes"})
    noted = read_table(write_table(tmp_path / "n.csv", [row("secret-project", step_time_s=1.5, **texts)])).rows
    table += measurements_of_rows(noted, {each.source: pseudonym(OURS, each.source) for each in noted}).measurements
    assert (len(trials), len(table)) == (6, 4)
    text = bundle_text(bundle(*trials, *table)).lower()
    for word in (*PLANTED, job, socket.gethostname(), str(tmp_path), "lovelace", "corp", "hunter"):
        assert word.lower() not in text, word
    # It is in the database and the table that were exported, so that this test can fail.
    assert "secret-project" in json.dumps(store.job(job).request)
    assert any("hunter2" in json.dumps(trial.result.environment) for trial in store.trials(job) if trial.result)


def test_configurations_with_texts_of_the_user_are_left_out(store: Store) -> None:
    own = measured("x", 3)
    trial = own[0].trial
    assert trial is not None
    secret = dataclasses.replace(trial, config=trial.config.replace({"environment": "NCCL_SOCKET_IFNAME=hunter2"}))
    job = run_job(store, [dataclasses.replace(own[0], trial=secret), *own[1:]])
    found = job_measurements(store, job)
    assert len(found.measurements) == 2
    assert found.left_out == {"the configuration has texts of the user": 1}


def test_a_source_has_one_name_for_each_key() -> None:
    assert pseudonym(OURS, "lab") == pseudonym(OURS, "lab") != pseudonym(THEIRS, "lab")
    assert pseudonym(OURS, "lab") != pseudonym(OURS, "other")
